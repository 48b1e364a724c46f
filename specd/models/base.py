"""What the pipeline needs of a target model, and of a draft language model."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from specd.errors import ModelError
from specd.kv import PagedKV
from specd.tensors import BatchInfo, BestTokens, TopTokens


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers that others size their buffers by."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int  # width of the logits
    max_position: int  # longest context the model was made for


class KVOwner(Protocol):
    """A model or head that writes keys and values."""

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device


def make_kv(model: KVOwner, *, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> PagedKV:
    """The model's pages; dtype: its own by default."""
    shape = model.shape
    return PagedKV(
        num_layers=shape.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype or model.dtype,
        device=model.device,
    )


def kv_slot_bytes(model: KVOwner, dtype: torch.dtype | None = None) -> int:
    """Bytes of one token's keys and values in all layers."""
    shape = model.shape
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * (dtype or model.dtype).itemsize


def feature_layers(features: str | None, num_layers: int) -> tuple[int, ...]:
    """After how many layers the residual stream is taken for `Model.forward`'s features; () for None and "last".

    Raises ModelError for features that do not exist, or a model too shallow for them.
    """
    if features in (None, "last"):
        return ()
    if features == "pre":
        return (num_layers,)
    if features != "aux":
        raise ModelError(f"unknown features {features!r}; 'last', 'pre' and 'aux' exist")
    if num_layers < 3:
        raise ModelError(f"'aux' features need at least 3 layers, the model has {num_layers}")
    return (2, num_layers // 2, num_layers - 3)


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

        features: None, "last" (the hidden states after the final norm, F = H), "pre" (before it) or "aux" (the residual
        stream entering layers 2, L // 2, L - 3, concatenated, F = 3H). Writes the tokens' keys and values at
        `batch.write_slots`.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V], in the model's dtype."""
        ...

    def best(self, hidden: torch.Tensor) -> BestTokens:
        """[R, H] -> the largest of each row's logits, without more of them than it takes."""
        ...

    def top(self, hidden: torch.Tensor, k: int) -> TopTokens:
        """[R, H] -> the k largest of each row's logits (1 <= k <= V), and what makes log-probabilities of them.

        Equal to `specd.sampling.logprobs.top_tokens` of the logits bit for bit.
        """
        ...

    def weight_bytes(self) -> int:
        """Bytes of distinct weights (shared ones once)."""
        ...
