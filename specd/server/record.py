"""What one generation request cost, gathered while it runs: its log line and its share of the histograms."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Any

from specd.log import get_logger
from specd.request import SequenceDelta, SequenceStats
from specd.server.metrics import ServerMetrics
from specd.server.openai import GenerationCall
from specd.server.spans import DecodeEvents, SpanSink, request_spans
from specd.server.trace_context import TraceContext

_CLIENT_GONE = 499  # nginx's status for a client that left before it had its answer
_CLIENT_SECRET = secrets.token_bytes(16)  # names of clients hold for one life of the process

log = get_logger("server")


class RequestRecord:
    """One per HTTP request to a generation endpoint; `close` writes the `request_finished` line, once."""

    def __init__(
        self, endpoint: str, metrics: ServerMetrics, *, drafter: str, telemetry: SpanSink | None = None
    ) -> None:
        self.arrival_s = time.monotonic()
        self.trace: TraceContext | None = None  # the caller's
        self.client: str | None = None  # who it was, by a name that tells nothing
        self.tokenized_s: tuple[float, float] | None = None  # from, to
        self.endpoint = endpoint
        self.call: GenerationCall | None = None
        self.bytes_sent = 0
        self.backpressure_s = 0.0  # of waiting for the client to read
        self.aborted_by: str | None = None  # client, slow, deadline, drain, admin, server
        self.error_code: str | None = None
        self.begun = False  # a stream's status 200 has been sent: whatever comes now is told in the stream
        self.delivered = False  # all of a stream was written: a client that closes now has not left early
        self.drafter = drafter
        self.first_s: float | None = None
        self.num_tokens = 0
        self.events = None if telemetry is None else DecodeEvents(telemetry.event_steps)
        self._metrics = metrics
        self._telemetry = telemetry
        self._last_s: dict[int, float] = {}
        self._finished: list[tuple[str, SequenceStats | None]] = []

    @property
    def last_s(self) -> float:
        """When the latest token came."""
        return max(self._last_s.values())

    @property
    def finish_reasons(self) -> list[str]:
        return [reason for reason, _ in self._finished]

    @property
    def stats(self) -> list[SequenceStats]:
        """Of the choices that ended with an account of themselves."""
        return [item for _, item in self._finished if item is not None]

    @property
    def answered(self) -> bool:
        """Whether the server, not its client, ended a stream that had begun."""
        told = self.error_code is not None or self.aborted_by not in (None, "client")
        return self.delivered or (self.begun and told)

    def observe(self, choice: int, delta: SequenceDelta) -> None:
        """Counts one delta and times it."""
        now = time.monotonic()
        if delta.token_ids:
            self.num_tokens += len(delta.token_ids)
            if self.first_s is None:
                self.first_s = now
                self._metrics.ttft.observe(now - self.arrival_s)
            if choice in self._last_s:
                self._metrics.itl.observe(now - self._last_s[choice])
            self._last_s[choice] = now
            if self.events is not None:
                self.events.observe(choice, delta, now)
        if delta.finish_reason is not None:
            self._finished.append((str(delta.finish_reason), delta.stats))
            if delta.stats is not None:
                self._metrics.observe_choice(delta.stats)

    def sent(self, seconds: float) -> None:
        """One write to the stream took so long."""
        self.backpressure_s += seconds
        self._metrics.sends.observe(seconds)

    def close(self, request_id: str, status: int | None) -> None:
        """Logs. status: of the response, None when the client left before there was one."""
        total_s = time.monotonic() - self.arrival_s
        if self._finished and self.aborted_by is None:
            self._metrics.e2e.observe(total_s)
        self._observe_call(self.stats)
        status = _CLIENT_GONE if status is None else status
        fields: dict[str, Any] = {
            "request_id": request_id,
            "trace_id": self._trace_id(request_id, status),
            "client": self.client,
            "endpoint": str(self.endpoint),
            "status": status,
            "error": self.error_code,
            "aborted_by": self.aborted_by,
            "completion_tokens": self.num_tokens,
            "finish_reason": ",".join(self.finish_reasons) or None,
            "total_ms": _ms(total_s),
            "ttft_ms": None if self.first_s is None else _ms(self.first_s - self.arrival_s),
            "bytes_sent": self.bytes_sent,
            "backpressure_ms": _ms(self.backpressure_s),
            "drafter": self.drafter,
        }
        if self.call is not None:
            fields |= {
                "model": self.call.model,
                "stream": self.call.stream,
                "n": self.call.n,
                "prompt_tokens": sum(len(request.prompt_ids) for request in self.call.requests),
            }
        log.info("request_finished", **fields, **self.costs())

    def _trace_id(self, request_id: str, status: int) -> str | None:
        """Of the trace that the request is part of, its spans made on the way; None where there is none."""
        if self._telemetry is not None:
            try:
                return self._telemetry.finish(request_spans(self, request_id, status), self.trace)
            except Exception as error:  # the request has been answered: its spans must not undo that
                log.error("spans_failed", request_id=request_id, exc_info=error)
        return None if self.trace is None else self.trace.trace_id

    def costs(self) -> dict[str, Any]:
        """Sums over the choices that ended with an account of themselves."""
        stats = self.stats
        if not stats:
            return {}
        steps = sum(item.num_spec_steps for item in stats)
        accepted = sum(item.num_accepted_tokens for item in stats)
        decoded = sum(item.completion_tokens - 1 for item in stats)
        decode_s = sum(item.total_s - item.ttft_s for item in stats)
        return {
            "cached_tokens": sum(item.cached_tokens for item in stats),
            "queue_ms": _ms(max(item.queue_s for item in stats)),
            "tpot_ms": _ms(decode_s / decoded) if decoded > 0 else None,
            "spec_steps": steps,
            "drafted": sum(item.num_draft_tokens for item in stats),
            "accepted": accepted,
            "accept_len": round(1 + accepted / steps, 3) if steps else None,
            "preemptions": sum(item.num_preemptions for item in stats),
        }

    def _observe_call(self, stats: list[SequenceStats]) -> None:
        if self.call is None:
            return
        self._metrics.n.observe(self.call.n)
        self._metrics.max_tokens.observe(max(request.sampling.max_tokens for request in self.call.requests))
        if stats:
            self._metrics.longest.observe(max(item.completion_tokens for item in stats))
        if self.call.stream and self.bytes_sent:
            self._metrics.backpressure.observe(self.backpressure_s)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def client_name(address: str | None, salt: bytes) -> str:
    """The same for the same address and key, and nothing can be told from it."""
    return hashlib.blake2b((address or "").encode() + b"|" + salt, key=_CLIENT_SECRET, digest_size=6).hexdigest()
