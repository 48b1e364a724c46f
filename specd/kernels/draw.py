"""Drawing tokens in the CPU kernels (src/draw.h); the reference is specd/sampling: filters.py, noise.py, process.py.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from specd.errors import ModelError
from specd.kernels.library import CDraws, Library, Workspace, compute_lock, load_library
from specd.kernels.pack import address


@functools.cache
def loaded() -> Library | None:
    """None when the kernels were not built; whoever loads a model has been told by then."""
    try:
        return load_library()
    except ModelError:
        return None


@functools.cache
def workspace(library: Library) -> Workspace:
    return Workspace(library)  # one for all: calls take turns


def takes(logits: torch.Tensor) -> bool:
    """Whether rows like these are drawn here: real float32 tensors on the CPU, and the kernels are built."""
    plain = type(logits) is torch.Tensor and logits.device.type == "cpu" and logits.dtype == torch.float32
    return plain and loaded() is not None


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    keys: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    library: Library | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each of R rows: tokens i64[R], and usable bool[R]; a row that is not has token 0.

    logits f32[*, V]; rows i64[R] of them, None = all; keys i64[R] of `position_keys`. temperature f32 > 0, top_k i64
    (V: off), top_p f32 (inf: off), min_p f32 (0: off): R values each. Raises ModelError.
    """
    parameters = [tensor.contiguous() for tensor in (temperature, top_k, top_p, min_p)]
    return _call(logits, rows, keys, parameters, library)


def race(weights: torch.Tensor, keys: torch.Tensor, *, library: Library | None = None) -> torch.Tensor:
    """A draw per row in proportion to weights f32[R, V] >= 0, keys i64[R] -> i64[R]. Raises ModelError.

    Any scale, as long as a row's largest weight is no denormal.
    """
    return _call(weights, None, keys, [], library)[0]


def _call(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    keys: torch.Tensor,
    parameters: list[torch.Tensor],
    library: Library | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    library = library or loaded() or load_library()
    logits, keys = logits.contiguous(), keys.contiguous()
    rows = None if rows is None else rows.contiguous()
    count = len(keys)
    assert count == (len(logits) if rows is None else len(rows)), (count, logits.shape)
    assert rows is None or bool(((rows >= 0) & (rows < len(logits))).all()), "rows that the logits do not have"
    tokens, usable = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)
    names = ("temperature", "top_k", "top_p", "min_p")
    record = CDraws(
        logits=address(logits),
        rows=None if rows is None else address(rows),
        keys=address(keys),
        tokens=address(tokens),
        usable=address(usable),
        num_rows=count,
        vocabulary=logits.shape[1],
        stride=logits.shape[1],
        **{name: address(values) for name, values in zip(names, parameters, strict=False)},
    )
    with compute_lock:
        status = library.c.specd_draw(
            library.functions,
            ctypes.byref(record),
            workspace(library).pointer,
            torch.get_num_threads(),
        )
    library.check(status)
    return tokens, usable
