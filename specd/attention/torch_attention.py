"""Paged attention in plain torch: the CPU backend, and the reference of the others.

`plan` sorts the batch's rows into groups on the host. Rows of few query tokens (decode, verify) share a padded group
with rows of about the same context length; a prefill chunk is a group of its own. `run` gathers each group's context
from its pages, and does one attention call per group. Padding never reads another row's slot or one that was never
written: a padded slot repeats the row's first one, so NaN in junk cannot leak through a weight of zero.

Legend: B rows, T packed query tokens, Bg rows of a group, Q and L its longest query and context, Hq and Hkv heads,
D head dimension, N tree nodes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from specd.attention.tree import ancestor_mask, merge_attention, partial_attention
from specd.step import indptr
from specd.tensors import BatchInfo

I64 = npt.NDArray[np.int64]

MAX_BATCHED_QUERY_LEN = 16  # longer rows are prefill chunks: padding others to their length would cost more than a call


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows that one attention call computes together. Index tensors are on the batch's device."""

    num_rows: int
    query_len: int  # Q
    context_len: int  # L
    query_index: torch.Tensor  # i64[Bg * Q] packed query token; padding repeats the row's first
    kv_index: torch.Tensor  # i64[2 * Bg * L] into kv_layer as [pages * 2 * page_size, ...]: keys, then values
    mask: torch.Tensor | None  # bool[Bg, 1, Q, L], None when `causal` or when everything is seen
    causal: bool  # no context before the query: the top-left causal mask is the right one


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TreePart:
    """The tree's own keys, and masks. A group then holds the prefix alone, its mask [Bg, 1, 1, L] marks real slots."""

    kv_index: torch.Tensor  # i64[2 * B * N]
    mask: torch.Tensor  # bool[B, N, N]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TorchAttentionPlan:
    groups: tuple[Group, ...]
    order: torch.Tensor | None  # i64[T] where each token's output is in the groups' concatenation; None: as it is
    tree: TreePart | None = None


class TorchAttention:
    """Exact softmax attention by torch's scaled_dot_product_attention. Stateless."""

    def plan(self, batch: BatchInfo) -> TorchAttentionPlan:
        if batch.tree is not None:
            return _plan_tree(batch, batch.tree.parents)
        layout = _Layout(batch)
        groups = layout.groups()
        parts = [layout.group(rows) for rows in groups]
        order = _token_order(layout, groups)
        padded = sum(part.num_rows * part.query_len for part in parts)
        as_it_is = padded == len(order) and bool((order == np.arange(padded)).all())
        return TorchAttentionPlan(groups=tuple(parts), order=None if as_it_is else _put(order, batch.positions.device))

    def run(self, query: torch.Tensor, kv_layer: torch.Tensor, plan: TorchAttentionPlan, scale: float) -> torch.Tensor:
        """query [T, Hq, D], kv_layer [pages, 2, page_size, Hkv, D] -> [T, Hq, D] in query's dtype."""
        flat = kv_layer.view(-1, *kv_layer.shape[3:])
        if plan.tree is not None:
            return _run_tree(query, flat, plan.groups[0], plan.tree, scale)
        outputs = [_run_group(query, flat, group, scale) for group in plan.groups]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if plan.order is None else output.index_select(0, plan.order)


class _Layout:
    """Host arithmetic over one batch: who goes with whom, and where everything lies."""

    def __init__(self, batch: BatchInfo) -> None:
        self.batch = batch
        self.query_lens = batch.query_lens_cpu.astype(np.int64)
        self.kv_lens = batch.kv_lens_cpu.astype(np.int64)
        self.starts = indptr(batch.query_lens_cpu).astype(np.int64)

    def groups(self) -> list[list[int]]:
        """Long rows alone; short ones by the power of two of their context, so that no row pads to twice its size."""
        buckets: dict[int, list[int]] = {}
        alone: list[list[int]] = []
        for row, (query_len, kv_len) in enumerate(zip(self.query_lens, self.kv_lens, strict=True)):
            if query_len > MAX_BATCHED_QUERY_LEN:
                alone.append([row])
            elif query_len > 0:
                buckets.setdefault(int(kv_len - 1).bit_length(), []).append(row)
        return [*buckets.values(), *alone]

    def group(self, rows: list[int]) -> Group:
        query_lens, kv_lens = self.query_lens[rows], self.kv_lens[rows]
        num_queries, context = int(query_lens.max()), int(kv_lens.max())
        steps = np.arange(num_queries)
        query_index = self.starts[rows][:, None] + np.where(steps < query_lens[:, None], steps, 0)
        causal = len(rows) == 1 and num_queries == context
        whole = num_queries == 1 and int(kv_lens.min()) == context
        mask = None
        if not causal and not whole:
            # Bottom-right causal: query i of a row stands at kv_len - query_len + i. Padded queries see the first slot.
            stands = np.where(steps < query_lens[:, None], (kv_lens - query_lens)[:, None] + steps, 0)
            mask = np.arange(context) <= stands[:, None, :, None]
        device = self.batch.positions.device
        return Group(
            num_rows=len(rows),
            query_len=num_queries,
            context_len=context,
            query_index=_put(query_index.ravel(), device),
            kv_index=_put(self.kv_index(rows, np.zeros_like(kv_lens), kv_lens), device),
            mask=None if mask is None else torch.from_numpy(mask).to(device, non_blocking=True),
            causal=causal and num_queries > 1,
        )

    def kv_index(self, rows: list[int], first: I64, last: I64) -> I64:
        """Flat places of the slots first[i] : last[i] of each row, keys then values: i64[2 * len(rows) * longest]."""
        batch, page_size = self.batch, self.batch.page_size
        steps = np.arange(max(int((last - first).max(initial=0)), 1))
        # A row without any slot in the range still needs a readable place: its own first slot, masked by the caller.
        slots = np.where(steps < (last - first)[:, None], first[:, None] + steps, 0)
        pages = batch.kv_indices_cpu[batch.kv_indptr_cpu[rows][:, None] + slots // page_size].astype(np.int64)
        keys = pages * (2 * page_size) + slots % page_size
        return np.concatenate([keys.ravel(), keys.ravel() + page_size])


def _token_order(layout: _Layout, groups: list[list[int]]) -> I64:
    order = np.zeros(int(layout.starts[-1]), np.int64)
    base = 0
    for rows in groups:
        width = int(layout.query_lens[rows].max())
        for row in rows:
            length = int(layout.query_lens[row])
            order[layout.starts[row] : layout.starts[row] + length] = base + np.arange(length)
            base += width
    return order


def _put(array: I64, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def _gather(flat: torch.Tensor, index: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """flat [slots, Hkv, D] at index i64[2 * Bg * L] -> [2, Bg, L, Hkv, D]."""
    return flat.index_select(0, index).view(2, num_rows, -1, *flat.shape[1:]).to(dtype)


def _run_group(query: torch.Tensor, flat: torch.Tensor, group: Group, scale: float) -> torch.Tensor:
    queries = query.index_select(0, group.query_index).view(group.num_rows, group.query_len, *query.shape[1:])
    keys, values = _gather(flat, group.kv_index, group.num_rows, query.dtype)
    output = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=group.mask,
        is_causal=group.causal,
        scale=scale,
        enable_gqa=query.shape[1] != flat.shape[1],
    )
    return output.transpose(1, 2).reshape(group.num_rows * group.query_len, *query.shape[1:])


def _plan_tree(batch: BatchInfo, parents: torch.Tensor) -> TorchAttentionPlan:
    layout = _Layout(batch)
    rows = list(range(batch.num_rows))
    num_nodes = parents.shape[1]
    prefix_lens = layout.kv_lens - num_nodes
    device = batch.positions.device
    longest = max(int(prefix_lens.max(initial=0)), 1)
    real = np.arange(longest) < prefix_lens[:, None]
    prefix = Group(
        num_rows=len(rows),
        query_len=num_nodes,
        context_len=longest,
        query_index=_put(np.arange(batch.num_tokens), device),
        kv_index=_put(layout.kv_index(rows, np.zeros_like(prefix_lens), prefix_lens), device),
        mask=torch.from_numpy(real[:, None, None, :]).to(device, non_blocking=True),
        causal=False,
    )
    own = _put(layout.kv_index(rows, prefix_lens, layout.kv_lens), device)
    return TorchAttentionPlan(groups=(prefix,), order=None, tree=TreePart(kv_index=own, mask=ancestor_mask(parents)))


def _run_tree(query: torch.Tensor, flat: torch.Tensor, prefix: Group, tree: TreePart, scale: float) -> torch.Tensor:
    assert prefix.mask is not None
    queries = query.view(prefix.num_rows, prefix.query_len, *query.shape[1:])
    keys, values = _gather(flat, prefix.kv_index, prefix.num_rows, query.dtype)
    above, above_lse = partial_attention(queries, keys, values, prefix.mask[:, 0], scale)
    keys, values = _gather(flat, tree.kv_index, prefix.num_rows, query.dtype)
    own, own_lse = partial_attention(queries, keys, values, tree.mask, scale)
    return merge_attention(above, above_lse, own, own_lse).to(query.dtype).view_as(query)
