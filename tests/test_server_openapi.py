"""The API's description and the API: the same routes, fields, ranges, statuses and answers."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specd.config import Config, ServerConfig
from specd.errors import (
    AbortedError,
    DeadlineError,
    DrainingError,
    EngineError,
    GrammarError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
)
from specd.server.app import create_app
from specd.server.errors import _REQUEST_STATUS, describe
from specd.server.fields import CHAT_PROMPT_FIELDS
from specd.server.openapi import ROUTES, Route, document
from specd.server.schemas import SCHEMAS
from tests.fake_engine import FakeEngine
from tests.http_server import Client, Reply, serve
from tests.schema_values import ANY_JSON, counterexamples, samples, values

ENGINE = FakeEngine()
CONFIG = Config(server=ServerConfig(max_choices=3, max_logprobs=7, max_stop=2))
DOCUMENT = document(CONFIG, ENGINE.info, version="1")
BODIES: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": "hi"},
    "ChatCompletionRequest": {"messages": [{"role": "user", "content": "hi"}]},
    "ResponseRequest": {"input": "hi"},
    "MessageRequest": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "CountRequest": {"messages": [{"role": "user", "content": "hi"}]},
    "TokenizeRequest": {"prompt": "hi"},
    "DetokenizeRequest": {"tokens": [1]},
}
OWN = ("CompletionRequest", "ChatCompletionRequest", "TokenizeRequest", "DetokenizeRequest")
# What a field's value needs beside it to be taken.
WITH: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "continue_final_message": {"messages": [{"role": "assistant", "content": "hi"}]},
    "min_tokens": {"max_tokens": 20},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "x"}}]},
}
# Fields whose highest value is more than this model's context or vocabulary holds.
BEYOND = ("max_tokens", "max_completion_tokens", "min_tokens")
POSTS = [route for route in ROUTES if route.body]
# Those that are not a translation of another one's body, or read it once more.
READERS = [route for route in POSTS if route.body in OWN and not route.path.endswith("/render")]


@functools.cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """Of one schema of the description."""
    found: dict[str, Any] = DOCUMENT["components"]["schemas"][name]
    return jsonschema.Draft202012Validator({**found, "components": DOCUMENT["components"]})


def fields(route: Route) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, part in DOCUMENT["components"]["schemas"][route.body]["properties"].items():
        if part.get("description") != "accepted; changes nothing":
            yield name, part


def check_documented(reply: Reply, route: Route) -> None:
    """Status, type and body are those of the description."""
    assert str(reply.status) in DOCUMENT["paths"][route.path][route.method.lower()]["responses"], reply.raw
    assert reply.status < 500, reply.raw
    if reply.status >= 400:
        validator(route.error).validate(reply.body)
    elif reply.headers["Content-Type"].startswith("text/event-stream"):
        for event in reply.events if route.chunk in SCHEMAS else ():
            validator(route.chunk).validate(event)
    elif route.answer:
        validator(route.answer).validate(reply.body)


def test_the_routes_are_the_application_s() -> None:
    app = create_app(FakeEngine(), CONFIG)
    served = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    served = {(method, path) for method, path in served if path.partition("/")[2].partition("/")[0] != "ui"}  # a page
    assert {(method, path) for method, path in served if method != "HEAD"} == {(r.method, r.path) for r in ROUTES}


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    for name in DOCUMENT["components"]["schemas"]:
        jsonschema.Draft202012Validator.check_schema(DOCUMENT["components"]["schemas"][name])
    used = {name for route in ROUTES for name in (route.answer, route.body, route.error)}
    assert used - {""} <= set(DOCUMENT["components"]["schemas"])
    assert {"Error", "Usage", "Metrics", "Timings"} <= set(SCHEMAS)


async def test_gets_answer_as_described() -> None:
    async with serve(FakeEngine()) as client:
        for route in ROUTES:
            if route.method == "GET":
                reply = await client.get(route.path.replace("{name}", "tiny"))
                assert reply.status == 200
                assert reply.headers["Content-Type"].startswith(route.media)
                if route.answer:
                    validator(route.answer).validate(reply.body)
        assert (await client.get("/openapi.json")).body["openapi"] == "3.1.0"


def body_with(route: Route, name: str, value: Any) -> bytes:
    """A body in which nothing but this one value can be wrong. Integers may be longer than orjson writes."""
    body = {**BODIES[route.body], **WITH.get(name, {})}
    if name == "max_tokens" and route.body == "CompletionRequest":
        body["echo"] = True
    if route.path == "/tokenize" and name in ("content", *CHAT_PROMPT_FIELDS):
        body.pop("prompt")
        if name != "content":
            body.setdefault("messages", BODIES["ChatCompletionRequest"]["messages"])
    return json.dumps({**body, name: value}).encode()


@pytest.mark.parametrize("route", READERS, ids=lambda route: route.path)
async def test_every_documented_field_is_taken(route: Route) -> None:
    async with serve(FakeEngine(max_len=2048), config=CONFIG) as client:
        for name, part in fields(route):
            for value in samples(part):
                if name in BEYOND and value == part["maximum"]:
                    continue
                reply = await client.post(route.path, body_with(route, name, value))
                assert reply.status == 200, (name, value, reply.raw)
                assert name not in reply.headers.get("x-specd-ignored-fields", "").split(",")
                check_documented(reply, route)


@pytest.mark.parametrize("route", READERS, ids=lambda route: route.path)
async def test_what_the_description_excludes_is_refused(route: Route) -> None:
    async with serve(FakeEngine(), config=CONFIG) as client:
        for name, part in fields(route):
            for value in counterexamples(part):
                reply = await client.post(route.path, body_with(route, name, value))
                assert reply.status == (404 if name == "model" and isinstance(value, str) else 400), (name, value)
                param = reply.error["param"] or ""
                assert param.partition(".")[0].partition("[")[0] == name, (name, value, reply.raw)


async def test_unsupported_fields_are_listed_and_refused() -> None:
    async with serve(FakeEngine()) as client:
        for route in POSTS[:2]:
            for name in DOCUMENT["components"]["schemas"][route.body]["x-unsupported"]:
                reply = await client.post(route.path, {**BODIES[route.body], name: {"something": "asked"}})
                assert (reply.status, reply.error["param"]) == (400, name)


async def test_errors_are_described() -> None:
    async with serve(FakeEngine(), max_body_bytes=1024) as client:
        for route in POSTS:
            for body, headers in ((b"[]", {}), (b"{", {}), (b"x" * 2000, {}), (b"{}", {"Content-Type": "text/plain"})):
                reply = await client.post(route.path, body, headers=headers)
                assert reply.status in (400, 413, 415)
                check_documented(reply, route)


def test_every_status_of_an_error_is_described() -> None:
    """405 is of other methods and 403 of the page at /ui, which have no place in a description."""
    kinds = (
        AbortedError, DeadlineError, DrainingError, EngineError, GrammarError, QueueFullError, QueueTimeoutError,
    )  # fmt: skip
    statuses = {describe(kind("x"))[0] for kind in kinds}
    statuses |= {describe(RequestError("x", code=code))[0] for code in (*_REQUEST_STATUS, "out_of_range")}
    for route in POSTS[:4]:
        documented = DOCUMENT["paths"][route.path]["post"]["responses"]
        assert {str(status) for status in statuses - {403, 405}} <= set(documented)


def bodies(route: Route) -> st.SearchStrategy[Any]:
    """Bodies that are nearly right: what is required, and some other fields."""
    parts = dict(fields(route))
    names = st.lists(st.sampled_from(sorted(parts)), unique=True, max_size=5)
    some = names.flatmap(lambda chosen: st.fixed_dictionaries({name: values(parts[name]) for name in chosen}))
    strange = st.dictionaries(st.text(max_size=8), ANY_JSON, max_size=2)
    return st.tuples(some, strange).map(lambda both: {**BODIES[route.body], "max_tokens": 8, **both[1], **both[0]})


def test_no_body_makes_the_server_fail() -> None:
    """Random bodies out of the description: every answer is one that is described, and none is a fault."""
    with asyncio.Runner() as runner:
        context = serve(FakeEngine(), config=CONFIG)
        client: Client = runner.run(context.__aenter__())

        @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(data=st.data(), route=st.sampled_from(POSTS))
        def fuzz(data: st.DataObject, route: Route) -> None:
            body = data.draw(bodies(route))
            check_documented(runner.run(client.post(route.path, body)), route)

        try:
            fuzz()
        finally:
            runner.run(context.__aexit__(None, None, None))
