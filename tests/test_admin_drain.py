"""Drains that meet each other, a resume, or a signal to stop."""

from __future__ import annotations

import asyncio

import pytest

from specd.errors import RequestError
from specd.server.admin.console import Console
from specd.status import EngineState
from tests.admin import Desk
from tests.admin_engine import Engine


def drain(console: Console, timeout_s: float) -> asyncio.Task[bool]:
    return asyncio.create_task(console.drain(timeout_s, abort_rest=True, wait=True))


async def test_of_drains_that_begin_together_one_goes_on() -> None:
    engine = Engine()
    engine.start("a")
    console = Desk().console(engine)
    first = drain(console, 30)
    await asyncio.sleep(0.01)
    second, third = drain(console, 0.1), drain(console, 30)
    await asyncio.sleep(0.01)
    await console.resume()
    assert await asyncio.gather(first, second, third) == [False] * 3
    await asyncio.sleep(0.15)
    assert engine.live.keys() == {"a"}, "a drain that was ended aborts nothing"
    assert engine.state is EngineState.READY


class Interrupted(Engine):
    """Asked to stop in the moment in which its drain ends."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self.desk = desk

    async def drain(self, timeout_s: float) -> bool:
        try:
            return await super().drain(timeout_s)
        finally:
            self.desk.stopping = True


async def test_a_signal_to_stop_outlasts_a_resume_and_another_drain() -> None:
    for call in (Console.resume, lambda console: console.drain(30, abort_rest=True, wait=True)):
        desk = Desk()
        engine = Interrupted(desk)
        engine.start("a")
        console = desk.console(engine)
        waiting = drain(console, 30)
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="stopping"):
            async with asyncio.timeout(1):
                await call(console)
        assert engine.state is EngineState.DRAINING
        assert not await waiting
