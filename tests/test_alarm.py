"""A time limit that is moved: real event loops, with waits of a few hundredths of a second."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest
import uvloop

from specd.server.alarm import Alarm

SHORT_S = 0.03


class Bell:
    def __init__(self) -> None:
        self.rings: list[float] = []
        self.alarm = Alarm(self.ring)

    def ring(self) -> None:
        self.rings.append(asyncio.get_running_loop().time())


async def test_it_rings_once_and_not_early() -> None:
    bell, start = Bell(), asyncio.get_running_loop().time()
    bell.alarm.set(SHORT_S)
    await asyncio.sleep(4 * SHORT_S)
    assert len(bell.rings) == 1
    assert bell.rings[0] - start >= SHORT_S - 0.002


@pytest.mark.parametrize("times", [1, 5])
async def test_moved_on_it_rings_after_the_last_time(times: int) -> None:
    bell = Bell()
    for _ in range(times):
        bell.alarm.set(20 * SHORT_S)  # far longer than a busy machine stands still
        last = asyncio.get_running_loop().time()
        await asyncio.sleep(SHORT_S)
    await asyncio.sleep(22 * SHORT_S)
    assert len(bell.rings) == 1
    assert bell.rings[0] - last >= 20 * SHORT_S - 0.002


async def test_set_earlier_it_rings_earlier() -> None:
    bell = Bell()
    bell.alarm.set(60)
    bell.alarm.set(SHORT_S)
    await asyncio.sleep(4 * SHORT_S)
    assert len(bell.rings) == 1


async def test_cleared_it_is_silent_and_can_be_set_again() -> None:
    bell = Bell()
    bell.alarm.set(SHORT_S)
    bell.alarm.clear()
    await asyncio.sleep(3 * SHORT_S)
    assert bell.rings == []
    bell.alarm.set(SHORT_S)
    await asyncio.sleep(3 * SHORT_S)
    assert len(bell.rings) == 1


async def test_many_settings_start_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, started = asyncio.get_running_loop(), []
    start = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *args: started.append(args) or start(*args))  # type: ignore[func-returns-value]
    bell = Bell()
    for _ in range(100):
        bell.alarm.set(10)
        bell.alarm.clear()
    assert len(started) == 1
    bell.alarm.close()


async def test_closed_it_holds_nothing() -> None:
    """Its owner goes with the last name for it, and does not wait for the garbage collector."""
    bell = Bell()
    bell.alarm.set(60)
    bell.alarm.close()
    kept = weakref.ref(bell)
    gc.disable()
    try:
        del bell
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_timer_is_not_started_over_and_over(make: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """uvloop's timers fire up to half a millisecond early."""

    async def started() -> int:
        loop, count, seconds = asyncio.get_running_loop(), 0, 0.0104
        rung = asyncio.Event()
        alarm = Alarm(rung.set)
        start = alarm._start

        def counted() -> None:
            nonlocal count
            count += 1
            start()

        alarm._start = counted  # type: ignore[method-assign]
        begin = loop.time()
        alarm.set(seconds)
        await rung.wait()
        assert loop.time() - begin >= seconds
        return count

    with asyncio.Runner(loop_factory=make) as runner:
        assert runner.run(started()) == 1
