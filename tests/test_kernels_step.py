"""The kernels' acceptance and shift against their torch references, over random steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from specd.frames import fresh_upload
from specd.kernels import step as kernel
from specd.pipeline.refill import shift_left
from specd.pipeline.verify import VerifyBatch, upload
from specd.request import SamplingParams
from specd.sampling.chain import keep_best
from specd.step import DraftSource, Refill, RowSampling, StepPlan, indptr
from specd.tensors import Acceptance, BestTokens, DraftTokens
from tests.native import needs_kernels
from tests.tiny import CPU

pytestmark = needs_kernels
VOCAB = 7
GREEDY = RowSampling(SamplingParams(max_tokens=9, temperature=0.0, seed=1), (), (1, 0, 0), position=3, num_output=0)


def random_plan(rng: np.random.Generator) -> StepPlan:
    """Prompt chunks, decode rows with and without drafts, in any order."""
    size = int(rng.integers(1, 9))
    emits = rng.random(size) < 0.7
    emits[rng.integers(size)] = True  # else `nothing_emitted` answers
    known = np.where(emits & (rng.random(size) < 0.7), 1, rng.integers(1, 6, size)).astype(np.int32)
    num_drafts = np.where(emits, rng.integers(0, 5, size), 0).astype(np.int32)
    width = int(num_drafts.max(initial=0))
    host = np.full((size, width), -1, np.int32)
    query_lens = known + num_drafts
    return StepPlan(
        step=0,
        page_size=16,
        slots=np.arange(size, dtype=np.int32),
        query_lens=query_lens,
        kv_lens=query_lens,
        num_drafts=num_drafts,
        sources=np.full(size, DraftSource.DRAFTER, np.int32),
        host_drafts=host,
        page_indptr=np.arange(size + 1, dtype=np.int32),
        page_indices=np.arange(size, dtype=np.int32),
        tokens=rng.integers(0, VOCAB, int(known.sum())).astype(np.int32),
        next_prompt_tokens=np.where(emits, -1, rng.integers(0, VOCAB, size)).astype(np.int32),
        emits=emits.astype(np.int32),
        drafter_lens=np.zeros(size, np.int32),
        refills=np.full(size, Refill.NEWEST, np.int32),
        refill_indptr=indptr(np.zeros(size, np.int32)),
        refill_tokens=np.zeros(0, np.int32),
        sampling=tuple(GREEDY if emitting else None for emitting in emits),
    )


def world(seed: int) -> tuple[VerifyBatch, DraftTokens, BestTokens, torch.Tensor]:
    """A step in which drafts are often right, and a few rows of logits are not finite."""
    rng = np.random.default_rng(seed)
    plan = random_plan(rng)
    batch = upload(plan, fresh_upload(CPU), VOCAB)
    rows = len(batch.logit_rows)
    best = torch.from_numpy(rng.integers(0, VOCAB, rows))
    values = torch.from_numpy(rng.standard_normal(rows).astype(np.float32))
    values[torch.from_numpy(rng.random(rows) < 0.05)] = float(rng.choice([np.nan, np.inf, -np.inf]))
    drafts = torch.full((plan.num_rows, plan.max_drafts), -1)
    for row in range(plan.num_rows):
        for i in range(plan.num_drafts[row]):
            right = int(best[batch.sampling.row_index[row, i]])
            drafts[row, i] = right if rng.random() < 0.7 else int(rng.integers(-1, VOCAB))
    computed = torch.from_numpy(rng.integers(0, VOCAB, plan.num_tokens))
    return batch, DraftTokens(drafts), BestTokens(values, best), computed


def both(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[tuple[Acceptance, torch.Tensor, torch.Tensor]]:
    """What the kernels give, and what torch does."""
    batch, drafts, best, computed = world(seed)
    found = []
    for takes in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "takes", lambda tensor, takes=takes: takes)
            accepted = keep_best(best, None, drafts, batch.info, batch.sampling)
            found.append((accepted, *shift_left(computed, batch, accepted)))
    return found


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_equal_torch(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    kept = failed = 0
    for seed in range(first, first + 100):
        ours, theirs = both(monkeypatch, seed)
        for field in dataclasses.fields(Acceptance):
            left, right = (getattr(accepted, field.name) for accepted, _, _ in (ours, theirs))
            if right is None:
                assert left is None, field.name
            else:
                assert left.dtype == right.dtype, field.name
                assert torch.equal(left, right), (seed, field.name)
        assert torch.equal(ours[1], theirs[1]), seed
        assert torch.equal(ours[2], theirs[2]), seed
        kept += int(ours[0].num_accepted.sum())
        failed += int(ours[0].failed.sum())
    assert kept > 50
    assert failed > 5
