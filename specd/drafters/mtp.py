"""MTP: a head on the target's hidden states proposes (spec: methods 5.6).

Its KV has one slot for each of the target's: slot i holds (h_i, t_{i+1}), so that a refill can reuse the target's own
batch, tokens shifted left by one (PADDED). The first draft token comes from the logits carried over; each further one
is a forward of the head on its own output (the chain's slots are written again by the next refill).
"""

from __future__ import annotations

from typing import Protocol

import torch

from specd.errors import DraftError
from specd.kv import PagedKV
from specd.models.base import KVOwner, kv_slot_bytes, make_kv
from specd.models.heads import HeadConfig
from specd.step import DraftTraits, RefillMode
from specd.tensors import BatchInfo, DraftState


class HeadModel(KVOwner, Protocol):
    """`specd.models.heads.Head`, whoever computes it."""

    config: HeadConfig

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, batch: BatchInfo, kv: PagedKV, *, own: bool
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward_best(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        batch: BatchInfo,
        kv: PagedKV,
        rows: torch.Tensor,
        *,
        own: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def logits(self, out: torch.Tensor) -> torch.Tensor: ...


class MtpDrafter:
    """`Drafter` around one head. vocab_size: the target's; a reduced draft vocabulary has -inf elsewhere."""

    def __init__(
        self,
        head: HeadModel,
        *,
        name: str,
        max_depth: int,
        max_context: int | None = None,
        refill_mode: RefillMode = RefillMode.PADDED,
    ) -> None:
        self.traits = DraftTraits(
            name=name,
            max_depth=max_depth,
            max_context=max_context,
            refill_mode=refill_mode,
            shifted=True,
            features=head.config.features,
            leader_only=False,
        )
        self.vocab_size = head.config.vocab_size
        self._head = head
        self._kv: PagedKV | None = None

    def kv_bytes_per_page(self, page_size: int) -> int:
        return kv_slot_bytes(self._head) * page_size

    def allocate(self, *, num_pages: int, page_size: int) -> None:
        self._kv = make_kv(self._head, num_pages=num_pages, page_size=page_size)

    def make_carry(self, num_slots: int) -> DraftState:
        device = self._head.device
        return DraftState(
            best=torch.zeros(num_slots, dtype=torch.int64, device=device),
            logits=torch.zeros((num_slots, self.vocab_size), device=device),
            hidden=torch.zeros((num_slots, self._head.config.hidden_size), dtype=self._head.dtype, device=device),
        )

    @property
    def kv(self) -> PagedKV:
        if self._kv is None:
            raise DraftError(f"drafter {self.traits.name}: allocate() was not called")
        return self._kv

    def extend(self, tokens: torch.Tensor, state: DraftState, batch: BatchInfo, *, logits: bool) -> DraftState:
        assert state.hidden is not None
        every = torch.arange(len(tokens), device=tokens.device)
        return self._state(tokens, state.hidden, batch, every, own=True, logits=logits)

    def refill(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor | None,
        batch: BatchInfo,
        last_rows: torch.Tensor,
        *,
        logits: bool,
    ) -> DraftState:
        assert features is not None
        return self._state(tokens, features, batch, last_rows, own=False, logits=logits)

    def _state(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        batch: BatchInfo,
        rows: torch.Tensor,
        *,
        own: bool,
        logits: bool,
    ) -> DraftState:
        """After the packed rows i64[B]."""
        if not logits:
            best, hidden = self._head.forward_best(tokens, states, batch, self.kv, rows, own=own)
            return DraftState(best, hidden=hidden)
        out, fed_back = self._head.forward(tokens, states, batch, self.kv, own=own)
        return DraftState.of(self._head.logits(out[rows]), fed_back[rows])
