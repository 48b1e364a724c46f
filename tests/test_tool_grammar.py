"""The grammars of tool calls, by the texts that they allow."""

from __future__ import annotations

import functools
import json
import threading
from typing import Any

import pytest
from llguidance import LLTokenizer

from specd import one_of
from specd.guidance import build_tokenizer, compile_matcher
from specd.server.fields import Endpoint, read_fields
from specd.server.tool_grammar import output_grammar
from tests.fake_engine import FakeEngine
from tests.http_server import HELLO, serve
from tests.test_hermes import call, parse
from tests.test_one_of import TREE

NODE = {
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    },
    "properties": {"of": {"$ref": "#/$defs/node"}},
    "required": ["of"],
    "additionalProperties": False,
}
NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "x-guidance": {"lenient": True}}},
    "required": ["n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


F, G, NONE = tool("f", parameters=NUMBER), tool("get", parameters=NODE), tool("get_weather")
STRICT = tool("f", parameters=NUMBER, strict=True)
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": NUMBER}}


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALL_F, CALL_G, CALL_NONE = written("f", '{"n": 1}'), written("get", '{"of":{"next":{}}}'), written("get_weather", "{}")
WRONG = written("f", '{"n": "1"}')


@functools.cache
def trie() -> LLTokenizer:
    return build_tokenizer([bytes([byte]) for byte in range(256)] + [b"<eos>"], special=[256], eos=[256])


def allowed(fields: dict[str, Any], text: str) -> bool:
    """Whether the grammar of a request takes the whole text and may end there."""
    grammar = output_grammar(read_fields(fields, Endpoint.CHAT)[0])
    assert grammar is not None
    matcher = compile_matcher(trie(), grammar.kind, grammar.text)
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


REQUIRED = {"tools": [F, G, NONE], "tool_choice": "required"}
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "required": (
        REQUIRED,
        [CALL_F, CALL_G, CALL_NONE, f"{CALL_F}\n{CALL_F}\n{CALL_NONE}", written("f", '{"n":\n 1}')],
        ["", "hi", WRONG, CALL_F + " ", CALL_F + CALL_F, CALL_F[:-1], f"a{CALL_F}", written("get_weather", '{"a":1}'),
         written("get", "{}"), written("h", "{}")],
    ),
    "one": ({**REQUIRED, "parallel_tool_calls": False}, [CALL_F, CALL_NONE], ["", f"{CALL_F}\n{CALL_F}"]),
    "named": (
        {**REQUIRED, "tool_choice": {"type": "function", "function": {"name": "get"}}},
        [CALL_G],
        ["", CALL_F, f"{CALL_G}\n{CALL_G}"],
    ),
    "a format is for answers, not for calls": ({**REQUIRED, "response_format": FORMAT}, [CALL_F], ['{"n": 1}']),
    "auto, strict": (
        {"tools": [STRICT, G]},
        ["", "any <text> \n", CALL_F, f"so\n{CALL_F}\n{CALL_G} and", "<tool_cal", written("get", '{"what": 1}')],
        [WRONG, "a <tool_call> b", f"{CALL_F} {WRONG}", written("get", "[]"), "<tool_call>"],
    ),
    "auto, strict, one": (
        {"tools": [STRICT], "parallel_tool_calls": False},
        ["", "text", f"so: {CALL_F}"],
        [WRONG, f"{CALL_F}\n{CALL_F}", f"{CALL_F} and"],
    ),
    "auto, one": (
        {"tools": [F], "parallel_tool_calls": False},
        ["", "the marker </tool_call> ends one", f"so: {CALL_F}", written("f", '{"a": "</tool_call>"}'), WRONG],
        [f"{CALL_F}\n{CALL_F}", f"{CALL_F} and", written("g", "{}")],
    ),
    "auto, with a format": (
        {"tools": [F], "response_format": FORMAT},
        ['{"n": 3}', CALL_F, f"{CALL_F}\n{CALL_F}"],
        ["", "3", f'{{"n": 3}}{CALL_F}', '{"n": "3"}', WRONG],
    ),
    "auto, with choices": (
        {"tools": [F], "structured_outputs": {"choice": ["yes", 'n"o']}},
        ["yes", 'n"o', CALL_F],
        ["", "yesyes", WRONG],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_texts(name: str) -> None:
    fields, good, bad = CASES[name]
    assert [text for text in good if not allowed(fields, text)] == []
    assert [text for text in bad if allowed(fields, text)] == []


def test_what_a_grammar_allows_is_what_the_parser_reads() -> None:
    text = f"{CALL_NONE}\n{CALL_NONE}"
    assert allowed(REQUIRED, text)
    assert parse([text], eager=True) == ([*call(0, "get_weather", "{}"), *call(1, "get_weather", "{}")], 2)


def test_no_grammar_where_nothing_is_exact() -> None:
    nothing: dict[str, Any] = {}
    for fields in (nothing, {"tools": [F]}, {"tools": [STRICT], "tool_choice": "none"}, {"tools": []}):
        assert output_grammar(read_fields(fields, Endpoint.CHAT)[0]) is None
    other = output_grammar(
        read_fields({"tools": [F], "tool_choice": "none", "response_format": FORMAT}, Endpoint.CHAT)[0]
    )
    assert other is not None
    assert (other.kind, json.loads(other.text)) == ("json_schema", NUMBER)


def test_one_of_that_calls_itself_is_proved_as_in_response_format() -> None:
    schema = {"type": "object", "properties": {"t": TREE}, "required": ["t"], "$defs": TREE["$defs"]}
    fields = {"tools": [tool("f", parameters=schema)], "tool_choice": "required"}
    said = written("f", '{"t": {"kind": "a", "child": {"kind": "b"}}}')
    assert allowed(fields, said)
    assert not allowed(fields, said.replace('"b"', '"c"'))


MANY = [
    tool(f"f{i}", parameters={"properties": {"a": {"oneOf": [{"const": j} for j in range(100)]}}}) for i in range(9)
]


def test_the_proofs_of_all_tools_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these takes 5,000 comparisons: 128 such tools took seconds."""
    compared: list[None] = []
    plainly = one_of._Prover._plainly

    def counting(self: one_of._Prover, *args: Any) -> bool:
        compared.append(None)
        return plainly(self, *args)

    monkeypatch.setattr(one_of._Prover, "_plainly", counting)
    grammar = output_grammar(read_fields({"tools": MANY, "tool_choice": "required"}, Endpoint.CHAT)[0])
    assert grammar is not None
    assert 9_000 < len(compared) <= 10_000
    assert '"oneOf"' in grammar.text, "what was not proved stays as it is: it is refused where it is compiled"


async def test_the_event_loop_does_not_wait_for_a_grammar_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def made(values: Any) -> Any:
        threads.append(threading.current_thread())
        return output_grammar(values)

    monkeypatch.setattr("specd.server.generation.output_grammar", made)
    engine = FakeEngine(max_len=4096)
    async with serve(engine) as client:
        body = {**HELLO, "tools": [F], "tool_choice": "required", "max_tokens": 1}
        assert (await client.post("/v1/chat/completions", body)).status == 200
    assert len(threads) == 1, "once a request"
    assert threads[0] is not threading.main_thread()
    assert engine.requests_seen[0].sampling.grammar == output_grammar(read_fields(body, Endpoint.CHAT)[0])
