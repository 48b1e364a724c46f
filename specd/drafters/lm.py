"""Target-draft: a smaller language model proposes (SONAR's first scheme, spec/methods.md 2).

Its KV covers every token up to and including the newest one, one slot more than the target's, so that its logits after
the newest token can be carried to the next step: the first draft token costs no forward.
"""

from __future__ import annotations

import torch

from specd.errors import DraftError
from specd.kv import PagedKV
from specd.models.base import Model
from specd.step import DraftTraits
from specd.tensors import BatchInfo, DraftState


class LMDrafter:
    """A draft language model with its own KV tensors and the target's page ids.

    vocab_size: a draft whose lm_head is wider than the target's (padded) is sliced, a narrower one is filled with -inf:
    what it cannot say it never proposes.
    """

    def __init__(self, model: Model, *, name: str, vocab_size: int, max_depth: int, max_context: int | None) -> None:
        self.traits = DraftTraits(name=name, max_depth=max_depth, max_context=max_context)
        self.vocab_size = vocab_size
        self._model = model
        self._kv: PagedKV | None = None

    def kv_bytes_per_page(self, page_size: int) -> int:
        shape = self._model.shape
        return 2 * shape.num_layers * page_size * shape.num_kv_heads * shape.head_dim * self._model.dtype.itemsize

    def allocate(self, *, num_pages: int, page_size: int) -> None:
        shape = self._model.shape
        self._kv = PagedKV(
            num_layers=shape.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=self._model.dtype,
            device=self._model.device,
        )

    def make_carry(self, num_slots: int) -> DraftState:
        return DraftState(logits=torch.zeros((num_slots, self.vocab_size), device=self._model.device))

    @property
    def kv(self) -> PagedKV:
        if self._kv is None:
            raise DraftError(f"drafter {self.traits.name}: allocate() was not called")
        return self._kv

    def extend(self, tokens: torch.Tensor, state: DraftState, batch: BatchInfo) -> DraftState:
        out, _ = self._model.forward(tokens, batch, self.kv)
        return DraftState(logits=self._fit(self._model.logits(out)))

    def refill(
        self, tokens: torch.Tensor, features: torch.Tensor | None, batch: BatchInfo, last_rows: torch.Tensor
    ) -> DraftState:
        out, _ = self._model.forward(tokens, batch, self.kv)
        return DraftState(logits=self._fit(self._model.logits(out[last_rows])))

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, V_draft] -> f32 [B, V_target]."""
        width = logits.shape[-1]
        if width >= self.vocab_size:
            return logits[:, : self.vocab_size].float()
        return torch.nn.functional.pad(logits.float(), (0, self.vocab_size - width), value=float("-inf"))
