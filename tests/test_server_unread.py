"""One rule at every depth: a name in no class is ignored, reported by its path, and refused under `x-specd-strict`."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from specd.server import messages_api, responses_api
from specd.server.checks import schema_of
from specd.server.fields import ENDPOINT_FIELDS, TOKENIZE_FIELDS, FieldTable, read_table
from specd.server.unread import unread
from tests.fake_engine import FakeEngine
from tests.http_server import serve

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}, "odd": 1}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "odd": 1}}}
TEXT = {"type": "text", "text": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"odd": 1}'}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT], "is_error": False}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"odd": 1}}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
# With every object that a body of the endpoint can have; what is the client's own has names of its own.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": [TEXT], "refusal": None},
            {"role": "user", "content": "x", "name": "n"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning_content": "r"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None, "annotations": [{"a": 1}]},
            {"role": "tool", "content": [TEXT], "tool_call_id": "c", "tool_calls": []},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "prediction": {"type": "content", "content": [TEXT]},
        "speculation": {"mode": "auto"},
    },
    COMPLETIONS: {
        "prompt": "x",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "logit_bias": {"1": 1},
        "metadata": {"a": "b"},
    },
    RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x", "annotations": [{"a": 1}]}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "summary": [{"a": 1}]},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "metadata": {"a": "b"},
        "stream_options": {"include_obfuscation": False},
        "stream": True,
        "speculation": {"mode": "auto"},
    },
    MESSAGES: {
        "max_tokens": 3,
        "system": [{**TEXT, "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [TEXT]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, TEXT, USE]},
            {"role": "user", "content": [RESULT, TEXT]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object", "odd": 1}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "disabled"},
        "prediction": {"type": "content", "content": [TEXT]},
    },
}
# What belongs to the client, whatever is in it.
FREE = ("parameters", "schema", "input_schema", "input", "annotations", "summary", "metadata", "logit_bias")
TABLES = {**dict(zip((COMPLETIONS, CHAT), ENDPOINT_FIELDS.values(), strict=True)),
          RESPONSES: responses_api.FIELDS, MESSAGES: messages_api.FIELDS}  # fmt: skip


def odd_everywhere(value: Any, path: str, paths: list[str]) -> None:
    """Puts a name that nobody reads into every object that is not the client's own."""
    for name, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        below = f"{path}[{name}]" if isinstance(value, list) else f"{path}.{name}".lstrip(".")
        own = (name in FREE and path != "") or name in ("cache_control", "metadata", "logit_bias")
        if isinstance(item, dict | list) and not own:
            odd_everywhere(item, below, paths)
    if isinstance(value, dict):
        value["odd"] = 1
        paths.append(f"{path}.odd".lstrip("."))


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_name_that_nobody_reads_is_reported_wherever_it_stands(path: str) -> None:
    body, paths = copy.deepcopy(BODIES[path]), list[str]()
    odd_everywhere(body, "", paths)
    assert len(paths) >= 2
    async with serve(FakeEngine(max_len=4096)) as client:
        clean = await client.post(path, BODIES[path])
        reply = await client.post(path, body)
        strict = await client.post(path, body, headers={"x-specd-strict": "1"})
        good = await client.post(path, BODIES[path], headers={"x-specd-strict": "1"})
        metrics = (await client.get("/metrics")).raw.decode()
    assert (clean.status, good.status, reply.status) == (200, 200, 200), (clean.raw, good.raw, reply.raw)
    assert "x-specd-ignored-fields" not in clean.headers
    reported = reply.headers["x-specd-ignored-fields"].split(",")
    assert set(reported) <= set(paths)
    assert len(reported) == min(len(paths), 20)
    assert strict.status == 400
    assert "unknown_parameter" in strict.raw.decode() or path == MESSAGES  # whose errors have no codes
    assert f"specd_ignored_fields_total {float(len(paths))}" in metrics
    _, ignored = read_table(body, TABLES[path])
    assert sorted(ignored) == sorted(paths)


def names(table: FieldTable, field: str, value: Any) -> list[str]:
    return list(unread(value, schema_of(table.honoured[field]), field))


def test_a_name_counts_where_it_is_read() -> None:
    chat = TABLES[CHAT]
    thought = {"role": "user", "content": "x", "reasoning_content": "r"}
    assert names(chat, "messages", [thought]) == ["messages[0].reasoning_content"]
    assert names(chat, "messages", [{**thought, "role": "assistant"}]) == []
    failed = {"role": "user", "content": [{**RESULT, "is_error": True}]}
    assert names(TABLES[MESSAGES], "messages", [failed]) == ["messages[0].content[0].is_error"]
    assert names(chat, "messages", [{**thought, "reasoning_content": None}]) == []
    bare = {"role": "user", "content": "x", "id": "i", "arguments": "{}", "summary": []}  # a message, not a call
    assert names(TABLES[RESPONSES], "input", [bare]) == ["input[0].arguments", "input[0].summary"]


@pytest.mark.parametrize("value", [5, None, "x", [5], [[]], [{"role": 5}], [{"role": "x", "odd": 1}], {"odd": 1}])
def test_what_is_of_the_wrong_shape_is_its_check_s_to_refuse(value: Any) -> None:
    for field in ("messages", "response_format"):
        assert all(name.endswith(".odd") for name in names(TABLES[CHAT], field, value))


async def test_what_is_not_read_is_not_in_the_prompt() -> None:
    tools = BODIES[CHAT]["tools"]
    odd = [{**tools[0], "odd": 1, "function": {**FUNCTION, "odd": 1}}]
    async with serve(FakeEngine(max_len=4096)) as client:
        plain, more = [await client.post(f"{CHAT}/render", {**BODIES[CHAT], "tools": t}) for t in (tools, odd)]
        tokenized = await client.post("/tokenize", {"messages": [{"role": "user", "content": "x", "odd": 1}]})
    assert plain.body["prompts"] == more.body["prompts"]
    assert more.headers["x-specd-ignored-fields"] == "tools[0].function.odd,tools[0].odd"
    assert tokenized.headers["x-specd-ignored-fields"] == "messages[0].odd"
    assert "messages" in TOKENIZE_FIELDS.honoured


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (CHAT, {"tools": [{"type": "function", "function": FUNCTION, "defer_loading": True}]},
         "tools[0].defer_loading"),
        (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        (CHAT, {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    ],
)  # fmt: skip
async def test_what_would_change_the_answer_is_refused_at_every_depth(
    path: str, fields: dict[str, Any], place: str
) -> None:
    async with serve(FakeEngine(max_len=4096)) as client:
        reply = await client.post(path, {**BODIES[path], **fields})
    assert (reply.error["code"], reply.error["param"]) == ("unsupported_parameter", place)
