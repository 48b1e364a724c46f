"""What the pipeline needs of a target model, and of a draft language model."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from specd.kv import PagedKV
from specd.tensors import BatchInfo, BestTokens


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers that others size their buffers by."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int  # width of the logits
    max_position: int  # longest context the model was made for


class Model(Protocol):
    """A decoder over packed tokens and paged KV."""

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device

    def prepare(self, batch: BatchInfo) -> BatchInfo:
        """The batch with its attention planned: host work that needs no tokens, done while they are drafted."""
        ...

    def forward(
        self, tokens: torch.Tensor, batch: BatchInfo, kv: PagedKV, *, features: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens i64[T] -> hidden [T, H] after the final norm, and features [T, F] when asked for.

        features: None, "last" (the hidden states after the final norm, F = H) or "aux" (the residual stream entering
        layers 2, L // 2, L - 3, concatenated, F = 3H). Writes the tokens' keys and values at `batch.write_slots`.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V], in the model's dtype."""
        ...

    def best(self, hidden: torch.Tensor) -> BestTokens:
        """[R, H] -> the largest of each row's logits, without more of them than it takes."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of distinct weights (shared ones once)."""
        ...
