"""Which PyTorch operations a process spends its time in, on all of its threads (`specd ctl profile torch`).

PyTorch's profiler holds up the whole process while it gathers what it saw, some 15 us an operation. So it looks for a
tenth of a second at a time and rests in between: streams then wait for as long, not for seconds. The first look in a
process takes some seconds to begin, without holding anything up. What specd's own kernels compute is no operation of
PyTorch and not seen.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity

_LOOK_S, _REST_S = 0.1, 0.2


@dataclasses.dataclass(slots=True)
class Operation:
    """Time of one kind of operation; self_ns: without the operations inside."""

    calls: int = 0
    total_ns: int = 0
    self_ns: int = 0


def sample(seconds: float, ended: threading.Event) -> tuple[float, dict[str, Operation]]:
    """(seconds looked at, operations by name). Blocks for `seconds`, or until `ended` is set."""
    found: dict[str, Operation] = {}
    looked_s = 0.0
    _look(0.0, ended)  # what the first one has to set up is not counted
    until = time.monotonic() + seconds
    while not ended.is_set() and (left_s := until - time.monotonic()) > 0:
        begun = time.monotonic()
        events = _look(min(_LOOK_S, left_s), ended)
        looked_s += min(_LOOK_S, left_s, time.monotonic() - begun)
        _tally(events, found)
        ended.wait(min(_REST_S, max(until - time.monotonic(), 0.0)))
    return looked_s, found


def _look(seconds: float, ended: threading.Event) -> list[Any]:
    profiler = torch.profiler.profile(
        activities=[ProfilerActivity.CPU],
        acc_events=False,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    profiler.start()
    try:
        ended.wait(seconds)
    finally:
        profiler.stop()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return [] if results is None else [event for event in results.events() if not event.is_async()]


def _tally(events: Iterable[Any], found: dict[str, Operation]) -> None:
    """Events of one thread are nested or apart: what is open when another begins is around it."""
    spans = sorted((event.start_thread_id(), event.start_ns(), -event.end_ns(), event.name()) for event in events)
    for _, group in itertools.groupby(spans, key=lambda span: span[0]):
        around: list[tuple[int, str]] = []  # (end, name), the innermost last
        for _, start, minus_end, name in group:
            while around and around[-1][0] <= start:
                around.pop()
            operation = found.setdefault(name, Operation())
            operation.calls += 1
            operation.self_ns += -minus_end - start
            if all(outer != name for _, outer in around):
                operation.total_ns += -minus_end - start
            if around:
                found[around[-1][1]].self_ns -= -minus_end - start
            around.append((-minus_end, name))
