"""The pieces of a decoder layer: functions and small records over tensors. Inference only.

Legend: T packed tokens, H hidden, D head size, N heads, I the MLP's inner size.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F

from specd.errors import ModelError
from specd.models.config import RopeConfig


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """x [..., in] -> [..., out]."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None  # [out]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, statistics in fp32, result in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def swiglu(x: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)); gate and up are one matmul, gate's rows first."""
    gate, up = gate_up(x).chunk(2, dim=-1)
    return down(F.silu(gate) * up)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians a token of each rotated pair, f32[D / 2], on the CPU.

    llama3: wavelengths past the original context are slowed by `factor`, short ones kept, between them a linear blend
    (Llama 3.1; the same arithmetic as transformers' `_compute_llama3_parameters`). Raises ModelError for frequencies
    that turn nothing.
    """
    divisors = (rope.theta, rope.factor, *(rope.freq_factors or ()))
    if not all(0 < divisor < math.inf for divisor in divisors):
        raise ModelError(f"the frequencies of {rope} are not all positive and finite")
    if rope.kind == "llama3" and not rope.low_freq_factor < rope.high_freq_factor:
        raise ModelError(f"the frequencies of {rope} are not defined: low_freq_factor must be below high_freq_factor")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif rope.kind != "default":
        raise ModelError(f"rope kind {rope.kind!r} is not supported; default, linear and llama3 are")
    if rope.freq_factors is not None:
        if len(rope.freq_factors) != head_dim // 2:
            raise ModelError(f"{len(rope.freq_factors)} rope factors do not fit a head size of {head_dim}: it has half")
        inv_freq = inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return inv_freq


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    wavelen = 2 * math.pi / inv_freq
    blend = (rope.original_max_position / wavelen - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)  # 1: kept as it is, 0: slowed by the whole factor
    return (1 - blend) * inv_freq / rope.factor + blend * inv_freq


def rope_angles(
    inv_freq: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, D] of positions i64[T]; computed in fp32 whatever the dtype asked for."""
    angles = positions.float()[:, None] * inv_freq  # [T, D / 2]
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, N, D] turned by its tokens' angles; pairs are (i, i + D / 2), the half-split order of HF checkpoints."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
