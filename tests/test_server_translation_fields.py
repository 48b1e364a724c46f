"""Fields of the Responses and the Messages API that change nothing, or that are on when nobody asks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fake_engine import FakeEngine
from tests.http_server import serve
from tests.test_server_translations import ASK, COUNT, MESSAGES, RESPONSES, named, post

BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}]


def nested(levels: int) -> Any:
    return {"a": nested(levels - 1)} if levels else "x"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"metadata": nested(300)}, "invalid_type", "metadata.a"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
        ({"metadata": ["a"]}, "invalid_type", "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "out_of_range", "metadata"),
        ({"user": nested(300)}, "invalid_type", "user"),
        ({"safety_identifier": 1}, "invalid_type", "safety_identifier"),
        ({"prompt_cache_key": ["k"]}, "invalid_type", "prompt_cache_key"),
        ({"parallel_tool_calls": nested(300)}, "invalid_type", "parallel_tool_calls"),
    ],
)
async def test_what_is_repeated_in_a_response_is_checked(
    fields: dict[str, Any], code: str, param: str, stream: bool
) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        body = {**ASK[RESPONSES], "stream": stream, **fields}
        reply = await client.post(RESPONSES, json.dumps(body).encode())  # orjson writes nothing that is so deep
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param)
    assert not engine.requests_seen


async def test_what_changes_nothing_is_repeated() -> None:
    fields = {
        "metadata": {str(i): "x" for i in range(16)}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k",
        "parallel_tool_calls": False,
    }  # fmt: skip
    async with serve(FakeEngine()) as client:
        body = (await post(client, RESPONSES, **fields)).body
        absent = (await post(client, RESPONSES, **dict.fromkeys(fields))).body
    assert {name: body[name] for name in fields} == fields
    assert absent["metadata"] == {}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_limit_of_time_and_a_salt_are_those_of_a_chat(path: str) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        for fields in ({}, {"timeout": 1.5, "cache_salt": "s"}):
            await post(client, path, **fields)
        refused = await client.post(path, {**ASK[path], "timeout": 0})
    plain, limited = engine.requests_seen
    assert (plain.timeout_s, limited.timeout_s, refused.status) == (None, 1.5, 400)
    assert plain.cache_salt != limited.cache_salt


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_flag_that_is_on_by_default_is_not_turned_off_unheard(path: str) -> None:
    async with serve(FakeEngine()) as client:
        reply = await post(client, path, add_generation_prompt=False)
        assert reply.status == 400
        assert b"'add_generation_prompt' is not supported" in reply.raw
        for value in (True, None):
            assert (await post(client, path, add_generation_prompt=value)).status == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"continue_final_message": False}, 200),
        ({"continue_final_message": True}, 400),
        ({"messages": BEGUN}, 200),
        ({"messages": BEGUN, "add_generation_prompt": False}, 200),
        ({"messages": BEGUN, "continue_final_message": True}, 200),
        ({"messages": BEGUN, "continue_final_message": False}, 400),
        ({"messages": BEGUN, "add_generation_prompt": True}, 400),
    ],
)
async def test_the_last_message_says_who_is_next(fields: dict[str, Any], status: int) -> None:
    async with serve(FakeEngine()) as client:
        assert (await post(client, MESSAGES, **fields)).status == status
        assert (await client.post(COUNT, {"messages": ASK[MESSAGES]["messages"], **fields})).status == status


async def test_padding_of_a_response_s_events_can_be_asked_for_and_off() -> None:
    async with serve(FakeEngine()) as client:
        for wish in (True, False):
            options = {"include_obfuscation": wish}
            events = named(await post(client, RESPONSES, stream=True, stream_options=options))
            assert any("obfuscation" in body for _, body in events) is wish
        for options in ({"include_obfuscation": 1}, 5):
            reply = await client.post(RESPONSES, {**ASK[RESPONSES], "stream": True, "stream_options": options})
            assert reply.status == 400
