"""Acceptance through the real stage function: equality with plain decoding, bookkeeping, faults."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch

from specd.config import SpeculationConfig
from specd.sampling.batch import SamplingBatch, draft_batch, sampling_batch
from specd.sampling.chain import ACCEPTANCE_RULES, AcceptanceSettings, accept, draw_draft
from specd.step import RowSampling, StepPlan
from specd.tensors import BatchInfo, DraftState, DraftTokens, TargetOutput
from tests.sampling_plans import CPU, info_of, params, plan_of, row
from tests.toy_world import ALPHA, goodness

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
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_a_missing_draft_never_matches(rule: str, temperature: float, threshold: float) -> None:
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
        settings=AcceptanceSettings(threshold=threshold),
    )
    assert out.tokens.equal(torch.tensor([[0, -1, -1]]))


def test_a_proposers_token_is_a_point_mass_beside_drawn_drafts() -> None:
    """ratio: one record of probs for the batch, but the drafts of half of the rows came from the host."""
    size = 20_000
    host = np.full((size, 1), -1, np.int32)
    host[: size // 2] = 0
    plan = plan_of([row(params(), choice=i) for i in range(size)], [1] * size, host_drafts=host)
    p, q = torch.tensor([0.4, 0.3, 0.3]), torch.tensor([0.6, 0.1, 0.3])
    drawn, probs = draw_draft(DraftState.of(q.log().expand(size, 3)), draft_batch(plan, 3, CPU), 0, rule="ratio")
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
    tokens, probs = draw_draft(DraftState.of(torch.zeros(1, 3)), draft_batch(plan, 3, CPU), 0, rule="ratio")
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
    tokens, probs = draw_draft(DraftState.of(logits), draft_batch(plan, 7, CPU), 0, rule="ratio")
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


def test_a_row_of_which_the_filters_leave_nothing_fails_alone() -> None:
    """Finite logits are not enough: these leave fp32 when they are divided by the temperature."""
    states = [row(params(temperature=t, top_p=0.9), choice=i) for i, t in enumerate((1e-5, 1.0, 0.0))]
    plan = plan_of(states, [1, 1, 1])
    logits = torch.zeros(6, 5)
    logits[:, 3] = 60.0
    logits[0, 3] = 1e35
    drafts = DraftTokens(tokens=torch.full((3, 1), 3))
    for rule in ACCEPTANCE_RULES:
        out = accept(TargetOutput(logits=logits), drafts, plan, info_of(plan), sampling_batch(plan, 5, CPU), rule=rule)
        assert out.failed.equal(torch.tensor([True, False, False]))
        assert out.tokens.equal(torch.tensor([[-1, -1], [3, 3], [3, 3]]))


@pytest.mark.parametrize("temperature", [1e-50, 1e-40, 9e-6])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    plan = plan_of([row(params(temperature=temperature)), row(params(temperature=1.0))], [0, 0])
    empty = DraftTokens(tokens=torch.empty(2, 0, dtype=torch.int64))
    logits = torch.zeros(2, 5)
    logits[:, 3] = 60.0
    out = accept(TargetOutput(logits=logits), empty, plan, info_of(plan), sampling_batch(plan, 5, CPU))
    assert out.tokens.equal(torch.tensor([[3], [3]]))
    assert not out.failed.any()


def test_a_top_p_next_to_nothing_keeps_the_most_likely_token() -> None:
    plan = plan_of([row(params(top_p=1e-50), choice=i) for i in range(20)], [0] * 20)
    empty = DraftTokens(tokens=torch.empty(20, 0, dtype=torch.int64))
    logits = torch.zeros(20, 5)
    logits[:, 3] = 0.1
    out = accept(TargetOutput(logits=logits), empty, plan, info_of(plan), sampling_batch(plan, 5, CPU))
    assert out.tokens.equal(torch.full((20, 1), 3))
    assert not out.failed.any()


def test_the_rules_constants_are_the_configurations_defaults() -> None:
    settings, config = AcceptanceSettings(), SpeculationConfig()
    for field in dataclasses.fields(settings):
        assert getattr(settings, field.name) == getattr(config, field.name)


@pytest.mark.parametrize(("score", "kept"), [("min", 2), ("prod", 1)])
def test_the_threshold_is_compared_with_the_score_that_was_chosen(score: Literal["min", "prod"], kept: int) -> None:
    """Two drafts of probability 0.5 each: the least is 0.5, the product 0.25."""
    plan = plan_of([row(params(seed=1))], [2])
    out = accept(
        TargetOutput(logits=torch.tensor([0.5, 0.5]).log().expand(3, 2)),
        DraftTokens(tokens=torch.tensor([[0, 1]])),
        plan,
        info_of(plan),
        sampling_batch(plan, 2, CPU),
        rule="threshold",
        settings=AcceptanceSettings(threshold=0.4, threshold_score=score),
    )
    assert int(out.num_accepted[0]) == kept


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
