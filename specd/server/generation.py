"""The two generation endpoints: read, check, submit, answer as one body or as a stream.

The status line is sent only once the first delta is there, so whatever goes wrong before has a status of its own.
After that a failure is an error event and a connection closed in the middle of its body: a stream that ends cleanly
without a finish reason would be taken as a whole answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from aiohttp import web

from specd.config import Config
from specd.errors import AbortedError, EngineError, QueueTimeoutError, RequestError
from specd.listeners import is_loopback
from specd.log import get_logger
from specd.request import Grammar, SequenceDelta
from specd.server.arrivals import split_failed
from specd.server.chat import ChatTemplate
from specd.server.context import Room
from specd.server.echo import echoes_of
from specd.server.errors import describe, json_response
from specd.server.fields import Endpoint, refuse_unread, report_names
from specd.server.json_body import parse_json
from specd.server.limits import BODY_TIMEOUT_S
from specd.server.metrics import ServerMetrics
from specd.server.openai import GenerationCall, build_call, read_body, room_of
from specd.server.predictions import prediction_ids
from specd.server.prompts import Prompts, chat_prompts, completion_prompts
from specd.server.protocol import EngineProtocol
from specd.server.record import RequestRecord
from specd.server.request_headers import request_timeout, speculation_header, strict_header
from specd.server.responses import ChoiceText, ResponseWriter
from specd.server.sending import Sender, SlowClientError
from specd.server.spans import SpanSink
from specd.server.sse import StreamEncoder
from specd.server.streams import DeltaStreams
from specd.server.tool_grammar import output_grammar
from specd.server.translation import Encoder, Translate, Translation, own_names

REQUEST_ID_KEY: web.RequestKey[str] = web.RequestKey("request_id", str)
SALT_KEY: web.RequestKey[bytes] = web.RequestKey("cache_salt", bytes)
HEADERS_KEY: web.RequestKey[dict[str, str]] = web.RequestKey("headers", dict)
WEIGHT_KEY: web.RequestKey[int] = web.RequestKey("weight", int)
RECORD_KEY: web.RequestKey[RequestRecord] = web.RequestKey("record", RequestRecord)

_INLINE_BYTES = 8192  # longer bodies are tokenised in a thread, longer answers are written in one
_SCORE_BYTES = 100  # of an answer, about, for a token's log-probabilities
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Work = TypeVar("Work")

log = get_logger("server")


def as_it_is(body: dict[str, Any]) -> Translation:
    """OpenAI's completions: nothing to translate."""
    return Translation(body, encoder=StreamEncoder, whole=ResponseWriter.whole, reads_parts=True)


class Generation:
    """Handlers of /v1/completions and /v1/chat/completions."""

    def __init__(
        self,
        engine: EngineProtocol,
        config: Config,
        *,
        metrics: ServerMetrics,
        template: ChatTemplate | None,
        telemetry: SpanSink | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._template = template
        self._telemetry = telemetry
        self._live: set[str] = set()
        self._serials = itertools.count()

    def reconfigure(self, config: Config) -> None:
        """For requests that come from now on, and for how running streams are sent."""
        self._config = config

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, Endpoint.COMPLETIONS)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, Endpoint.CHAT)

    async def translated(self, request: web.Request, translate: Translate) -> web.StreamResponse:
        """A request of another API, answered as a chat completion is. Raises RequestError in that API's names."""
        return await self._handle(request, Endpoint.CHAT, translate)

    def record(self, endpoint: str) -> RequestRecord:
        drafter = self._engine.info.drafter
        return RequestRecord(endpoint, self._metrics, drafter=drafter, telemetry=self._telemetry)

    async def _handle(
        self, request: web.Request, endpoint: Endpoint, translate: Translate = as_it_is
    ) -> web.StreamResponse:
        record = request[RECORD_KEY]
        self._engine.admit(request[SALT_KEY])  # before a body is read that would be refused anyway
        timeout_s = request_timeout(request.headers.get("x-request-timeout"))
        values, prompts, translation, grammar = await self.read(request, endpoint, translate, fits=True)
        request[REQUEST_ID_KEY] = name = self._free_id(values.get("request_id", request[REQUEST_ID_KEY]))
        self._live.add(name)
        try:
            with own_names(translation.params):
                call = build_call(
                    values,
                    prompts.ids,
                    endpoint=endpoint,
                    config=self._config,
                    info=self._engine.info,
                    tokenizer=self._engine.tokenizer,
                    request_id=name,
                    created=int(time.time()),
                    arrival_s=record.arrival_s,
                    serial=next(self._serials),
                    tenant=request[SALT_KEY],
                    weight=request[WEIGHT_KEY],
                    timeout_s=timeout_s,
                    exposed=_exposed(request),
                    reading=translation.reading(values, prompts.thinking, self._config.chat, grammar),
                    grammar=grammar,
                )
            record.call = call
            request[HEADERS_KEY] |= {"x-specd-seed": str(call.seed), "x-specd-drafter": self._engine.info.drafter}
            with own_names(translation.params):
                call = await self._prepare(call, values, record)
            return await self._answer(request, call, record, translation)
        finally:
            self._live.discard(name)

    async def _prepare(self, call: GenerationCall, values: Mapping[str, Any], record: RequestRecord) -> GenerationCall:
        """What may take long, and is done only for what would be accepted: the echo of prompts, then the grammar."""
        echo, first = values.get("echo", False), call.requests[0]
        if not echo and first.sampling.grammar is None:
            return call
        self._engine.admit(first.tenant, call.requests)
        if echo:
            prompts = [request.prompt_ids for request in call.requests]
            call = dataclasses.replace(call, echoes=await echoes_of(values["prompt"], prompts, self._engine.tokenizer))
        try:
            await self._engine.prepare_grammar(first)
        except QueueTimeoutError:
            record.aborted_by = "deadline"
            raise
        return call

    async def read(
        self, request: web.Request, endpoint: Endpoint, translate: Translate = as_it_is, *, fits: bool = False
    ) -> tuple[dict[str, Any], Prompts, Translation, Grammar | None]:
        """The checked fields of a body, its prompts, how it is answered, and its grammar. Raises RequestError.

        fits: prompts that cannot fit into the context are refused before they are tokenised.
        """
        raw = await read_raw(request)
        strict = strict_header(request.headers.get("x-specd-strict"))
        translation, values, ignored = await long_work(len(raw), self._checked, raw, endpoint, translate, strict)
        with own_names(translation.params):
            if "tools" in values:  # however short the body is
                grammar = await asyncio.to_thread(output_grammar, values)
            else:
                grammar = output_grammar(values)
            began_s = time.monotonic()
            room = room_of(values, endpoint, self._engine.info) if fits else None
            prompts = await long_work(len(raw), self.prompts, values, endpoint, room)
            if RECORD_KEY in request:
                request[RECORD_KEY].tokenized_s = (began_s, time.monotonic())
        if "prediction" in values:
            text, info = values["prediction"], self._engine.info
            ids = await long_work(len(raw), prediction_ids, text, self._engine.tokenizer, info.max_len)
            values["prediction"] = ids
        self.note_ignored(request, ignored + prompts.unread, strict=strict)
        speculation_header(values, request.headers.get("x-specd-speculation"))
        return values, prompts, translation, grammar

    def _checked(
        self, raw: bytes, endpoint: Endpoint, translate: Translate, strict: bool
    ) -> tuple[Translation, dict[str, Any], tuple[str, ...]]:
        """The request, its checked fields, and names that nobody reads. May be slow. Raises RequestError."""
        translation = translate(parse_json(raw))
        with own_names(translation.params):
            values, ignored = read_body(translation.body, endpoint, self._config, self._engine.info)
        ignored = tuple(dict.fromkeys(ignored + translation.ignored))  # what is shared may be seen by both
        if strict:
            refuse_unread(ignored)
        return translation, values, ignored

    def prompts(self, values: Mapping[str, Any], endpoint: Endpoint, room: Room | None = None) -> Prompts:
        """May be slow. room: what they must fit in. Raises RequestError."""
        tokenizer, size = self._engine.tokenizer, self._engine.info.vocab_size
        if endpoint is Endpoint.CHAT:
            return chat_prompts(values, tokenizer, self._template, self._config.chat, room=room)
        limit = self._config.server.max_prompts
        found = completion_prompts(values["prompt"], tokenizer, vocab_size=size, max_prompts=limit, room=room)
        return Prompts(found)

    def note_ignored(self, request: web.Request, names: tuple[str, ...], *, strict: bool) -> None:
        """Reports names that nobody reads. Raises RequestError where the client wants none."""
        if not names:
            return
        if strict:
            refuse_unread(names)
        request[HEADERS_KEY]["x-specd-ignored-fields"] = report_names(names)
        self._metrics.ignored_fields.inc(len(names))

    def _free_id(self, name: str) -> str:
        """The client's own name, with a suffix while another request of that name is live."""
        return name if name not in self._live else f"{name}-{uuid.uuid4().hex[:8]}"

    async def _answer(
        self, request: web.Request, call: GenerationCall, record: RequestRecord, translation: Translation
    ) -> web.StreamResponse:
        writer = ResponseWriter(call, self._engine.info, self._engine.tokenizer)
        async with DeltaStreams(self._engine, call) as streams:
            if call.stream:
                return await self._stream(request, translation.encoder(writer), streams, record)
            choices = writer.choices()
            while arrived := await streams.get():
                batch, failure = split_failed(arrived, record)
                if failure is not None:
                    raise failure
                for choice, delta in batch:
                    choices[choice].add(delta)
            _check_finished(choices)
        request[HEADERS_KEY]["x-specd-accept-length"] = f"{_accept_length(choices):.3f}"
        size = _SCORE_BYTES * sum(choice.num_scored for choice in choices)
        body = await long_work(size, lambda: json_response(translation.whole(writer, choices)))
        record.bytes_sent = body.content_length or 0
        return body

    async def _stream(
        self, request: web.Request, encoder: Encoder, streams: DeltaStreams, record: RequestRecord
    ) -> web.StreamResponse:
        waiting = False  # it is begun before its first token is there
        try:
            batch, failure = split_failed(await streams.get(self._config.server.queued_stream_s or None), record)
        except TimeoutError:
            batch, failure, waiting = [], None, True
        if failure is not None and not any(delta.token_ids for _, delta in batch):
            raise failure
        if not batch and not waiting:
            _check_finished(encoder.choices)
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(request)
        record.begun = True
        sender = Sender(request, response, record, timeout_s=self._config.server.slow_client_timeout_s)
        try:
            await sender.send(encoder.start())
            if waiting:
                batch, failure = split_failed(await self._next(streams, sender, encoder.keep_alive), record)
            while batch or failure:
                await sender.send(await _encoded(encoder, batch))
                if failure is not None:
                    raise failure
                batch, failure = split_failed(await self._next(streams, sender, encoder.keep_alive), record)
            _check_finished(encoder.choices)
            await sender.send(encoder.end())
            record.delivered = True
            await response.write_eof()
        except ConnectionError:
            record.aborted_by = None if record.delivered else "client"
        except SlowClientError:
            record.aborted_by, record.error_code = "slow", "slow_client"
            self._metrics.slow_client_aborts.inc()
            sender.transport.abort()
        except Exception as error:  # noqa: BLE001  every failure must reach the client as an event
            await self._break_off(request, sender, error, record, encoder)
        finally:
            sender.close()
            self._metrics.coalesced.inc(streams.num_joined)
        return response

    async def _next(
        self, streams: DeltaStreams, sender: Sender, keep_alive: bytes
    ) -> Sequence[tuple[int, SequenceDelta]]:
        """The next deltas; keep_alive is sent while there are none, or only such as are held back for a call."""
        while True:
            left_s = sender.sent_s + self._config.server.keep_alive_s - time.monotonic()
            if left_s <= 0:
                await sender.send(keep_alive)
                continue
            try:
                return await streams.get(left_s)
            except TimeoutError:
                continue

    async def _break_off(
        self, request: web.Request, sender: Sender, error: Exception, record: RequestRecord, encoder: Encoder
    ) -> None:
        """Error event, then the connection is closed without the chunk that would end the body."""
        status, body, _ = describe(error)
        record.error_code = getattr(error, "code", "internal_error")
        if isinstance(error, AbortedError) or status < 500:  # the request itself, such as its grammar, may be why
            log.info("stream_aborted", request_id=request[REQUEST_ID_KEY])
        else:
            log.error("stream_failed", request_id=request[REQUEST_ID_KEY], exc_info=error)
        try:
            await sender.send(encoder.failed(body, status))
        except (ConnectionError, SlowClientError):
            sender.transport.abort()
            return
        sender.transport.close()  # writes out what is buffered; the body's end can no longer be written


async def long_work(num_bytes: int, work: Callable[..., Work], *args: Any) -> Work:
    """`work(*args)`; in a thread when the body or the answer it is about is long."""
    return work(*args) if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(work, *args)


async def read_raw(request: web.Request) -> bytes:
    """The raw JSON body. Raises RequestError (415, 408); HTTPRequestEntityTooLarge, at once if its length says so."""
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        text = f"the content type must be application/json, not {kind[:64]}"
        raise RequestError(text, code="unsupported_media_type")
    transfer = request.headers.get("Transfer-Encoding", "chunked").lower()  # "gzip, chunked" passes aiohttp
    if request.headers.get("Content-Encoding", "identity") != "identity" or transfer != "chunked":
        raise RequestError("compressed bodies are not accepted", code="unsupported_encoding")
    if (request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError as error:
        raise RequestError(f"the body took longer than {BODY_TIMEOUT_S:g} s", code="request_timeout") from error
    except web.RequestPayloadError as error:
        raise RequestError(str(error), code="malformed_request") from error


async def _encoded(encoder: Encoder, batch: Sequence[tuple[int, SequenceDelta]]) -> bytes:
    """What a batch adds to a stream; the scores of a long prompt are written in a thread."""
    size = _SCORE_BYTES * sum(len(delta.prompt_logprobs or ()) for _, delta in batch)
    return await long_work(size, lambda: b"".join([encoder.push(choice, delta) for choice, delta in batch]))


def _exposed(request: web.Request) -> bool:
    """Whether the answer leaves this machine."""
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    return isinstance(peer, tuple) and not is_loopback(peer[0])


def _accept_length(choices: Sequence[ChoiceText]) -> float:
    """Tokens of a step with drafts, over all choices; 0 when there was none."""
    stats = [choice.stats for choice in choices if choice.stats is not None]
    steps = sum(item.num_spec_steps for item in stats)
    return 1 + sum(item.num_accepted_tokens for item in stats) / steps if steps else 0.0


def _check_finished(choices: Sequence[ChoiceText]) -> None:
    missing = [i for i, choice in enumerate(choices) if choice.finish_reason is None]
    if missing:
        raise EngineError(f"the stream ended before choices {missing} did")
