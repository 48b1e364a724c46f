"""Whether a request may wait: decided from counts alone, before anything is made for it. No torch.

Limits are `scheduler.*`: sequences and prompt tokens that wait, and for each API key its live requests and its share of
the waiting tokens (everybody without a key is one key). Whoever is refused is told when to try again: what is too much,
divided by what has lately been finished in a second.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from specd.config import SchedulerConfig
from specd.errors import QueueFullError, RateLimitError, RequestError
from specd.pipeline.waiting import WaitingQueue
from specd.request import Request

_WINDOW_S = 30
_LEAST_S, _MOST_S = 1, 60  # of Retry-After


class DrainRate:
    """How much was done over the last half minute, in slots of one second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_s = clock()
        self._slots: collections.deque[tuple[int, int]] = collections.deque(maxlen=_WINDOW_S)

    def add(self, amount: int) -> None:
        second = int(self._clock())
        if self._slots and self._slots[-1][0] == second:
            amount += self._slots.pop()[1]
        self._slots.append((second, amount))

    def seconds_for(self, amount: int) -> int:
        """Time to do `amount` more at that rate, 1..60 s. Where nothing was done, the rate is below one a window."""
        now = self._clock()
        done = sum(count for second, count in self._slots if second > now - _WINDOW_S)
        window = min(max(now - self._start_s, 1.0), _WINDOW_S)
        return min(max(math.ceil(amount * window / max(done, 1)), _LEAST_S), _MOST_S)

    @property
    def silent(self) -> bool:
        """Nothing was done in the window."""
        return not self._slots or self._slots[-1][0] <= self._clock() - _WINDOW_S


@dataclasses.dataclass(slots=True)
class _Key:
    """What one API key has going on."""

    drained: DrainRate
    num_live: int = 0  # requests that wait or run


class Admission:
    """`check` before a request is accepted, `begin` when it is, `end` when it is over."""

    def __init__(self, waiting: WaitingQueue, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rejected: collections.Counter[str] = collections.Counter()  # by status.REFUSALS
        self._waiting = waiting
        self._clock = clock
        self._sequences = DrainRate(clock)
        self._tokens = DrainRate(clock)
        self._keys: dict[bytes, _Key] = {}

    def check(self, limits: SchedulerConfig, tenant: bytes, requests: Sequence[Request] = ()) -> None:
        """All of the requests, or one more of the least size. Raises QueueFullError or RateLimitError, and RequestError
        for more sequences than may ever wait.

        A prompt that is longer than a limit of waiting tokens may wait while no other does.
        """
        num_requests = max(len(requests), 1)
        num_sequences = sum(request.n for request in requests) or 1
        num_tokens = sum(len(request.prompt_ids) for request in requests) or 1
        if num_sequences > limits.max_waiting:
            raise RequestError(
                f"'n' times the number of prompts is {num_sequences} ({requests[0].n} times {num_requests}); at most "
                f"{limits.max_waiting} sequences may wait here (scheduler.max_waiting)",
                code="out_of_range",
                param="n",
            )
        key = self._keys.get(tenant)
        if limits.max_requests_per_key and key is not None:
            excess = key.num_live + num_requests - limits.max_requests_per_key
            if excess > 0 and key.num_live:
                self._refuse_key("key_requests", key, excess, f"{limits.max_requests_per_key} requests at a time")
        queued = self._waiting.tokens_of(tenant)
        if limits.max_waiting_tokens_per_key and key is not None and queued:
            excess = queued + num_tokens - limits.max_waiting_tokens_per_key
            if excess > 0:
                self._refuse_key("key_tokens", key, 1, f"{limits.max_waiting_tokens_per_key} waiting prompt tokens")
        excess = len(self._waiting) + num_sequences - limits.max_waiting
        if excess > 0:
            self._refuse("waiting_sequences", self._sequences, excess, f"{limits.max_waiting} sequences")
        excess = self._waiting.num_tokens + num_tokens - limits.max_waiting_tokens
        if limits.max_waiting_tokens and excess > 0 and self._waiting.num_tokens:
            self._refuse("waiting_tokens", self._tokens, excess, f"{limits.max_waiting_tokens} prompt tokens")

    def begin(self, request: Request) -> None:
        if request.tenant not in self._keys:
            self._keys = {name: key for name, key in self._keys.items() if key.num_live or not key.drained.silent}
            self._keys[request.tenant] = _Key(DrainRate(self._clock))
        self._keys[request.tenant].num_live += 1

    def end(self, request: Request) -> None:
        key = self._keys[request.tenant]
        key.num_live -= 1
        key.drained.add(1)
        self._sequences.add(request.n)
        self._tokens.add(len(request.prompt_ids))

    def _refuse(self, reason: str, drained: DrainRate, excess: int, limit: str) -> None:
        self.rejected[reason] += 1
        raise QueueFullError(f"the waiting queue is full ({limit})", retry_after_s=drained.seconds_for(excess))

    def _refuse_key(self, reason: str, key: _Key, excess: int, limit: str) -> None:
        self.rejected[reason] += 1
        wait = key.drained.seconds_for(excess)
        raise RateLimitError(f"this API key's limit is reached ({limit})", retry_after_s=wait)
