"""Acceptance through the real stage function: distributions with negative controls, equality, bookkeeping, faults.

The toy world of the distribution tests: a target p(. | prefix) and a draft q(. | prefix) over V tokens, both tables.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from specd.sampling.batch import SamplingBatch, draft_batch, sampling_batch
from specd.sampling.chain import ACCEPTANCE_RULES, LOSSY_RULES, AcceptanceSettings, accept, draw_draft
from specd.step import RowSampling, StepPlan
from specd.tensors import Acceptance, BatchInfo, DraftTokens, TargetOutput
from tests.sampling_plans import CPU, info_of, params, plan_of, row

V = 6
ALPHA = 1e-4
NUM_ROWS = 20_000
ROUNDS = 5  # 100,000 sequences per test, two steps each

Tables = tuple[torch.Tensor, torch.Tensor]  # p [V + 1, V], q [V + 1, V]: by the last token, the last row for none


# ---- the toy world


def tables(kind: str, *, seed: int = 0) -> Tables:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(V) * 0.8, V + 1), rng.dirichlet(np.ones(V) * 0.8, V + 1)
    if kind == "zeros in p":
        p[:, 1::3] = 0.0
    elif kind == "zeros in q":
        q[:, ::3] = 0.0
    elif kind == "equal":
        q = p.copy()
    elif kind == "disjoint":
        p[:, : V // 2], q[:, V // 2 :] = 0.0, 0.0
    elif kind == "one-hot p":
        p = np.eye(V)[rng.integers(0, V, V + 1)]
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return torch.from_numpy(p).float(), torch.from_numpy(q).float()


KINDS = ["random", "zeros in p", "zeros in q", "equal", "disjoint", "one-hot p"]


@functools.cache
def world(num_drafts: int, rows: int = NUM_ROWS) -> tuple[StepPlan, BatchInfo, SamplingBatch, SamplingBatch]:
    """Plan, info, target and draft batch of `rows` sampled rows; `reseeded` gives them new noise each round."""
    plan = plan_of([row(params())] * rows, [num_drafts] * rows)
    return plan, info_of(plan), sampling_batch(plan, V, CPU), draft_batch(plan, V, CPU)


def reseeded(batch: SamplingBatch, round_: int, position: torch.Tensor) -> SamplingBatch:
    seeds = torch.from_numpy(np.random.default_rng(round_).integers(-(2**63), 2**63, len(batch.num_drafts)))
    return dataclasses.replace(batch, keys=seeds[batch.sequence], position=position[batch.sequence])


def step(
    p: torch.Tensor, q: torch.Tensor, last: torch.Tensor, position: torch.Tensor, *, num_drafts: int, round_: int,
    rule: str, sampled: bool, settings: AcceptanceSettings,
) -> Acceptance:  # fmt: skip
    """One whole step of NUM_ROWS sequences whose newest tokens are `last` (V = none yet)."""
    plan, info, base, draft_base = world(num_drafts)
    target, drafting = (reseeded(batch, round_, position) for batch in (base, draft_base))
    drafts, probs, logits, here = [], [], [p[last].log()], last
    for j in range(num_drafts):
        here, q_here = draw_draft(q[here].log(), drafting, j, rule=rule, sampled=sampled)
        drafts.append(here)
        if q_here is not None:
            probs.append(q_here)
        logits.append(p[here].log())
    return accept(
        TargetOutput(logits=torch.stack(logits, 1).flatten(0, 1)),
        DraftTokens(
            tokens=torch.stack(drafts, 1) if drafts else torch.empty((len(last), 0), dtype=torch.int64),
            probs=torch.stack(probs, 1) if probs else None,
        ),
        plan, info, target, rule=rule, settings=settings,
    )  # fmt: skip


def first_two_tokens(
    kind: str, *, num_drafts: int, rule: str, sampled: bool, settings: AcceptanceSettings | None = None
) -> np.ndarray:
    """Counts [V, V] of the first two emitted tokens over many sequences; a second step where one token came."""
    p, q = tables(kind)
    counts = np.zeros((V, V))
    for round_ in range(ROUNDS):
        run = functools.partial(
            step, p, q, num_drafts=num_drafts, round_=round_, rule=rule, sampled=sampled,
            settings=settings or AcceptanceSettings(),
        )  # fmt: skip
        start = torch.zeros(NUM_ROWS, dtype=torch.int64)
        emitted = run(torch.full((NUM_ROWS,), V), start).tokens
        first = emitted[:, 0]
        second = emitted[:, 1] if num_drafts else torch.full_like(first, -1)
        again = run(first, start + 1).tokens[:, 0]
        np.add.at(counts, (first.numpy(), torch.where(second >= 0, second, again).numpy()), 1)
    return counts


def p_values(counts: np.ndarray, kind: str) -> tuple[float, float]:
    """Of the first token against p_1, and of the first two against p_1 x p_2; 0 when something impossible came."""
    p, _ = (table.double().numpy() for table in tables(kind))
    joint = p[V][:, None] * p[:V]
    return goodness(counts.sum(1), p[V]), goodness(counts.ravel(), joint.ravel())


def goodness(counts: np.ndarray, probs: np.ndarray) -> float:
    probs = probs / probs.sum()
    if counts[probs <= 0].sum():
        return 0.0
    expected = probs * counts.sum()
    large = expected >= 5
    observed = [*counts[large], counts[~large].sum()]
    wanted = [*expected[large], expected[~large].sum()]
    cells = [(o, e) for o, e in zip(observed, wanted, strict=True) if e > 0]
    if len(cells) < 2:
        return 1.0
    return float(stats.chisquare([o for o, _ in cells], [e for _, e in cells]).pvalue)


# ---- distributions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rule", "sampled"), [("exact", True), ("exact", False), ("ratio", True), ("ratio", False)])
def test_lossless_rules_have_the_targets_distribution(kind: str, rule: str, sampled: bool) -> None:
    first, joint = p_values(first_two_tokens(kind, num_drafts=2, rule=rule, sampled=sampled), kind)
    assert first > ALPHA
    assert joint > ALPHA


@pytest.mark.parametrize("rule", ["exact", "ratio"])
@pytest.mark.parametrize("num_drafts", [0, 1])
def test_plain_decoding_and_the_bonus_token(rule: str, num_drafts: int) -> None:
    first, joint = p_values(first_two_tokens("random", num_drafts=num_drafts, rule=rule, sampled=True), "random")
    assert first > ALPHA
    assert joint > ALPHA


NEGATIVE: list[tuple[str, bool, AcceptanceSettings]] = [
    ("literal", False, AcceptanceSettings()),
    ("threshold", True, AcceptanceSettings(threshold=0.1)),
    ("threshold", False, AcceptanceSettings(threshold_score="prod", threshold=0.05)),
    ("typical", True, AcceptanceSettings()),
    ("typical", False, AcceptanceSettings()),
]


@pytest.mark.parametrize(("rule", "sampled", "settings"), NEGATIVE)
def test_lossy_rules_fail_the_same_test(rule: str, sampled: bool, settings: AcceptanceSettings) -> None:
    counts = first_two_tokens("random", num_drafts=2, rule=rule, sampled=sampled, settings=settings)
    assert min(p_values(counts, "random")) < ALPHA
    assert rule in LOSSY_RULES


def test_the_trap_in_numbers() -> None:
    """methods 1.2: p = (.5, .5), q = (.8, .2): read literally, token 0 comes with probability .625."""
    plan, info, base, drafting = world(1)
    p, q = (torch.tensor(x).log().expand(NUM_ROWS, 2) for x in ((0.5, 0.5), (0.8, 0.2)))
    shares = {}
    for rule in ("literal", "ratio", "exact"):
        tokens, probs = draw_draft(q, drafting, 0, rule=rule, sampled=False)
        batch = reseeded(base, 5, torch.zeros(NUM_ROWS, dtype=torch.int64))
        drafts = DraftTokens(tokens=tokens[:, None], probs=None if probs is None else probs[:, None])
        out = accept(TargetOutput(logits=p.repeat_interleave(2, 0)), drafts, plan, info, batch, rule=rule)
        shares[rule] = float((out.tokens[:, 0] == 0).float().mean())
    assert shares["literal"] == pytest.approx(0.625, abs=0.012)
    assert shares["ratio"] == pytest.approx(0.5, abs=0.012)
    assert shares["exact"] == pytest.approx(0.5, abs=0.012)


def test_sampled_drafts_are_accepted_as_often_as_the_theory_says() -> None:
    """ratio: 1 - TV(p, q), the optimum; exact: less, but far more than with argmax drafts on average."""
    p, q = tables("random")
    last, zeros = torch.full((NUM_ROWS,), V), torch.zeros(NUM_ROWS, dtype=torch.int64)
    kept = {}
    for rule in ("ratio", "exact"):
        out = step(p, q, last, zeros, num_drafts=1, round_=0, rule=rule, sampled=True, settings=AcceptanceSettings())
        kept[rule] = float(out.num_accepted.float().mean())
    best = float(torch.minimum(p[V], q[V]).sum())
    assert kept["ratio"] == pytest.approx(best, abs=0.015)
    assert best / (2 - best) - 0.015 < kept["exact"] <= best + 0.015


# ---- the match rule: equality


def chain_logits(prefix: list[int], vocab_size: int) -> torch.Tensor:
    """The toy target of the equality tests: logits that depend on the whole prefix."""
    seed = functools.reduce(lambda a, b: (a * 31 + b + 1) % 1_000_003, prefix, 7)
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def decode(state: RowSampling, *, steps: int, propose: Callable[[list[int], int], list[int]]) -> list[int]:
    """Decodes `steps` tokens through the accept stage with penalties kept up to date; propose gives the drafts."""
    vocab_size, prompt = 12, [1]
    output: list[int] = []
    while len(output) < steps:
        p = state.params
        here = dataclasses.replace(row(p, prompt=prompt, output=output), noise_key=state.noise_key)
        drafts = propose(output, min(5, steps - len(output) - 1))
        plan = plan_of([here], [len(drafts)])
        logits = [chain_logits([*prompt, *output, *drafts[:i]], vocab_size) for i in range(len(drafts) + 1)]
        out = accept(
            TargetOutput(logits=torch.stack(logits)),
            DraftTokens(tokens=torch.tensor([drafts], dtype=torch.int64).view(1, -1)),
            plan,
            info_of(plan),
            sampling_batch(plan, vocab_size, CPU),
        )
        output += [int(t) for t in out.tokens[0] if t >= 0]
    return output


EQUALITY = [
    params(seed=3),
    params(seed=4, temperature=0.7, top_p=0.9),
    params(seed=-5, top_k=4, presence_penalty=0.8, frequency_penalty=0.3),
    params(seed=6, min_p=0.1, repetition_penalty=1.4, bad_words_ids=((2, 3), (5,))),
    params(seed=8, min_tokens=9, stop_token_ids=(0, 1, 2, 3)),
    params(seed=0, temperature=0.0, repetition_penalty=1.5),
]


@pytest.mark.parametrize("index", range(len(EQUALITY)))
def test_exact_emits_what_plain_decoding_emits_whatever_is_proposed(index: int) -> None:
    state = row(EQUALITY[index], choice=index)
    plain = decode(state, steps=24, propose=lambda output, room: [])
    rng = np.random.default_rng(index)

    def guesses(output: list[int], room: int) -> list[int]:
        """Right for a random while, then random: accepts anything from none to all."""
        size = int(rng.integers(0, room + 1))
        right = int(rng.integers(0, size + 1))
        return [*plain[len(output) : len(output) + right], *map(int, rng.integers(0, 12, size - right))]

    for _ in range(6):
        assert decode(state, steps=24, propose=guesses) == plain
    assert decode(dataclasses.replace(state, noise_key=(99, 0, 0)), steps=24, propose=guesses) != plain or index == 5


def test_a_drawn_draft_of_the_same_distribution_is_always_kept() -> None:
    """Under the match rule draft and target share their noise."""
    p, _ = tables("random")
    last, zeros = torch.full((NUM_ROWS,), V), torch.zeros(NUM_ROWS, dtype=torch.int64)
    out = step(p, p, last, zeros, num_drafts=3, round_=2, rule="exact", sampled=True, settings=AcceptanceSettings())
    assert bool((out.num_accepted == 3).all())


# ---- bookkeeping


def mixed() -> tuple[StepPlan, BatchInfo, SamplingBatch, torch.Tensor, torch.Tensor]:
    """Five rows: greedy with 3 drafts, a prompt chunk, sampled with 1, greedy plain after a chunk, greedy with 2."""
    states = [row(params(temperature=0.0)), None, row(params(seed=9)), row(params(temperature=0.0))]
    states.append(row(params(temperature=0.0, logprobs=1)))
    plan = plan_of(states, [3, 0, 1, 0, 2], num_known=[1, 4, 1, 3, 1])
    logits = torch.zeros(4 + 2 + 1 + 3, 8)
    for index, token in enumerate([1, 2, 3, 4, 5, 5, 6, 7, 1, 2]):
        logits[index, token] = 50.0
    drafts = torch.tensor([[1, 2, 7], [-1, -1, -1], [5, -1, -1], [-1, -1, -1], [7, 1, -1]])
    return plan, info_of(plan), sampling_batch(plan, 8, CPU), logits, drafts


@pytest.mark.parametrize("rule", list(ACCEPTANCE_RULES))
def test_counts_tokens_and_rows_of_a_mixed_batch(rule: str) -> None:
    """With p all but one-hot every rule gives the same answer."""
    plan, info, batch, logits, drafts = mixed()
    out = accept(TargetOutput(logits=logits), DraftTokens(tokens=drafts), plan, info, batch, rule=rule)
    expected = [[1, 2, 3, -1], [-1, -1, -1, -1], [5, 5, -1, -1], [6, -1, -1, -1], [7, 1, 2, -1]]
    assert out.tokens.equal(torch.tensor(expected))
    assert out.num_accepted.equal(torch.tensor([2, 0, 1, 0, 2]))
    assert out.next_token[[0, 2, 3, 4]].equal(torch.tensor([3, 5, 6, 2]))
    # packed query rows: 4 | 4 | 2 | 3 | 3
    assert out.last_row.equal(torch.tensor([2, 7, 9, 12, 15]))
    assert not out.failed.any()
    assert out.logprobs is not None
    assert out.top_ids is not None
    assert out.top_ids[4, :3, 0].equal(torch.tensor([7, 1, 2]))
    torch.testing.assert_close(out.logprobs[4], torch.tensor([0.0, 0.0, 0.0, 0.0]), atol=1e-5, rtol=0)


def test_a_step_in_which_nobody_emits() -> None:
    plan = plan_of([None, None], [0, 0], num_known=[3, 5])
    batch = sampling_batch(plan, 8, CPU)
    empty = DraftTokens(tokens=torch.empty(2, 0, dtype=torch.int64))
    out = accept(TargetOutput(logits=torch.empty(0, 8)), empty, plan, info_of(plan), batch)
    assert out.tokens.equal(torch.full((2, 1), -1))
    assert out.last_row.equal(torch.tensor([2, 7]))
    assert not out.failed.any()


@pytest.mark.parametrize("rule", list(ACCEPTANCE_RULES))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_missing_draft_never_matches(rule: str, temperature: float) -> None:
    """-1 inside num_drafts (a drafter that gave up), also where token 0 is the likely one."""
    plan = plan_of([row(params(temperature=temperature))], [2])
    logits = torch.full((3, 4), -50.0)
    logits[:, 0] = 50.0
    out = accept(
        TargetOutput(logits=logits),
        DraftTokens(tokens=torch.tensor([[-1, 0]])),
        plan,
        info_of(plan),
        sampling_batch(plan, 4, CPU),
        rule=rule,
    )
    assert out.tokens.equal(torch.tensor([[0, -1, -1]]))


def test_a_proposers_token_is_a_point_mass_beside_drawn_drafts() -> None:
    """ratio: one record of probs for the batch, but the drafts of half of the rows came from the host."""
    size = 20_000
    host = np.full((size, 1), -1, np.int32)
    host[: size // 2] = 0
    plan = plan_of([row(params(), choice=i) for i in range(size)], [1] * size, host_drafts=host)
    p, q = torch.tensor([0.4, 0.3, 0.3]), torch.tensor([0.6, 0.1, 0.3])
    drawn, probs = draw_draft(q.log().expand(size, 3), draft_batch(plan, 3, CPU), 0, rule="ratio")
    assert probs is not None
    tokens = torch.where(torch.arange(size) < size // 2, 0, drawn)
    out = accept(
        TargetOutput(logits=p.log().expand(2 * size, 3)),
        DraftTokens(tokens=tokens[:, None], probs=probs[:, None]),
        plan,
        info_of(plan),
        sampling_batch(plan, 3, CPU),
        rule="ratio",
    )
    for half in (out.tokens[: size // 2, 0], out.tokens[size // 2 :, 0]):
        assert goodness(torch.bincount(half, minlength=3).numpy(), p.double().numpy()) > ALPHA


@pytest.mark.parametrize("rule", list(ACCEPTANCE_RULES))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_past_a_rows_own_drafts_is_kept(rule: str, temperature: float) -> None:
    """A narrow row in a wide batch, with junk in the columns that are not its own."""
    states = [row(params(temperature=temperature), choice=i) for i in range(2)]
    plan = plan_of(states, [1, 3])
    logits = torch.full((6, 4), -50.0)
    logits[:, 2] = 50.0
    drafts = DraftTokens(tokens=torch.full((2, 3), 2))
    out = accept(TargetOutput(logits=logits), drafts, plan, info_of(plan), sampling_batch(plan, 4, CPU), rule=rule)
    assert out.tokens.equal(torch.tensor([[2, 2, -1, -1], [2, 2, 2, 2]]))
    assert out.num_accepted.equal(torch.tensor([1, 3]))


def test_a_drafter_with_a_smaller_vocabulary() -> None:
    plan = plan_of([row(params(seed=1))], [1])
    tokens, probs = draw_draft(torch.zeros(1, 3), draft_batch(plan, 3, CPU), 0, rule="ratio")
    assert probs is not None
    logits = torch.full((2, 5), -50.0)
    logits[:, 4] = 50.0
    out = accept(
        TargetOutput(logits=logits),
        DraftTokens(tokens=tokens[:, None], probs=probs[:, None]),
        plan,
        info_of(plan),
        sampling_batch(plan, 5, CPU),
        rule="ratio",
    )
    assert out.tokens.equal(torch.tensor([[4, -1]]))


def test_greedy_drafts_in_a_sampled_batch_are_argmax_with_a_one_hot_distribution() -> None:
    plan = plan_of([row(params(temperature=0.0)), row(params(seed=2))], [1, 1])
    logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(0))
    tokens, probs = draw_draft(logits, draft_batch(plan, 7, CPU), 0, rule="ratio")
    assert probs is not None
    assert int(tokens[0]) == int(logits[0].argmax())
    assert torch.equal(probs[0], torch.nn.functional.one_hot(logits[0].argmax(), 7).float())
    torch.testing.assert_close(probs[1], logits[1].softmax(-1))


# ---- faults


BROKEN = {
    "nan": lambda row_: row_.fill_(math.nan),
    "one nan": lambda row_: row_[3:4].fill_(math.nan),
    "+inf": lambda row_: row_[3:4].fill_(math.inf),
    "all -inf": lambda row_: row_.fill_(-math.inf),
}


@pytest.mark.parametrize("name", list(BROKEN))
@pytest.mark.parametrize("rule", list(ACCEPTANCE_RULES))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_fails_alone_and_only_where_it_is_used(name: str, rule: str, temperature: float) -> None:
    """Row 1's second logits row is broken. It is used when its first draft is kept, and not when it is rejected."""
    states = [row(params(seed=i, temperature=temperature), choice=i) for i in range(3)]
    plan = plan_of(states, [2, 2, 2])
    batch, info = sampling_batch(plan, 8, CPU), info_of(plan)
    logits = torch.full((9, 8), -60.0)
    logits[:, 5] = 60.0
    broken = logits.clone()
    BROKEN[name](broken[4])
    for first_draft, failed in ((5, True), (6, False)):
        drafts = DraftTokens(tokens=torch.tensor([[5, 5], [first_draft, 5], [5, 1]]))
        clean = accept(TargetOutput(logits=logits), drafts, plan, info, batch, rule=rule)
        out = accept(TargetOutput(logits=broken), drafts, plan, info, batch, rule=rule)
        assert out.failed.equal(torch.tensor([False, failed, False]))
        others = [0, 2] if failed else [0, 1, 2]
        assert out.tokens[others].equal(clean.tokens[others])
        assert out.num_accepted[others].equal(clean.num_accepted[others])
        if failed:
            assert bool((out.tokens[1] == -1).all())
            assert int(out.num_accepted[1]) == 0
            assert 0 <= int(out.next_token[1]) < 8
            assert int(out.last_row[1]) == 3


def test_a_row_whose_every_token_is_forbidden_fails() -> None:
    plan = plan_of([row(params(allowed_token_ids=(2,), min_tokens=4), eos=(2,)), row(params())], [0, 0])
    empty = DraftTokens(tokens=torch.empty(2, 0, dtype=torch.int64))
    out = accept(TargetOutput(logits=torch.zeros(2, 5)), empty, plan, info_of(plan), sampling_batch(plan, 5, CPU))
    assert out.failed.equal(torch.tensor([True, False]))


def test_nan_that_a_mask_hides_still_fails() -> None:
    plan = plan_of([row(params(allowed_token_ids=(1, 2)))], [0])
    empty = DraftTokens(tokens=torch.empty(1, 0, dtype=torch.int64))
    logits = torch.zeros(1, 5)
    logits[0, 4] = math.nan
    out = accept(TargetOutput(logits=logits), empty, plan, info_of(plan), sampling_batch(plan, 5, CPU))
    assert out.failed.equal(torch.tensor([True]))


def test_a_broken_draft_distribution_costs_drafts_but_not_the_row() -> None:
    plan = plan_of([row(params(seed=3))], [1])
    out = accept(
        TargetOutput(logits=torch.zeros(2, 4)),
        DraftTokens(tokens=torch.tensor([[2]]), probs=torch.full((1, 1, 4), math.nan)),
        plan,
        info_of(plan),
        sampling_batch(plan, 4, CPU),
        rule="ratio",
    )
    assert not out.failed.any()
    assert int(out.num_accepted[0]) == 0
    assert 0 <= int(out.tokens[0, 0]) < 4


def test_the_result_does_not_depend_on_batch_mates() -> None:
    generator = torch.Generator().manual_seed(12)
    states = [row(params(seed=i, temperature=0.5 + i / 4, top_p=0.8 if i % 2 else 1.0), choice=i) for i in range(6)]
    sizes = [i % 4 for i in range(6)]
    logits = [torch.randn(k + 1, 50, generator=generator) for k in sizes]
    drafts = torch.full((6, 3), -1)
    for i, k in enumerate(sizes):
        drafts[i, :k] = torch.randint(0, 50, (k,), generator=generator)
    plan = plan_of(states, sizes)
    together = accept(
        TargetOutput(logits=torch.cat(logits)),
        DraftTokens(tokens=drafts),
        plan,
        info_of(plan),
        sampling_batch(plan, 50, CPU),
    )
    for i, k in enumerate(sizes):
        one = plan_of([states[i]], [k])
        out = accept(
            TargetOutput(logits=logits[i]),
            DraftTokens(tokens=drafts[i : i + 1, :k]),
            one,
            info_of(one),
            sampling_batch(one, 50, CPU),
        )
        assert out.tokens[0].equal(together.tokens[i, : k + 1])
