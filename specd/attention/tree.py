"""Attention of token trees in two parts: ancestor masks, partial attention with its log-sum-exp, and the merge.

A mask over the whole context would cost as much as the context is long; only the tree's own N x N part needs one.

Legend: B rows, H heads (key heads Hkv, G queries a key head), N tree nodes, L context, D head dimension.
"""

from __future__ import annotations

import torch


def ancestor_mask(parents: torch.Tensor) -> torch.Tensor:
    """parents i64[B, N] (parents first, -1 for the root) -> bool[B, N, N]: [i, j] when j is i or an ancestor of i.

    The transitive closure by squaring: ceil(log2 N) small matrix products, no look at the values from the host.
    """
    num_nodes = parents.shape[1]
    nodes = torch.arange(num_nodes, device=parents.device)
    reach = ((nodes == parents[:, :, None]) | (nodes == nodes[:, None])).float()
    for _ in range(max(num_nodes - 1, 1).bit_length()):
        reach = (reach @ reach).clamp(max=1.0)
    return reach > 0


def partial_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over a part of the context, in fp32, with what is needed to merge it with another part.

    query [B, N, Hq, D], keys and values [B, L, Hkv, D], mask bool broadcastable to [B, N, L]
    -> output f32[B, N, Hq, D], lse f32[B, N, Hq] (natural log). A query that sees nothing gets 0 and -inf.
    """
    batch, num_nodes, heads, dim = query.shape
    kv_heads = keys.shape[2]
    grouped = query.float().view(batch, num_nodes, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("bnhgd,blhd->bnhgl", grouped, keys.float()) * scale
    scores = scores.masked_fill(~mask[:, :, None, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # exp(-inf - -inf) would be NaN: a query that sees nothing is given a finite reference, its weights are all 0.
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    output = torch.einsum("bnhgl,blhd->bnhgd", weights, values.float())
    return output.reshape(batch, num_nodes, heads, dim), lse.reshape(batch, num_nodes, heads)


def merge_attention(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> torch.Tensor:
    """Attention over the union of two disjoint parts: outputs [..., D] and lse [...] of both -> [..., D].

    At least one part must have seen something (a tree node always sees itself).
    """
    lse = torch.logaddexp(first_lse, second_lse)
    return first * torch.exp(first_lse - lse)[..., None] + second * torch.exp(second_lse - lse)[..., None]
