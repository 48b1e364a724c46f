"""What the service manager is told while the daemon serves and drains, and when the watchdog is fed.

The watchdog is fed by progress, not by time: steps must end (or there must be nothing to do) and the event loop must
come round. Limits are extended on the same condition.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from specd.account import Account
from specd.log import get_logger
from specd.sdnotify import Notifier
from specd.server.admin.protocol import AdminEngine
from specd.signals import StopSignal
from specd.status import EngineState, EngineStats

PERIOD_S = 5.0  # between STATUS lines
_LAG_PERIOD_S = 0.25
_LAG_WINDOW = 20  # periods: the worst lag of the last 5 s
_MOST_LAG_S = 5.0  # a loop that is later than this is as good as stuck

log = get_logger("daemon")


class DaemonEngine(AdminEngine, Protocol):
    """What the daemon needs beyond the view of its sockets: `specd.engine.Engine`, or a fake in tests."""

    account: Account

    async def close(self) -> None:
        """Ends what still runs (each stream gets its last delta) and frees everything."""
        ...


class LoopLag:
    """How late the event loop is, measured with a timer. Each of `observers` is told every delay, in seconds."""

    def __init__(self) -> None:
        self.observers: list[Callable[[float], None]] = []
        self._recent: collections.deque[float] = collections.deque(maxlen=_LAG_WINDOW)

    @property
    def worst_s(self) -> float:
        return max(self._recent, default=0.0)

    @contextlib.asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run(), name="specd-loop-lag")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _run(self) -> None:
        while True:
            due_s = time.monotonic() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            late_s = max(time.monotonic() - due_s, 0.0)
            self._recent.append(late_s)
            for observe in self.observers:
                observe(late_s)


class Supervisor:
    """Watches one engine. stall_s gives the seconds without a step that count as a hang."""

    def __init__(
        self, engine: DaemonEngine, notifier: Notifier, stop: StopSignal, lag: LoopLag, *, stall_s: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._notifier = notifier
        self._stop = stop
        self._lag = lag
        self._stall_s = stall_s
        self._period_s = min(PERIOD_S, (notifier.watchdog_s or 2 * PERIOD_S) / 2)
        self._stalled = False

    async def watch(self) -> bool:
        """Reports until asked to stop; True when the engine failed."""
        before = self._engine.stats()
        while not await set_within(self._stop.drain, self._period_s):
            stats = self._engine.stats()
            if stats.state is EngineState.FAILED:
                log.error("engine_failed", running=stats.running, waiting=stats.waiting)
                notify(self._notifier, "STATUS=the engine failed", "WATCHDOG=trigger")
                return True
            notify(self._notifier, status_line(before, stats), *self._food(stats))
            before = stats
        return False

    async def drain(self) -> bool:
        """True when everything accepted has ended; False when the time ran out or a second request to stop came."""
        draining = asyncio.ensure_future(self._engine.drain(self._stop.drain_timeout_s))
        stopping = asyncio.ensure_future(self._stop.now.wait())
        try:
            while not draining.done() and not stopping.done():
                stats = self._engine.stats()
                fed = self._food(stats)
                extend = [] if self._stalled else [f"EXTEND_TIMEOUT_USEC={int(4 * PERIOD_S * 1e6)}"]
                left = stats.running + stats.waiting
                notify(self._notifier, "STOPPING=1", f"STATUS=draining {left}", *extend, *fed)
                await asyncio.wait((draining, stopping), timeout=self._period_s, return_when=asyncio.FIRST_COMPLETED)
            return draining.result() if draining.done() else False
        finally:
            draining.cancel()
            stopping.cancel()
            await asyncio.wait((draining, stopping))

    def _food(self, stats: EngineStats) -> list[str]:
        """For the watchdog. Tells the log once when a stall begins."""
        was, self._stalled = self._stalled, stats.last_progress_s > self._stall_s()
        if self._stalled and not was:
            log.error("engine_stalled", seconds=round(stats.last_progress_s, 1), running=stats.running)
        late = self._lag.worst_s > _MOST_LAG_S
        if late:
            log.error("loop_lagged", seconds=round(self._lag.worst_s, 1))
        return ["WATCHDOG=1"] if self._notifier.watchdog_s and not self._stalled and not late else []


def status_line(before: EngineStats, now: EngineStats) -> str:
    """`STATUS=3 running, 0 waiting, 41.0 tokens/s, 2.90 tokens a draft step`: what happened between two snapshots."""
    seconds = max(now.uptime_s - before.uptime_s, 1e-3)
    rate = (now.generation_tokens - before.generation_tokens) / seconds
    drafts = sum(now.drafts.values()) - sum(before.drafts.values())
    accepted = sum(now.accepted_tokens.values()) - sum(before.accepted_tokens.values())
    length = f", {1 + accepted / drafts:.2f} tokens a draft step" if drafts else ""
    state = "paused: " if now.paused else "" if now.state is EngineState.READY else f"{now.state}: "
    return f"STATUS={state}{now.running} running, {now.waiting} waiting, {rate:.1f} tokens/s{length}"


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def notify(notifier: Notifier, *assignments: str) -> None:
    """A service manager that went away must not take the daemon along."""
    try:
        notifier.send(*assignments)
    except OSError as error:
        log.warning("notify_failed", error=str(error))
