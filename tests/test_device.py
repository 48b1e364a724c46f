"""Streams: order, waits that follow from arguments, errors, and what outlives what."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specd import device as module
from specd.device import (
    ChaosStream,
    Device,
    Handle,
    InlineStream,
    Stream,
    ThreadStream,
    chaos_device,
    cpu_device,
    inline_device,
    ready,
)
from specd.timeline import Timeline

MakeStream = Callable[[str], Stream]


@pytest.fixture(params=["inline", "thread", "chaos"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeStream]:
    """Streams of one kind, closed at the end."""
    timeline = Timeline()
    made: list[Stream] = []

    def make_stream(name: str) -> Stream:
        kinds: dict[str, Callable[[], Stream]] = {
            "inline": lambda: InlineStream(name, timeline),
            "thread": lambda: ThreadStream(name, timeline, 1),
            "chaos": lambda: ChaosStream(name, timeline, seed=len(made)),
        }
        made.append(kinds[request.param]())
        return made[-1]

    yield make_stream
    for stream in made:
        stream.close()


@pytest.fixture
def stream() -> Iterator[ThreadStream]:
    stream = ThreadStream("compute", Timeline(), 1)
    yield stream
    stream.close()


def add(*values: int) -> int:
    return sum(values)


def fail(*_: object) -> int:
    raise ValueError("broken")


# Values, order, waits


async def test_a_handle_gives_its_value_as_often_as_asked(make: MakeStream) -> None:
    handle = make("a").launch(add, 1, 2)
    assert (await handle, await handle, handle.result()) == (3, 3, 3)
    assert handle.done()
    assert handle.error() is None


async def test_handles_among_the_arguments_are_waited_for(make: MakeStream) -> None:
    one, two, three = make("one"), make("two"), make("three")
    first = one.launch(add, 1)
    second = two.launch(add, first, 10)
    last = three.launch(add, first, second, 100)
    assert await last == 112


async def test_a_stream_keeps_order(make: MakeStream) -> None:
    stream, seen = make("a"), list[int]()
    handles = [stream.launch(seen.append, number) for number in range(30)]
    await handles[-1]
    assert seen == list(range(30))
    assert all(handle.done() for handle in handles)


def test_a_ready_handle() -> None:
    assert ready(5).result() == 5


async def test_the_loop_goes_on_while_a_stream_computes(stream: ThreadStream) -> None:
    over = threading.Event()
    handle = stream.launch(over.wait, 10.0)
    await asyncio.sleep(0)
    assert not handle.done()
    assert handle.error() is None
    over.set()
    assert await handle is True


async def test_streams_compute_at_the_same_time() -> None:
    """Each waits for the other: on one thread this would never end."""
    streams = [ThreadStream(name, Timeline(), 1) for name in ("a", "b")]
    barrier = threading.Barrier(2, timeout=10.0)
    await asyncio.gather(*(stream.launch(barrier.wait) for stream in streams))
    for one in streams:
        one.close()


def test_computing_needs_no_gradients(make: MakeStream) -> None:
    assert make("a").launch(torch.is_inference_mode_enabled).result()
    assert not torch.is_inference_mode_enabled()


# Errors


async def test_an_error_comes_out_of_the_handle(make: MakeStream) -> None:
    stream = make("a")
    handle = stream.launch(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            await handle
    with pytest.raises(ValueError, match="broken"):
        handle.result()
    assert isinstance(handle.error(), ValueError)
    assert await stream.launch(add, 1) == 1, "the stream goes on"


async def test_an_error_travels_along_the_arguments(make: MakeStream) -> None:
    seen: list[object] = []
    handle = make("b").launch(seen.append, make("a").launch(fail))
    with pytest.raises(ValueError, match="broken"):
        await handle
    assert seen == [], "what needs a value that is not there does not run"


async def test_on_error_gives_a_value_instead(make: MakeStream) -> None:
    one, two = make("a"), make("b")
    seen: list[str] = []

    def repair(error: Exception) -> int:
        seen.append(str(error))
        return -1

    assert await one.launch(fail, on_error=repair) == -1
    assert await two.launch(add, one.launch(fail), 1, on_error=repair) == -1, "also for an argument that failed"
    assert await one.launch(add, 2, on_error=repair) == 2
    assert seen == ["broken", "broken"]


async def test_an_on_error_that_fails_is_the_error(make: MakeStream) -> None:
    def worse(error: Exception) -> int:
        raise KeyError("worse") from error

    with pytest.raises(KeyError, match="worse") as caught:
        await make("a").launch(fail, on_error=worse)
    assert isinstance(caught.value.__cause__, ValueError)


async def test_a_leaked_stop_iteration_does_not_hang_the_waiter(make: MakeStream) -> None:
    """asyncio refuses to carry StopIteration: whoever awaited it would wait for ever."""
    handle = make("a").launch(next, iter(()))
    with pytest.raises(RuntimeError, match="StopIteration"):
        async with asyncio.timeout(5):
            await handle


# Cancelling


async def test_whoever_stops_waiting_does_not_stop_the_work(stream: ThreadStream) -> None:
    go = threading.Event()
    handle = stream.launch(lambda: (go.wait(10.0), "done")[1])

    async def wait() -> str:
        return await handle

    impatient, patient = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    go.set()
    assert await patient == "done"
    assert await handle == "done"


async def test_a_timeout_leaves_the_handle_alone(stream: ThreadStream) -> None:
    go = threading.Event()
    handle = stream.launch(go.wait, 10.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await handle
    assert not handle.done()
    go.set()
    assert await handle is True


# Lifetime


def test_close_finishes_what_is_queued() -> None:
    stream, seen = ThreadStream("closing", Timeline(), 1), list[int]()
    stream.launch(time.sleep, 0.02)
    handles = [stream.launch(seen.append, number) for number in range(5)]
    stream.close()
    assert seen == [0, 1, 2, 3, 4]
    assert all(handle.done() for handle in handles)
    assert "specd-closing" not in [thread.name for thread in threading.enumerate()]
    stream.close()


def test_a_closed_stream_refuses_work() -> None:
    """A handle that nobody computes would hang whoever awaits it."""
    stream = ThreadStream("closed", Timeline(), 1)
    stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        stream.launch(add, 1)


def test_a_stream_may_close_itself() -> None:
    stream = ThreadStream("self", Timeline(), 1)
    stream.launch(stream.close).result()
    stream._thread.join(timeout=5.0)
    assert not stream._thread.is_alive()


def test_a_device_closes_streams_that_wait_for_each_other() -> None:
    device = cpu_device(layout="stages", threads=1, timeline=Timeline())
    handle: Handle[int] = ready(0)
    for stage in ("verify", "accept", "refill", "draft") * 5:
        handle = device.stream(stage).launch(add, handle, 1)
    device.close()
    assert handle.done()
    assert handle.result() == 20
    device.close()


class Buffer:
    """Something whose life can be watched."""


async def test_an_idle_stream_holds_nothing_alive(stream: ThreadStream) -> None:
    buffer = Buffer()
    watched = weakref.ref(buffer)
    await stream.launch(lambda held: None, buffer)
    del buffer
    deadline = time.monotonic() + 5.0
    while watched() is not None and time.monotonic() < deadline:
        gc.collect()
        await asyncio.sleep(0.001)
    assert watched() is None


# What is measured


async def test_spans_and_durations_do_not_count_waiting() -> None:
    timeline = Timeline()
    slow, quick = ThreadStream("slow", timeline, 1), ThreadStream("quick", timeline, 1)
    first = slow.launch(time.sleep, 0.2, stage="draft", step=7)
    second = quick.launch(lambda _: None, first, stage="verify", step=7)
    await second
    assert first.duration_s >= 0.2
    assert second.duration_s < 0.15
    spans = {span.name: span for span in timeline.spans()}
    assert (spans["draft"].track, spans["verify"].track, spans["verify"].step) == ("slow", "quick", 7)
    assert spans["draft"].end_ns <= spans["verify"].start_ns
    assert (spans["draft"].end_ns - spans["draft"].start_ns) / 1e9 == first.duration_s
    for one in (slow, quick):
        one.close()


def test_a_failed_stage_has_a_span_and_a_nameless_one_has_none() -> None:
    timeline = Timeline()
    stream = InlineStream("inline", timeline)
    stream.launch(add, 1)
    handle = stream.launch(fail, stage="verify", step=1, on_error=lambda error: 0)
    assert [span.name for span in timeline.spans()] == ["verify"]
    assert handle.duration_s > 0.0


# Devices


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("single", ["compute"] * 4),
        ("paired", ["draft", "target", "target", "draft"]),
        ("stages", ["draft", "verify", "accept", "refill"]),
    ],
)
def test_layouts(layout: str, names: list[str]) -> None:
    for device in (cpu_device(layout=layout, threads=4, timeline=Timeline()), chaos_device(0, layout=layout)):
        streams = [device.stream(stage) for stage in ("draft", "verify", "accept", "refill")]
        assert [stream.name for stream in streams] == names
        assert len({id(stream) for stream in streams}) == len(set(names))
        device.close()


@pytest.mark.parametrize(("layout", "share"), [("single", 3), ("paired", 1), ("stages", 1)])
def test_threads_are_shared_out(layout: str, share: int) -> None:
    device = cpu_device(layout=layout, threads=3, timeline=Timeline())
    found = {device.stream(stage).launch(torch.get_num_threads).result() for stage in ("draft", "verify")}
    device.close()
    assert found == {share}


def test_an_inline_device_computes_on_the_spot() -> None:
    device = inline_device()
    handle = device.stream("verify").launch(threading.get_ident)
    assert handle.done()
    assert handle.result() == threading.get_ident()
    device.close()


# Chaos: the tool that finds missing waits


def race(device: Device, *, waits: bool) -> bool:
    """Writes a buffer on one stream and reads it on another, again and again; False when an old value was read."""
    buffer, reads = [-1], list[Handle[Any]]()

    def write(number: int) -> None:
        buffer[0] = number

    def read(*_: object) -> int:
        return buffer[0]

    before: Handle[Any] = ready(None)
    for number in range(20):
        written = device.stream("draft").launch(lambda n, _: write(n), number, before)
        before = device.stream("verify").launch(read, *([written] if waits else []))
        reads.append(before)
    values = [handle.result() for handle in reads]
    device.close()
    return values == list(range(20))


def test_chaos_shows_a_missing_wait() -> None:
    assert all(race(chaos_device(seed), waits=True) for seed in range(3))
    assert not all(race(chaos_device(seed), waits=False) for seed in range(3))


def test_chaos_poisons_and_repeats() -> None:
    """Delays come from the seed, one sequence a stream."""
    devices = [chaos_device(seed) for seed in (1, 1, 2)]
    draws = []
    for device in devices:
        streams = [device.stream(stage) for stage in ("draft", "verify")]
        assert all(isinstance(stream, ChaosStream) for stream in streams)
        draws.append([stream._random.random() for stream in streams if isinstance(stream, ChaosStream)])
        assert device.frames is not None
        device.close()
    assert draws[0] == draws[1] != draws[2]
    assert draws[0][0] != draws[0][1]
    assert inline_device().frames is None


@pytest.mark.parametrize(
    ("content", "cores"),
    [("max 100000", 8), ("150000 100000", 2), ("1000 100000", 1), ("6400000 100000", 8), (None, 8)],
)
def test_a_container_has_no_more_cores_than_time(
    content: str | None, cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(module, "_CPU_MAX", tmp_path / "cpu.max")
    if content is not None:
        (tmp_path / "cpu.max").write_text(content + "\n")
    assert module.usable_cores() == cores
