"""Plans and logits for the tests of sampling and acceptance: only what those stages read is real."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specd.request import SamplingParams
from specd.step import DraftSource, RowSampling, StepPlan, indptr
from specd.tensors import BatchInfo, batch_info

CPU = torch.device("cpu")


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 64, "seed": 0, **changes})


def row(
    sampling: SamplingParams,
    *,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    choice: int = 0,
    eos: tuple[int, ...] = (),
) -> RowSampling:
    """The state of a sequence with these tokens, as the scheduler would give it."""
    ids, counts = np.unique(np.asarray(output, np.int32), return_counts=True)
    return RowSampling(
        params=sampling,
        eos_ids=eos,
        noise_key=(sampling.seed, 0, choice),
        position=len(prompt) + len(output),
        num_output=len(output),
        output_ids=ids.astype(np.int32) if sampling.penalised else None,
        output_counts=counts.astype(np.int32) if sampling.penalised else None,
        prompt_ids=np.unique(np.asarray(prompt, np.int32)) if sampling.penalised else None,
        tail=tuple([*prompt, *output][-8:]),
    )


def plan_of(
    rows: Sequence[RowSampling | None],
    num_drafts: Sequence[int],
    *,
    num_known: Sequence[int] | None = None,
    host_drafts: np.ndarray[Any, np.dtype[np.int32]] | None = None,
) -> StepPlan:
    """A step over these rows; a row of None is a prompt chunk that does not emit."""
    size = len(rows)
    drafts = np.asarray(num_drafts, np.int32)
    known = np.ones(size, np.int32) if num_known is None else np.asarray(num_known, np.int32)
    lens = known + drafts
    ones = np.ones(size, np.int32)
    proposed = np.full((size, int(drafts.max(initial=0))), -1, np.int32) if host_drafts is None else host_drafts
    return StepPlan(
        step=1,
        page_size=64,
        slots=np.arange(size, dtype=np.int32),
        query_lens=lens,
        kv_lens=lens,
        num_drafts=drafts,
        sources=np.where(drafts > 0, DraftSource.DRAFTER, 0).astype(np.int32),
        host_drafts=proposed,
        page_indptr=indptr(ones),
        page_indices=np.arange(size, dtype=np.int32),
        tokens=np.ones(int(known.sum()), np.int32),
        next_prompt_tokens=-ones,
        emits=np.asarray([state is not None for state in rows], np.int32),
        drafter_lens=0 * ones,
        refills=0 * ones,
        refill_indptr=indptr(0 * ones),
        refill_tokens=np.zeros(0, np.int32),
        sampling=tuple(rows),
    )


def info_of(plan: StepPlan) -> BatchInfo:
    return batch_info(
        query_lens=plan.query_lens,
        kv_lens=plan.kv_lens,
        page_indptr=plan.page_indptr,
        page_indices=plan.page_indices,
        slots=plan.slots,
        page_size=plan.page_size,
        device=CPU,
    )


def advance(state: RowSampling, prompt: Sequence[int], output: Sequence[int]) -> RowSampling:
    """The same request after it has emitted `output` in all."""
    fresh = row(state.params, prompt=prompt, output=output, eos=state.eos_ids)
    return dataclasses.replace(fresh, noise_key=state.noise_key)
