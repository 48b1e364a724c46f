"""What all commands of the control socket share: the engine, the settings that can be changed, and who listens."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from specd.errors import AdminAbortedError, RequestError
from specd.log import get_logger
from specd.reload import Reloader, ReloadReport
from specd.server.admin.events import EventBus
from specd.server.admin.keyfile import KeyFile
from specd.server.admin.override import Override
from specd.server.admin.peers import Levels
from specd.server.admin.protocol import AdminEngine
from specd.server.openai import PREFIXES
from specd.server.translation import MESSAGE_PREFIX, RESPONSE_PREFIX
from specd.status import EngineStats

_CUT_OFF_S = 10.0  # for what was aborted at the end of a drain to end

log = get_logger("admin")


@dataclasses.dataclass(frozen=True, slots=True)
class Shutdown:
    """What `POST /v1/shutdown` asks. drain: finish what was accepted, at most timeout_s (None: the configured time)."""

    drain: bool = True
    timeout_s: float | None = None


@dataclasses.dataclass(slots=True)
class Daemon:
    """What the daemon gives to its control socket. The callables return at once."""

    reload: Callable[[bool], ReloadReport]  # (dry_run); raises ConfigError
    shutdown: Callable[[Shutdown], None]
    stopping: Callable[[], bool]
    loop_lag_s: Callable[[], float]
    set_log_level: Callable[[str | None], None]  # None: as configured


class Console:
    """`generation` grows with every change, whoever made it; `If-Match` compares it."""

    def __init__(
        self, engine: AdminEngine, daemon: Daemon, *, reloader: Reloader, keys: KeyFile, levels: Levels
    ) -> None:
        self.engine = engine
        self.daemon = daemon
        self.reloader = reloader
        self.keys = keys
        self.levels = levels
        self.events = EventBus()
        self.generation = 1
        self.log_level: Override[str] = Override(daemon.set_log_level, on_revert=lambda: self._reverted("loglevel"))
        self.draft_length: Override[int | str] = Override(
            engine.set_draft_length, on_revert=lambda: self._reverted("speculation")
        )
        self._drain: asyncio.Task[bool] | None = None

    @property
    def state(self) -> str:
        """The engine's state, or "paused"."""
        return self.engine.stats().shown_state

    def changed(self, what: str, **fields: Any) -> None:
        """Something is not as it was: a new generation, and everybody who listens is told."""
        self.generation += 1
        self.events.publish("changed", what=what, generation=self.generation, **fields)

    def _reverted(self, what: str) -> None:
        log.info("override_reverted", what=what)
        self.changed(what, reverted=True)

    def check_ready(self, what: str) -> None:
        """Raises RequestError unless the engine takes requests and computes them."""
        if self.state != "ready":
            raise RequestError(f"{what}: the daemon is {self.state}", code="conflict")

    def check_not_stopping(self) -> None:
        """Raises RequestError."""
        if self.daemon.stopping():
            raise RequestError("the daemon is stopping", code="conflict")

    # ---------------------------------------------------------------- drain

    async def drain(self, timeout_s: float, *, abort_rest: bool, wait: bool) -> bool:
        """True when everything accepted has ended; False when time ran out, `resume` came, or nobody waits for it.

        Another drain that is going on ends: the new one's timeout counts. Raises RequestError while the daemon stops.
        """
        await self._stop_drain()
        self.check_not_stopping()  # since a signal may have come meanwhile
        drained = self._drained(timeout_s, abort_rest=abort_rest)
        drain = self._drain = asyncio.create_task(drained, name="specd-admin-drain")
        if not wait:
            await asyncio.sleep(0)  # it has begun: nothing is accepted any more
            return False
        await asyncio.wait((drain,))
        return not drain.cancelled() and drain.result()

    async def _drained(self, timeout_s: float, *, abort_rest: bool) -> bool:
        if await self.engine.drain(timeout_s):
            return True
        if not abort_rest:
            return False
        self.abort(self.live_ids())
        return await self.engine.drain(_CUT_OFF_S)

    async def resume(self) -> None:
        """Raises RequestError while the daemon stops."""
        await self._stop_drain()
        self.check_not_stopping()  # since a signal may have come meanwhile
        self.engine.resume()
        self.engine.unpause()

    async def _stop_drain(self) -> None:
        """Also one that another caller begins meanwhile."""
        while self._drain is not None and not self._drain.done():
            self._drain.cancel()
            await asyncio.wait((self._drain,))

    async def close(self) -> None:
        """The daemon stops: nothing is reverted any more, nobody is told any more."""
        await self._stop_drain()
        self.log_level.close()
        self.draft_length.close()
        self.events.close()

    # ---------------------------------------------------------------- requests

    def live_ids(self) -> list[str]:
        return list(dict.fromkeys(status.request_id for status in self.engine.requests()))

    def find(self, name: str) -> list[str]:
        """Live requests of that name: the engine's own, the response's `id`, or the client's `x-request-id`."""
        return self._named(name) or self._named(name.removeprefix(RESPONSE_PREFIX).removeprefix(MESSAGE_PREFIX))

    def _named(self, name: str) -> list[str]:
        names = {name, *(prefix + name for prefix in PREFIXES.values())}
        return [found for found in self.live_ids() if found == name or found.partition("#")[0] in names]

    def abort(self, request_ids: list[str]) -> list[str]:
        """Those that were live."""
        error = AdminAbortedError("ended by an operator")
        return [request_id for request_id in request_ids if self.engine.abort(request_id, error)]

    def lost(self, stats: EngineStats) -> int:
        """Accepted requests of which nothing is known any more: must be 0."""
        ended = stats.requests_finished + stats.requests_failed + stats.requests_aborted
        return stats.accepted_requests - ended - stats.live_requests
