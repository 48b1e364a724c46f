"""Page tensors of one model: append, compact. The page ids come from `pages.py`; nothing here allocates pages."""

from __future__ import annotations

import math

import numpy as np
import torch

from specd.tensors import BatchInfo


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU a page of memory is taken only when it is first written, so an idle pool costs nothing.

    (torch.zeros writes all of it.) Aligned to 64 bytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


class PagedKV:
    """Keys and values of one model: one tensor a layer, [pages, 2, page_size, Hkv, D] (index 0 keys, 1 values).

    Nothing is erased: lengths shrink on the host and slots are written again. Junk beyond a length is never read.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_pages, 2, page_size, num_kv_heads, head_dim)
        self.page_size = page_size
        self.layers = [lazy_zeros(shape, dtype, device) for _ in range(num_layers)]

    def append(self, layer: int, batch: BatchInfo, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values [T, Hkv, D] of the batch's query tokens at `batch.write_slots`."""
        kv = self.layers[layer]
        pages = batch.write_slots // self.page_size
        offsets = batch.write_slots % self.page_size
        kv[pages, 0, offsets] = keys.to(kv.dtype)
        kv[pages, 1, offsets] = values.to(kv.dtype)

    def compact(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Moves flat slots source -> target (i64[M] each) in every layer: a tree's accepted path becomes a chain.

        Everything is gathered before anything is written, so overlapping moves are safe.
        """
        for kv in self.layers:
            moved = kv[source_slots // self.page_size, :, source_slots % self.page_size].clone()
            kv[target_slots // self.page_size, :, target_slots % self.page_size] = moved


class PagedFeatures:
    """Target hidden states that a head reads, paged with the same ids: [pages, page_size, F]."""

    def __init__(self, *, num_pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.data = lazy_zeros((num_pages, page_size, width), dtype, device)
        self._flat = self.data.view(-1, width)

    def write(self, batch: BatchInfo, features: torch.Tensor) -> None:
        """features [T, F] at the batch's query slots."""
        self._flat.index_copy_(0, batch.write_slots, features.to(self.data.dtype))

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Flat slots i64[M] -> [M, F]."""
        return self._flat.index_select(0, slots)
