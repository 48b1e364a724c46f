"""The seam between models and attention kernels."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from specd.tensors import BatchInfo


class AttentionBackend(Protocol):
    """Paged attention. `plan` runs once a forward (host work), `run` once a layer."""

    def plan(self, batch: BatchInfo) -> Any:
        """Whatever `run` needs; with `batch.tree` set, prefix and tree attention are split and merged by LSE."""
        ...

    def run(self, query: torch.Tensor, kv_layer: torch.Tensor, plan: Any, scale: float) -> torch.Tensor:
        """query [T, Hq, D], kv_layer [pages, 2, page_size, Hkv, D] (0 = keys) -> [T, Hq, D].

        The query rows' own keys and values are already in the cache.
        """
        ...
