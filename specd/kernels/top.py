"""The largest logits of rows and their log-sum-exp in the CPU kernels (src/top.h); the reference is
specd/sampling/logprobs.py.

Legend: R rows, V vocabulary, H hidden, k largest.
"""

from __future__ import annotations

import ctypes

import torch

from specd.errors import ModelError
from specd.kernels.draw import loaded, workspace
from specd.kernels.library import CLogitsRows, CModel, CTops, Library, compute_lock, load_library
from specd.kernels.pack import address
from specd.tensors import TopTokens


def top_of_rows(
    logits: torch.Tensor, rows: torch.Tensor | None, k: int, *, library: Library | None = None
) -> TopTokens:
    """Of rows that exist: logits f32[*, V], rows i64[R] of them (None = all). Raises ModelError unless 1 <= k <= V.

    `specd.kernels.draw.takes` says which logits are taken.
    """
    library = library or loaded() or load_library()
    logits = logits.contiguous()
    rows = None if rows is None else rows.contiguous()
    assert rows is None or bool(((rows >= 0) & (rows < len(logits))).all()), "rows that the logits do not have"
    out = _empty(len(logits) if rows is None else len(rows), k, logits.shape[1])
    given = CLogitsRows(
        logits=address(logits),
        rows=None if rows is None else address(rows),
        num_rows=len(out.values),
        vocabulary=logits.shape[1],
        stride=logits.shape[1],
    )
    with compute_lock:
        status = library.c.specd_top_rows(
            library.functions,
            ctypes.byref(given),
            ctypes.byref(_record(out)),
            workspace(library).pointer,
            torch.get_num_threads(),
        )
    library.check(status)
    return out


def top_of_hidden(library: Library, model: CModel, hidden: torch.Tensor, k: int) -> TopTokens:
    """Of lm_head times hidden f32[R, H]: `top_of_rows` of the model's logits bit for bit, which are never written.

    Raises ModelError unless 1 <= k <= V.
    """
    hidden = hidden.contiguous()
    out = _empty(len(hidden), k, model.head.rows)
    with compute_lock:
        status = library.c.specd_top(
            library.functions,
            ctypes.byref(model),
            address(hidden),
            len(hidden),
            ctypes.byref(_record(out)),
            workspace(library).pointer,
            torch.get_num_threads(),
        )
    library.check(status)
    return out


def _empty(num_rows: int, k: int, vocabulary: int) -> TopTokens:
    if not 1 <= k <= vocabulary:
        raise ModelError(f"the {k} largest of {vocabulary} logits do not exist; ask for 1 to {vocabulary}")
    return TopTokens(
        values=torch.empty(num_rows, k),
        tokens=torch.empty(num_rows, k, dtype=torch.int64),
        lse=torch.empty(num_rows, dtype=torch.float64),
    )


def _record(out: TopTokens) -> CTops:
    return CTops(values=address(out.values), places=address(out.tokens), lse=address(out.lse), k=out.values.shape[1])
