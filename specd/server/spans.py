"""What is told of a finished request as spans: names, times, attributes. No SDK; `telemetry.py` makes and sends them.

    chat MODEL                                    the request, from its arrival to its last byte
    |- tokenize |- queue |- prefill |- decode     one decode span, with an event every N steps of a choice

Names are those of OpenTelemetry's GenAI semantic conventions, ours begin with `specd.`. No prompt, output or stop
string is in them.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client.core import CounterMetricFamily, Metric

from specd.config_telemetry import TelemetryConfig
from specd.errors import ConfigError
from specd.request import SequenceDelta, TokenOrigin
from specd.server.fields import Endpoint
from specd.server.openai import GenerationCall
from specd.server.trace_context import TraceContext

if TYPE_CHECKING:
    from specd.server.record import RequestRecord
    from specd.server.telemetry import Telemetry

_MOST_EVENTS = 32  # of one span; the latest ones stay
_OWN_TOKENS = (TokenOrigin.TARGET, TokenOrigin.BONUS)

Attributes = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span. Times are `time.monotonic`."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = dataclasses.field(default_factory=dict)
    events: tuple[tuple[str, float, Attributes], ...] = ()
    failed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RequestSpans:
    root: SpanRecord
    children: tuple[SpanRecord, ...]


class SpanSink(Protocol):
    """`telemetry.Telemetry`, as a record knows it."""

    event_steps: int

    def finish(self, spans: RequestSpans, parent: TraceContext | None) -> str:
        """Makes the spans of a request that is over, without waiting for anybody; gives the trace's id."""
        ...


class DecodeEvents:
    """An event every so many steps of each choice, gathered while the deltas come."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._choices: dict[int, tuple[int, int, int]] = {}  # steps, tokens, kept drafts so far
        self.events: collections.deque[tuple[str, float, Attributes]] = collections.deque(maxlen=_MOST_EVENTS)

    def observe(self, choice: int, delta: SequenceDelta, now_s: float) -> None:
        """delta: of one step, or of several that were joined."""
        steps, tokens, kept = self._choices.get(choice, (0, 0, 0))
        before = steps // self._every
        steps += len({step for _, step, _ in delta.origins}) or 1
        tokens += len(delta.token_ids)
        kept += sum(origin not in _OWN_TOKENS for origin, _, _ in delta.origins)
        self._choices[choice] = steps, tokens, kept
        if steps // self._every > before:
            told = {"specd.choice": choice, "specd.steps": steps, "specd.tokens": tokens, "specd.kept_drafts": kept}
            self.events.append(("steps", now_s, told))


class SpanCounts:
    """What becomes of spans: each is counted once. Threads may call it; a collector of /metrics."""

    def __init__(self, max_queued: int) -> None:
        self.exported = 0
        self.failed = 0  # the collector did not take them
        self.dropped = 0  # too many waited already
        self._max_queued = max_queued
        self._queued = 0
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """One more wants to be sent; False, and it is counted as dropped, when too many wait."""
        with self._lock:
            if self._queued >= self._max_queued:
                self.dropped += 1
                return False
            self._queued += 1
            return True

    def leave(self, count: int, *, exported: bool) -> None:
        """So many have been sent, or were given up."""
        with self._lock:
            self._queued -= count
            self.exported += count if exported else 0
            self.failed += 0 if exported else count

    def give_up(self) -> None:
        """Those that still wait will not be sent."""
        self.leave(self._queued, exported=False)

    def collect(self) -> Iterator[Metric]:
        text = "Spans of requests, by what became of them; dropped: too many waited, failed: the collector took none."
        family = CounterMetricFamily("specd_telemetry_spans", text, labels=["result"])
        for result in ("exported", "failed", "dropped"):
            family.add_metric([result], getattr(self, result))
        yield family


def configured_telemetry(config: TelemetryConfig) -> Telemetry | None:
    """None when it is off. ConfigError when OpenTelemetry's SDK is wanted and not installed."""
    if not config.enabled:
        return None
    telemetry: Telemetry = _module().Telemetry.sending(config)
    return telemetry


def check_telemetry(config: TelemetryConfig) -> None:
    """For those who want to know before they load a model. Raises ConfigError as `configured_telemetry` does."""
    if config.enabled:
        _module()


def _module() -> Any:
    try:
        return importlib.import_module("specd.server.telemetry")
    except ImportError as error:
        text = f"telemetry.enabled needs OpenTelemetry ({error}): install specd with its extra 'otel'"
        raise ConfigError(text) from error


def request_spans(record: RequestRecord, request_id: str, status: int) -> RequestSpans:
    """All of a request that is over now."""
    call, error = record.call, record.error_code or (record.aborted_by and f"aborted_by_{record.aborted_by}")
    attributes: Attributes = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": "specd",
        "http.response.status_code": status,
        "gen_ai.usage.output_tokens": record.num_tokens,
        "specd.endpoint": str(record.endpoint),
        "specd.request_id": request_id,
        "specd.drafter": record.drafter,
    }
    if call is not None:
        attributes |= _call_attributes(call)
    if error:
        attributes["error.type"] = error
    attributes |= {f"specd.{name}": value for name, value in record.costs().items() if value is not None}
    if reasons := record.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    failed = status >= 500 or (error is not None and record.aborted_by != "client" and status < 400)
    name = attributes["gen_ai.operation.name"] + ("" if call is None else f" {call.model}")
    root = SpanRecord(name, record.arrival_s, time.monotonic(), attributes, failed=failed)
    return RequestSpans(root, tuple(_children(record)))


def _operation(record: RequestRecord) -> str:
    return "text_completion" if record.endpoint == Endpoint.COMPLETIONS else "chat"


def _call_attributes(call: GenerationCall) -> Attributes:
    """What was asked for, defaults filled in. Stop strings are the user's own text: their number alone."""
    sampling = call.requests[0].sampling
    return {
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "gen_ai.response.id": call.response_id,
        "gen_ai.request.max_tokens": max(request.sampling.max_tokens for request in call.requests),
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": call.n,
        "gen_ai.request.stream": call.stream,
        "gen_ai.usage.input_tokens": sum(len(request.prompt_ids) for request in call.requests),
        "specd.request.num_stop_sequences": len(sampling.stop),
    }


def _children(record: RequestRecord) -> Iterator[SpanRecord]:
    """Those that are known: a client that left takes the engine's account of its queue with it."""
    asked_s = record.arrival_s
    if record.tokenized_s is not None:
        yield SpanRecord("tokenize", *record.tokenized_s)
        asked_s = record.tokenized_s[1]
    queue_s = min((stats.queue_s for stats in record.stats), default=None)
    if queue_s is not None:
        scheduled_s = max(record.arrival_s + queue_s, asked_s)
        yield SpanRecord("queue", asked_s, scheduled_s)
        if record.first_s is not None:
            yield SpanRecord("prefill", scheduled_s, max(record.first_s, scheduled_s))
    if record.first_s is not None:
        events = () if record.events is None else tuple(record.events.events)
        tokens: Mapping[str, Any] = {"gen_ai.usage.output_tokens": record.num_tokens}
        yield SpanRecord("decode", record.first_s, record.last_s, dict(tokens), events)
