"""Target-draft: a smaller language model proposes (SONAR's first scheme, spec/methods.md 2).

Its KV covers every token up to and including the newest one, one slot more than the target's, so that its logits after
the newest token can be carried to the next step: the first draft token costs no forward.
"""

from __future__ import annotations

import torch

from specd.errors import DraftError
from specd.kv import PagedKV
from specd.models.base import Model, kv_slot_bytes, make_kv
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
        return kv_slot_bytes(self._model) * page_size

    def allocate(self, *, num_pages: int, page_size: int) -> None:
        self._kv = make_kv(self._model, num_pages=num_pages, page_size=page_size)

    def make_carry(self, num_slots: int) -> DraftState:
        device = self._model.device
        best = torch.zeros(num_slots, dtype=torch.int64, device=device)
        return DraftState(best, torch.zeros((num_slots, self.vocab_size), device=device))

    @property
    def kv(self) -> PagedKV:
        if self._kv is None:
            raise DraftError(f"drafter {self.traits.name}: allocate() was not called")
        return self._kv

    def extend(self, tokens: torch.Tensor, state: DraftState, batch: BatchInfo, *, logits: bool) -> DraftState:
        out, _ = self._model.forward(tokens, batch, self.kv)
        return self._state(out, logits)

    def refill(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor | None,
        batch: BatchInfo,
        last_rows: torch.Tensor,
        *,
        logits: bool,
    ) -> DraftState:
        out, _ = self._model.forward(tokens, batch, self.kv)
        return self._state(out[last_rows], logits)

    def _state(self, out: torch.Tensor, logits: bool) -> DraftState:
        if logits or self._model.shape.vocab_size > self.vocab_size:
            return DraftState.of(self._fit(self._model.logits(out)))
        return DraftState(self._model.best(out).tokens)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, V_draft] -> f32 [B, V_target]."""
        width = logits.shape[-1]
        if width >= self.vocab_size:
            return logits[:, : self.vocab_size].float()
        return torch.nn.functional.pad(logits.float(), (0, self.vocab_size - width), value=float("-inf"))
