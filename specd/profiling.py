"""Where this process spends its time and its memory, looked at for some seconds. Places in the code, never values.

    cpu    every thread's stack, 100 times a second    "thread;outermost;...;innermost count", the format that
                                                       flame graph tools read (Brendan Gregg's stackcollapse)
    torch  PyTorch's operations, a third of the time     calls and milliseconds by name: see `torch_profiling`
    heap   what is allocated meanwhile and still there   bytes and blocks by line, the largest first

In `cpu` code outside Python (the kernels, torch) shows as the line that called it. Sampling takes the GIL for some
0.1 ms each time; tracing allocations makes Python code about three times slower while it lasts.
"""

from __future__ import annotations

import asyncio
import collections
import importlib
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar

from specd.errors import RequestError
from specd.stacks import short_path, thread_stacks

T = TypeVar("T")

KINDS = ("cpu", "torch", "heap")
_PERIOD_S = 0.01
_HEAP_FRAMES = 1
_MOST_LINES = 100
_running = threading.Lock()


async def profile(kind: str, seconds: float) -> dict[str, Any]:
    """kind: see the module. Raises RequestError while another one is made."""
    if not _running.acquire(blocking=False):
        raise RequestError("a profile is being made already", code="conflict")
    try:
        return await _PROFILES[kind](seconds)
    finally:
        _running.release()


async def _cpu(seconds: float) -> dict[str, Any]:
    counts = await _in_a_thread(_sample, seconds)
    stacks = [f"{stack} {count}" for stack, count in counts.most_common()]
    return {"kind": "cpu", "seconds": seconds, "period_s": _PERIOD_S, "stacks": stacks}


def _sample(seconds: float, ended: threading.Event) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    me = f"-{threading.get_ident()}"
    until = time.monotonic() + seconds
    while time.monotonic() < until and not ended.wait(_PERIOD_S):
        for thread, frames in thread_stacks().items():
            if not thread.endswith(me):
                counts[";".join((thread, *frames))] += 1
    return counts


async def _in_a_thread(sample: Callable[[float, threading.Event], T], seconds: float) -> T:
    """The event ends it early: nobody waits for it any more."""
    ended = threading.Event()
    work = asyncio.get_running_loop().run_in_executor(None, sample, seconds, ended)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        ended.set()
        await asyncio.wait((work,))  # the next one begins when it has ended
        raise


async def _torch(seconds: float) -> dict[str, Any]:
    module = importlib.import_module("specd.torch_profiling")  # torch, which a daemon has loaded long ago
    looked_s, found = await _in_a_thread(module.sample, seconds)
    rows = sorted(found.items(), key=lambda item: -item[1].self_ns)[:_MOST_LINES]
    operations = [
        {"operation": name, "calls": o.calls, "self_ms": o.self_ns / 1e6, "total_ms": o.total_ns / 1e6}
        for name, o in rows
    ]
    return {"kind": "torch", "seconds": seconds, "looked_s": looked_s, "operations": operations}


async def _heap(seconds: float) -> dict[str, Any]:
    tracemalloc.start(_HEAP_FRAMES)
    try:
        await asyncio.sleep(seconds)
        found = await asyncio.to_thread(tracemalloc.take_snapshot)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    lines = found.statistics("lineno")[:_MOST_LINES]
    rows = [
        {"bytes": line.size, "blocks": line.count, "line": f"{short_path(frame.filename)}:{frame.lineno}"}
        for line in lines
        for frame in line.traceback
    ]
    return {"kind": "heap", "seconds": seconds, "peak_bytes": peak, "lines": rows}


_PROFILES = {"cpu": _cpu, "torch": _torch, "heap": _heap}
