"""What one generation request cost, gathered while it runs: its log line and its share of the histograms."""

from __future__ import annotations

import time
from typing import Any

from specd.log import get_logger
from specd.request import SequenceDelta, SequenceStats
from specd.server.metrics import ServerMetrics
from specd.server.openai import GenerationCall

_CLIENT_GONE = 499  # nginx's status for a client that left before it had its answer

log = get_logger("server")


class RequestRecord:
    """One per HTTP request to a generation endpoint; `close` writes the `request_finished` line, once."""

    def __init__(self, endpoint: str, metrics: ServerMetrics, *, drafter: str) -> None:
        self.arrival_s = time.monotonic()
        self.endpoint = endpoint
        self.call: GenerationCall | None = None
        self.bytes_sent = 0
        self.backpressure_s = 0.0  # of waiting for the client to read
        self.aborted_by: str | None = None  # client, slow, deadline, drain, admin, server
        self.error_code: str | None = None
        self.delivered = False  # all of a stream was written: a client that closes now has not left early
        self._metrics = metrics
        self._drafter = drafter
        self._first_s: float | None = None
        self._last_s: dict[int, float] = {}
        self._num_tokens = 0
        self._finished: list[tuple[str, SequenceStats | None]] = []

    def observe(self, choice: int, delta: SequenceDelta) -> None:
        """Counts one delta and times it."""
        now = time.monotonic()
        if delta.token_ids:
            self._num_tokens += len(delta.token_ids)
            if self._first_s is None:
                self._first_s = now
                self._metrics.ttft.observe(now - self.arrival_s)
            if choice in self._last_s:
                self._metrics.itl.observe(now - self._last_s[choice])
            self._last_s[choice] = now
        if delta.finish_reason is not None:
            self._finished.append((str(delta.finish_reason), delta.stats))
            if delta.stats is not None:
                self._metrics.observe_choice(delta.stats)

    def close(self, request_id: str, status: int | None) -> None:
        """Logs. status: of the response, None when the client left before there was one."""
        total_s = time.monotonic() - self.arrival_s
        if self._finished and self.aborted_by is None:
            self._metrics.e2e.observe(total_s)
        stats = [item for _, item in self._finished if item is not None]
        self._observe_call(stats)
        fields: dict[str, Any] = {
            "request_id": request_id,
            "endpoint": str(self.endpoint),
            "status": _CLIENT_GONE if status is None else status,
            "error": self.error_code,
            "aborted_by": self.aborted_by,
            "completion_tokens": self._num_tokens,
            "finish_reason": ",".join(reason for reason, _ in self._finished) or None,
            "total_ms": _ms(total_s),
            "ttft_ms": None if self._first_s is None else _ms(self._first_s - self.arrival_s),
            "bytes_sent": self.bytes_sent,
            "backpressure_ms": _ms(self.backpressure_s),
            "drafter": self._drafter,
        }
        if self.call is not None:
            fields |= {
                "model": self.call.model,
                "stream": self.call.stream,
                "n": self.call.n,
                "prompt_tokens": sum(len(request.prompt_ids) for request in self.call.requests),
            }
        log.info("request_finished", **fields, **_costs(stats))

    def _observe_call(self, stats: list[SequenceStats]) -> None:
        if self.call is None:
            return
        self._metrics.n.observe(self.call.n)
        self._metrics.max_tokens.observe(max(request.sampling.max_tokens for request in self.call.requests))
        if stats:
            self._metrics.longest.observe(max(item.completion_tokens for item in stats))
        if self.call.stream and self.bytes_sent:
            self._metrics.backpressure.observe(self.backpressure_s)


def _costs(stats: list[SequenceStats]) -> dict[str, Any]:
    """Sums over the choices that ended with an account of themselves."""
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


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
