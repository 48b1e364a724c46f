"""The torch backend against attention written out row by row; trees against a mask over everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specd.attention.torch_attention import TorchAttention
from specd.attention.tree import ancestor_mask, merge_attention, partial_attention
from specd.step import indptr
from specd.tensors import BatchInfo, TokenTree, batch_info

HEADS, KV_HEADS, DIM = 6, 2, 16
SCALE = DIM**-0.5


def batch_of(query_lens: list[int], kv_lens: list[int], *, page_size: int, tree: TokenTree | None = None) -> BatchInfo:
    """Rows on shuffled pages, each with a page more than it needs."""
    kv = np.asarray(kv_lens, np.int32)
    num_pages = ((kv + page_size - 1) // page_size + 1).astype(np.int32)
    pages = np.random.default_rng(3).permutation(int(num_pages.sum())).astype(np.int32)
    return batch_info(
        query_lens=np.asarray(query_lens, np.int32),
        kv_lens=kv,
        page_indptr=indptr(num_pages),
        page_indices=pages,
        slots=np.arange(len(kv), dtype=np.int32),
        page_size=page_size,
        device=torch.device("cpu"),
        tree=tree,
    )


def tensors_for(batch: BatchInfo, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and a KV layer in which every slot that no row owns is NaN."""
    generator = torch.Generator().manual_seed(seed)
    pages = int(batch.kv_indices_cpu.max()) + 2
    kv = torch.full((pages, 2, batch.page_size, KV_HEADS, DIM), float("nan"))
    for row in range(batch.num_rows):
        page, offset = slots_of(batch, row)
        kv[page, :, offset] = torch.randn(len(page), 2, KV_HEADS, DIM, generator=generator)
    return torch.randn(batch.num_tokens, HEADS, DIM, generator=generator), kv


def slots_of(batch: BatchInfo, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(int(batch.kv_lens_cpu[row]))
    pages = torch.from_numpy(batch.kv_indices_cpu[batch.kv_indptr_cpu[row] : batch.kv_indptr_cpu[row + 1]]).long()
    return pages[positions // batch.page_size], positions % batch.page_size


def written_out(
    query: torch.Tensor, kv: torch.Tensor, batch: BatchInfo, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax attention in fp64, one row after the other; `mask` bool[B, N, N] holds among the last N keys."""
    outputs = []
    starts = indptr(batch.query_lens_cpu)
    for row in range(batch.num_rows):
        length, context = int(batch.query_lens_cpu[row]), int(batch.kv_lens_cpu[row])
        page, offset = slots_of(batch, row)
        keys, values = (kv[page, i, offset].double().repeat_interleave(HEADS // KV_HEADS, 1) for i in (0, 1))
        seen = torch.arange(context) <= torch.arange(context - length, context)[:, None]
        if mask is not None:
            seen = torch.cat([torch.ones(length, context - length, dtype=torch.bool), mask[row]], 1)
        scores = torch.einsum("qhd,lhd->hql", query[starts[row] : starts[row + 1]].double(), keys) * SCALE
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hql,lhd->qhd", weights, values))
    return torch.cat(outputs).float()


def attend(query: torch.Tensor, kv: torch.Tensor, batch: BatchInfo) -> torch.Tensor:
    backend = TorchAttention()
    return backend.run(query, kv, backend.plan(batch), SCALE)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("query_lens", "kv_lens"),
    [
        ([1], [1]),
        ([1, 1, 1], [7, 7, 7]),
        ([1, 1, 1], [3, 90, 4]),
        ([5, 2, 1, 5], [5, 40, 33, 64]),
        ([40], [40]),
        ([40], [75]),
        ([1, 30, 4, 17, 2], [70, 30, 9, 50, 2]),
        ([0, 3, 0], [4, 9, 2]),
    ],
)
def test_equals_attention_row_by_row(query_lens: list[int], kv_lens: list[int], page_size: int) -> None:
    batch = batch_of(query_lens, kv_lens, page_size=page_size)
    query, kv = tensors_for(batch)
    torch.testing.assert_close(attend(query, kv, batch), written_out(query, kv, batch), atol=2e-6, rtol=0)


def test_a_short_row_is_not_padded_to_a_long_ones_length() -> None:
    plan = TorchAttention().plan(batch_of([1, 1, 1], [4000, 50, 60], page_size=16))
    assert sorted((group.num_rows, group.context_len) for group in plan.groups) == [(1, 4000), (2, 60)]


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    together = batch_of([4, 2, 1, 20], [30, 21, 17, 40], page_size=16)
    query, kv = tensors_for(together)
    output = attend(query, kv, together)
    starts = indptr(together.query_lens_cpu)
    for row in range(4):
        pages = together.kv_indices_cpu[together.kv_indptr_cpu[row] : together.kv_indptr_cpu[row + 1]]
        alone = batch_info(
            query_lens=together.query_lens_cpu[row : row + 1],
            kv_lens=together.kv_lens_cpu[row : row + 1],
            page_indptr=indptr(np.asarray([len(pages)], np.int32)),
            page_indices=pages,
            slots=np.zeros(1, np.int32),
            page_size=16,
            device=torch.device("cpu"),
        )
        mine = slice(int(starts[row]), int(starts[row + 1]))
        torch.testing.assert_close(attend(query[mine], kv, alone), output[mine], atol=1e-5, rtol=0)


def test_keeps_the_querys_dtype_when_the_cache_has_another() -> None:
    batch = batch_of([2, 1], [9, 30], page_size=16)
    query, kv = tensors_for(batch)
    output = attend(query.bfloat16(), kv, batch)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), written_out(query, kv, batch), atol=3e-2, rtol=0)


def random_tree(rows: int, nodes: int, *, seed: int = 1) -> TokenTree:
    rng = np.random.default_rng(seed)
    parents = np.full((rows, nodes), -1, np.int64)
    depths = np.zeros((rows, nodes), np.int64)
    for row in range(rows):
        for node in range(1, nodes):
            parents[row, node] = rng.integers(0, node)
            depths[row, node] = depths[row, parents[row, node]] + 1
    return TokenTree(
        tokens=torch.from_numpy(rng.integers(0, 50, (rows, nodes))),
        parents=torch.from_numpy(parents),
        depths=torch.from_numpy(depths),
    )


def chain_tree(rows: int, nodes: int) -> TokenTree:
    steps = torch.arange(nodes).expand(rows, nodes)
    return TokenTree(tokens=steps.clone(), parents=steps - 1, depths=steps.clone())


def test_ancestor_mask_is_the_walk_to_the_root() -> None:
    for nodes in (1, 2, 3, 9, 33):
        tree = random_tree(2, nodes)
        mask = ancestor_mask(tree.parents)
        for row in range(2):
            for node in range(nodes):
                walk, here = set(), node
                while here >= 0:
                    walk.add(here)
                    here = int(tree.parents[row, here])
                assert {j for j in range(nodes) if mask[row, node, j]} == walk


def test_ancestor_mask_of_a_deep_chain() -> None:
    assert torch.equal(ancestor_mask(chain_tree(1, 60).parents)[0], torch.ones(60, 60).tril().bool())


@pytest.mark.parametrize("prefix_lens", [[20, 33], [0, 18], [0, 0]])
def test_tree_attention_equals_a_mask_over_everything(prefix_lens: list[int]) -> None:
    tree = random_tree(2, 7)
    batch = batch_of([7, 7], [length + 7 for length in prefix_lens], page_size=16, tree=tree)
    query, kv = tensors_for(batch)
    expected = written_out(query, kv, batch, ancestor_mask(tree.parents))
    torch.testing.assert_close(attend(query, kv, batch), expected, atol=1e-6, rtol=0)


def test_a_chain_as_a_tree_equals_causal() -> None:
    as_tree = batch_of([5, 5], [25, 9], page_size=16, tree=chain_tree(2, 5))
    query, kv = tensors_for(as_tree)
    causal = attend(query, kv, batch_of([5, 5], [25, 9], page_size=16))
    torch.testing.assert_close(attend(query, kv, as_tree), causal, atol=1e-6, rtol=0)


def test_merging_two_halves_is_attention_over_both() -> None:
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(1, 3, HEADS, DIM, generator=generator)
    keys, values = torch.randn(2, 1, 10, KV_HEADS, DIM, generator=generator)
    mask = torch.ones(1, 3, 10, dtype=torch.bool)
    whole, _ = partial_attention(query, keys, values, mask, SCALE)
    first = partial_attention(query, keys[:, :4], values[:, :4], mask[..., :4], SCALE)
    second = partial_attention(query, keys[:, 4:], values[:, 4:], mask[..., 4:], SCALE)
    torch.testing.assert_close(merge_attention(*first, *second), whole, atol=1e-6, rtol=0)
    blind, lse = partial_attention(query, keys, values, ~mask, SCALE)
    assert not blind.any()
    assert bool((lse == float("-inf")).all())
    torch.testing.assert_close(merge_attention(blind, lse, *second), second[0], atol=0, rtol=0)
