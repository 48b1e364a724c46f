"""Profiles of a running process: time by stacks, memory by lines, one at a time."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc

import pytest
import torch

from specd.errors import RequestError
from specd.profiling import profile


def busy(until: threading.Event) -> None:
    while not until.is_set():
        sum(range(1000))


async def test_where_time_goes() -> None:
    until = threading.Event()
    thread = threading.Thread(target=busy, args=(until,), name="worker")
    thread.start()
    try:
        found = await profile("cpu", 0.3)
    finally:
        until.set()
        thread.join()
    stacks = [line.rpartition(" ") for line in found["stacks"]]
    counts = [int(count) for *_, count in stacks]
    assert counts == sorted(counts, reverse=True)
    seen = sum(count for (stack, *_), count in zip(stacks, counts, strict=True) if stack.startswith("worker-"))
    assert seen >= 3
    assert any(stack.startswith("worker-") and stack.endswith("busy") for stack, *_ in stacks)
    assert not any("_sample" in stack for stack, *_ in stacks), "it does not look at itself"


async def test_what_is_allocated_and_stays() -> None:
    held: list[bytes] = []

    async def allocate() -> None:
        await asyncio.sleep(0.05)
        held.append(bytes(3_000_000))

    task = asyncio.create_task(allocate())
    found = await profile("heap", 0.2)
    await task
    assert not tracemalloc.is_tracing()
    first = found["lines"][0]
    assert first["bytes"] >= 3_000_000
    assert "tests/test_profiling.py:" in first["line"]
    assert found["peak_bytes"] >= first["bytes"]


async def test_which_operations_take_time() -> None:
    """On a thread that was there before; what is inside another operation counts in its total alone."""
    until = threading.Event()

    def compute() -> None:
        matrix = torch.ones(64, 64)
        while not until.is_set():
            torch.nn.functional.linear(matrix, matrix)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        found = await profile("torch", 0.15)
    finally:
        until.set()
        thread.join()
    rows = {row["operation"]: row for row in found["operations"]}
    outer, inner = rows["aten::linear"], rows["aten::mm"]
    assert outer["calls"] > 3
    assert outer["total_ms"] > outer["self_ms"] + 0.5 * inner["total_ms"] > 0
    assert 0 < inner["self_ms"] <= inner["total_ms"]
    assert 0 < found["looked_s"] <= 0.16


async def test_one_at_a_time() -> None:
    first = asyncio.create_task(profile("cpu", 0.2))
    await asyncio.sleep(0.05)
    with pytest.raises(RequestError) as refused:
        await profile("heap", 0.1)
    assert refused.value.code == "conflict"
    await first
    assert (await profile("cpu", 0.05))["kind"] == "cpu"


async def test_a_caller_that_leaves_ends_it() -> None:
    task = asyncio.create_task(profile("cpu", 60))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await profile("cpu", 0.05))["kind"] == "cpu"
