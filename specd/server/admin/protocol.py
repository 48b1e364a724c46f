"""What the control socket needs of an engine besides what the server needs. Tests use a scripted one."""

from __future__ import annotations

from typing import Protocol

from specd.config import SchedulerConfig
from specd.corpora import Corpora
from specd.errors import SpecdError
from specd.server.protocol import EngineProtocol
from specd.status import KVStatus, LengthPolicy, RequestDetail


class AdminEngine(EngineProtocol, Protocol):
    """All methods are called on the event loop and none of them blocks it."""

    corpora: Corpora

    def abort(self, request_id: str, error: SpecdError | None = None) -> bool:
        """Ends a live request, its stream with `error`; False when there is none of that name."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Accepts nothing more and waits for what was accepted; False when the time ran out. Ends a pause."""
        ...

    def resume(self) -> None:
        """Accepts requests again after `drain`."""
        ...

    def pause(self) -> None:
        """Schedules nothing more; accepted and new requests wait."""
        ...

    def unpause(self) -> None: ...

    def kv(self) -> KVStatus: ...

    def flush_kv(self) -> int:
        """Forgets cached prefixes that nobody uses; how many pages that freed."""
        ...

    def request(self, request_id: str) -> list[RequestDetail]:
        """The choices of one live request; empty when there is none of that name."""
        ...

    @property
    def draft_length(self) -> LengthPolicy: ...

    def set_draft_length(self, k: int | str | None) -> None:
        """Drafts a step: a number, "adaptive", or None: as configured. Raises RequestError."""
        ...

    def set_limits(self, limits: SchedulerConfig) -> None:
        """Limits of what is accepted from now on."""
        ...
