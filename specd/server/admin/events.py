"""GET /v1/events: a snapshot every second, and what happens in between, as NDJSON or SSE."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

_QUEUE = 64  # events that a listener may be behind; older ones are dropped and counted


class Listener:
    """One who listens; `get` gives what has happened."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(_QUEUE)
        self.num_dropped = 0

    def put(self, event: dict[str, Any] | None) -> None:
        if self._queue.full():
            self._queue.get_nowait()
            self.num_dropped += 1
        self._queue.put_nowait(event)

    async def get(self, timeout_s: float) -> dict[str, Any] | None:
        """The next event; None at the end. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            return await self._queue.get()


class EventBus:
    """Never waits for a listener."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()
        self.closed = False

    def publish(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "ts": time.time(), **fields}
        for listener in self._listeners:
            listener.put(event)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Listener]:
        listener = Listener()
        if self.closed:
            listener.put(None)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        self.closed = True
        for listener in self._listeners:
            listener.put(None)
