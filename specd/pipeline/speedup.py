"""How much faster decoding is than it would be without drafts, by what steps were measured to take. No torch.

A plain step emits one token a row. So a step of B rows that emitted N tokens stands for N / B plain steps of B rows,
and the estimate is the time of those over the time that was taken, summed over the latest decode steps, plain ones
included: what the server gains as it runs, and 1 where it does not draft. Only plain steps that were really made count
as a measure: while there were none of about this size there is no estimate.
"""

from __future__ import annotations

import bisect
import dataclasses

from specd.step import StepStats

_LATEST = 512.0  # decode steps that the estimate reaches back
_MEMORY = 32.0  # plain steps of one size that an average reaches back
_SLOW = 4.0  # times the usual: a slower step counts as this much, one accident is no trend
_SETTLED = 1  # plain steps before one that is a measure: the refill of a step with drafts may still have run in it


@dataclasses.dataclass(slots=True)
class _Average:
    seconds: float
    count: float = 1.0

    def observe(self, seconds: float) -> None:
        self.count = min(self.count + 1, _MEMORY)
        self.seconds += (min(seconds, _SLOW * self.seconds) - self.seconds) / self.count


class SpeedUp:
    """Told of every step; `value` is the estimate."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # rows of plain steps that were measured, rising
        self._plain: dict[int, _Average] = {}
        self._plain_s = self._taken_s = self._base_s = 0.0  # fading sums over the same steps; base: one plain step each
        self._num_plain = 0  # steps in a row

    @property
    def value(self) -> float | None:
        """None while it is not known."""
        return self._plain_s / self._taken_s if self._taken_s > 0 else None

    @property
    def _usual(self) -> float:
        """How many times as long as a plain step of as many rows a step takes."""
        return self._taken_s / self._base_s if self._taken_s > 0 else 1.0

    def observe(self, stats: StepStats) -> None:
        """Steps with prompts are no measure of decoding."""
        if stats.num_prefill_tokens or not stats.num_emitted:
            self._num_plain = 0
            return
        plain = not (stats.num_draft_tokens or stats.num_draft_steps or stats.refill_s)
        if plain and self._num_plain >= _SETTLED:
            self._learn(stats.num_rows, stats.duration_s)
        self._num_plain = self._num_plain + 1 if plain else 0
        step_s = self._plain_step_s(stats.num_rows)
        if step_s is not None:
            keep = 1 - 1 / _LATEST
            taken_s = min(stats.duration_s, _SLOW * step_s * self._usual)
            self._plain_s = self._plain_s * keep + step_s * stats.num_emitted / stats.num_rows
            self._taken_s = self._taken_s * keep + taken_s
            self._base_s = self._base_s * keep + step_s

    def _learn(self, num_rows: int, seconds: float) -> None:
        known = self._plain.get(num_rows)
        if known is None:
            bisect.insort(self._sizes, num_rows)
            self._plain[num_rows] = _Average(seconds)
        elif _SLOW * seconds < known.seconds:  # nothing is so fast by accident: what was known came from a stall
            self._plain[num_rows] = _Average(seconds)
            self._plain_s = self._taken_s = self._base_s = 0.0
        else:
            known.observe(seconds)

    def _plain_step_s(self, num_rows: int) -> float | None:
        """Seconds of a plain step: as measured, in proportion between two sizes; None beyond those."""
        known = self._plain.get(num_rows)
        if known is not None:
            return known.seconds
        at = bisect.bisect_left(self._sizes, num_rows)
        if at in (0, len(self._sizes)):
            return None
        low, high = self._sizes[at - 1], self._sizes[at]
        share = (num_rows - low) / (high - low)
        return self._plain[low].seconds * (1 - share) + self._plain[high].seconds * share
