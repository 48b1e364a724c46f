"""The Responses and the Messages API against a scripted engine: shapes, order of events, refusals, failures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest

from specd.config import Config, ServerConfig
from specd.errors import RequestError
from specd.server import messages_api, responses_api
from specd.server.fields import ENDPOINT_FIELDS, Endpoint
from specd.server.translation import named_event, own_names
from tests.fake_engine import FakeEngine, Script
from tests.http_server import Client, Reply, serve

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
ASK: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "tiny", "input": "hi"},
    MESSAGES: {"model": "tiny", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]},
}
TEXT = "hello world"


async def post(client: Client, path: str, **fields: Any) -> Reply:
    return await client.post(path, {**ASK[path], **fields})


def named(reply: Reply) -> list[tuple[str, dict[str, Any]]]:
    """(name, body) of every event; the name is repeated in the body."""
    found = []
    blocks = reply.raw.split(b"\n\n")
    assert blocks.pop() == b"", "the last event is complete"
    for block in blocks:
        if block.startswith(b": "):
            continue
        first, second = block.split(b"\n")
        assert first.startswith(b"event: ")
        assert second.startswith(b"data: ")
        body = orjson.loads(second[6:])
        assert body["type"] == first[7:].decode()
        found.append((body["type"], body))
    return found


def order(events: list[tuple[str, dict[str, Any]]]) -> list[str]:
    names = [name for name, _ in events]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


# Responses


async def test_a_response() -> None:
    async with serve(FakeEngine()) as client:
        reply = await post(client, RESPONSES, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    body = reply.body
    assert body["id"].startswith("resp_")
    assert reply.headers["x-request-id"] in body["id"]
    assert (body["object"], body["status"], body["error"], body["incomplete_details"]) == (
        "response", "completed", None, None,
    )  # fmt: skip
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    assert body["instructions"] == "Be brief."
    assert (body["store"], body["temperature"], body["metadata"]) == (False, 0.5, {"a": "b"})
    usage = body["usage"]
    assert usage["output_tokens"] == 11
    assert usage["total_tokens"] == usage["input_tokens"] + 11
    assert usage["input_tokens_details"] == {"cached_tokens": usage["input_tokens"] // 2}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


async def test_the_events_of_a_response() -> None:
    async with serve(FakeEngine(Script(blocks=(2, 1)))) as client:
        whole = (await post(client, RESPONSES)).body
        events = named(await post(client, RESPONSES, stream=True))
    assert order(events) == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [body["sequence_number"] for _, body in events] == list(range(len(events)))
    assert "".join(body["delta"] for name, body in events if name.endswith("text.delta")) == TEXT
    first, last = events[0][1]["response"], events[-1][1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    differing = ("id", "output", "created_at", "completed_at")
    assert {k: v for k, v in last.items() if k not in differing} == {
        k: v for k, v in whole.items() if k not in differing
    }
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert {body["item_id"] for _, body in events if "item_id" in body} == {last["output"][0]["id"]}


async def test_a_response_that_is_cut() -> None:
    async with serve(FakeEngine()) as client:
        body = (await post(client, RESPONSES, max_output_tokens=3)).body
        events = named(await post(client, RESPONSES, max_output_tokens=3, stream=True))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert events[-1][0] == "response.incomplete"


async def test_a_response_is_the_chat_completion() -> None:
    """The same request reaches the engine."""
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "more"},
    ]  # fmt: skip
    chat = [
        {"role": "system", "content": "First."}, {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "more"},
    ]  # fmt: skip
    shared = {"temperature": 0.3, "top_p": 0.9, "seed": 5, "prediction": {"type": "content", "content": "he"}}
    engine = FakeEngine()
    async with serve(engine) as client:
        await post(client, RESPONSES, input=items, instructions="First.", max_output_tokens=9, **shared)
        await client.chat(messages=chat, max_completion_tokens=9, **shared)
    same_request(engine)


def same_request(engine: FakeEngine) -> None:
    ours, theirs = engine.requests_seen
    blank: dict[str, Any] = {"request_id": "", "arrival_s": 0.0}
    assert dataclasses.replace(ours, **blank) == dataclasses.replace(theirs, **blank)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"store": True}, "unsupported_parameter", "store"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"conversation": "c"}, "unsupported_parameter", "conversation"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"text": {"verbosity": "low"}}, "unsupported_parameter", "text.verbosity"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"logprobs": True}, "unsupported_parameter", "logprobs"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"input": None}, "missing_parameter", "input"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": []}, "out_of_range", "input"),
        ({"input": ["x"]}, "invalid_type", "input[0]"),
        ({"input": [{"type": "item_reference"}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "out_of_range", "input[0].role"),
        ({"input": [{"role": "user"}]}, "missing_parameter", "input[0].content"),
        ({"input": [{"role": "user", "content": 1}]}, "invalid_type", "input[0].content"),
        ({"input": [{"role": "user", "content": [1]}]}, "invalid_type", "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "unsupported_parameter",
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "missing_parameter",
            "input[0].content[0].text",
        ),
        ({"instructions": 1}, "invalid_type", "instructions"),
        ({"max_output_tokens": 0}, "out_of_range", "max_output_tokens"),
        ({"max_output_tokens": 600}, "context_length_exceeded", "input"),
        ({"temperature": 3}, "out_of_range", "temperature"),
        ({"stop": ["a"] * 5}, "out_of_range", "stop"),
    ],
)
async def test_what_a_response_is_refused_for(fields: dict[str, Any], code: str, param: str) -> None:
    async with serve(FakeEngine()) as client:
        reply = await post(client, RESPONSES, **fields)
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == (code, param)


async def test_what_asks_for_nothing_is_no_reason() -> None:
    empty = {
        "tools": [], "tool_choice": "auto", "store": False, "background": False, "previous_response_id": None,
        "include": [], "truncation": "disabled", "text": {"format": {"type": "text"}}, "user": "u", "metadata": {},
    }  # fmt: skip
    async with serve(FakeEngine()) as client:
        assert (await post(client, RESPONSES, **empty)).status == 200
        reply = await post(client, RESPONSES, surprise=1, input=[{"role": "user", "content": "x", "odd": 1}])
        assert sorted(reply.headers["x-specd-ignored-fields"].split(",")) == ["input[0].odd", "surprise"]
        strict = await client.post(RESPONSES, {**ASK[RESPONSES], "surprise": 1}, headers={"x-specd-strict": "1"})
        assert (strict.status, strict.error["code"]) == (400, "unknown_parameter")


# Messages


async def test_a_message() -> None:
    async with serve(FakeEngine()) as client:
        reply = await post(client, MESSAGES)
    body = reply.body
    assert body["id"].startswith("msg_")
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "tiny")
    assert body["content"] == [{"type": "text", "text": TEXT}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    usage = body["usage"]
    assert usage["output_tokens"] == 11
    assert usage["cache_read_input_tokens"] > 0
    async with serve(FakeEngine()) as client:
        count = (await client.post(COUNT, {k: v for k, v in ASK[MESSAGES].items() if k != "max_tokens"})).body
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_the_events_of_a_message() -> None:
    async with serve(FakeEngine(Script(blocks=(2, 1)))) as client:
        whole = (await post(client, MESSAGES)).body
        events = named(await post(client, MESSAGES, stream=True))
    assert order(events) == [
        "message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    message = events[0][1]["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    deltas = [body["delta"] for name, body in events if name == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == TEXT
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2][1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"max_tokens": 3}, ("max_tokens", None)),
        ({"stop_sequences": ["zz", "o w"]}, ("stop_sequence", "o w")),
        ({}, ("end_turn", None)),
    ],
)
async def test_why_a_message_ends(fields: dict[str, Any], end: tuple[str, str | None]) -> None:
    async with serve(FakeEngine()) as client:
        body = (await post(client, MESSAGES, **fields)).body
        events = named(await post(client, MESSAGES, **fields, stream=True))
    assert (body["stop_reason"], body["stop_sequence"]) == end
    assert tuple(events[-2][1]["delta"].values()) == end


@pytest.mark.parametrize("begun", [False, True])
async def test_a_message_is_the_chat_completion(begun: bool) -> None:
    """A last message of the assistant is continued."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    chat: list[dict[str, Any]] = [{"role": "system", "content": "Terse."}, {"role": "user", "content": "hi"}]
    if begun:
        messages.append({"role": "assistant", "content": "he"})
        chat.append({"role": "assistant", "content": "he"})
    engine = FakeEngine()
    system = [{"type": "text", "text": "Terse.", "cache_control": {"type": "ephemeral"}}]
    shared = {"temperature": 0.3, "top_k": 7, "seed": 5}
    end = {"continue_final_message": True, "add_generation_prompt": False} if begun else {}
    async with serve(engine) as client:
        await post(client, MESSAGES, messages=messages, system=system, max_tokens=9, stop_sequences=["x"], **shared)
        await client.chat(messages=chat, max_tokens=9, stop=["x"], **shared, **end)
    same_request(engine)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop": ["a"]}, "stop"),
        ({"n": 2}, "n"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 600}, "maximum context length"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"system": 5}, "system"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_what_a_message_is_refused_for(fields: dict[str, Any], word: str) -> None:
    async with serve(FakeEngine()) as client:
        reply = await post(client, MESSAGES, **fields)
    assert reply.status == 400
    assert reply.body.keys() == {"type", "error", "request_id"}
    assert reply.body["error"]["type"] == "invalid_request_error"
    assert word in reply.body["error"]["message"]


async def test_errors_have_anthropics_shape_on_its_paths_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    config = Config(server=ServerConfig(api_keys_file=str(keys), max_body_bytes=2000))
    async with serve(FakeEngine(), config=config) as client:
        for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
            assert (await client.post(MESSAGES, ASK[MESSAGES], headers=headers)).status == 200
            assert (await client.post(RESPONSES, ASK[RESPONSES], headers=headers)).status == 200
        key = {"x-api-key": "secret"}
        large = {**ASK[MESSAGES], "system": "x" * 3000}
        for reply, status, kind in (
            (await client.post(MESSAGES, ASK[MESSAGES], headers={"x-api-key": "wrong"}), 401, "authentication_error"),
            (await client.post(COUNT, ASK[MESSAGES]), 401, "authentication_error"),
            (await client.get(MESSAGES, headers=key), 405, "invalid_request_error"),
            (await client.post(MESSAGES, large, headers=key), 413, "request_too_large"),
            (await client.post(MESSAGES, {**ASK[MESSAGES], "model": "nope"}, headers=key), 404, "not_found_error"),
        ):
            assert (reply.status, reply.body["type"], reply.body["error"]["type"]) == (status, "error", kind)
            assert reply.body["request_id"] == reply.headers["x-request-id"]
        assert (await client.post(RESPONSES, ASK[RESPONSES])).error["code"] == "invalid_api_key"
        missing = await client.post("/v1/messages/batches", {}, headers=key)
        assert (missing.status, missing.error["code"]) == (404, "not_found")


# Both


async def keep(response: aiohttp.ClientResponse, chunks: list[bytes]) -> None:
    """Also what came before it broke off."""
    async for chunk in response.content.iter_any():
        chunks.append(chunk)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_an_answer_that_breaks_off(path: str) -> None:
    """An error event, and no end of the body."""
    async with serve(FakeEngine(Script(fail_after=3))) as client:
        data = orjson.dumps({**ASK[path], "stream": True})
        headers = {"Content-Type": "application/json"}
        chunks: list[bytes] = []
        async with client.session.post(client.url + path, data=data, headers=headers) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await keep(response, chunks)
    name, body = named(Reply(200, {}, b"".join(chunks)))[-1]
    assert name == "error"
    assert "could not compute" in body["error"]["message"]
    if path == RESPONSES:
        assert body["code"] == body["error"]["code"]
    else:
        assert body["error"]["type"] == "api_error"


@pytest.mark.parametrize(("path", "comment"), [(RESPONSES, b": keep-alive\n\n"), (MESSAGES, b"event: ping\ndata: ")])
async def test_silence_is_filled(path: str, comment: bytes) -> None:
    config = Config(server=ServerConfig(keep_alive_s=0.1))
    async with serve(FakeEngine(Script(delay_s=0.35, text=lambda request, index: "ab")), config=config) as client:
        reply = await post(client, path, stream=True)
    assert reply.raw.count(comment) >= 3


@pytest.mark.parametrize("fields", [responses_api.FIELDS, messages_api.FIELDS], ids=["responses", "messages"])
def test_every_name_of_a_chat_completion_has_a_class(fields: Any) -> None:
    """What means something there is honoured or refused here, never ignored."""
    chat = ENDPOINT_FIELDS[Endpoint.CHAT]
    classes = [set(fields.honoured), set(fields.inert), set(fields.unbuilt)]
    assert sum(map(len, classes)) == len(set.union(*classes)), "a name is in one class only"
    assert set.union(set(chat.honoured), chat.inert, set(chat.unbuilt)) <= set.union(*classes)
    assert set(chat.unbuilt) <= set(fields.unbuilt) | set(fields.honoured)


def test_refusals_are_told_in_the_requests_own_words() -> None:
    def refuse(param: str | None) -> None:
        raise RequestError(f"'{param}' is wrong", code="out_of_range", param=param)

    for param, own in (("messages[2].content", "input[2].content"), ("messages", "input"), ("model", "model")):
        with pytest.raises(RequestError) as caught, own_names({"messages": "input"}):
            refuse(param)
        assert (caught.value.param, str(caught.value)) == (own, f"'{own}' is wrong")
    with pytest.raises(RequestError), own_names({"messages": "input"}):
        refuse(None)


def test_events_are_padded_where_others_may_count_bytes() -> None:
    sizes = {len(named_event("x", {"delta": "a" * n}, padded=True)) for n in range(60)}
    assert all(size % 64 == 0 for size in sizes)
    assert len(sizes) <= 3
    assert b"obfuscation" not in named_event("x", {"delta": "a"}, padded=False)


async def test_openais_own_client_reads_a_response() -> None:
    async with (
        serve(FakeEngine(Script(blocks=(2, 1)))) as client,
        openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0) as sdk,
    ):
        whole = await sdk.responses.create(model="tiny", input="hi", store=False)
        async with sdk.responses.stream(model="tiny", input="hi") as stream:
            streamed = await stream.get_final_response()
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await sdk.responses.create(model="tiny", input="hi", previous_response_id=whole.id)
    assert whole.output_text == streamed.output_text == TEXT
    assert whole.usage == streamed.usage
