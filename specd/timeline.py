"""When each stage of each step ran: a bounded ring, written out as Chrome trace JSON (Perfetto reads it). No torch."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One stage on one track. Times are `time.perf_counter_ns`."""

    name: str
    track: str  # "host" or a stream's name
    step: int
    start_ns: int
    end_ns: int


class Timeline:
    """A ring of spans. `record` is one deque append, so every thread may call it."""

    def __init__(self, capacity: int = 65536) -> None:
        self._spans: collections.deque[Span] = collections.deque(maxlen=capacity)

    def record(self, span: Span) -> None:
        self._spans.append(span)

    @contextlib.contextmanager
    def measure(self, name: str, step: int, track: str = "host") -> Iterator[None]:
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.record(Span(name, track, step, start, time.perf_counter_ns()))

    def spans(self, seconds: float | None = None) -> list[Span]:
        """Spans that ended within the last `seconds`, oldest first."""
        since = 0 if seconds is None else time.perf_counter_ns() - int(seconds * 1e9)
        # They are recorded as they end: from the newest one back, the first that is too old is followed by older ones.
        found = list(itertools.takewhile(lambda span: span.end_ns >= since, reversed(self._spans.copy())))
        return found[::-1]

    def chrome_trace(self, seconds: float | None = None) -> dict[str, Any]:
        """The Trace Event Format: one complete event ("X") a span, microseconds, one thread a track."""
        spans = self.spans(seconds)
        tracks = {name: i for i, name in enumerate(dict.fromkeys(["host", *(span.track for span in spans)]))}
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": track}}
            for track, tid in tracks.items()
        ]
        events += [
            {
                "ph": "X",
                "pid": 1,
                "tid": tracks[span.track],
                "name": span.name,
                "cat": "stage",
                "ts": span.start_ns / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": {"step": span.step},
            }
            for span in spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}
