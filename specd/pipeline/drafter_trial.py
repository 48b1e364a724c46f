"""Whether a drafter pays, found by trying. No torch.

What a drafter costs is not its forwards alone: features are kept for it, its refills hold up the next schedule, the
caches are colder after it. So decode steps with and without it are compared by what matters, tokens a second:

    on | off | on | off |  better one ......... | other one |  better one ................... | other one | ...
    opening, WINDOW each   rest                   WINDOW       rest, twice as long after each verdict that stands

A drafter that does not pay after the first two windows rests at once: where it is not worth its price, finding that out
must cost next to nothing. One that seems to is asked to show it again.
Each power of two of concurrent sequences has a trial of its own: what pays for one stream may not for eight.
A window with the drafter begins with a few drafts in any case (`probing`); one in which none seem worth it after those
ends early (`rest`).
"""

from __future__ import annotations

import dataclasses

WINDOW = 24  # steps of a window in which a mode is tried
SETTLING = 2  # of them, the first ones do not count: the drafter catches up, or its last refill ends
OPENING = 4  # windows before the verdict that it pays; two show that it does not
PROBES = 8  # drafts to see how often the drafter is right now
SHORTEST_REST, LONGEST_REST = 256, 4096  # steps
GAIN = 1.05  # of the drafter over going without, or it rests: measurements are noisy, and resting costs nothing
_MEMORY = 32.0  # steps that a rate reaches back
_SLOW = 4.0  # times the usual: a slower step counts as this much, one accident is no trend


class _Rate:
    """Tokens a second: fading sums."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._steps = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if self._steps >= 1:
            seconds = min(seconds, _SLOW * self._seconds / self._steps)
        keep = 1 - 1 / _MEMORY
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds
        self._steps = self._steps * keep + 1

    def __call__(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


@dataclasses.dataclass(slots=True)
class _Trial:
    """Of one class of batch sizes."""

    drafting: bool = True  # the mode of the window that runs
    better: bool = False  # the mode that won last
    left: int = WINDOW  # steps of the window
    rest: int = SHORTEST_REST
    windows: int = 0
    settling: int = SETTLING
    probes: int = PROBES
    with_drafter: _Rate = dataclasses.field(default_factory=_Rate)
    without: _Rate = dataclasses.field(default_factory=_Rate)

    @property
    def trying(self) -> bool:
        return self.windows < OPENING or self.drafting != self.better

    def observe(self, tokens: int, seconds: float) -> None:
        if self.settling:
            self.settling -= 1
        else:
            (self.with_drafter if self.drafting else self.without).observe(tokens, seconds)
        self.left -= 1
        if self.left <= 0:
            self._next()

    def _next(self) -> None:
        self.windows += 1
        better = self.with_drafter() > self.without() * GAIN
        opening = self.windows < OPENING and (self.windows % 2 == 1 or better)
        if opening or (self.windows > OPENING and not self.trying):
            self.start(not self.drafting, WINDOW)
            return
        self.windows = max(self.windows, OPENING)
        if better != self.better:
            self.better, self.rest = better, SHORTEST_REST
        elif self.windows > OPENING:
            self.rest = min(self.rest * 2, LONGEST_REST)
        self.start(self.better, self.rest)

    def start(self, drafting: bool, steps: int) -> None:
        if drafting != self.drafting:
            self.settling, self.probes = SETTLING, PROBES
        self.drafting, self.left = drafting, steps

    def end_early(self) -> None:
        if self.trying:
            self.rest = min(self.rest * 2, LONGEST_REST)
        else:
            self.rest = SHORTEST_REST
        self.windows, self.better = max(self.windows, OPENING), False
        self.start(False, self.rest)


class DrafterTrial:
    """Decides step by step whether the drafter takes part. Asked for the class of `begin`, told by `observe`."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}
        self._trial = self._of(1)

    def begin(self, num_sequences: int) -> None:
        """A step of so many sequences is planned, those included that compute their prompts."""
        self._trial = self._of(num_sequences)

    def _of(self, num_sequences: int) -> _Trial:
        return self._trials.setdefault(num_sequences.bit_length(), _Trial())

    @property
    def drafting(self) -> bool:
        """Whether the drafter drafts and keeps up."""
        return self._trial.drafting

    @property
    def probing(self) -> bool:
        """Whether drafts are made to see what they bring, whatever is thought of them."""
        return self._trial.drafting and self._trial.probes > 0

    def probed(self, drafts: int) -> None:
        self._trial.probes -= drafts

    def observe(self, tokens: int, seconds: float) -> None:
        """A decode step without prompts: what it emitted, and how long it took."""
        self._trial.observe(tokens, seconds)

    def rest(self) -> None:
        """By all that is known its drafts do not pay now: the drafter rests at once."""
        self._trial.end_early()
