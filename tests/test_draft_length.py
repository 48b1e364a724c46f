"""How many drafts: fixed ones exactly, adaptive ones in simulated worlds where every cost is known."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from specd.pipeline.draft_length import AdaptiveLength, DraftLength, DraftRequest, FixedLength, StepCost
from specd.pipeline.drafter_trial import OPENING, PROBES, SHORTEST_REST, WINDOW
from specd.step import DraftSource, StepStats

DRAFTER, NGRAM = DraftSource.DRAFTER, DraftSource.NGRAM
MAX_DRAFT = 8


class Name:
    """Stands for a sequence: policies know them by identity alone."""


def request(sequence: Any, source: DraftSource = DRAFTER, max_drafts: int = MAX_DRAFT) -> DraftRequest:
    return DraftRequest(sequence, source, max_drafts)


def stats_of(**changes: Any) -> StepStats:
    zero = {field.name: 0 for field in dataclasses.fields(StepStats)}
    return StepStats(**{**zero, **changes})


# Worlds: seconds of a verify of m tokens


def flat(size: int) -> float:
    """Memory-bound: eight more tokens cost a third more."""
    return 0.010 + 0.0005 * size


def steep(size: int) -> float:
    """Compute-bound: every token costs the same, so drafts never pay."""
    return 0.010 * size


@dataclasses.dataclass
class Simulation:
    """A policy in a world where `rows` sequences decode for ever."""

    policy: DraftLength
    verify: Callable[[int], float]
    accept: float  # probability that a draft is kept
    source: DraftSource = NGRAM
    draft_s: float = 0.0  # one forward of the drafter
    rows: int = 1
    slow: Callable[[int, int], float] = lambda step, size: 1.0  # factor on a step's verify
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.sequences: list[Any] = [Name() for _ in range(self.rows)]
        self.carried = dict.fromkeys(map(id, self.sequences), True)
        self.step = 0
        self.refilled = False
        self.lengths: list[list[int]] = []

    def run(self, steps: int) -> tuple[float, float]:
        """(tokens a second, mean drafts of a row) of these steps."""
        tokens, seconds, drafts = 0, 0.0, 0
        for _ in range(steps):
            emitted, duration = self._one()
            tokens, seconds, drafts = tokens + emitted, seconds + duration, drafts + sum(self.lengths[-1])
        return tokens / seconds, drafts / steps / self.rows

    def _one(self) -> tuple[int, float]:
        self.policy.begin(self.rows)
        asked = [s for s in self.sequences if self.source is not DRAFTER or self.carried[id(s)]]
        chosen = self.policy.choose([request(s, self.source) for s in asked], self.rows - len(asked))
        lengths = {id(s): 0 for s in self.sequences} | {id(s): n for s, n in zip(asked, chosen, strict=True)}
        emitted = self.rows + sum(self._verify(s, lengths[id(s)]) for s in self.sequences)
        forwards = max(0, max(chosen, default=0) - 1) if self.source is DRAFTER else 0
        wants = [self.policy.wants_drafter(s, DRAFTER) for s in self.sequences]
        self.carried = {id(s): wanted for s, wanted in zip(self.sequences, wants, strict=True)}
        verify_s = self.verify(self.rows + sum(chosen)) * self.slow(self.step, self.rows + sum(chosen))
        refill_s = self.draft_s * self.refilled
        duration = verify_s + forwards * self.draft_s + refill_s + 0.0005
        stats = stats_of(
            num_rows=self.rows,
            num_tokens=self.rows + sum(chosen),
            num_draft_steps=forwards,
            num_emitted=emitted,
            num_refill_rows=self.rows * self.refilled,
            verify_s=verify_s,
            draft_s=forwards * self.draft_s,
            refill_s=refill_s,
            duration_s=duration,
        )
        self.policy.observe_step(stats)
        self.refilled = self.source is DRAFTER and any(wants)
        self.lengths.append(list(lengths.values()))
        self.step += 1
        return emitted, duration

    def _verify(self, sequence: Any, drafted: int) -> int:
        kept = 0
        while kept < drafted and self.random.random() < self.accept:
            kept += 1
        if drafted:
            self.policy.observe_row(sequence, self.source, drafted=drafted, accepted=kept)
        elif self.source is not DRAFTER:  # a proposal is compared with what comes, for nothing
            self.policy.observe_row(sequence, self.source, drafted=1, accepted=int(self.random.random() < self.accept))
        return kept


def best_fixed(**world: Any) -> float:
    """Tokens a second of the best fixed length."""
    return max(Simulation(FixedLength(length), **world).run(300)[0] for length in (0, 1, 2, 3, 4, 6, 8))


# Fixed


@pytest.mark.parametrize("length", [0, 1, 5])
def test_fixed_is_exact(length: int) -> None:
    policy = FixedLength(length)
    requests = [request(Name(), source, most) for source in (DRAFTER, NGRAM) for most in (0, 1, 3, 8)]
    wanted = [min(length, most) for most in (0, 1, 3, 8)] * 2
    assert policy.choose(requests, 3) == wanted
    for asked, drafts in zip(requests, wanted, strict=True):
        policy.observe_row(asked.sequence, asked.source, drafted=drafts, accepted=0)
    policy.observe_step(stats_of(num_rows=11, num_tokens=11, verify_s=100.0))
    policy.forget(requests[0].sequence)
    assert policy.choose(requests, 3) == wanted, "whatever it sees"
    assert policy.wants_drafter(requests[0].sequence, DraftSource.NONE) == (length > 0)


# What a step costs


def test_costs_are_measured_and_linear_in_between() -> None:
    cost = StepCost()
    assert cost(3) is None
    for _ in range(50):
        for size, seconds in ((2, 0.02), (6, 0.04)):
            cost.observe(size, seconds)
    found = [cost(size) or 0.0 for size in (2, 4, 6)]
    assert found == pytest.approx([0.02, 0.03, 0.04], rel=0.05)


def test_unseen_sizes_look_cheap_enough_to_be_tried() -> None:
    cost = StepCost()
    cost.observe(4, 0.04)
    larger, smaller = cost(8), cost(2)
    assert larger is not None
    assert smaller is not None
    assert 0.04 < larger < 0.05
    assert smaller <= 0.02, "half the tokens may cost half: plain decoding must never look dearer than it is"


def test_an_outlier_does_not_count_like_a_trend() -> None:
    cost = StepCost()
    for _ in range(30):
        cost.observe(1, 0.01)
    cost.observe(1, 10.0)
    assert (cost(1) or 1.0) < 0.02
    for _ in range(200):
        cost.observe(1, 0.03)
    assert cost(1) == pytest.approx(0.03, rel=0.05), "a trend does"


def test_a_size_measured_once_and_long_ago_is_tried_again() -> None:
    cost = StepCost()
    for size, times in ((1, 30), (9, 1)):
        for _ in range(times):
            cost.observe(size, 0.01 if size == 1 else 0.1)
    for _ in range(50):
        cost.observe(1, 0.01)
    assert (cost(9) or 1.0) < 0.06
    for _ in range(400):
        cost.observe(1, 0.01)
    assert (cost(9) or 1.0) < 0.025


def test_what_tokens_cost_is_learned_from_all_sizes_together() -> None:
    """Where every token was seen to cost as much as the first, other sizes are not hoped to be cheap."""
    cost = StepCost()
    for size in (8, 12, 16) * 10:
        cost.observe(size, 0.001 * size)
    for _ in range(60):
        cost.observe(8, 0.008)
    assert 0.017 < (cost(20) or 0.0) <= 0.0201
    for _ in range(1500):
        cost.observe(8, 0.008)
    assert (cost(20) or 1.0) < 0.013, "long ago: worth another try"


def test_a_size_beyond_all_others_costs_no_more_than_in_proportion() -> None:
    cost = StepCost()
    for size, times in ((16, 15), (1, 60)):
        for _ in range(times):
            cost.observe(size, 0.001 * size)
    for size in (17, 20, 24):
        assert 0.7 * 0.001 * size < (cost(size) or 0.0) <= 0.00101 * size
    forwards = StepCost(optimism=0.0)
    for rows, seconds, times in ((8, 0.004, 20), (1, 0.0005, 60)):
        for _ in range(times):
            forwards.observe(rows, seconds)
    assert (forwards(16) or 1.0) <= 0.00801


# Adaptive


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("accept", [0.3, 0.6, 0.8])
@pytest.mark.parametrize(("source", "draft_s"), [(NGRAM, 0.0), (DRAFTER, 0.001)])
def test_drafts_that_do_not_pay_are_not_made(source: DraftSource, draft_s: float, accept: float, rows: int) -> None:
    world: dict[str, Any] = {"verify": steep, "accept": accept, "source": source, "draft_s": draft_s, "rows": rows}
    plain, _ = Simulation(FixedLength(0), **world).run(300)
    adaptive = Simulation(AdaptiveLength(), **world)
    adaptive.run(200)
    speed, drafts = adaptive.run(1000)
    assert speed > 0.85 * plain, "looking whether that has changed costs something"
    assert drafts < 0.6
    assert Simulation(FixedLength(4), **world).run(300)[0] < 0.8 * plain, "the world is as hard as it is meant to be"


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("accept", [0.05, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(("source", "draft_s"), [(NGRAM, 0.0), (DRAFTER, 0.001)])
def test_where_drafts_pay_it_comes_near_the_best_length(
    source: DraftSource, draft_s: float, accept: float, rows: int
) -> None:
    world: dict[str, Any] = {"verify": flat, "accept": accept, "source": source, "draft_s": draft_s, "rows": rows}
    adaptive = Simulation(AdaptiveLength(), **world)
    adaptive.run(200)
    speed, _ = adaptive.run(1000)
    assert speed > 0.9 * best_fixed(**world)


def test_likelier_drafts_get_longer() -> None:
    means = []
    for accept in (0.3, 0.6, 0.9):
        adaptive = Simulation(AdaptiveLength(), flat, accept)
        adaptive.run(200)
        means.append(adaptive.run(300)[1])
    assert means[0] + 1 < means[1] < means[2] - 1


def test_drafts_go_to_the_rows_where_they_are_kept() -> None:
    policy = AdaptiveLength()
    good, bad = Name(), Name()
    for _ in range(20):
        policy.observe_step(stats_of(num_rows=2, num_tokens=2, verify_s=flat(2)))
        policy.observe_row(good, NGRAM, drafted=4, accepted=4)  # type: ignore[arg-type]
        policy.observe_row(bad, NGRAM, drafted=4, accepted=0)  # type: ignore[arg-type]
    lengths = policy.choose([request(good, NGRAM), request(bad, NGRAM)], 0)
    assert lengths[0] >= 4
    assert lengths[1] == 0


@pytest.mark.parametrize("rows", [1, 4])
def test_a_world_that_changes_is_followed(rows: int) -> None:
    """Drafts that stop being kept are dropped, a drafter that is worth it again is found again, by all rows."""
    adaptive = Simulation(AdaptiveLength(), flat, 0.95, DRAFTER, 0.004, rows)
    adaptive.run(300)
    high = adaptive.run(100)[1]
    adaptive.accept = 0.02
    adaptive.run(200)
    low = adaptive.run(200)[1]
    adaptive.accept = 0.95
    adaptive.run(1200)
    again = adaptive.run(200)[1]
    assert high > 1.5
    assert low < 0.15, "but for a trial now and then"
    assert again > 1.5


def test_a_drafter_that_does_not_pay_is_left_and_retried() -> None:
    adaptive = Simulation(AdaptiveLength(), steep, 0.1, DRAFTER, 0.001, rows=2)
    adaptive.run(OPENING * WINDOW)
    start = len(adaptive.lengths)
    wants = []
    for _ in range(2 * SHORTEST_REST + 2 * WINDOW):
        adaptive.run(1)
        wants.append(adaptive.refilled)
    lengths = adaptive.lengths[start:]
    tried = [i for i, drafts in enumerate(lengths) if any(drafts)]
    assert len(tried) == PROBES / 2, "once"
    assert all(lengths[i] == [1, 1] for i in tried), "one draft, in all rows at once"
    assert sum(wants) < WINDOW / 2, "and the drafter rests in between"


@pytest.mark.parametrize("source", [NGRAM, DRAFTER])
def test_one_slow_step_does_not_end_speculation(source: DraftSource) -> None:
    """The first measurement of a size may be an accident: a page fault, another process."""
    seen: set[int] = set()

    def first_time(step: int, size: int) -> float:
        known = size in seen or size == 1
        seen.add(size)
        return 1.0 if known else 10.0

    adaptive = Simulation(AdaptiveLength(), flat, 0.8, source, slow=first_time)
    adaptive.run(600)
    speed, drafts = adaptive.run(400)
    assert drafts > 2
    assert speed > 0.85 * best_fixed(verify=flat, accept=0.8, source=source)


def test_rare_slow_steps_are_not_a_reason_to_stop() -> None:
    adaptive = Simulation(AdaptiveLength(), flat, 0.8, slow=lambda step, size: 8.0 if step % 40 == 7 else 1.0)
    adaptive.run(300)
    assert adaptive.run(700)[1] > 2


def test_steps_with_a_prompt_are_no_measure() -> None:
    policy, sequence = AdaptiveLength(), Name()
    policy.observe_step(stats_of(num_rows=1, num_tokens=1, num_prefill_tokens=500, verify_s=9.0))
    assert policy.choose([request(sequence, NGRAM)], 0) == [0], "nothing is known yet"
    policy.observe_step(stats_of(num_rows=1, num_tokens=1, verify_s=flat(1)))
    assert policy.choose([request(sequence, NGRAM)], 0)[0] > 0


def test_a_length_never_depends_on_a_token() -> None:
    """Only on the past: two runs that saw the same counts choose alike, and asking changes nothing for a proposer."""
    runs = [Simulation(AdaptiveLength(), flat, 0.7, seed=3) for _ in range(2)]
    for world in runs:
        world.run(150)
    one, two = ([request(sequence, NGRAM) for sequence in world.sequences] for world in runs)
    assert runs[0].lengths == runs[1].lengths
    first = runs[0].policy.choose(one, 0)
    assert first == runs[1].policy.choose(two, 0) == runs[0].policy.choose(one, 0)
    fields = {field.name for field in dataclasses.fields(DraftRequest)}
    assert fields == {"sequence", "source", "max_drafts"}


def test_what_ended_is_forgotten() -> None:
    policy = AdaptiveLength()
    adaptive = Simulation(policy, flat, 0.7, DRAFTER, 0.001, rows=3)
    adaptive.run(50)
    assert len(policy._rates) == 3
    for sequence in adaptive.sequences:
        policy.forget(sequence)
    assert not policy._rates


def test_the_wish_of_a_request_is_the_limit() -> None:
    policy, sequence = AdaptiveLength(), Name()
    for _ in range(200):
        policy.observe_step(stats_of(num_rows=1, num_tokens=1, verify_s=flat(1)))
        policy.observe_row(sequence, NGRAM, drafted=8, accepted=8)  # type: ignore[arg-type]
    assert [policy.choose([request(sequence, NGRAM, most)], 0) for most in (0, 1, 3)] == [[0], [1], [3]]


def test_a_proposer_is_preferred_while_it_is_as_often_right() -> None:
    policy, one, other = AdaptiveLength(), Name(), Name()
    assert policy.prefers(one, NGRAM, DRAFTER)  # nothing is known: proposals cost nothing
    for _ in range(8):
        policy.observe_row(one, DRAFTER, drafted=1, accepted=1)
        policy.observe_row(one, NGRAM, drafted=4, accepted=0)
    assert not policy.prefers(one, NGRAM, DRAFTER)
    for _ in range(64):
        policy.observe_row(one, NGRAM, drafted=1, accepted=1)  # as when it is passed over, and would have been right
    assert policy.prefers(one, NGRAM, DRAFTER)
    assert FixedLength(3).prefers(other, NGRAM, DRAFTER)


def test_proposals_are_taken_while_the_drafter_does_not_pay() -> None:
    adaptive = Simulation(AdaptiveLength(), steep, 0.1, DRAFTER, 0.001)
    policy, one = adaptive.policy, adaptive.sequences[0]
    for _ in range(8):
        policy.observe_row(one, DRAFTER, drafted=1, accepted=1)
        policy.observe_row(one, NGRAM, drafted=4, accepted=0)
    assert not policy.prefers(one, NGRAM, DRAFTER)
    adaptive.run(OPENING * WINDOW + 1)
    assert policy.prefers(one, NGRAM, DRAFTER)


def test_the_drafter_rests_beside_a_proposer_that_is_nearly_always_right() -> None:
    policy, one = AdaptiveLength(), Name()
    assert policy.wants_drafter(one, NGRAM)
    for _ in range(10):
        policy.observe_row(one, NGRAM, drafted=8, accepted=8)
        policy.choose([request(one, NGRAM)], 0)
    assert not policy.wants_drafter(one, NGRAM)
    assert policy.wants_drafter(one, DraftSource.NONE), "where its proposals end the drafter catches up"
