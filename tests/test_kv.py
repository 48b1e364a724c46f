"""Page tensors: append at the batch's slots, compaction of overlapping moves, features."""

from __future__ import annotations

import numpy as np
import torch

from specd.kv import PagedFeatures, PagedKV
from specd.step import indptr
from specd.tensors import BatchInfo, batch_info

CPU = torch.device("cpu")


def batch_of(query_lens: list[int], kv_lens: list[int], pages: list[list[int]], page_size: int) -> BatchInfo:
    return batch_info(
        query_lens=np.asarray(query_lens, np.int32),
        kv_lens=np.asarray(kv_lens, np.int32),
        page_indptr=indptr(np.asarray([len(row) for row in pages], np.int32)),
        page_indices=np.asarray([page for row in pages for page in row], np.int32),
        slots=np.arange(len(pages), dtype=np.int32),
        page_size=page_size,
        device=CPU,
    )


def empty_kv(page_size: int, *, layers: int = 2, pages: int = 6, dtype: torch.dtype = torch.float32) -> PagedKV:
    return PagedKV(
        num_layers=layers, num_pages=pages, page_size=page_size, num_kv_heads=2, head_dim=3, dtype=dtype, device=CPU
    )


def test_append_writes_the_last_positions_of_each_row_and_nothing_else() -> None:
    kv = empty_kv(4)
    batch = batch_of([3, 1], [6, 2], [[5, 1], [3]], 4)
    keys, values = torch.randn(2, 4, 2, 3)
    kv.append(1, batch, keys, values)
    for token, (page, offset) in enumerate([(5, 3), (1, 0), (1, 1), (3, 1)]):
        assert torch.equal(kv.layers[1][page, 0, offset], keys[token])
        assert torch.equal(kv.layers[1][page, 1, offset], values[token])
    assert int((kv.layers[1] != 0).any(-1).any(-1).sum()) == 8  # four tokens, keys and values
    assert not kv.layers[0].any()


def test_append_casts_to_the_cache_dtype() -> None:
    kv = empty_kv(2, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 1, 2, 3)
    kv.append(0, batch_of([1], [1], [[2]], 2), keys, values)
    assert torch.equal(kv.layers[0][2, 0, 0], keys[0].bfloat16())
    assert torch.equal(kv.layers[0][2, 1, 0], values[0].bfloat16())


def test_compact_gathers_before_it_writes() -> None:
    """An accepted path 2, 3, 5 of a tree goes to 1, 2, 3: sources are targets of other moves, across a page border."""
    kv = empty_kv(4)
    for layer in kv.layers:
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in kv.layers]
    kv.compact(torch.tensor([2, 3, 5]), torch.tensor([1, 2, 3]))
    for layer, old in zip(kv.layers, before, strict=True):
        assert torch.equal(layer[0, :, 1], old[0, :, 2])
        assert torch.equal(layer[0, :, 2], old[0, :, 3])
        assert torch.equal(layer[0, :, 3], old[1, :, 1])
        assert torch.equal(layer[0, :, 0], old[0, :, 0])
        assert torch.equal(layer[1:], old[1:])


def test_compact_of_a_cycle_and_of_moves_to_itself() -> None:
    kv = empty_kv(4, layers=1)
    kv.layers[0].copy_(torch.randn(kv.layers[0].shape))
    old = kv.layers[0].clone()
    kv.compact(torch.tensor([0, 1, 7]), torch.tensor([1, 0, 7]))
    assert torch.equal(kv.layers[0][0, :, 0], old[0, :, 1])
    assert torch.equal(kv.layers[0][0, :, 1], old[0, :, 0])
    assert torch.equal(kv.layers[0][1], old[1])


def test_features_come_back_from_where_they_were_written() -> None:
    features = PagedFeatures(num_pages=4, page_size=4, width=5, dtype=torch.float32, device=CPU)
    batch = batch_of([3, 2], [5, 2], [[2, 0], [3]], 4)
    written = torch.randn(5, 5)
    features.write(batch, written)
    assert torch.equal(features.read(batch.write_slots), written)
    assert not features.read(torch.tensor([4, 5])).any()  # page 1 belongs to nobody
