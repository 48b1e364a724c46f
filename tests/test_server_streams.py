"""Streams over real sockets: order, failures at every phase, and clients that leave or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import weakref
from typing import Any

import aiohttp
import pytest
import structlog

from specd.errors import DrainingError, EngineError, GrammarError, QueueFullError, SpecdError
from specd.request import FinishReason, Request, SequenceDelta
from specd.server.sending import Sender
from specd.server.streams import DeltaStreams
from tests.fake_engine import FakeEngine, Script
from tests.http_server import HELLO, Client, serve, until

POSTS = ("/v1/completions", "/v1/chat/completions")


def scripted(how: str, after: int) -> Script:
    """Goes wrong in the way that one of Script's fields names, after so many deltas."""
    script = Script(delay_s=0.01)
    setattr(script, how, after)
    return script


async def test_stream_headers_and_order() -> None:
    async with serve(FakeEngine(Script(blocks=(3,)))) as client:
        reply = await client.chat(stream=True)
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["Cache-Control"] == "no-cache"
    assert reply.headers["X-Accel-Buffering"] == "no"
    assert reply.raw.endswith(b"data: [DONE]\n\n")
    events = reply.events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "hello world"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert "speculative_decoding" in events[-1]["metrics"]  # no usage chunk to carry it


async def test_stream_of_several_prompts() -> None:
    script = Script(text=lambda request, index: f"<{request.prompt_index}.{index}>", blocks=(2, 1))
    async with serve(FakeEngine(script)) as client:
        reply = await client.complete(prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True})
    texts: dict[int, str] = {}
    for chunk in reply.events:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "<0.0>", 1: "<0.1>", 2: "<1.0>", 3: "<1.1>"}
    assert reply.events[-1]["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (QueueFullError("64 requests are waiting"), 429, "rate_limit_error", "queue_full"),
        (DrainingError(), 503, "server_error", "draining"),
        (EngineError("/secret/path"), 500, "server_error", "engine_error"),
        (RuntimeError("/secret/path"), 500, "server_error", "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refused_by_the_engine(error: Exception, status: int, kind: str, code: str, stream: bool) -> None:
    async with serve(FakeEngine(Script(refuse=error))) as client:
        reply = await client.chat(stream=stream)
    assert (reply.status, reply.error["type"], reply.error["code"]) == (status, kind, code)
    assert b"secret" not in reply.raw
    if status in (429, 503):
        assert int(reply.headers["Retry-After"]) > 0
    if status == 500:
        assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["fail_after", "abort_after", "raise_after", "stop_short_after"])
async def test_a_failure_before_the_first_delta_has_a_status(how: str, stream: bool) -> None:
    engine = FakeEngine(scripted(how, 0))
    async with serve(engine) as client:
        reply = await client.chat(stream=stream)
        assert reply.status == (503 if how == "abort_after" else 500)
        assert reply.error["code"] in ("non_finite_logits", "aborted", "internal_error", "engine_error")
        assert b"secret" not in reply.raw
    assert not engine.live


@pytest.mark.parametrize("how", ["fail_after", "abort_after", "raise_after", "stop_short_after"])
async def test_a_failure_in_mid_stream(how: str) -> None:
    """Error event, no finish, no [DONE], and a body that does not end: no client may take it for an answer."""
    engine = FakeEngine(scripted(how, 3))
    async with serve(engine) as client:
        data = bytearray()

        async def read(response: aiohttp.ClientResponse) -> None:
            async for chunk in response.content.iter_any():
                data.extend(chunk)

        async with client.session.post(client.url + POSTS[1], json={**HELLO, "stream": True}) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await read(response)
        *chunks, error = (line for line in data.split(b"\n\n") if line)
        assert error.startswith(b'data: {"error":{"message"')
        assert b"secret" not in data
        assert b"[DONE]" not in data
        assert all(b'"finish_reason":null' in chunk for chunk in chunks)
        assert (await client.get("/health")).status == 200
    assert not engine.live


async def test_a_failure_of_the_whole_answer_in_the_middle() -> None:
    engine = FakeEngine(Script(fail_after=3))
    async with serve(engine) as client:
        reply = await client.chat(n=2)
    assert (reply.status, reply.error["code"]) == (500, "non_finite_logits")
    assert not engine.live


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3, "stream": True}], ids=str)
@pytest.mark.parametrize("hang_after", [0, 2])
async def test_disconnect_aborts(fields: dict[str, Any], hang_after: int) -> None:
    """At any phase: before the first delta, between deltas; one body or a stream."""
    engine = FakeEngine(Script(hang_after=hang_after))
    async with serve(engine) as client:
        task = asyncio.create_task(client.chat(**fields))
        await until(lambda: bool(engine.live))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not engine.live)
        assert len(engine.aborted) == 1
        await asyncio.sleep(0.02)
        reply = await client.get("/metrics")
        assert "specd_client_disconnects_total 1.0" in reply.raw.decode()


async def test_disconnect_aborts_every_prompt() -> None:
    engine = FakeEngine(Script(hang_after=1))
    async with serve(engine) as client:
        task = asyncio.create_task(client.complete(prompt=["a", "b", "c"]))
        await until(lambda: len(engine.live) == 3)
        task.cancel()
        await until(lambda: not engine.live)
    assert len(engine.aborted) == 3


async def test_a_refused_prompt_takes_the_others_along() -> None:
    """All prompts of a request are accepted, or none."""

    class Full(FakeEngine):
        def submit(self, request: Request) -> Any:
            if request.prompt_index == 2:
                raise QueueFullError("full")
            return super().submit(request)

    engine = Full()
    async with serve(engine) as client:
        assert (await client.complete(prompt=["a", "b", "c"])).status == 429
    assert not engine.live
    assert len(engine.aborted) == 2


async def test_keep_alive_comments() -> None:
    engine = FakeEngine(Script(delay_s=0.35, text=lambda request, index: "a"))
    async with serve(engine, keep_alive_s=0.1) as client:
        reply = await client.chat(stream=True)
    assert b": keep-alive\n\n" in reply.raw
    assert b"id:" not in reply.raw.replace(b'"id":', b"")
    assert reply.events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_concurrent_streams_do_not_mix() -> None:
    engine = FakeEngine(Script(blocks=(1, 3, 2)))
    engine.script.text = lambda request, index: engine.tokenizer.decode(request.prompt_ids) * 3

    async def one(client: Client, name: str) -> str:
        reply = await client.complete(prompt=name, stream=True)
        return "".join(chunk["choices"][0]["text"] for chunk in reply.events)

    async with serve(engine) as client:
        names = [f"p{i:02}" for i in range(20)]
        assert await asyncio.gather(*(one(client, name) for name in names)) == [name * 3 for name in names]
    assert not engine.live


async def test_a_client_that_does_not_read_is_given_up() -> None:
    huge = "x" * (1 << 16)
    engine = FakeEngine(Script(text=lambda request, index: huge, finish=False), max_len=1 << 24)
    engine.change = lambda delta: dataclasses.replace(delta, text=huge)
    async with serve(engine, slow_client_timeout_s=0.2) as client:
        host, port = client.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = b'{"prompt": "x", "stream": true, "max_tokens": 4000000}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await until(lambda: bool(engine.live))
        await until(lambda: not engine.live)
        await asyncio.sleep(0.05)
        assert b"specd_slow_client_aborts_total 1.0" in (await client.get("/metrics")).raw
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answered_request_does_not_wait_for_the_garbage_collector(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the daemon a full collection is rare, and a request holds its prompt and its body."""
    kept: list[weakref.ref[Any]] = []
    enter, send = DeltaStreams.__aenter__, Sender.send

    async def entered(self: DeltaStreams) -> DeltaStreams:
        kept.append(weakref.ref(self))
        return await enter(self)

    async def sent(self: Sender, data: bytes) -> None:
        kept.append(weakref.ref(self))
        await send(self, data)

    monkeypatch.setattr(DeltaStreams, "__aenter__", entered)
    monkeypatch.setattr(Sender, "send", sent)
    async with serve(FakeEngine()) as client:
        gc.disable()
        try:
            for _ in range(3):
                assert (await client.chat(stream=stream)).status == 200
            await until(lambda: all(ref() is None for ref in kept))
        finally:
            gc.enable()
    assert len(kept) >= 3


async def test_half_closed_clients_are_gone() -> None:
    engine = FakeEngine(Script(hang_after=1))
    async with serve(engine) as client:
        host, port = client.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt": "x", "stream": true}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await until(lambda: bool(engine.live))
        writer.write_eof()
        await until(lambda: not engine.live)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("ours", [False, True])
async def test_a_grammar_that_fails_in_a_stream_is_no_fault_of_the_server(ours: bool) -> None:
    """The client's own: it is told with status 400 where there is no stream, and anybody can send it."""
    engine = FakeEngine()
    error: SpecdError = EngineError("a fault") if ours else GrammarError("the grammar became too complex")
    tokens = 0

    def change(delta: SequenceDelta) -> SequenceDelta:
        nonlocal tokens
        tokens += 1
        if tokens < 3:
            return delta
        return dataclasses.replace(delta, finish_reason=FinishReason.ERROR, error=error, token_ids=(), text="")

    engine.change = change
    with structlog.testing.capture_logs() as lines:
        async with serve(engine) as client:
            response = await client.session.post(client.url + POSTS[1], json={**HELLO, "stream": True})
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
    assert bool([line for line in lines if line["log_level"] == "error"]) is ours
