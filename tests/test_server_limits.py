"""Admission, deadlines, priorities and slow clients as a client of the HTTP API sees them."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog

from specd.errors import ConfigError, DeadlineError, QueueFullError, QueueTimeoutError, RateLimitError, SpecdError
from specd.request import FinishReason, Request, SequenceDelta
from specd.server.auth import ApiKeys
from tests.fake_engine import FakeEngine, Script
from tests.http_server import HELLO, PROMPT, serve, until


class Refusing(FakeEngine):
    """Refuses at the moment that is named: before the body is read, or when the prompts are known."""

    def __init__(self, error: SpecdError, *, early: bool) -> None:
        super().__init__()
        self.error, self.early = error, early

    def admit(self, tenant: bytes, requests: Sequence[Request] = ()) -> None:
        super().admit(tenant, requests)
        if self.early or requests:
            raise self.error


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("error", [QueueFullError("full", retry_after_s=7), RateLimitError("much", retry_after_s=9)])
async def test_429(error: QueueFullError | RateLimitError, early: bool) -> None:
    """All prompts of a call are judged together, before any of them is submitted."""
    engine = Refusing(error, early=early)
    async with serve(engine) as client:
        reply = await client.complete(prompt=["a", "b", "c"])
        assert (reply.status, reply.error["type"], reply.error["code"]) == (429, "rate_limit_error", error.code)
        assert reply.headers["Retry-After"] == str(error.retry_after_s)
        assert reply.headers["x-should-retry"] == "true"
    assert engine.admitted == ([(b"", 0)] if early else [(b"", 0), (b"", 3)])
    assert not engine.requests_seen


async def test_a_refusal_does_not_wait_for_the_body() -> None:
    async with serve(Refusing(QueueFullError("full"), early=True)) as client:
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9000000"
        writer.write(head.encode() + b"\r\n\r\n{")
        assert b" 429 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        await writer.wait_closed()


async def test_fields_of_the_queue() -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        for fields, priority in (
            ({}, 0),
            ({"priority": -3}, -3),
            ({"service_tier": "flex"}, 6),
            ({"service_tier": "priority"}, -6),
            ({"service_tier": "auto"}, 0),
            ({"service_tier": "flex", "priority": 0}, 0),
        ):
            assert (await client.complete(**fields)).status == 200
            assert engine.requests_seen[-1].priority == priority, fields
        for bad in ({"priority": 101}, {"priority": "high"}, {"service_tier": "gold"}):
            reply = await client.complete(**bad)
            assert (reply.status, reply.error["param"]) == (400, next(iter(bad)))
        headers = {"x-request-timeout": "2.5"}
        assert (await client.post("/v1/completions", PROMPT, headers=headers)).status == 200
        assert engine.requests_seen[-1].timeout_s == 2.5
        for header, field, least in ((None, 3, 3.0), ("2.5", 0.5, 0.5), ("2.5", 4.0, 2.5)):
            headers = {} if header is None else {"x-request-timeout": header}
            assert (await client.post("/v1/completions", {**PROMPT, "timeout": field}, headers=headers)).status == 200
            assert engine.requests_seen[-1].timeout_s == least
        for value in ("0", "-1", "soon", "nan", "inf", "86401", ""):
            reply = await client.post("/v1/completions", PROMPT, headers={"x-request-timeout": value})
            assert (reply.status, reply.error["param"], reply.error["code"]) == (
                400, "x-request-timeout", "out_of_range",
            ), value  # fmt: skip


async def test_the_weight_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\nsecond weight=4\n")
    engine = FakeEngine()
    async with serve(engine, api_keys_file=str(path)) as client:
        for key in ("first", "second"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.post("/v1/completions", PROMPT, headers=headers)).status == 200
    first, second = engine.requests_seen
    assert (first.weight, second.weight) == (1, 4)
    assert first.tenant == first.cache_salt != second.tenant
    for line in ("key weight=0", "key weight=1001"):
        path.write_text(line)
        with pytest.raises(ConfigError, match="from 1 to 1000"):
            ApiKeys.from_file(str(path))


def ending(engine: FakeEngine, error: SpecdError, *, after: int, text: str = "") -> None:
    """The engine aborts with a reason, its last delta holding the text that was held back."""
    engine.script = Script(abort_after=after, delay_s=0.001)
    original = engine._end

    def end(delta: SequenceDelta, reason: FinishReason, _: Any) -> SequenceDelta:
        return dataclasses.replace(original(delta, reason, None), error=error, text=text)

    engine._end = end  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_timeout_before_the_first_token_is_503(stream: bool) -> None:
    engine = FakeEngine()
    ending(engine, QueueTimeoutError("no token within 2 s"), after=0)
    async with serve(engine) as client:
        reply = await client.chat(stream=stream)
    assert (reply.status, reply.error["code"]) == (503, "queue_timeout")
    assert reply.headers["x-should-retry"] == "true"


async def test_a_timeout_before_anything_was_submitted_is_a_deadline_too() -> None:
    engine = FakeEngine(Script(refuse_grammar=QueueTimeoutError("no token within 2 s")))
    async with serve(engine) as client:
        with structlog.testing.capture_logs() as logs:
            reply = await client.chat(response_format={"type": "json_object"})
            await until(lambda: any(line["event"] == "request_finished" for line in logs))
    assert (reply.status, reply.error["code"]) == (503, "queue_timeout")
    (line,) = [line for line in logs if line["event"] == "request_finished"]
    assert (line["aborted_by"], line["error"]) == ("deadline", "queue_timeout")
    assert engine.admitted == [(b"", 0), (b"", 1)], "no grammar is compiled for what would be turned away"
    assert not engine.requests_seen


async def test_a_deadline_in_mid_stream_delivers_what_was_said() -> None:
    engine = FakeEngine()
    ending(engine, DeadlineError("the request took longer than 2 s"), after=3, text="HELD")
    async with serve(engine) as client:
        data = bytearray()

        async def read(response: aiohttp.ClientResponse) -> None:
            async for chunk in response.content.iter_any():
                data.extend(chunk)

        body = {**HELLO, "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
        async with client.session.post(client.url + "/v1/chat/completions", json=body) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await read(response)
        whole = await client.chat()
    *chunks, error = (line for line in bytes(data).split(b"\n\n") if line)
    assert b'"code":"deadline_exceeded"' in error
    assert b'"usage":{"prompt_tokens":' in error
    assert b"HELD" in chunks[-1]
    assert b"[DONE]" not in data
    assert (whole.status, whole.error["code"]) == (504, "deadline_exceeded")
    assert whole.headers["x-should-retry"] == "false"


async def test_little_is_held_for_a_client_that_does_not_read() -> None:
    """Without a limit of its own the kernel takes megabytes for each."""
    engine = FakeEngine(Script(finish=False, text=lambda request, index: "x"), max_len=1 << 24)
    engine.change = lambda delta: dataclasses.replace(delta, text="x" * 5000)
    async with serve(engine, slow_client_timeout_s=0.3) as client:
        host, port = client.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection, structlog.testing.capture_logs() as logs:
            connection.setblocking(False)
            body = b'{"prompt": "x", "stream": true, "max_tokens": 4000000}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: any(line["event"] == "request_finished" for line in logs), seconds=10)
    (line,) = [line for line in logs if line["event"] == "request_finished"]
    assert line["aborted_by"] == "slow"
    assert line["backpressure_ms"] > 250
    assert line["bytes_sent"] < 1_000_000


async def test_a_slow_client_gets_everything_in_fewer_events() -> None:
    """It reads nothing while thousands of deltas are made; then it reads all of their text."""
    count = 3000
    engine = FakeEngine(Script(finish=False, text=lambda request, index: "abcdefgh" * 4), max_len=1 << 20)
    pad = "." * 200
    engine.change = lambda delta: dataclasses.replace(delta, text=delta.text + pad)
    async with serve(engine) as client:
        body = {**PROMPT, "stream": True, "max_tokens": count}
        async with client.session.post(client.url + "/v1/completions", json=body, read_bufsize=1024) as response:
            await until(lambda: not engine.live, seconds=20)
            text = bytearray()
            async for chunk in response.content.iter_any():
                text.extend(chunk)
        scraped = (await client.get("/metrics")).raw.decode()
    assert text.count(b"." * 200) == count
    events = text.count(b"data: ")
    assert events < count
    assert f"specd_stream_joined_deltas_total {count + 2 - events}" in scraped.replace(".0", "")
