"""Times after which a request is ended: one timer each, none where there is no limit. No torch.

Whatever limit passes before the first token, the request was never begun as far as its client can see
(`queue_timeout`); afterwards it is cut off (`deadline_exceeded`), and what it said so far has been delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

from specd.config import SchedulerConfig
from specd.errors import AbortedError, DeadlineError, QueueTimeoutError
from specd.request import Request
from specd.sequence import Sequence as Choice

Abort = Callable[[str, AbortedError], object]


@contextlib.asynccontextmanager
async def before_first_token(request: Request, limits: SchedulerConfig) -> AsyncIterator[None]:
    """What is done for a request before it is accepted counts too. Raises QueueTimeoutError when its time is over."""
    given = [limit for limit in (limits.queue_timeout_s, limits.request_timeout_s, request.timeout_s) if limit]
    limit = min(given, default=None)
    left_s = None if limit is None else request.arrival_s + limit - time.monotonic()
    try:
        async with asyncio.timeout(left_s):
            yield
    except TimeoutError as error:
        raise QueueTimeoutError(f"no token within {limit:g} s") from error


class Deadlines:
    """`begin` when a request is accepted, `end` when it is over; in between `abort` may be called, once."""

    def __init__(self, abort: Abort) -> None:
        self._abort = abort
        self._timers: dict[str, list[asyncio.TimerHandle]] = {}

    def begin(self, request: Request, choices: Sequence[Choice], limits: SchedulerConfig) -> None:
        """Limits count from the request's arrival."""
        loop, waited_s = asyncio.get_running_loop(), time.monotonic() - request.arrival_s
        totals = [limit for limit in (limits.request_timeout_s, request.timeout_s) if limit]
        timers = []
        if limits.queue_timeout_s:
            limit = limits.queue_timeout_s
            timers.append(loop.call_later(limit - waited_s, self._expire, request, choices, limit, False))
        if totals:
            limit = min(totals)
            timers.append(loop.call_later(limit - waited_s, self._expire, request, choices, limit, True))
        if timers:
            self._timers[request.request_id] = timers

    def end(self, request: Request) -> None:
        for timer in self._timers.pop(request.request_id, ()):
            timer.cancel()

    def _expire(self, request: Request, choices: Sequence[Choice], limit_s: float, total: bool) -> None:
        if all(choice.first_token_s is None for choice in choices):
            error: AbortedError = QueueTimeoutError(f"no token within {limit_s:g} s")
        elif total:
            error = DeadlineError(f"the request took longer than {limit_s:g} s")
        else:
            return
        self._abort(request.request_id, error)
