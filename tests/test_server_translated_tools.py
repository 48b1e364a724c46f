"""Tools on /v1/responses and /v1/messages: what the chat is told, what the answer is, refusals in their names."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import orjson
import pytest

from specd.config import ChatConfig, Config
from specd.errors import DeadlineError, ShutdownError
from specd.request import SequenceDelta
from tests.fake_engine import FakeEngine, Script
from tests.http_server import Reply, serve
from tests.test_server_translations import ASK, COUNT, MESSAGES, RESPONSES, keep, named, order, post

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA}
CUSTOM = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
TOOLS = {RESPONSES: FUNCTION, MESSAGES: CUSTOM}
CHAT_TOOL = {"type": "function", "function": {k: v for k, v in FUNCTION.items() if k != "type"}}
ARGUMENTS = '{"city": "Oslo"}'
CALL = f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>'
SAID = f"Let me look. {CALL}{CALL}"


def scripted(text: str, *, tokens: int = 3, **script: Any) -> FakeEngine:
    return FakeEngine(Script(text=lambda request, index: text, blocks=(tokens,), **script), max_len=4096)


@pytest.mark.parametrize("tokens", [1, 7])
async def test_a_response_that_calls(tokens: int) -> None:
    async with serve(scripted(SAID, tokens=tokens)) as client:
        whole = (await post(client, RESPONSES, tools=[FUNCTION])).body
        events = named(await post(client, RESPONSES, tools=[FUNCTION], stream=True))
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
    assert whole["output"][0]["content"][0]["text"] == "Let me look."
    assert whole["status"] == "completed"
    assert whole["tools"] == [FUNCTION]
    for item in whole["output"][1:]:
        assert (item["name"], item["arguments"], item["status"]) == ("weather", ARGUMENTS, "completed")
    assert order(events) == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        *("response.output_item.added", "response.function_call_arguments.delta",
          "response.function_call_arguments.done", "response.output_item.done") * 2,
        "response.completed",
    ]  # fmt: skip
    last = events[-1][1]["response"]
    assert [shape(item) for item in last["output"]] == [shape(item) for item in whole["output"]]
    assert last["output"] == [body["item"] for name, body in events if name == "response.output_item.done"]
    assert len({item["id"] for item in last["output"]}) == 3
    deltas = [body for name, body in events if name == "response.function_call_arguments.delta"]
    assert "".join(body["delta"] for body in deltas if body["output_index"] == 1) == ARGUMENTS


def shape(item: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in item.items() if k not in ("id", "call_id")}


@pytest.mark.parametrize("tokens", [1, 7])
async def test_a_message_that_calls(tokens: int) -> None:
    async with serve(scripted(SAID, tokens=tokens)) as client:
        whole = (await post(client, MESSAGES, tools=[CUSTOM], max_tokens=400)).body
        events = named(await post(client, MESSAGES, tools=[CUSTOM], max_tokens=400, stream=True))
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    assert whole["content"][0]["text"] == "Let me look."
    assert all(block["input"] == {"city": "Oslo"} for block in whole["content"][1:])
    assert whole["stop_reason"] == "tool_use"
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order(events) == [
        "message_start", "content_block_start", "ping", *block[1:], *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip
    arguments = [
        body["delta"]["partial_json"]
        for _, body in events
        if body.get("delta", {}).get("type") == "input_json_delta" and body["index"] == 2
    ]
    assert "".join(arguments) == ARGUMENTS
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_a_call_that_is_cut_off() -> None:
    """A grammar makes it, so its beginning is given away; what there is of it is no JSON."""
    choice = {"tool_choice": "required"}
    async with serve(scripted(CALL)) as client:
        response = (await post(client, RESPONSES, tools=[FUNCTION], max_output_tokens=48, **choice)).body
        any_tool = {"tool_choice": {"type": "any"}}
        message = (await post(client, MESSAGES, tools=[CUSTOM], max_tokens=48, **any_tool)).body
    item, block = response["output"][0], message["content"][0]
    assert (response["status"], item["status"]) == ("incomplete", "incomplete")
    assert ARGUMENTS.startswith(item["arguments"])
    assert item["arguments"] != ARGUMENTS
    assert (message["stop_reason"], block["type"], block["input"]) == ("max_tokens", "tool_use", {})


@pytest.mark.parametrize("tokens", [1, 5])
async def test_thinking(tokens: int) -> None:
    config = Config(chat=ChatConfig(reasoning="think"))
    async with serve(scripted("<think>well</think>yes", tokens=tokens), config=config) as client:
        response = (await post(client, RESPONSES)).body
        events = named(await post(client, RESPONSES, stream=True))
        adaptive = {"thinking": {"type": "adaptive"}}
        message = (await post(client, MESSAGES, **adaptive)).body
        blocks = named(await post(client, MESSAGES, stream=True, **adaptive))
        unasked = [(await post(client, MESSAGES, thinking=t)).body["content"] for t in (None, {"type": "disabled"})]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "well"}]
    assert response["output"][1]["content"][0]["text"] == "yes"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    streamed = events[-1][1]["response"]["output"]
    assert [shape(item) for item in streamed] == [shape(item) for item in response["output"]]
    assert "".join(body["delta"] for name, body in events if name == "response.reasoning_text.delta") == "well"
    assert message["content"] == [
        {"type": "thinking", "thinking": "well", "signature": ""}, {"type": "text", "text": "yes"},
    ]  # fmt: skip
    assert unasked == [[{"type": "text", "text": "yes"}]] * 2
    deltas = [body["delta"] for name, body in blocks if name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "well"


def same_prompts(engine: FakeEngine) -> None:
    first, *others = engine.requests_seen
    assert others
    assert all(other.prompt_ids == first.prompt_ids for other in others)


async def test_earlier_calls_are_what_they_are_in_a_chat() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "wait", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        {"role": "tool", "tool_call_id": "c", "content": "sun"},
        {"role": "user", "content": "so?"},
    ]
    item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": ARGUMENTS, "status": "completed"}
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
        item,
        item,
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "sun"}]},
        {"role": "user", "content": "so?"},
    ]
    use = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "c"}
    thought = {"type": "thinking", "thinking": "x", "signature": "y"}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "wait"}, use, use]},
        {"role": "user", "content": [
            {**result, "content": "rain"}, {**result, "content": [{"type": "text", "text": "sun"}]},
            {"type": "text", "text": "so?"},
        ]},
    ]  # fmt: skip
    engine = FakeEngine(max_len=4096)
    async with serve(engine) as client:
        await client.chat(messages=chat, tools=[CHAT_TOOL])
        replies = [
            await post(client, RESPONSES, input=items, tools=[FUNCTION]),
            await post(client, MESSAGES, messages=messages, tools=[CUSTOM]),
        ]
        body = {"model": "tiny", "messages": messages, "tools": [CUSTOM]}
        counted = await client.post(COUNT, {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}})
        refused = await client.post(COUNT, {**body, "tools": [{**CUSTOM, "name": "a b"}]})
    assert [reply.status for reply in replies] == [200, 200]
    assert all("x-specd-ignored-fields" not in reply.headers for reply in replies)
    same_prompts(engine)
    assert counted.body == {"input_tokens": len(engine.requests_seen[0].prompt_ids)}
    assert "'tools[0].name'" in refused.body["error"]["message"]


CHOICES = [
    ("none", "none", {"type": "none"}, None),
    ("auto", "auto", {"type": "auto"}, None),
    ("auto", "auto", {"type": "auto", "disable_parallel_tool_use": True}, False),
    ("required", "required", {"type": "any", "disable_parallel_tool_use": True}, False),
    (
        {"type": "function", "function": {"name": "weather"}},
        {"type": "function", "name": "weather"},
        {"type": "tool", "name": "weather"},
        None,
    ),
]


@pytest.mark.parametrize(("chat", "response", "message", "parallel"), CHOICES)
async def test_choices_are_those_of_a_chat(chat: Any, response: Any, message: Any, parallel: bool | None) -> None:
    engine = scripted(CALL)
    ask = ASK[MESSAGES]["messages"]
    async with serve(engine) as client:
        await client.chat(messages=ask, tools=[CHAT_TOOL], tool_choice=chat, parallel_tool_calls=parallel)
        shared = {"tools": [FUNCTION], "parallel_tool_calls": parallel}
        assert (await post(client, RESPONSES, tool_choice=response, **shared)).status == 200
        assert (await post(client, MESSAGES, tool_choice=message, tools=[CUSTOM])).status == 200
    same_prompts(engine)
    first, *others = (request.sampling for request in engine.requests_seen)
    for other in others:
        assert (other.grammar, other.stop) == (first.grammar, first.stop)


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (RESPONSES, {"tools": "x"}, "tools"),
        (RESPONSES, {"tools": ["x"]}, "tools[0]"),
        (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name"),
        (RESPONSES, {"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name"),
        (RESPONSES, {"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
        (RESPONSES, {"tools": [{**FUNCTION, "parameters": 5}]}, "tools[0].parameters"),
        (RESPONSES, {"tools": [{**FUNCTION, "defer_loading": True}]}, "tools[0].defer_loading"),
        (RESPONSES, {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        (RESPONSES, {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        (RESPONSES, {"tools": [FUNCTION], "tool_choice": "maybe"}, "tool_choice"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"max_tool_calls": 3}, "max_tool_calls"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[0].call_id"),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}, "input"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        (MESSAGES, {"tools": [{**CUSTOM, "name": "a b"}]}, "tools[0].name"),
        (MESSAGES, {"tools": [{**CUSTOM, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        (MESSAGES, {"tools": [CUSTOM], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        (MESSAGES, {"tools": [CUSTOM], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (MESSAGES, {"tools": [CUSTOM], "tool_choice": "any"}, "tool_choice"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        (RESPONSES, {"instructions": "x", "input": [
            {"role": "assistant", "content": "a"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]}, "input[1].arguments"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0].tool_use_id"),
    ],
)  # fmt: skip
async def test_refusals_name_the_place(path: str, fields: dict[str, Any], place: str) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        reply = await post(client, path, **fields)
    assert reply.status == 400
    assert f"'{place}'" in reply.body["error"]["message"]
    assert not engine.requests_seen


@pytest.mark.parametrize("arguments", ['{"n": 123456789012345678901234567890}', '{"s": "\\ud800"}', '{"n": 1e999}'])
async def test_arguments_are_given_as_they_were_written(arguments: str) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    async with serve(scripted(text)) as client:
        reply = await post(client, MESSAGES, tools=[CUSTOM], max_tokens=400)
    assert reply.status == 200
    assert f'"input":{arguments}' in reply.raw.decode()


async def test_what_nobody_reads_in_a_message_is_told() -> None:
    content = [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x", "odd": 1}]}]
    system = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}, "strange": 1}]
    async with serve(FakeEngine(max_len=4096)) as client:
        reply = await post(client, MESSAGES, messages=[{"role": "user", "content": content}], system=system)
        refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
        refused = await post(client, RESPONSES, input=[refusal, {"role": "user", "content": "why?"}])
    ignored = reply.headers["x-specd-ignored-fields"].split(",")
    assert sorted(ignored) == ["messages[0].content[0].content[0].odd", "system[0].strange"]
    assert refused.status == 200


async def test_input_that_is_nested_too_deep() -> None:
    use = {"type": "tool_use", "id": "c", "name": "weather", "input": "NESTED"}
    body = json.dumps({**ASK[MESSAGES], "messages": [{"role": "assistant", "content": [use]}]})
    async with serve(FakeEngine()) as client:
        reply = await client.post(MESSAGES, body.replace('"NESTED"', '{"a":' * 1000 + "{}" + "}" * 1000).encode())
    assert reply.status == 400


async def test_a_wrong_expectation_is_answered() -> None:
    async with serve(FakeEngine()) as client:
        reply = await client.post(MESSAGES, ASK[MESSAGES], headers={"Expect": "nonsense"})
    assert reply.status == 417


@pytest.mark.parametrize(
    ("error", "kind"),
    [(DeadlineError("late"), "timeout_error"), (ShutdownError("stops"), "overloaded_error")],
)
async def test_why_a_stream_of_messages_broke_off(error: Exception, kind: str) -> None:
    engine, seen = FakeEngine(), []

    def break_off(delta: SequenceDelta) -> SequenceDelta:
        seen.append(delta)
        if len(seen) > 2:
            raise error
        return delta

    engine.change = break_off
    async with serve(engine) as client:
        data = orjson.dumps({**ASK[MESSAGES], "stream": True})
        headers = {"Content-Type": "application/json"}
        chunks: list[bytes] = []
        async with client.session.post(client.url + MESSAGES, data=data, headers=headers) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await keep(response, chunks)
    name, body = named(Reply(200, {}, b"".join(chunks)))[-1]
    assert (name, body["error"]["type"]) == ("error", kind)


async def test_openais_own_client_reads_calls() -> None:
    tools: Any = [FUNCTION]
    async with (
        serve(scripted(SAID)) as client,
        openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0) as sdk,
        sdk.responses.stream(model="tiny", input="hi", tools=tools) as stream,
    ):
        response = await stream.get_final_response()
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert orjson.loads(response.output[1].arguments) == {"city": "Oslo"}  # type: ignore[union-attr]
