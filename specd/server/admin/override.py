"""A setting that an operator changes while the daemon runs, for good or for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Override(Generic[T]):
    """`apply(value)` is called with each new value, None: as configured. Must be used on the event loop."""

    def __init__(self, apply: Callable[[T | None], None], *, on_revert: Callable[[], None]) -> None:
        self._apply = apply
        self._on_revert = on_revert
        self._timer: asyncio.TimerHandle | None = None
        self._until_s = 0.0
        self.value: T | None = None

    def set(self, value: T | None, ttl_s: float | None = None) -> None:
        """Until ttl_s have passed, or until the next call. When `apply` raises, everything stays as it was."""
        self._apply(value)
        self._stop_timer()
        self.value = value
        if value is not None and ttl_s is not None:
            self._until_s = time.monotonic() + ttl_s
            self._timer = asyncio.get_running_loop().call_later(ttl_s, self._revert)

    @property
    def ttl_left_s(self) -> float | None:
        """None when it lasts."""
        return None if self._timer is None else max(self._until_s - time.monotonic(), 0.0)

    def close(self) -> None:
        self._stop_timer()

    def _revert(self) -> None:
        self._timer = None
        self.set(None)
        self._on_revert()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
