"""Greedy rows need the largest logits and nothing else: same acceptance, and their logits are never made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from specd.sampling.batch import sampling_batch
from specd.sampling.chain import accept
from specd.sampling.logprobs import top_tokens
from specd.tensors import Acceptance, BestTokens, DraftTokens, LogitMasks, TargetOutput, TopTokens
from tests.engines import ask, generate, make_parts, running
from tests.fakes import SuccessorModel
from tests.sampling_plans import CPU, info_of, params, plan_of, row

V = 16


def both(
    logits: torch.Tensor, drafts: torch.Tensor, num_drafts: list[int], num_top: int | None = None
) -> tuple[Acceptance, Acceptance]:
    """num_top: alternatives that every other row asks for."""
    states = [row(params(temperature=0.0, logprobs=None if i % 2 else num_top)) for i in range(len(num_drafts))]
    plan = plan_of(states, num_drafts)
    batch, info = sampling_batch(plan, V, CPU), info_of(plan)
    assert not batch.needs_logits
    top = None if batch.logprobs is None else top_tokens(logits, batch.logprobs.width(V))
    best = TargetOutput(logits=None, best=BestTokens(*logits.max(-1)) if top is None else top.best, top=top)
    proposed = DraftTokens(tokens=drafts)
    return accept(best, proposed, plan, info, batch), accept(TargetOutput(logits=logits), proposed, plan, info, batch)


@pytest.mark.parametrize("num_top", [None, 0, 3, V + 4])
def test_the_best_logits_say_all_that_greedy_acceptance_reads(num_top: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    for trial in range(50):
        num_drafts = torch.randint(0, 4, (5,), generator=generator).tolist()
        logits = torch.randint(0, 4, (sum(num_drafts) + 5, V), generator=generator).float()  # full of ties
        width = max(num_drafts)
        drafts = torch.randint(-1, V, (5, width), generator=generator)
        starts = torch.tensor([0, *num_drafts]).cumsum(0) + torch.arange(6)
        for i, count in enumerate(num_drafts):
            likely = logits[starts[i] : starts[i] + count].argmax(-1)
            if trial % 2:
                drafts[i, :count] = likely
        if trial % 3 == 0:
            logits[trial % len(logits), 2] = (float("nan"), float("inf"))[trial % 2]
        fast, full = both(logits, drafts, num_drafts, num_top)
        for field in dataclasses.fields(Acceptance):
            a, b = getattr(fast, field.name), getattr(full, field.name)
            assert (a is None and b is None) or a.equal(b), (trial, field.name)
        assert (fast.logprobs is None) == (num_top is None)
        assert (fast.top_ids is None) == (not num_top)


def test_rows_of_which_nothing_is_left_fail_alone() -> None:
    logits = torch.zeros(3, V)
    logits[1] = float("-inf")
    fast, full = both(logits, torch.empty(3, 0, dtype=torch.int64), [0, 0, 0])
    assert fast.failed.tolist() == full.failed.tolist() == [False, True, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.0},
        {"logit_bias": ((3, 1.0),)},
        {"min_tokens": 2},
        {"presence_penalty": 0.5},
        {"allowed_token_ids": (3, 4)},
        {"bad_words_ids": ((3,),)},
    ],
)
def test_whatever_else_a_row_asks_for_needs_the_logits(changes: dict[str, Any]) -> None:
    plain = row(params(temperature=0.0))
    asking = row(params(**{"temperature": 0.0, "logprobs": 2, **changes}), eos=(0,))
    assert not sampling_batch(plan_of([plain, plain], [0, 1]), V, CPU).needs_logits
    assert sampling_batch(plan_of([plain, asking], [0, 1]), V, CPU).needs_logits


def test_a_grammar_never_acts_on_the_best_logits_alone() -> None:
    plan = plan_of([row(params(temperature=0.0))], [0])
    best = TargetOutput(logits=None, best=BestTokens(torch.zeros(1), torch.zeros(1, dtype=torch.int64)))
    empty = DraftTokens(tokens=torch.empty(1, 0, dtype=torch.int64))
    masks = LogitMasks(words=torch.full((1, 1), -1, dtype=torch.int32))
    with pytest.raises(ValueError, match="logits were not computed"):
        accept(best, empty, plan, info_of(plan), sampling_batch(plan, V, CPU), masks=masks)


class Watched(SuccessorModel):
    num_logits = 0  # calls

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_logits += 1
        return super().logits(hidden)

    def best(self, hidden: torch.Tensor) -> BestTokens:
        return BestTokens(*super().logits(hidden).max(-1))

    def top(self, hidden: torch.Tensor, k: int) -> TopTokens:
        return top_tokens(super().logits(hidden), k)


async def test_an_engine_makes_logits_for_those_who_need_them_only() -> None:
    model = Watched()
    async with running(make_parts(target=model, draft="ngram")) as engine:
        greedy = await generate(engine, [ask("greedy", [1, 2, 3], max_tokens=12)])
        told = await generate(engine, [ask("told", [1, 2, 3], max_tokens=12, logprobs=4)])
        assert model.num_logits == 0
        assert [entry.token_id for entry in told["told"][0].logprobs] == greedy["greedy"][0].tokens
        assert all(len(entry.top) == 4 for entry in told["told"][0].logprobs)
        sampled = await generate(engine, [ask("sampled", [1, 2, 3], max_tokens=12, temperature=0.01)])
        assert model.num_logits > 0
        # At this temperature the fake's distribution is one-hot.
        assert greedy["greedy"][0].tokens == sampled["sampled"][0].tokens
