"""The largest arrival rate at which nearly all requests meet an objective.

The rate is doubled, or halved, until one rate holds and a higher one does not; then the gap is bisected (geometrically:
rates are ratios). Each trial is a run of its own on a server that has become idle, with the same seed.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """What is looked for. start: the first rate that is tried; trial_s: the most that one trial takes.

    Below `lowest` a trial would hold no request, above `highest` more than it can.
    """

    start: float
    lowest: float
    highest: float
    trial_s: float
    target: float = 0.99  # share of requests that must meet the objective
    precision: float = 0.05  # of the rate
    most_s: float = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    rate: float
    holds: bool
    figures: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """rate: the largest that held, None: not even the lowest tried; limit: the lowest above it that did not hold.

    complete: they are as close as was asked; else what was left of the time was less than a trial may take.
    """

    rate: float | None
    limit: float | None
    complete: bool
    trials: tuple[Trial, ...]


async def find_rate(
    search: Search,
    trial: Callable[[float], Awaitable[Trial]],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """No trial begins that might not end within `most_s`."""
    end = clock() + search.most_s
    trials: list[Trial] = []
    low, high = 0.0, math.inf
    while not _is_close(low, high, search):
        if clock() + search.trial_s > end:
            return Found(low or None, None if high == math.inf else high, False, tuple(trials))
        found = await trial(_next(low, high, search))
        trials.append(found)
        low, high = (found.rate, high) if found.holds else (low, found.rate)
    return Found(low or None, None if high == math.inf else high, True, tuple(trials))


def _next(low: float, high: float, search: Search) -> float:
    if not low:
        return search.start if high == math.inf else high / 2
    return min(2 * low, search.highest) if high == math.inf else math.sqrt(low * high)


def _is_close(low: float, high: float, search: Search) -> bool:
    """Also where no further rate is worth trying."""
    return high <= low * (1 + search.precision) or high <= search.lowest or low >= search.highest
