"""Structured output on /v1/responses and /v1/messages: what is asked for, and refusals in their own names."""

from __future__ import annotations

from typing import Any

import pytest

from specd.errors import RequestError
from specd.request import Request
from tests.fake_engine import FakeEngine
from tests.http_server import serve
from tests.test_server_translations import COUNT, MESSAGES, RESPONSES, post

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT_SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}}}'


def text(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": fields}}


def config(**fields: Any) -> dict[str, Any]:
    return {"output_config": {"format": fields}}


@pytest.mark.parametrize(
    ("path", "fields", "grammar"),
    [
        (RESPONSES, text(type="json_schema", name="a", schema=SCHEMA, strict=True, description="x"), TEXT_SCHEMA),
        (RESPONSES, text(type="json_object"), '{"type":"object"}'),
        (RESPONSES, text(type="text"), None),
        (RESPONSES, {"text": {"format": None, "verbosity": "medium"}}, None),
        (MESSAGES, config(type="json_schema", schema=SCHEMA), TEXT_SCHEMA),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, TEXT_SCHEMA),
        (MESSAGES, {"output_config": {"format": None, "effort": None}}, None),
        (MESSAGES, {"output_config": {}, "output_format": {"type": "json_schema", "schema": SCHEMA}}, TEXT_SCHEMA),
    ],
)
async def test_what_the_answer_must_be(path: str, fields: dict[str, Any], grammar: str | None) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        reply = await post(client, path, **fields)
    assert reply.status == 200
    found = engine.requests_seen[0].sampling.grammar
    assert (found and found.text) == grammar
    if path == RESPONSES:
        assert reply.body["text"] == {"format": fields["text"]["format"] or {"type": "text"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        (RESPONSES, {"text": "json"}, "'text'"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "'text.verbosity'"),
        (RESPONSES, text(name="a"), "'text.format.type'"),
        (RESPONSES, text(type="xml"), "'text.format.type'"),
        (RESPONSES, text(type="text", name="a"), "'text.format.name'"),
        (RESPONSES, text(type="json_schema", name="a"), "'text.format.schema'"),
        (RESPONSES, text(type="json_schema", schema=SCHEMA), "'text.format.name'"),
        (RESPONSES, text(type="json_schema", name="a b", schema=SCHEMA), "'text.format.name'"),
        (RESPONSES, text(type="json_schema", name="a", schema=5), "'text.format.schema'"),
        (MESSAGES, config(type="json_object"), "'output_config.format.type'"),
        (MESSAGES, config(type="json_schema"), "'output_config.format.schema'"),
        (MESSAGES, config(type="json_schema", schema="x"), "'output_config.format.schema'"),
        (MESSAGES, {"output_config": {"effort": "low"}}, "'output_config.effort'"),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": []}}, "'output_format.schema'"),
        (MESSAGES, {**config(type="json_schema", schema=SCHEMA),
                    "output_format": {"type": "json_schema", "schema": SCHEMA}}, "'output_format'"),
    ],
)  # fmt: skip
async def test_refusals_name_the_place(path: str, fields: dict[str, Any], word: str, stream: bool) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        reply = await post(client, path, stream=stream, **fields)
    assert reply.status == 400
    assert word in reply.body["error"]["message"]
    assert "response_format" not in reply.raw.decode()
    assert not engine.requests_seen


class Refusing(FakeEngine):
    async def prepare_grammar(self, request: Request) -> None:
        assert request.sampling.grammar is not None
        param = request.sampling.grammar.param
        raise RequestError(f"'{param}.a' cannot be compiled", code="invalid_schema", param=f"{param}.a")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (RESPONSES, text(type="json_schema", name="a", schema=SCHEMA), "text.format.schema.a"),
        (MESSAGES, config(type="json_schema", schema=SCHEMA), "output_config.format.schema.a"),
    ],
)
async def test_a_schema_that_cannot_be_compiled(path: str, fields: dict[str, Any], param: str) -> None:
    async with serve(Refusing()) as client:
        reply = await post(client, path, **fields)
    assert reply.status == 400
    assert reply.body["error"]["message"] == f"'{param}' cannot be compiled"


async def test_counting_tokens_takes_the_same_fields() -> None:
    async with serve(FakeEngine()) as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        plain = await client.post(COUNT, body)
        asked = await client.post(COUNT, body | config(type="json_schema", schema=SCHEMA))
        wrong = await client.post(COUNT, body | config(type="xml"))
    assert (plain.status, wrong.status) == (200, 400)
    assert asked.body == plain.body
