"""`response_format` and `structured_outputs`: what they become, and every way to be refused by name."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from specd.errors import GrammarError, RequestError
from specd.request import Grammar
from specd.server.checks import schema_of
from specd.server.fields import Endpoint, read_fields
from specd.server.structured import MAX_TEXT_BYTES, grammar_of, response_format, structured_outputs
from tests.fake_engine import FakeEngine, Script
from tests.http_server import serve

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
GOOD: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "text"}, "structured_outputs": {}}, None),
    ({"response_format": {"type": "json_object", "json_schema": None}}, Grammar("json_schema", '{"type":"object"}')),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a-b_1", "schema": SCHEMA, "strict": False},
            }
        },
        Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "description": "d"}}},
        Grammar("json_schema", "{}"),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))),
    ({"structured_outputs": {"json": '{ "type": "null" }'}}, Grammar("json_schema", '{"type":"null"}')),
    ({"structured_outputs": {"regex": "a+", "json": None}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"json": None, "regexx": None}}, None),
    ({"structured_outputs": {"choice": ["é", 'b"']}}, Grammar("choice", '["é","b\\""]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


BIG = "x" * (MAX_TEXT_BYTES + 1)
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "invalid_type", "response_format"),
    ({"response_format": {}}, "missing_parameter", "response_format.type"),
    ({"response_format": {"type": "xml"}}, "out_of_range", "response_format.type"),
    ({"response_format": {"type": ["text"]}}, "out_of_range", "response_format.type"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "unsupported_parameter", "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "missing_parameter", "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "invalid_type", "response_format.json_schema"),
    (schema_format(SCHEMA, name=None), "missing_parameter", "response_format.json_schema.name"),
    (schema_format(SCHEMA, name="a b"), "out_of_range", "response_format.json_schema.name"),
    (schema_format(SCHEMA, name="n" * 65), "out_of_range", "response_format.json_schema.name"),
    (schema_format(SCHEMA, strict="yes"), "invalid_type", "response_format.json_schema.strict"),
    (schema_format(None), "missing_parameter", "response_format.json_schema.schema"),
    (schema_format([1]), "invalid_type", "response_format.json_schema.schema"),
    (schema_format(deep(33)), "schema_too_complex", "response_format.json_schema.schema"),
    (schema_format({"enum": [BIG]}), "schema_too_complex", "response_format.json_schema.schema"),
    ({"structured_outputs": []}, "invalid_type", "structured_outputs"),
    ({"structured_outputs": {"regexx": "a"}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "unsupported_parameter", "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": ""}}, "out_of_range", "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "invalid_type", "structured_outputs.regex"),
    ({"structured_outputs": {"regex": BIG}}, "schema_too_complex", "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": BIG}}, "schema_too_complex", "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": []}}, "out_of_range", "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "out_of_range", "structured_outputs.choice[1]"),
    ({"structured_outputs": {"choice": [BIG]}}, "schema_too_complex", "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "invalid_schema", "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, "invalid_type", "structured_outputs.json"),
    ({"structured_outputs": {"json": True}}, "invalid_type", "structured_outputs.json"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "invalid_value",
        "structured_outputs",
    ),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "invalid_value", "ignore_eos"),
]


@pytest.mark.parametrize(("body", "grammar"), GOOD)
@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_what_is_asked_for(body: dict[str, Any], grammar: Grammar | None, endpoint: Endpoint) -> None:
    values, ignored = read_fields(body, endpoint)
    assert ignored == ()
    assert grammar_of(values) == grammar


@pytest.mark.parametrize(("body", "code", "param"), BAD)
def test_refusals_name_field_and_value(body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of(read_fields(body, Endpoint.CHAT)[0])
    assert (caught.value.code, caught.value.param) == (code, param)
    assert f"'{param}'" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_limits_are_allowed_themselves() -> None:
    assert grammar_of(read_fields(schema_format(deep(32)), Endpoint.CHAT)[0]) is not None
    exact = {"structured_outputs": {"regex": BIG[1:]}}
    assert grammar_of(read_fields(exact, Endpoint.CHAT)[0]) is not None


def test_what_the_description_of_the_api_says() -> None:
    """Its schemas accept what is accepted, and refuse what is of a wrong shape."""
    for body, _ in GOOD:
        for name, check in (("response_format", response_format), ("structured_outputs", structured_outputs)):
            value = body.get(name)
            if value is not None and None not in value.values():
                jsonschema.validate(value, schema_of(check))
    for value in ({}, {"type": "xml"}, {"type": "json_schema"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, schema_of(response_format))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"regex": "a", "choice": ["b"]}, schema_of(structured_outputs))


async def test_the_engine_prepares_a_grammar_before_it_gets_the_request() -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        assert (await client.chat(response_format={"type": "json_object"})).status == 200
        body = {"prompt": ["a", "b"], "structured_outputs": {"regex": "a|b"}}
        assert (await client.post("/v1/completions", body)).status == 200
        assert (await client.chat()).status == 200
    assert engine.grammars == [Grammar("json_schema", '{"type":"object"}'), Grammar("regex", "a|b")]
    assert [request.sampling.grammar for request in engine.requests_seen] == [
        engine.grammars[0], engine.grammars[1], engine.grammars[1], None
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_cannot_be_compiled_is_a_400_before_anything_runs(stream: bool) -> None:
    refused = RequestError("'f' is too complex", code="schema_too_complex", param="f")
    engine = FakeEngine(Script(refuse_grammar=refused))
    async with serve(engine) as client:
        reply = await client.chat(response_format={"type": "json_object"}, stream=stream)
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("schema_too_complex", "f")
    assert not engine.requests_seen


async def test_nothing_left_to_say_is_the_clients_error() -> None:
    engine = FakeEngine(Script(refuse=GrammarError("no token can follow")))
    async with serve(engine) as client:
        reply = await client.chat()
    assert (reply.status, reply.error["code"]) == (400, "no_token_allowed")
    assert reply.error["message"] == "no token can follow"
    assert reply.headers["x-should-retry"] == "false"
