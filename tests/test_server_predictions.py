"""The request field `prediction`: its checks, its way to the engine, and the counts in usage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specd.request import SequenceDelta
from tests.fake_engine import FakeEngine
from tests.http_server import serve

POSTS = ("chat", "complete")
WRONG: list[tuple[Any, str, str]] = [
    ("text", "invalid_type", "prediction"),
    (True, "invalid_type", "prediction"),
    ([], "invalid_type", "prediction"),
    ({}, "missing_parameter", "prediction.type"),
    ({"type": "content"}, "missing_parameter", "prediction.content"),
    ({"type": "content", "content": None}, "missing_parameter", "prediction.content"),
    ({"content": "x"}, "missing_parameter", "prediction.type"),
    ({"type": "tokens", "content": "x"}, "out_of_range", "prediction.type"),
    ({"type": 1, "content": "x"}, "out_of_range", "prediction.type"),
    ({"type": "content", "content": 5}, "invalid_type", "prediction.content"),
    ({"type": "content", "content": []}, "out_of_range", "prediction.content"),
    ({"type": "content", "content": ["x"]}, "invalid_type", "prediction.content[0]"),
    ({"type": "content", "content": [{"type": "text"}]}, "missing_parameter", "prediction.content[0].text"),
    ({"type": "content", "content": [{"type": "text", "text": 1}]}, "invalid_type", "prediction.content[0].text"),
    (
        {"type": "content", "content": [{"type": "image_url", "text": "x"}]},
        "out_of_range",
        "prediction.content[0].type",
    ),
    ({"type": "content", "content": "x" * 513}, "context_length_exceeded", "prediction.content"),
]


def content(value: Any) -> dict[str, Any]:
    return {"type": "content", "content": value}


@pytest.mark.parametrize("post", POSTS)
async def test_what_is_refused(post: str) -> None:
    async with serve(FakeEngine()) as client:
        for value, code, param in WRONG:
            reply = await getattr(client, post)(prediction=value)
            assert reply.status == 400, value
            assert (reply.error["code"], reply.error["param"]) == (code, param), value
        assert (await getattr(client, post)(prediction=None)).status == 200


@pytest.mark.parametrize("post", POSTS)
async def test_its_tokens_travel_in_the_request(post: str) -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    async with serve(engine) as client:
        for value in (content("hello world"), content(parts), content(""), None, content("x" * 512)):
            assert (await getattr(client, post)(prediction=value)).status == 200
    tokens = tuple(engine.tokenizer.encode("hello world", add_special=False))
    seen = [request.prediction for request in engine.requests_seen]
    assert seen[:4] == [tokens, tokens, (), None]
    assert seen[4] is not None
    assert len(seen[4]) == 512 == engine.info.max_len, "the longest that is taken"


def with_counts(delta: SequenceDelta) -> SequenceDelta:
    if delta.stats is None:
        return delta
    stats = dataclasses.replace(delta.stats, accepted_prediction_tokens=5, rejected_prediction_tokens=2)
    return dataclasses.replace(delta, stats=stats)


@pytest.mark.parametrize("post", POSTS)
async def test_usage_says_what_became_of_it(post: str) -> None:
    engine = FakeEngine()
    engine.change = with_counts
    details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    async with serve(engine) as client:
        send = getattr(client, post)
        usage = (await send(prediction=content("hello"))).body["usage"]
        assert usage["completion_tokens_details"] == details
        assert usage["completion_tokens"] == 11, "what was verified in vain is no output"
        two = (await send(prediction=content("hello"), n=2)).body["usage"]
        assert two["completion_tokens_details"] == {name: 2 * count for name, count in details.items()}
        stream = await send(prediction=content("hello"), stream=True, stream_options={"include_usage": True})
        assert stream.events[-1]["usage"] == usage
        assert "completion_tokens_details" not in (await send()).body["usage"]
