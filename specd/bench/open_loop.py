"""Open-loop load: requests arrive by the clock, whether or not earlier ones have been answered.

    schedule  |  |   | ||    |  |      |                  each at its own time, drawn before the first is sent
              |- warm-up -|- duration -|- grace period -|
                 not counted                 nothing new; what has not ended then is `unfinished`

Every latency counts from the scheduled arrival: a client that is late, or a server that is slow to accept, cannot hide
what a user would have waited ("coordinated omission").
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Literal

from specd.bench.client import UNFINISHED, Sample
from specd.errors import UsageError

MOST_ARRIVALS = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come. poisson: independently of each other, seeded; constant: evenly. Times are seconds."""

    rate: float  # a second
    pattern: Literal["poisson", "constant"] = "poisson"
    duration_s: float = 30.0
    warmup_s: float = 0.0
    grace_s: float = 30.0
    seed: int = 0
    most: int | None = None  # requests after the warm-up

    def schedule(self) -> list[float]:
        """Seconds after the start, ascending; those of the warm-up included. At least one counts.

        Raises UsageError when they are too many.
        """
        end_s = self.warmup_s + self.duration_s
        if self.rate * end_s > MOST_ARRIVALS:
            raise UsageError(f"{self.rate:g} requests/s for {end_s:g} s: more than {MOST_ARRIVALS:,} requests")
        times = list(itertools.takewhile(lambda at: at < end_s, self._times()))
        warm = self.num_warm(times)
        if warm == len(times):
            times.append(self.warmup_s)
        return times if self.most is None else times[: warm + self.most]

    def _times(self) -> Iterator[float]:
        if self.pattern == "constant":
            return (i / self.rate for i in itertools.count())
        draw = random.Random(self.seed)
        return itertools.accumulate(draw.expovariate(self.rate) for _ in itertools.repeat(None))

    def num_warm(self, schedule: Sequence[float]) -> int:
        return sum(at < self.warmup_s for at in schedule)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run of a schedule. seconds: in which the counted requests arrived; wall_s: until the last of them ended."""

    samples: list[Sample]  # without those of the warm-up, in order of arrival
    num_warm: int
    num_unsent: int  # left out because the run was given up
    seconds: float
    wall_s: float


Send = Callable[[int, float], Awaitable[Sample]]


async def run_schedule(
    arrivals: Arrivals, send: Send, *, given_up: Callable[[Sample], bool] = lambda sample: False
) -> Run:
    """send(i, due) sends request i, whose latencies count from `due` (time.perf_counter).

    given_up is told of each counted sample; once it says so, nothing more is sent and nothing more waited for.
    """
    schedule = arrivals.schedule()
    warm = arrivals.num_warm(schedule)
    samples: dict[int, Sample] = {}
    over = asyncio.Event()

    async def one(index: int, due: float) -> None:
        samples[index] = sample = await send(index, due)
        if index >= warm and given_up(sample):
            over.set()

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        for index, at in enumerate(schedule):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, start + at - time.perf_counter())):
                    await over.wait()
            if over.is_set():
                break
            tasks.append(group.create_task(one(index, start + at)))
        await _wait(tasks, over, arrivals.grace_s)
        for task in tasks:
            task.cancel()
    now = time.perf_counter()
    for index in range(len(tasks)):
        if index not in samples:
            samples[index] = _unfinished(now - start - schedule[index])
    counted = range(warm, len(tasks))
    # Without the last gap n arrivals would seem to come n / (n - 1) times as often as they do.
    seconds = min(arrivals.duration_s, schedule[counted[-1]] - arrivals.warmup_s + 1 / arrivals.rate)
    wall_s = max(schedule[i] + samples[i].total_s for i in counted) - schedule[warm]
    return Run([samples[i] for i in counted], warm, len(schedule) - len(tasks), seconds, wall_s)


async def _wait(tasks: Sequence[asyncio.Task[None]], over: asyncio.Event, seconds: float) -> None:
    """Until all tasks are done, or it is over, or the time is up."""
    if not tasks:
        return
    watching = asyncio.ensure_future(over.wait())
    ended = asyncio.ensure_future(asyncio.wait(tasks))
    try:
        await asyncio.wait((watching, ended), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        ended.cancel()
        await asyncio.wait((watching, ended))


def _unfinished(seconds: float) -> Sample:
    return Sample(
        ok=False,
        speculation="auto",
        total_s=seconds,
        arrivals=(),
        error="had not ended when the grace period was over",
        kind=UNFINISHED,
    )
