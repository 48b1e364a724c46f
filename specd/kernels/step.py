"""The small work between two forwards in the CPU kernels (src/step.c), where a chain of torch calls on a few numbers
would take longer than a layer; the references are `specd.sampling.chain` and `specd.pipeline.refill`.

Legend: B rows of the plan, T packed tokens, R logits rows, K drafts.
"""

from __future__ import annotations

import ctypes

import torch

from specd.kernels.draw import loaded
from specd.kernels.library import CAcceptance, CShifts
from specd.kernels.pack import address
from specd.tensors import Acceptance, BatchInfo, BestTokens


def takes(tensor: torch.Tensor) -> bool:
    """Whether a step with tensors like this one is handled here: real ones on the CPU, and the kernels are built."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and loaded() is not None


def accept(
    best: BestTokens,
    drafts: torch.Tensor,
    info: BatchInfo,
    *,
    row_index: torch.Tensor,
    num_drafts: torch.Tensor,
    emits: torch.Tensor,
    root_offset: torch.Tensor,
) -> Acceptance:
    """`specd.sampling.chain.keep_best` without log-probabilities.

    drafts i64[B, K]; row_index i64[B, K + 1] into best's R rows; num_drafts, root_offset i64[B]; emits bool[B].
    """
    library = loaded()
    assert library is not None
    shape = drafts.shape
    out = Acceptance(
        tokens=torch.empty((shape[0], shape[1] + 1), dtype=torch.int64),
        num_accepted=torch.empty(shape[0], dtype=torch.int64),
        next_token=torch.empty(shape[0], dtype=torch.int64),
        last_row=torch.empty(shape[0], dtype=torch.int64),
        failed=torch.empty(shape[0], dtype=torch.bool),
    )
    values, tokens, chosen = best.values.contiguous(), best.tokens.contiguous(), drafts.contiguous()
    record = CAcceptance(
        values=address(values),
        best=address(tokens),
        drafts=address(chosen),
        row_index=address(row_index),
        num_drafts=address(num_drafts),
        emits=address(emits),
        root_offset=address(root_offset),
        offsets=address(info.qo_indptr),
        num_sequences=shape[0],
        num_rows=len(tokens),
        max_drafts=shape[1],
        tokens=address(out.tokens),
        num_accepted=address(out.num_accepted),
        next_token=address(out.next_token),
        last_row=address(out.last_row),
        failed=address(out.failed),
    )
    library.check(library.c.specd_accept(ctypes.byref(record)))
    return out


def shift_left(
    tokens: torch.Tensor, info: BatchInfo, emits: torch.Tensor, accepted: Acceptance, next_prompt: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`specd.pipeline.refill.shift_left`: tokens i64[T], emits bool[B], next_prompt i64[B] -> i64[T], last rows i64[B].

    info and accepted are of one step.
    """
    library = loaded()
    assert library is not None
    tokens = tokens.contiguous()
    shifted, last_rows = torch.empty_like(tokens), torch.empty(info.num_rows, dtype=torch.int64)
    record = CShifts(
        tokens=address(tokens),
        offsets=address(info.qo_indptr),
        emits=address(emits),
        last_row=address(accepted.last_row),
        next_token=address(accepted.next_token),
        next_prompt=address(next_prompt),
        num_sequences=info.num_rows,
        num_tokens=len(tokens),
        shifted=address(shifted),
        last_rows=address(last_rows),
    )
    library.check(library.c.specd_shift(ctypes.byref(record)))
    return shifted, last_rows
