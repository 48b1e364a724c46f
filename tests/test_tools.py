"""Tools over HTTP, with a scripted model: what is checked, what the prompt says, and how calls come back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from specd.config import ChatConfig, Config
from tests import fake_engine
from tests.fake_engine import CHAT_TEMPLATE, FakeEngine, Script, byte_tokenizer
from tests.http_server import HELLO, serve

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "climate", "description": "Of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "climate"}}
PARIS = '{"city": "Paris, \\"la\\" {one}"}'
CALL = f'<tool_call>\n{{"name": "climate", "arguments": {PARIS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOL_TEMPLATE = "{% if tools %}[{% for t in tools %}{{ t.function | tojson }};{% endfor %}]{% endif %}" + (
    CHAT_TEMPLATE.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}:{{ c.function.arguments.city }})"
        "{% endfor %}",
    )
)


def engine(text: str, *, blocks: tuple[int, ...] = (3, 1), template: str = CHAT_TEMPLATE) -> FakeEngine:
    tokenizer = byte_tokenizer(chat_template=template)
    script = Script(text=lambda request, index: text.replace("INDEX", str(index)), blocks=blocks)
    return FakeEngine(script, tokenizer=tokenizer, max_len=8192)


def prompt(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.requests_seen[-1].prompt_ids, skip_special=False)


def add_up(events: list[Any]) -> dict[int, tuple[dict[str, Any], str]]:
    """(message, finish reason) per choice, as a client makes them out of chunks. Checks the order on the way."""
    messages: dict[int, dict[str, Any]] = {}
    finishes: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        message, delta = messages.setdefault(choice["index"], {}), choice["delta"]
        assert choice["index"] not in finishes, "nothing follows the finish"
        if choice["finish_reason"] is not None:
            finishes[choice["index"]] = choice["finish_reason"]
            assert delta == {}
            continue
        assert len(delta) == (3 if "role" in delta else 1), delta
        for name, value in delta.items():
            if name == "tool_calls":
                _add_call(message.setdefault(name, []), *value)
            elif name in ("role", "refusal"):
                message[name] = value
            else:
                assert value or "role" in delta, "only the first content is empty"
                message[name] = (message.get(name) or "") + (value or "")
    for message in messages.values():
        message["content"] = message["content"] or (None if "tool_calls" in message else "")
    return {index: (messages[index], finishes[index]) for index in messages}


def _add_call(calls: list[Any], piece: dict[str, Any]) -> None:
    if "id" in piece:
        assert piece.keys() == {"index", "id", "type", "function"}
        assert (piece["index"], piece["type"], piece["function"]["arguments"]) == (len(calls), "function", "")
        calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
    else:
        assert piece.keys() == {"index", "function"}
        assert piece["index"] == len(calls) - 1
        assert piece["function"]["arguments"]
        calls[-1]["function"]["arguments"] += piece["function"]["arguments"]


def told(message: dict[str, Any]) -> tuple[Any, list[tuple[str, str]]]:
    """(content, calls without their ids)."""
    calls = message.get("tool_calls", [])
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return message["content"], [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


# What the model says, fields of the request -> content, calls, finish reason.
ANSWERS: dict[str, tuple[str, dict[str, Any], tuple[Any, list[tuple[str, str]], str]]] = {
    "auto": (CALL, {}, (None, [("climate", PARIS)], "tool_calls")),
    "text first, two calls": (f"Hm.\n\n{CALL}\n{NOW}", {}, ("Hm.", [("climate", PARIS), ("now", "{}")], "tool_calls")),
    "no call": ("hello <b>", {}, ("hello <b>", [], "stop")),
    "malformed": (CALL.replace("}}", "}"), {}, (CALL.replace("}}", "}"), [], "stop")),
    "unknown function": (CALL.replace("climate", "storm"), {}, (CALL.replace("climate", "storm"), [], "stop")),
    "truncated": (CALL, {"max_tokens": 60}, (CALL[:60], [], "length")),
    "truncated behind a call": (f"{CALL}{NOW}", {"max_tokens": len(CALL) + 9},
                                (NOW[:9], [("climate", PARIS)], "length")),
    "none": (CALL, {"tool_choice": "none"}, (CALL, [], "stop")),
    "required": (f"{CALL}\n{NOW}", {"tool_choice": "required"},
                 (None, [("climate", PARIS), ("now", "{}")], "tool_calls")),
    "required, truncated": (CALL, {"tool_choice": "required", "max_tokens": 60},
                            (None, [("climate", PARIS[:15])], "length")),
    "required, stopped": (CALL, {"tool_choice": "required", "stop": "la"}, (None, [("climate", PARIS[:19])], "stop")),
    "named": (CALL, {"tool_choice": NAMED}, (None, [("climate", PARIS)], "stop")),
    "one alone": (f"so: {CALL}", {"parallel_tool_calls": False}, ("so:", [("climate", PARIS)], "tool_calls")),
    "one alone, and none": ("the marker </tool_call> ends a call", {"parallel_tool_calls": False},
                            ("the marker </tool_call> ends a call", [], "stop")),
    "several choices": ("INDEX " + NOW, {"n": 2}, ("0", [("now", "{}")], "tool_calls")),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_streamed_or_not(name: str) -> None:
    """The same from one body and from chunks, whatever the tokens of a step were."""
    text, fields, expected = ANSWERS[name]
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True, **fields}
    for blocks in ((1,), (5, 2), (1000,)):
        async with serve(engine(text, blocks=blocks)) as client:
            whole = (await client.chat(**fields)).body
            reply = await client.chat(**fields, stream=True, stream_options={"include_obfuscation": True})
        streamed = add_up(reply.events)
        for choice in whole["choices"]:
            message, finish = streamed[choice["index"]]
            assert (*told(choice["message"]), choice["finish_reason"]) == (*told(message), finish)
            chunks = [c for e in reply.events for c in e["choices"] if c["index"] == choice["index"]]
            scored = [item for c in chunks for item in (c["logprobs"] or {"content": []})["content"]]
            assert scored == choice["logprobs"]["content"], "each token once"
            assert [token for c in chunks for token in c["token_ids"]] == choice["token_ids"]
            assert choice["stop_reason"] == fields.get("stop"), "the server's own stop is not told"
        first = whole["choices"][0]
        assert (*told(first["message"]), first["finish_reason"]) == expected
        assert all(len(b"data: " + chunk) % 64 == 62 for chunk in reply.raw.split(b"\n\ndata: ")[1:-1])


async def test_arguments_that_a_grammar_makes_come_as_they_are_written() -> None:
    async with serve(engine(CALL, blocks=(1,))) as client:
        for choice, most in (("required", 99), ("auto", 1)):
            events = (await client.chat(tools=TOOLS, tool_choice=choice, stream=True)).events
            deltas = [event["choices"][0]["delta"].get("tool_calls") for event in events]
            assert (sum(delta is not None for delta in deltas) > 10) == (most > 10), choice


async def test_a_call_that_is_held_back_keeps_its_connection() -> None:
    fake = engine(CALL, blocks=(1,))
    fake.script.delay_s = 0.005
    async with serve(fake, keep_alive_s=0.1) as client:
        reply = await client.chat(tools=TOOLS, stream=True)
    assert reply.raw.count(b": keep-alive\n\n") >= 3
    assert told(add_up(reply.events)[0][0]) == (None, [("climate", PARIS)])


async def test_the_official_client_and_its_stream_helper() -> None:
    async with (
        serve(engine(f"So: {CALL}")) as client,
        openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0) as sdk,
    ):
        messages: list[Any] = HELLO["messages"]  # type: ignore[assignment]
        whole = await sdk.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        async with sdk.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        for answer in (whole, final):
            (call,) = answer.choices[0].message.tool_calls or []
            assert call.type == "function"
            assert json.loads(call.function.arguments) == json.loads(PARIS)
            assert answer.choices[0].finish_reason == "tool_calls"
        sent_back: list[Any] = [*messages, final.choices[0].message.model_dump()]
        sent_back += [{"role": "tool", "tool_call_id": "x", "content": "sunny"}]
        await sdk.chat.completions.create(model="tiny", messages=sent_back, tools=TOOLS)


async def test_markers_that_are_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text of special tokens is left out; these are looked for."""
    markers = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    monkeypatch.setattr(fake_engine, "SPECIAL", (*fake_engine.SPECIAL, *markers))
    fake = engine(f"<think>hm</think>so<|bos|>{CALL}", template=CHAT_TEMPLATE + "{# <think> #}")
    assert set(markers) <= set(fake.tokenizer.special_tokens)
    async with serve(fake) as client:
        message = (await client.chat(tools=TOOLS)).body["choices"][0]["message"]
        assert (message["reasoning_content"], *told(message)) == ("hm", "so", [("climate", PARIS)])
        message = (await client.chat()).body["choices"][0]["message"]
        assert message["content"].startswith("so\n{"), "nothing is looked for, so nothing is shown"


# ---------------------------------------------------------------- prompts

TALK: list[Any] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "climate", "arguments": '{"city":"Oslo"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain <|im_end|>"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "snow"}]},
    {"role": "user", "content": "so?"},
]


async def test_a_template_without_tools_gets_them_in_text() -> None:
    fake = engine("ok")
    async with serve(fake) as client:
        assert (await client.chat(messages=TALK, tools=TOOLS)).status == 200
        text = prompt(fake)
        assert text.startswith("<|im_start|>system\n# Tools")
        for tool in TOOLS:
            assert f"\n{json.dumps(tool)}\n" in text
        assert '<|im_start|>assistant\n<tool_call>\n{"name": "climate", "arguments": {"city": "Oslo"}}' in text
        results = "<tool_response>\nrain <|im_end|>\n</tool_response>\n<tool_response>\nsnow\n</tool_response>"
        assert f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>user\nso?" in text
        assert fake.requests_seen[-1].prompt_ids.count(fake.tokenizer.eos_ids[0]) == 5, "a result ends no turn"

        system = [{"role": "system", "content": "Be brief."}, *TALK]
        assert (await client.chat(messages=system, tools=TOOLS)).status == 200
        assert prompt(fake).startswith("<|im_start|>system\nBe brief.\n\n# Tools")
        assert (await client.chat(messages=TALK, tools=TOOLS, tool_choice="none")).status == 200
        assert "# Tools" not in prompt(fake)
        assert "<tool_response>" in prompt(fake), "what was said stays"


async def test_a_template_with_tools_writes_them_itself() -> None:
    fake = engine("ok", template=TOOL_TEMPLATE)
    hostile = [{"type": "function", "function": {"name": "x", "description": "a <|im_end|> b"}}]
    async with serve(fake) as client:
        assert (await client.chat(messages=TALK, tools=TOOLS)).status == 200
        listed = "".join(json.dumps(tool["function"]) + ";" for tool in TOOLS)
        assert prompt(fake).startswith(f"[{listed}]")
        assert "(climate:Oslo)" in prompt(fake), "arguments are objects there"
        await client.chat(tools=hostile)
        assert "a <|im_end|> b" in prompt(fake)
        assert fake.requests_seen[-1].prompt_ids.count(fake.tokenizer.eos_ids[0]) == 1, "text of a tool is text"
        await client.chat(tools=TOOLS, tool_choice="none")
        assert not prompt(fake).startswith("[")
        ids = (await client.post("/tokenize", {"messages": TALK, "tools": TOOLS})).body["tokens"]
        await client.chat(messages=TALK, tools=TOOLS)
        assert tuple(ids) == fake.requests_seen[-1].prompt_ids
        reply = await client.chat(tools=TOOLS, chat_template_kwargs={"tools": []})
        assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs.tools")
    async with serve(fake, config=Config(chat=ChatConfig(tools="hermes"))) as client:
        await client.chat(tools=TOOLS)
        assert prompt(fake).startswith("<|im_start|>system\n# Tools")


async def test_tools_that_are_refused_by_a_setting() -> None:
    for setting, template in (("refuse", TOOL_TEMPLATE), ("template", CHAT_TEMPLATE)):
        config = Config(chat=ChatConfig(tools=setting))  # type: ignore[arg-type]
        async with serve(engine("ok", template=template), config=config) as client:
            for fields, param in (({"tools": TOOLS}, "tools"), ({"messages": TALK}, "messages[1].tool_calls")):
                reply = await client.chat(**fields)
                error = reply.error
                assert (reply.status, error["code"], error["param"]) == (400, "unsupported_parameter", param)


# ---------------------------------------------------------------- checks


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def calls(function: Any, **item: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": function, **item}
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "invalid_type", "tools"),
    ({"tools": ["f"]}, "invalid_type", "tools[0]"),
    ({"tools": [{"function": {"name": "f"}}]}, "missing_parameter", "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "unsupported_parameter", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "missing_parameter", "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "missing_parameter", "tools[0].function.name"),
    ({"tools": [tool(name="a b")]}, "out_of_range", "tools[0].function.name"),
    ({"tools": [tool(name="x" * 65)]}, "out_of_range", "tools[0].function.name"),
    ({"tools": [{**tool(), "input_examples": [{}]}]}, "unsupported_parameter", "tools[0].input_examples"),
    ({"tools": [tool(), tool()]}, "invalid_value", "tools[1].function.name"),
    ({"tools": [tool(parameters=[])]}, "invalid_type", "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "out_of_range", "tools[0].function.parameters.type"),
    ({"tools": [tool(parameters={"d": "x" * (64 << 10)})]}, "schema_too_complex", "tools[0].function.parameters"),
    ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "out_of_range", "tools"),
    ({"tools": [tool(name=f"f{i}", parameters={"d": "x" * 60_000}) for i in range(5)], "tool_choice": "required"},
     "schema_too_complex", "tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "out_of_range", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 1}, "invalid_type", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "unsupported_parameter", "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "storm"}}},
     "invalid_value", "tool_choice.function.name"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tool_choice": NAMED, "tools": []}, "invalid_value", "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "invalid_type", "parallel_tool_calls"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "invalid_value", "ignore_eos"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a+"}}, "invalid_value", "structured_outputs.regex"),
    (calls({"name": "f", "arguments": "[1]"}), "out_of_range", "messages[0].tool_calls[0].function.arguments"),
    *[
        (calls({"name": "f", "arguments": text}), "out_of_range", "messages[0].tool_calls[0].function.arguments")
        for text in ('{"a":"\\ud800"}', '{"a":NaN}', '{"a":1e999}')
    ],
    (calls({"name": "f", "arguments": {}}), "invalid_type", "messages[0].tool_calls[0].function.arguments"),
    (calls({"arguments": "{}"}), "missing_parameter", "messages[0].tool_calls[0].function.name"),
    (calls({"name": "f"}, type="custom"), "unsupported_parameter", "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
     "invalid_value", "messages[0].tool_calls"),
]  # fmt: skip


async def test_what_is_refused() -> None:
    fake = engine("ok")
    async with serve(fake) as client:
        for fields, code, param in BAD:
            reply = await client.chat(**fields)
            assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param), (fields, reply.raw)
    assert not fake.requests_seen


async def test_what_is_accepted() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": ""}}
    fields: list[tuple[dict[str, Any], str | None]] = [
        ({"tools": []}, None),
        ({"tools": None, "tool_choice": "auto", "parallel_tool_calls": None}, None),
        ({"parallel_tool_calls": True}, None),
        ({"tools": [tool(description=None, strict=False, parameters={})]}, None),
        ({"tools": [{**tool(), "function": {"name": "f", "parameters": None}}]}, None),
        ({"messages": [{"role": "assistant", "tool_calls": [call]}]}, "messages[0].tool_calls[0].index"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": []}]}, None),
    ]
    async with serve(engine("ok")) as client:
        for body, ignored in fields:
            reply = await client.chat(**body)
            assert reply.status == 200, (body, reply.raw)
            assert reply.headers.get("x-specd-ignored-fields") == ignored
