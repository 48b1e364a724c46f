"""How many drafts each row gets: fixed, or from measured acceptance and measured step costs. No torch.

Lossless whatever it decides: the match rule's text does not depend on draft lengths, and a length never depends on a
token that was just drawn, only on the past (spec: the trap of 1.0).
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import Protocol

from specd.pipeline.drafter_trial import DrafterTrial
from specd.sequence import Sequence
from specd.step import DraftSource, StepStats


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRequest:
    """A row that could speculate: who would propose, and at most how many."""

    sequence: Sequence
    source: DraftSource
    max_drafts: int


class DraftLength(Protocol):
    """The seam between schedule and the length policy."""

    def begin(self, num_sequences: int, *, may_draft: bool = True) -> None:
        """A step is planned; so many sequences run, or would if there were pages, prompts included.

        may_draft: whether any of their requests allows drafts.
        """
        ...

    def choose(self, requests: Rows[DraftRequest], num_plain: int) -> list[int]:
        """Drafts for each request; num_plain rows of the step have none."""
        ...

    def prefers(self, sequence: Sequence, source: DraftSource, other: DraftSource) -> bool:
        """Whether proposals of `source` are better drafts for this sequence than those of the drafter, `other`."""
        ...

    def wants_drafter(self, sequence: Sequence, source: DraftSource) -> bool:
        """Whether the drafter should keep up with this sequence (refill it). source: of this step's drafts."""
        ...

    def observe_row(self, sequence: Sequence, source: DraftSource, *, drafted: int, accepted: int) -> None:
        """One verified row; also a proposal that was not verified but could be compared (drafted 1)."""
        ...

    def observe_step(self, stats: StepStats) -> None: ...

    def forget(self, sequence: Sequence) -> None: ...


class FixedLength:
    """Exactly `length` drafts in each decode step, shortened only by what a sequence may still emit."""

    def __init__(self, length: int) -> None:
        self._length = length

    def begin(self, num_sequences: int, *, may_draft: bool = True) -> None:
        return

    def choose(self, requests: Rows[DraftRequest], num_plain: int) -> list[int]:
        return [min(self._length, request.max_drafts) for request in requests]

    def prefers(self, sequence: Sequence, source: DraftSource, other: DraftSource) -> bool:
        return True

    def wants_drafter(self, sequence: Sequence, source: DraftSource) -> bool:
        return self._length > 0

    def observe_row(self, sequence: Sequence, source: DraftSource, *, drafted: int, accepted: int) -> None:
        return

    def observe_step(self, stats: StepStats) -> None:
        return

    def forget(self, sequence: Sequence) -> None:
        return


@dataclasses.dataclass(slots=True)
class _Measured:
    seconds: float
    count: float  # observations, fading with every step that is not of this size


class StepCost:
    """Seconds of a decode step by the tokens it verifies: fading averages, linear in between.

    A size that was measured seldom, or long ago, is believed only in part: the rest is a hopeful guess from the best
    known size, where fewer tokens cost less in proportion, and each more costs what they were seen to cost at all sizes
    together (a slope of `optimism` counts as one observation). So a size that once was slow by accident is tried again,
    and so is plain decoding after a long time of drafts, but not every size anew where all of them are slow.
    """

    def __init__(self, *, optimism: float = 0.02, memory: float = 20.0, fading: float = 0.995) -> None:
        self._optimism = optimism
        self._memory = memory  # observations an average reaches back
        self._fading = fading
        self._sizes: list[int] = []
        self._measured: dict[int, _Measured] = {}
        self._best = 0  # the size that is known best
        self._slope = optimism  # of a token more than that, as a share of its seconds

    def observe(self, size: int, seconds: float) -> None:
        for measured in self._measured.values():
            measured.count *= self._fading
        known = self._measured.get(size)
        if known is None:
            bisect.insort(self._sizes, size)
            self._measured[size] = _Measured(seconds, 1.0)
        else:
            known.count = min(known.count + 1.0, self._memory)
            # One slow step (another process, a page fault) must not count like a trend.
            known.seconds += (min(seconds, 4 * known.seconds) - known.seconds) / max(known.count, 1.0)
        self._best = max(self._sizes, key=lambda known: self._measured[known].count)
        self._slope = self._slope_above(self._best)

    def _slope_above(self, best: int) -> float:
        base = self._measured[best].seconds
        total, weight = self._optimism, 1.0
        for size in self._sizes[bisect.bisect_right(self._sizes, best) :] if base > 0 else ():
            measured = self._measured[size]
            # Once may have been an accident; and tokens do not cost more than in proportion.
            trust = max(measured.count - 1, 0.0)
            total += trust * min(max((measured.seconds / base - 1) / (size - best), 0.0), 1 / max(best, 1))
            weight += trust
        return total / weight

    def __contains__(self, size: int) -> bool:
        """Whether it was ever measured."""
        return size in self._measured

    def __call__(self, size: int) -> float | None:
        """None while nothing has been measured."""
        if not self._sizes:
            return None
        at = bisect.bisect_left(self._sizes, size)
        if at < len(self._sizes) and self._sizes[at] == size:
            return self._believed(size)
        if at == 0 or at == len(self._sizes):
            nearest = self._sizes[min(at, len(self._sizes) - 1)]
            return self._at_best(size, nearest, self._believed(nearest))
        low, high = self._sizes[at - 1], self._sizes[at]
        share = (size - low) / (high - low)
        return self._believed(low) * (1 - share) + self._believed(high) * share

    def _believed(self, size: int) -> float:
        measured, best = self._measured[size], self._best
        hoped = min(measured.seconds, self._at_best(size, best, self._measured[best].seconds))
        belief = 1.0 if size == best else measured.count / (measured.count + 1.0)
        return belief * measured.seconds + (1 - belief) * hoped

    def _at_best(self, size: int, known: int, seconds: float) -> float:
        """What `size` costs when `known` costs so many: fewer tokens in proportion, more by the slope at most."""
        if size <= known:
            return seconds * size / known if known else seconds
        grown = seconds + self._slope * self._measured[self._best].seconds * (size - known)
        return min(grown, seconds * size / known) if known else grown


@dataclasses.dataclass(slots=True)
class _Acceptance:
    """Probability that a draft is kept, given that the ones before it were: an average that starts at a prior."""

    rate: float
    weight: float = 4.0  # how many observations the prior counts for

    def observe(self, drafted: int, accepted: int) -> None:
        for i in range(min(drafted, accepted + 1)):
            self.weight = min(self.weight + 1, 32.0)
            self.rate += ((1.0 if i < accepted else 0.0) - self.rate) / self.weight


class AdaptiveLength:
    """Spends drafts where they are likeliest to be kept, for as long as the step's tokens per second rise.

    A row's j-th draft is kept with probability a ** j. All rows' candidates, likeliest first, are added to the step
    while (rows + expected kept) / cost(tokens) grows. Nothing is drafted when plain decoding is faster; then a
    proposer's guesses are still compared with what comes (free). Whether the drafter takes part at all is tried out
    (`DrafterTrial`); where even this estimate never drafts with it, it rests without a trial.
    """

    PROPOSER_MARGIN = 0.1  # of a proposer's rate over a drafter's
    SURE = 0.85  # rate of a proposer beside which the drafter need not follow
    GAIN = 1.03  # drafts must promise this much over plain decoding: measurements are noisy
    # With more rows not every number of drafts is priced, but every (rows / PRICED)th, and each size that was measured:
    # between those the best is flat, and one cheap size between dear ones may be all that is known of drafts that pay.
    PRICED = 16
    HOPELESS = 8  # numbers in a row that cost more than all drafts together could bring: the rest is glanced at
    IDLE = 6  # steps in a row in which the drafter could have drafted and was not asked

    def __init__(self) -> None:
        self._trial = DrafterTrial()
        self._verify = StepCost()
        self._draft = StepCost(optimism=0.0)  # seconds of one drafter forward, by rows
        self._host = StepCost()  # seconds of a step in which nothing computes
        self._prior: dict[DraftSource, _Acceptance] = {}
        self._rates: dict[tuple[int, DraftSource], _Acceptance] = {}
        self._idle_steps = 0
        self._may_draft = True

    def begin(self, num_sequences: int, *, may_draft: bool = True) -> None:
        self._trial.begin(num_sequences)
        self._may_draft = may_draft

    def choose(self, requests: Rows[DraftRequest], num_plain: int) -> list[int]:
        if not self._trial.drafting:
            requests = [_without_drafter(request) for request in requests]
        lengths = self._fastest(requests, num_plain)
        asked = [i for i, r in enumerate(requests) if r.source is DraftSource.DRAFTER and r.max_drafts]
        if self._trial.probing:
            for i in asked:
                lengths[i] = max(lengths[i], 1)
            self._trial.probed(len(asked))
        elif asked:
            self._idle_steps = 0 if any(lengths[i] for i in asked) else self._idle_steps + 1
            if self._idle_steps >= self.IDLE:
                self._idle_steps = 0
                self._trial.rest()
        return lengths

    def _fastest(self, requests: Rows[DraftRequest], num_plain: int) -> list[int]:
        """Drafts per request with the most expected tokens per second. O(C log B): C drafts are looked at."""
        rows, lengths = len(requests) + num_plain, [0] * len(requests)
        most = [request.max_drafts for request in requests]
        plain, total = self._cost(rows, 0, 0), sum(most)
        if not plain or not total:  # a clock too coarse for a step measures nothing, too
            return lengths
        rates = [self._rate(r.sequence, r.source).rate if r.max_drafts else 0.0 for r in requests]
        reachable = rows + sum(map(_expected, rates, most))
        best_speed, best = rows / plain * self.GAIN, 0
        stride = max(rows // self.PRICED, 1)
        taken: list[int] = []
        kept, deepest, drafting, hopeless = 0.0, 0, 0, 0
        for probability, depth, i in _likeliest(rates, most):
            taken.append(i)
            kept += probability
            if requests[i].source is DraftSource.DRAFTER:
                deepest, drafting = max(deepest, depth), drafting + (depth == 1)
            size = rows + len(taken)
            if len(taken) % stride and len(taken) < total and size not in self._verify:
                continue
            cost = self._cost(size, deepest, drafting)
            if cost and (rows + kept) / cost > best_speed:
                best_speed, best = (rows + kept) / cost, len(taken)
            hopeless = hopeless + 1 if cost and reachable / cost <= best_speed else 0
            if hopeless == self.HOPELESS:
                ahead = (self._cost(rows + n, deepest, drafting) for n in _ahead(len(taken), total, self.HOPELESS))
                if all(cost and reachable / cost <= best_speed for cost in ahead):
                    break
        for i in taken[:best]:
            lengths[i] += 1
        return lengths

    def prefers(self, sequence: Sequence, source: DraftSource, other: DraftSource) -> bool:
        """Proposals cost nothing: they need not be right as often, and are taken whenever the drafter does not pay."""
        if not self._trial.drafting:
            return True
        return self._rate(sequence, source).rate >= self._rate(sequence, other).rate - self.PROPOSER_MARGIN

    def wants_drafter(self, sequence: Sequence, source: DraftSource) -> bool:
        """While it takes part; but not beside a proposer that is nearly always right: where its proposals end, the
        drafter catches up on all of them at once."""
        if source not in (DraftSource.NONE, DraftSource.DRAFTER) and self._rate(sequence, source).rate > self.SURE:
            return False
        return self._trial.drafting

    def observe_row(self, sequence: Sequence, source: DraftSource, *, drafted: int, accepted: int) -> None:
        self._rate(sequence, source).observe(drafted, accepted)
        self._prior[source].observe(drafted, accepted)

    def observe_step(self, stats: StepStats) -> None:
        """Steps with prefill rows are no measure of a decode step."""
        if stats.num_prefill_tokens:
            return
        self._verify.observe(stats.num_tokens, stats.verify_s)
        if stats.num_draft_steps:
            self._draft.observe(stats.num_rows, stats.draft_s / stats.num_draft_steps)
        elif stats.num_refill_rows:
            self._draft.observe(stats.num_refill_rows, stats.refill_s)
        if self._may_draft:  # else the step says nothing of the drafter, in whichever window it falls
            self._trial.observe(stats.num_emitted, stats.duration_s)
        computing = stats.verify_s + stats.draft_s + stats.refill_s
        self._host.observe(0, max(stats.duration_s - computing, 0.0))

    def forget(self, sequence: Sequence) -> None:
        for source in DraftSource:
            self._rates.pop((id(sequence), source), None)

    def _rate(self, sequence: Sequence, source: DraftSource) -> _Acceptance:
        known = self._rates.get((id(sequence), source))
        if known is None:
            prior = self._prior.setdefault(source, _Acceptance(0.6))
            known = self._rates[id(sequence), source] = _Acceptance(prior.rate)
        return known

    def _cost(self, tokens: int, depth: int, drafting: int) -> float | None:
        """Seconds of a step that verifies `tokens`, after `depth` forwards of the drafter over `drafting` rows.

        A chain of K drafts takes K - 1 extends and the refill. None while nothing has been measured.
        """
        verify = self._verify(tokens)
        if verify is None:
            return None
        draft = depth * (self._draft(drafting) or 0.0) if depth else 0.0
        return verify + draft + (self._host(0) or 0.0)


def _likeliest(rates: Rows[float], most: Rows[int]) -> Iterator[tuple[float, int, int]]:
    """Rows' drafts, likeliest to be kept first: (probability, depth, row). Row i drafts at most most[i]."""
    heap = [(-rate, 1, i) for i, rate in enumerate(rates) if most[i]]
    heapq.heapify(heap)
    while heap:
        loss, depth, i = heap[0]
        yield -loss, depth, i
        if depth < most[i]:
            heapq.heapreplace(heap, (-(rates[i] ** (depth + 1)), depth + 1, i))
        else:
            heapq.heappop(heap)


def _ahead(taken: int, total: int, step: int) -> Iterator[int]:
    """Some larger numbers of drafts, ever further apart, the last one too: kernels may be slow at odd sizes, and fast
    where the next tile is full."""
    while taken < total:
        taken, step = min(taken + step, total), step * 2
        yield taken


def _expected(rate: float, most: int) -> float:
    """How many of `most` drafts are kept: rate + rate ** 2 + ..."""
    return most if rate >= 1 else rate * (1 - rate**most) / (1 - rate)


def _without_drafter(request: DraftRequest) -> DraftRequest:
    return DraftRequest(request.sequence, request.source, 0) if request.source is DraftSource.DRAFTER else request
