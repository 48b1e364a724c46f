"""A body is parsed in one go that nothing can interrupt: it is counted before."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specd.errors import RequestError
from specd.server import context, json_body
from specd.server.json_body import MAX_NODES, MAX_VALUES, check_counts, parse_json
from tests.fake_engine import FakeEngine
from tests.http_server import HELLO, serve
from tests.schema_values import ANY_JSON


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of what orjson was given."""
    lengths: list[int] = []

    def loads(raw: bytes) -> Any:
        lengths.append(len(raw))
        return orjson.loads(raw)

    class Counted:
        JSONDecodeError = orjson.JSONDecodeError

    Counted.loads = staticmethod(loads)  # type: ignore[attr-defined]
    monkeypatch.setattr(json_body, "orjson", Counted)
    return lengths


def body(item: bytes, count: int) -> bytes:
    return b'{"x":[' + b",".join([item] * count) + b"]}"


@pytest.mark.parametrize("item", [b"[]", b"{}", b'""', b'"\\"[{"', b"[[[[]]]]", b'{"a":1}'])
def test_more_nodes_than_there_may_be(item: bytes, parsed: list[int]) -> None:
    with pytest.raises(RequestError, match=f"more than {MAX_NODES} lists, objects and strings") as caught:
        parse_json(body(item, MAX_NODES + 1))
    assert caught.value.code == "request_too_large"
    assert parsed == []


def test_more_values_than_there_may_be(parsed: list[int]) -> None:
    assert len(parse_json(body(b"7", MAX_VALUES))["x"]) == MAX_VALUES
    with pytest.raises(RequestError, match=f"more than {MAX_VALUES} values"):
        parse_json(body(b"7", MAX_VALUES + 2))
    assert len(parsed) == 1


@pytest.mark.parametrize("text", ['"[{,', "\\", '\\"', "é[", "x" * 99 + '"'])
def test_what_is_in_a_string_does_not_count(text: str, parsed: list[int]) -> None:
    whole = {"x": text * (2 * MAX_NODES), "y": [text] * 50}
    assert parse_json(orjson.dumps(whole)) == whole
    assert len(parsed) == 1


@pytest.mark.parametrize(
    "raw", [b'{"x":"' + b"a" * MAX_NODES, b'{"' + b'\\"' * MAX_NODES + b"\\", b'"' * 9 + b" " * MAX_NODES]
)
def test_what_is_no_json_is_told_as_such(raw: bytes) -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_json(raw)


def nodes(value: Any) -> int:
    """Lists, objects and strings."""
    match value:
        case str():
            return 1
        case dict():
            return 1 + sum(1 + nodes(item) for item in value.values())
        case list():
            return 1 + sum(map(nodes, value))
    return 0


@given(value=ANY_JSON | st.lists(st.text(alphabet='"\\,[{x\n')), size=st.sampled_from([2, 3, 7]))
@example(value=['\\"', "\\\\", '",[{'], size=2)
def test_the_count_is_exact(value: Any, size: int) -> None:
    """Wherever a slice ends."""
    raw = orjson.dumps({"x": value})
    limits = {"MAX_NODES": nodes({"x": value}), "MAX_VALUES": 10_000, "_SLICE": size}
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(json_body, name, limit)
        check_counts(raw, "it")
        patch.setattr(json_body, "MAX_NODES", limits["MAX_NODES"] - 1)
        with pytest.raises(RequestError, match="it has more than"):
            check_counts(raw, "it")


async def test_the_server_refuses_it() -> None:
    arguments = orjson.dumps({"x": [[]] * MAX_NODES}).decode()
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = [
        ("/v1/chat/completions", body(b"[]", MAX_NODES)),
        ("/tokenize", body(b"[]", MAX_NODES)),
        ("/v1/chat/completions", orjson.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]})),
    ]
    async with serve(FakeEngine()) as client:
        replies = [await client.post(path, raw) for path, raw in asked]
        limits = (await client.get("/v1/limits")).body
        assert (await client.post("/v1/chat/completions", HELLO)).status == 200
    assert [(reply.status, reply.error["code"]) for reply in replies] == [(413, "request_too_large")] * 3
    assert replies[2].error["param"] == "messages[0].tool_calls[0].function.arguments"
    assert (limits["max_body_values"], limits["max_body_nodes"]) == (MAX_VALUES, MAX_NODES)


async def test_a_prompt_that_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(max_len=100)
    tokenised: list[Any] = []
    text = "x" * 5000
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["a", text]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"prompt": "x" * 1200, "max_tokens": 90}),
        ("/v1/completions", {"prompt": "a", "prediction": {"type": "content", "content": text}}),
        ("/v1/responses", {"input": text}),
    ]
    async with serve(engine) as client:
        for name in ("encode", "encode_chat"):
            monkeypatch.setattr(engine.tokenizer, name, lambda value, **_: tokenised.append(value))
        replies = [await client.post(path, fields) for path, fields in asked if "prediction" not in fields]
        assert tokenised == []
        monkeypatch.undo()
        replies.append(await client.post(*asked[4]))
        counted = await client.post("/v1/messages/count_tokens", asked[2][1])
        rendered = await client.post("/v1/completions/render", asked[0][1])
    for reply in replies:
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 100 tokens" in reply.error["message"]
        assert "at least" in reply.error["message"]
    assert [reply.error["param"] for reply in replies] == [
        "prompt",
        "prompt",
        "messages",
        "prompt",
        "input",
        "prediction.content",
    ]
    assert counted.body["input_tokens"] > 5000  # what is only counted is counted
    assert rendered.body["prompts"][0]["count"] == 5000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {"prompt": "x" * 101}, "prompt"),
        ("/tokenize", {"content": "x" * 101}, "content"),
        ("/v1/completions/render", {"prompt": ["x", "x" * 101]}, "prompt"),
    ],
)
async def test_a_text_that_is_tokenised_for_its_own_sake_is_not_endless(
    path: str, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "MAX_TEXT_CHARS", 100)
    async with serve(FakeEngine(max_len=50)) as client:
        reply = await client.post(path, fields)
        good = await client.post("/tokenize", {"prompt": "x" * 100})
        limits = (await client.get("/v1/limits")).body
    assert (reply.status, reply.error["code"], reply.error["param"]) == (413, "request_too_large", param)
    assert (good.body["count"], limits["max_text_chars"]) == (100, 100)
