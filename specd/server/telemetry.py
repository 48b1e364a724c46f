"""Spans over OpenTelemetry's SDK: made when a request is over, sent over OTLP/HTTP by a thread of the SDK's own.

The event loop never waits for a collector: what too many spans wait for is dropped, what the collector does not take is
given up, both are counted, and the log tells it once a minute at most. Imported when spans are wanted, not before.
"""

from __future__ import annotations

import collections
import importlib.metadata
import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from specd.config_telemetry import TelemetryConfig
from specd.log import get_logger
from specd.server.spans import RequestSpans, SpanCounts, SpanRecord
from specd.server.trace_context import TraceContext

_EXPORT_TIMEOUT_S = 10.0  # of one batch, its repetitions included
_BATCH = 256
_WARN_EVERY_S = 60.0
_MAX_REASON = 400  # characters
_CLOSE_S = 2.0  # for what is left at the end, and again for giving up

log = get_logger("telemetry")


class Telemetry:
    """Makes and sends the spans of requests (a `SpanSink`). `close` when the server ends."""

    def __init__(self, config: TelemetryConfig, exporter: SpanExporter, *, delay_s: float = 2.0) -> None:
        """delay_s: until spans are sent that do not fill a batch."""
        self.event_steps = config.decode_event_steps
        self.counts = SpanCounts(config.max_queued)
        self._exporter = _CountingExporter(exporter, self.counts)
        self._processor = _BoundedProcessor(
            self._exporter,
            self.counts,
            max_queue_size=config.max_queued,
            schedule_delay_millis=delay_s * 1000,
            max_export_batch_size=min(_BATCH, config.max_queued),
        )
        version = importlib.metadata.version("specd")
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create({"service.name": config.service_name, "service.version": version}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("specd", version)

    @classmethod
    def sending(cls, config: TelemetryConfig) -> Telemetry:
        """To the configured collector. OTEL_EXPORTER_OTLP_HEADERS and the like count where specd has no setting."""
        return cls(config, OTLPSpanExporter(endpoint=config.endpoint, timeout=_EXPORT_TIMEOUT_S))

    def finish(self, spans: RequestSpans, parent: TraceContext | None) -> str:
        """See `SpanSink`."""
        wall_ns = time.time_ns() - time.monotonic_ns()  # spans have wall-clock times, records monotonic ones
        root = self._begin(spans.root, wall_ns, _remote(parent), trace.SpanKind.SERVER)
        inside = trace.set_span_in_context(root, Context())
        for child in spans.children:
            _end(self._begin(child, wall_ns, inside, trace.SpanKind.INTERNAL), child, wall_ns)
        _end(root, spans.root, wall_ns)
        return trace.format_trace_id(root.get_span_context().trace_id)

    def _begin(self, record: SpanRecord, wall_ns: int, context: Context, kind: trace.SpanKind) -> trace.Span:
        start = wall_ns + _ns(record.start_s)
        return self._tracer.start_span(
            record.name, context=context, kind=kind, attributes=record.attributes, start_time=start
        )

    def close(self) -> None:
        """Sends what is left, for a few seconds at most; the rest is given up and counted. Blocks."""
        ending = threading.Thread(target=self._processor.shutdown, name="specd-spans", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            self._exporter.shutdown()  # ends its waits between repetitions
            ending.join(_CLOSE_S)
        self.counts.give_up()
        counts = self.counts
        log.info("spans_ended", exported=counts.exported, failed=counts.failed, dropped=counts.dropped)


def _end(span: trace.Span, record: SpanRecord, wall_ns: int) -> None:
    for name, at_s, attributes in record.events:
        span.add_event(name, attributes, timestamp=wall_ns + _ns(at_s))
    if record.failed:
        span.set_status(trace.Status(trace.StatusCode.ERROR))
    span.end(wall_ns + _ns(record.end_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _remote(parent: TraceContext | None) -> Context:
    """The caller's span; a context of nothing where there is none."""
    if parent is None:
        return Context()
    context = trace.SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else trace.TraceFlags.DEFAULT),
        trace_state=trace.TraceState.from_header([parent.state] if parent.state else []),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(context), Context())


class _BoundedProcessor(BatchSpanProcessor):
    """The SDK's, which drops the oldest span without a count when its queue is full; this one never lets it be."""

    def __init__(self, exporter: SpanExporter, counts: SpanCounts, **options: float) -> None:
        super().__init__(exporter, **options)  # type: ignore[arg-type]  # sizes are whole numbers
        self._counts = counts

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled and self._counts.enter():
            super().on_end(span)


class _CountingExporter(SpanExporter):
    """Counts what the inner one does, and tells the log why it fails."""

    def __init__(self, inner: SpanExporter, counts: SpanCounts) -> None:
        self._inner = inner
        self._counts = counts
        self._warned_s = -_WARN_EVERY_S

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        exported = False
        try:
            exported = self._inner.export(spans) is SpanExportResult.SUCCESS
        finally:
            self._counts.leave(len(spans), exported=exported)
            if not exported and time.monotonic() - self._warned_s >= _WARN_EVERY_S:
                self._warned_s = time.monotonic()
                log.warning("spans_not_exported", failed=self._counts.failed, reason=_COMPLAINTS.last)
        return SpanExportResult.SUCCESS if exported else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _Complaints(logging.Handler):
    """The SDK's own log, of which the last lines are kept: it would write one for each try, past ours."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: collections.deque[str] = collections.deque(maxlen=2)
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage()[:_MAX_REASON])

    @property
    def last(self) -> str:
        return " | ".join(self._lines)


_COMPLAINTS = _Complaints()
