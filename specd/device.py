"""Streams: where everything computes. The event loop launches and awaits; it never computes itself.

    handle = stream.launch(fn, *args)     # args may be handles of earlier launches, on any stream
    value = await handle

A stream runs its launches in order. Waits between streams follow from the arguments, so a stage cannot forget one.
`fn` is a plain function over tensors: it never awaits and closes over no mutable host state.

Three implementations on the CPU: a worker thread a stream (`ThreadStream`), on the spot (`InlineStream`, for unit
tests), and `ChaosStream`: the thread with random delays before and after each launch, so that a result that is read
without being waited for, or a buffer that is reused too early, shows. CUDA's (events, pinned rings, graphs) keeps this
protocol.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from specd.frames import Frames, Upload, fresh_upload
from specd.timeline import Span, Timeline

T = TypeVar("T")


class Handle(Generic[T]):
    """A value that a stream will have computed. `await handle` gives it on the host, or raises what fn raised."""

    def __init__(self) -> None:
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.duration_s = 0.0  # computing, without waiting for other streams; set before the value is there
        self._future.set_running_or_notify_cancel()  # whoever stops waiting does not cancel the work

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()

    def result(self) -> T:
        """Blocks until it is there. For streams and tests; the event loop awaits instead."""
        return self._future.result()

    async def settled(self) -> None:
        """Until it is there or has failed, which `error` tells."""
        with contextlib.suppress(Exception):
            await self

    def done(self) -> bool:
        return self._future.done()

    def error(self) -> BaseException | None:
        """What fn raised, when it is done; None while it runs and when it succeeded."""
        return self._future.exception() if self._future.done() else None

    def _set(self, value: T) -> None:
        self._future.set_result(value)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, StopIteration):
            # asyncio refuses to carry one, and whoever awaits would wait for ever.
            leaked = RuntimeError("a launched function raised StopIteration")
            leaked.__cause__ = error
            error = leaked
        self._future.set_exception(error)


class Stream(Protocol):
    """An ordered queue of work on a device."""

    name: str

    def launch(
        self,
        fn: Callable[..., T],
        *args: Any,
        stage: str = "",
        step: int = -1,
        on_error: Callable[[Exception], T] | None = None,
    ) -> Handle[T]:
        """Queues fn(*args); handles among args are replaced by their values.

        on_error turns an exception of fn, or of a handle it waits for, into a value; without it the handle raises.
        stage and step name the span on the timeline. RuntimeError when the stream is closed.
        """
        ...

    def close(self) -> None:
        """Finishes what is queued and stops."""
        ...


def ready(value: T) -> Handle[T]:
    """A handle of something that is already there."""
    handle: Handle[T] = Handle()
    handle._set(value)
    return handle


class InlineStream:
    """Runs each launch on the spot, in the caller's thread."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        self.name = name
        self._timeline = timeline

    def launch(
        self,
        fn: Callable[..., T],
        *args: Any,
        stage: str = "",
        step: int = -1,
        on_error: Callable[[Exception], T] | None = None,
    ) -> Handle[T]:
        handle: Handle[T] = Handle()
        self._run(fn, args, stage, step, on_error, handle)
        return handle

    def _run(
        self,
        fn: Callable[..., T],
        args: tuple[Any, ...],
        stage: str,
        step: int,
        on_error: Callable[[Exception], T] | None,
        handle: Handle[T],
    ) -> None:
        try:
            # Waiting for other streams is not part of the span: it would hide the overlap that the trace shows.
            values = [arg.result() if isinstance(arg, Handle) else arg for arg in args]
            start = time.perf_counter_ns()
            try:
                with torch.inference_mode():
                    value = fn(*values)
            finally:
                end = time.perf_counter_ns()
                handle.duration_s = (end - start) / 1e9
                if stage:
                    self._timeline.record(Span(stage, self.name, step, start, end))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the handle
            if on_error is None:
                handle._fail(error)
                return
            try:
                value = on_error(error)
            except Exception as second:  # noqa: BLE001
                handle._fail(second)
                return
        handle._set(value)

    def close(self) -> None:
        return


class ThreadStream(InlineStream):
    """One worker thread with a FIFO; `threads` intra-op threads of torch belong to it."""

    def __init__(self, name: str, timeline: Timeline, threads: int) -> None:
        super().__init__(name, timeline)
        self._threads = threads
        self._closed = False
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"specd-{name}", daemon=True)
        self._thread.start()

    def launch(
        self,
        fn: Callable[..., T],
        *args: Any,
        stage: str = "",
        step: int = -1,
        on_error: Callable[[Exception], T] | None = None,
    ) -> Handle[T]:
        if self._closed:
            raise RuntimeError(f"stream {self.name} is closed")
        handle: Handle[T] = Handle()
        self._queue.put((fn, args, stage, step, on_error, handle))
        return handle

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        while (item := self._queue.get()) is not None:
            self._run(*item)
            del item  # or the last launch's tensors live until the next one

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()


class ChaosStream(ThreadStream):
    """A ThreadStream that sleeps a random while around each launch (seeded), up to `max_delay_s`."""

    def __init__(self, name: str, timeline: Timeline, *, seed: int, max_delay_s: float = 0.002) -> None:
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        super().__init__(name, timeline, threads=1)

    def _run(self, *item: Any) -> None:
        time.sleep(self._random.random() * self._max_delay_s)
        super()._run(*item)
        time.sleep(self._random.random() * self._max_delay_s)


class Device:
    """The streams of the five stages, and where their tensors live.

    layout: "single" one stream for all (the default on a CPU: the cores are shared anyway), "paired" draft + refill and
    verify + accept, "stages" one each. The masks of grammars have a stream of their own in each: host work, done while
    verify runs.
    """

    def __init__(
        self,
        torch_device: torch.device,
        streams: dict[str, Stream],
        *,
        timeline: Timeline,
        frames: Frames | None = None,
        overlaps: bool = True,
    ) -> None:
        self.overlaps = overlaps  # whether the host can work beside the streams; else each would slow the other down
        self.torch_device = torch_device
        self.timeline = timeline
        self.frames = frames  # persistent inputs; None: a step's inputs are fresh tensors
        self._streams = streams

    def upload(self, step: int) -> Upload:
        """Where the inputs of a step go."""
        return fresh_upload(self.torch_device) if self.frames is None else self.frames.of(step)

    def stream(self, stage: str) -> Stream:
        """stage: "draft", "verify", "masks", "accept" or "refill"."""
        return self._streams[stage]

    def close(self) -> None:
        for stream in {id(stream): stream for stream in self._streams.values()}.values():
            stream.close()


_LAYOUTS = {
    "single": {"draft": "compute", "verify": "compute", "accept": "compute", "refill": "compute", "masks": "masks"},
    "paired": {"draft": "draft", "verify": "target", "accept": "target", "refill": "draft", "masks": "masks"},
    "stages": {"draft": "draft", "verify": "verify", "accept": "accept", "refill": "refill", "masks": "masks"},
}


_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # microseconds of all cores together, and in how many; "max": no bound


def usable_cores() -> int:
    """Of the machine, those that this process may run on; no more than its container has the time of."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_MAX.read_text().split()
    except OSError:  # no cgroup v2, or none of our own
        return cores
    return cores if quota == "max" else min(cores, -(-int(quota) // int(period)))


def cpu_device(*, layout: str, threads: int, timeline: Timeline, overlaps: bool | None = None) -> Device:
    """Worker threads on the CPU; the intra-op threads are shared out among the streams of the layout.

    overlaps: see `Device`; None: when the threads leave a core free.
    """
    names = set(_LAYOUTS[layout].values())
    # Paired streams compute at the same time; with one stream a stage accept and refill are short, so two still share.
    share = max(1, threads // min(2, len(names) - 1))  # masks have no use for torch's threads; the number is global
    streams = {name: ThreadStream(name, timeline, share) for name in sorted(names)}
    return Device(
        torch.device("cpu"),
        {stage: streams[name] for stage, name in _LAYOUTS[layout].items()},
        timeline=timeline,
        overlaps=threads < usable_cores() if overlaps is None else overlaps,
    )


def inline_device(timeline: Timeline | None = None) -> Device:
    """Everything on the spot: unit tests."""
    timeline = timeline or Timeline()
    stream = InlineStream("inline", timeline)
    return Device(torch.device("cpu"), dict.fromkeys(_LAYOUTS["single"], stream), timeline=timeline)


def chaos_device(seed: int, *, layout: str = "stages", timeline: Timeline | None = None) -> Device:
    """Threads with random delays and poisoned inputs: what is read without a wait, or too late, comes out wrong."""
    timeline = timeline or Timeline()
    names = sorted(set(_LAYOUTS[layout].values()))
    streams = {name: ChaosStream(name, timeline, seed=seed * 31 + i) for i, name in enumerate(names)}
    device = torch.device("cpu")
    stages: dict[str, Stream] = {stage: streams[name] for stage, name in _LAYOUTS[layout].items()}
    return Device(device, stages, timeline=timeline, frames=Frames(device, poisons=True))
