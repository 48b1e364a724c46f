"""The seam for drafters: models that propose tokens, with KV and a carry. A drafter has two forwards."""

from __future__ import annotations

from typing import Protocol

import torch

from specd.step import DraftTraits
from specd.tensors import BatchInfo, DraftState


class Drafter(Protocol):
    """Called on the draft stream only; owns its KV tensors, which share the target's page ids."""

    traits: DraftTraits
    vocab_size: int  # width of its logits; never more than the target's

    def extend(self, tokens: torch.Tensor, state: DraftState, batch: BatchInfo, *, logits: bool) -> DraftState:
        """One more draft token per row: tokens i64[B] at `batch.positions`, drawn from `state` (rows as in tokens).

        logits: whether the next drafts are drawn from logits; else the best token of each row is enough.
        """
        ...

    def refill(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor | None,
        batch: BatchInfo,
        last_rows: torch.Tensor,
        *,
        logits: bool,
    ) -> DraftState:
        """Catches up: tokens i64[T], features [T, F] for heads; gives the state of the packed rows last_rows i64[B]."""
        ...

    def make_carry(self, num_slots: int) -> DraftState:
        """An empty carry with logits, one row a slot."""
        ...

    def kv_bytes_per_page(self, page_size: int) -> int: ...

    def allocate(self, *, num_pages: int, page_size: int) -> None:
        """Makes the KV tensors; called once, before anything else."""
        ...
