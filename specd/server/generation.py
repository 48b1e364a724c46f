"""The two generation endpoints: read, check, submit, answer as one body or as a stream.

The status line is sent only once the first delta is there, so whatever goes wrong before has a status of its own.
After that a failure is an error event and a connection closed in the middle of its body: a stream that ends cleanly
without a finish reason would be taken as a whole answer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from specd.config import Config
from specd.errors import AbortedError, EngineError, RequestError
from specd.log import get_logger
from specd.request import FinishReason, SequenceDelta
from specd.server.errors import describe, json_response
from specd.server.fields import REQUEST_ID, Endpoint, report_names
from specd.server.metrics import ServerMetrics
from specd.server.openai import GenerationCall, build_call, read_body
from specd.server.prompts import Render, chat_prompt, check_messages, completion_prompts
from specd.server.protocol import EngineProtocol
from specd.server.record import RequestRecord
from specd.server.responses import ChoiceText, ResponseWriter
from specd.server.sse import KEEP_ALIVE, StreamEncoder, event
from specd.server.streams import DeltaStreams

REQUEST_ID_KEY: web.RequestKey[str] = web.RequestKey("request_id", str)
SALT_KEY: web.RequestKey[bytes] = web.RequestKey("cache_salt", bytes)
HEADERS_KEY: web.RequestKey[dict[str, str]] = web.RequestKey("headers", dict)
RECORD_KEY: web.RequestKey[RequestRecord] = web.RequestKey("record", RequestRecord)

_BODY_DEADLINE_S = 30.0
_SEND_DEADLINE_S = 30.0  # a client that reads nothing for so long is given up
_INLINE_BYTES = 8192  # longer bodies are tokenised in a thread
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

log = get_logger("server")


class SlowClientError(Exception):
    """The client did not read its stream in time."""


class Generation:
    """Handlers of /v1/completions and /v1/chat/completions."""

    def __init__(
        self, engine: EngineProtocol, config: Config, *, metrics: ServerMetrics, render: Render | None
    ) -> None:
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._render = render
        self._live: set[str] = set()
        self._serials = itertools.count()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, Endpoint.COMPLETIONS)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, Endpoint.CHAT)

    def record(self, endpoint: Endpoint) -> RequestRecord:
        return RequestRecord(endpoint, self._metrics, drafter=self._engine.info.drafter)

    async def _handle(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        record = request[RECORD_KEY]
        raw = await _read_body(request)
        strict = request.headers.get("x-specd-strict") == "1"
        values, ignored = read_body(raw, endpoint, self._config, self._engine.info, strict=strict)
        if len(raw) > _INLINE_BYTES:
            prompts, unread = await asyncio.to_thread(self._prompts, values, endpoint)
        else:
            prompts, unread = self._prompts(values, endpoint)
        self._note_ignored(request, ignored + unread, strict)
        request[REQUEST_ID_KEY] = name = self._free_id(values.get("request_id", request[REQUEST_ID_KEY]))
        self._live.add(name)
        try:
            call = build_call(
                values,
                prompts,
                endpoint=endpoint,
                config=self._config,
                info=self._engine.info,
                tokenizer=self._engine.tokenizer,
                request_id=name,
                created=int(time.time()),
                arrival_s=record.arrival_s,
                serial=next(self._serials),
                cache_salt=request[SALT_KEY],
            )
            record.call = call
            request[HEADERS_KEY]["x-specd-seed"] = str(call.seed)
            return await self._answer(request, call, record)
        finally:
            self._live.discard(name)

    def _prompts(self, values: dict[str, Any], endpoint: Endpoint) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
        """Token ids of every prompt, and names in messages that nobody reads. May be slow."""
        tokenizer, info = self._engine.tokenizer, self._engine.info
        if endpoint is Endpoint.CHAT:
            messages, unread = check_messages(values["messages"])
            return [chat_prompt(messages, tokenizer, self._render)], unread
        limit = self._config.server.max_prompts
        prompts = completion_prompts(values["prompt"], tokenizer, vocab_size=info.vocab_size, max_prompts=limit)
        return prompts, ()

    def _note_ignored(self, request: web.Request, names: tuple[str, ...], strict: bool) -> None:
        if not names:
            return
        shown = report_names(names)
        if strict:
            raise RequestError(f"unknown fields: {shown}", code="unknown_parameter", param=shown.partition(",")[0])
        request[HEADERS_KEY]["x-specd-ignored-fields"] = shown
        self._metrics.ignored_fields.inc(len(names))

    def _free_id(self, name: str) -> str:
        """The client's own name, with a suffix while another request of that name is live."""
        return name if name not in self._live else f"{name}-{uuid.uuid4().hex[:8]}"

    async def _answer(self, request: web.Request, call: GenerationCall, record: RequestRecord) -> web.StreamResponse:
        writer = ResponseWriter(call, self._engine.info, self._engine.tokenizer)
        async with DeltaStreams(self._engine, call) as streams:
            if call.stream:
                return await self._stream(request, writer, streams, record)
            choices = [ChoiceText() for _ in range(call.num_choices)]
            while batch := await streams.get():
                _raise_failure(batch, record)
                for choice, delta in batch:
                    choices[choice].add(delta)
            _check_finished(choices)
        body = json_response(writer.whole(choices))
        record.bytes_sent = body.content_length or 0
        return body

    async def _stream(
        self, request: web.Request, writer: ResponseWriter, streams: DeltaStreams, record: RequestRecord
    ) -> web.StreamResponse:
        encoder = StreamEncoder(writer)
        batch: Sequence[tuple[int, SequenceDelta]] = await streams.get()
        _raise_failure(batch, record)
        if not batch:
            _check_finished(encoder.choices)
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        await response.prepare(request)
        try:
            await _send(response, encoder.start(), record)
            while batch:
                data = b"".join([encoder.push(choice, delta) for choice, delta in batch])
                await _send(response, data, record)
                batch = await self._next(streams, response, record)
                _raise_failure(batch, record)
            _check_finished(encoder.choices)
            await _send(response, encoder.end(), record)
            record.delivered = True
            await response.write_eof()
        except ConnectionError:
            record.aborted_by = None if record.delivered else "client"
        except SlowClientError:
            record.aborted_by = "slow"
            self._metrics.slow_client_aborts.inc()
            _transport(request).abort()
        except Exception as error:  # noqa: BLE001  every failure must reach the client as an event
            await self._break_off(request, response, error, record)
        return response

    async def _next(
        self, streams: DeltaStreams, response: web.StreamResponse, record: RequestRecord
    ) -> Sequence[tuple[int, SequenceDelta]]:
        """The next deltas; comments keep the connection alive while there are none."""
        while True:
            try:
                return await streams.get(self._config.server.keep_alive_s)
            except TimeoutError:
                await _send(response, KEEP_ALIVE, record)

    async def _break_off(
        self, request: web.Request, response: web.StreamResponse, error: Exception, record: RequestRecord
    ) -> None:
        """Error event, then the connection is closed without the chunk that would end the body."""
        _, body, _ = describe(error)
        record.error_code = getattr(error, "code", "internal_error")
        if isinstance(error, AbortedError):
            log.info("stream_aborted", request_id=request[REQUEST_ID_KEY])
        else:
            log.error("stream_failed", request_id=request[REQUEST_ID_KEY], exc_info=error)
        try:
            await _send(response, event(body), record)
        except (ConnectionError, SlowClientError):
            _transport(request).abort()
            return
        _transport(request).close()  # writes out what is buffered; the body's end can no longer be written


def _transport(request: web.Request) -> asyncio.Transport:
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    return transport


async def _read_body(request: web.Request) -> bytes:
    """The raw JSON body. Raises RequestError (415, 408); aiohttp raises 413 by itself."""
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        text = f"the content type must be application/json, not {kind[:64]}"
        raise RequestError(text, code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError("compressed bodies are not accepted", code="unsupported_encoding")
    try:
        async with asyncio.timeout(_BODY_DEADLINE_S):
            return await request.read()
    except TimeoutError as error:
        raise RequestError(f"the body took longer than {_BODY_DEADLINE_S:g} s", code="request_timeout") from error


async def _send(response: web.StreamResponse, data: bytes, record: RequestRecord) -> None:
    if not data:
        return
    try:
        async with asyncio.timeout(_SEND_DEADLINE_S):
            await response.write(data)
    except TimeoutError as error:
        raise SlowClientError(f"nothing was read for {_SEND_DEADLINE_S:g} s") from error
    record.bytes_sent += len(data)


def _raise_failure(batch: Sequence[tuple[int, SequenceDelta]], record: RequestRecord) -> None:
    """Counts a batch of deltas; the first that failed ends the whole answer."""
    for choice, delta in batch:
        record.observe(choice, delta)
    for _, delta in batch:
        if delta.finish_reason is FinishReason.ERROR:
            raise delta.error or EngineError("the engine gave no reason")
        if delta.finish_reason is FinishReason.ABORT:
            record.aborted_by = "server"
            raise delta.error or AbortedError("ended by the server")


def _check_finished(choices: Sequence[ChoiceText]) -> None:
    missing = [i for i, choice in enumerate(choices) if choice.finish_reason is None]
    if missing:
        raise EngineError(f"the stream ended before choices {missing} did")


def valid_request_id(header: str | None) -> str:
    """The client's X-Request-Id when it is usable (proxies write all sorts of things there), else a new one."""
    return header if header is not None and REQUEST_ID.fullmatch(header) else uuid.uuid4().hex
