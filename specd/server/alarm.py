"""A time limit that is moved all the time and hardly ever reached, such as a stream's at every chunk. No HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

_TICK_S = 0.001  # uvloop rounds its timers to it: one that fires too early would be started over and over


class Alarm:
    """Calls back when `set` was so many seconds ago, unless it was set anew or cleared meanwhile.

    Setting it later costs a comparison: the timer that runs is left alone, and starts another one when it fires too
    early. Belongs to the event loop that runs; `close` ends it, and lets go of the timer and of what it calls: an owner
    that holds its alarm is no cycle then, for the garbage collector to find.
    """

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback
        self._loop = asyncio.get_running_loop()
        self._due = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._fires = math.inf  # when the timer does

    def set(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        if self._due < self._fires:
            self._start()

    def clear(self) -> None:
        self._due = math.inf

    def close(self) -> None:
        self._callback = None
        self._due = self._fires = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires = self._due
        self._timer = self._loop.call_at(self._due + _TICK_S, self._fire)

    def _fire(self) -> None:
        self._timer, self._fires = None, math.inf
        if self._loop.time() >= self._due:
            self._due = math.inf
            if self._callback is not None:
                self._callback()
        elif self._due < math.inf:
            self._start()
