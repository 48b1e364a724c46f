"""The CPU kernels for tests: the levels this machine runs, weights in every format, single projections."""

from __future__ import annotations

import ctypes
import os
import shutil
from typing import Any

import gguf
import gguf.quants
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specd.errors import ModelError
from specd.kernels.library import Library, Workspace, load_library
from specd.kernels.pack import PackedMatrix, Rows, WeightMemory, linear_record
from specd.models.config import LlamaConfig
from specd.models.native import Activations, NativeLlama, TensorSource
from tests.tiny import tiny_config, tiny_weights

Kind = GGMLQuantizationType
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
QUANTISED = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K)
KINDS = (*FLOATS, *QUANTISED)


def _levels() -> tuple[str, ...]:
    try:
        return load_library("").levels
    except ModelError:
        # With a compiler the install must have built them; without one specd is meant to run on torch.
        if os.environ.get("CI") and shutil.which("cc"):
            raise
        return ()


LEVELS = _levels()
needs_kernels = pytest.mark.skipif(not LEVELS, reason="the CPU kernels were not built (no C compiler?)")


def random_rows(kind: Kind, rows: int, cols: int, seed: int = 0) -> Rows:
    """Rows of about normal weights of size 0.1 in a format. K formats: random blocks with sane scales."""
    rng = np.random.default_rng(seed)
    if kind in (Kind.Q4_K, Kind.Q6_K):
        block, size = GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
        scale_at, scale = ((0, 1e-4), (2, 1e-4)), (rng.random((2, rows, cols // block)) + 0.5)
        if kind == Kind.Q6_K:
            scale_at = ((208, 1e-4),)
        for (at, unit), values in zip(scale_at, scale, strict=False):
            data[:, :, at : at + 2] = (values * unit).astype(np.float16)[..., None].view(np.uint8)
        return Rows(int(kind), data.reshape(rows, -1), cols)
    values = (0.1 * rng.standard_normal((rows, cols))).astype(np.float32)
    data = gguf.quants.quantize(values, kind)
    return Rows(int(kind), np.ascontiguousarray(data).view(np.uint8).reshape(rows, -1), cols)


def dequantised(rows: Rows) -> torch.Tensor:
    """f32[rows, cols] by the gguf package."""
    values = gguf.quants.dequantize(rows.data, Kind(rows.kind)).reshape(rows.num_rows, rows.cols)
    return torch.from_numpy(np.array(values, np.float32))


class Projection:
    """One packed matrix that can be multiplied with."""

    def __init__(self, rows: Rows, *, level: str, bias: torch.Tensor | None = None) -> None:
        self.library: Library = load_library(level)
        self.matrix = PackedMatrix(self.library, WeightMemory(), rows, name="test", bias=bias)
        self.workspace = Workspace(self.library)

    def __call__(self, x: torch.Tensor, *, activations: Activations, threads: int = 1) -> torch.Tensor:
        out = torch.empty(len(x), self.matrix.num_rows)
        record = linear_record(self.matrix)
        status = self.library.c.specd_linear_rows(
            self.library.functions,
            ctypes.byref(record),
            int(activations == "fast"),
            x.contiguous().data_ptr(),
            len(x),
            out.data_ptr(),
            self.workspace.pointer,
            threads,
        )
        self.library.check(status)
        return out


class QuantisedSource(TensorSource):
    """tiny_weights with the matrices in a format of GGUF, also as the tensors that torch gets."""

    def __init__(self, config: LlamaConfig, kind: Kind, seed: int = 0) -> None:
        self.kind = kind
        self.packed = {
            name: Rows(int(kind), gguf.quants.quantize(t.numpy(), kind).view(np.uint8).reshape(len(t), -1), t.shape[1])
            for name, t in tiny_weights(config, seed).items()
            if t.ndim == 2
        }
        super().__init__(tiny_weights(config, seed) | {name: dequantised(rows) for name, rows in self.packed.items()})

    def rows(self, name: str) -> Rows:
        return self.packed[name]


def native_llama(
    *,
    kind: Kind = Kind.Q4_1,
    activations: Activations = "fast",
    level: str = "",
    config: LlamaConfig | None = None,
    **overrides: Any,
) -> NativeLlama:
    """A tiny random Llama in the kernels."""
    config = config or tiny_config(**overrides)
    return NativeLlama(config, QuantisedSource(config, kind), activations=activations, library=load_library(level))
