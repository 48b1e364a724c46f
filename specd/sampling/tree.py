"""Acceptance of draft trees: the path from the root that is kept, and where its KV lies.

    draws or probabilities of all nodes -> the child that each node would go to -> descend from the root -> path

Exact rule: go to the child that equals the target's draw at its parent (greedy: the longest path of argmaxes).
Ratio rule: spec methods 1.7(a), children are point masses tried in order, in its single-coin form: one coin u per node,
the first child with u < the summed p of the children so far; else p without the children is drawn from.

Legend: B rows, N nodes a row, D deepest node, R = logits rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from specd.attention.tree import ancestor_mask
from specd.sampling.batch import SamplingBatch
from specd.sampling.chain import finish, usable_rows
from specd.sampling.noise import Purpose, position_keys, uniform
from specd.sampling.process import Distribution, process, race
from specd.tensors import Acceptance, BatchInfo, LogitMasks, TargetOutput, TokenTree

# (the target's [R, V], tree, batch, depth) -> (path i64[B, D + 1] padded -1, newest token i64[B])
TreeRule = Callable[[Distribution, TokenTree, SamplingBatch, int], tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TreeAcceptance:
    acceptance: Acceptance  # tokens [B, D + 1]
    path: torch.Tensor  # i64[B, D + 1] kept nodes from the root on, padded -1; just the root where the row failed


def tree_batch(batch: SamplingBatch, tree: TokenTree) -> SamplingBatch:
    """`sampling_batch` of a plan whose rows verify N - 1 drafts each, once the tree's shape is known."""
    tokens_above = ancestor_mask(tree.parents)[:, :, 1:]  # drafts are the nodes after the root
    parents = tree.parents[batch.sequence, batch.node].clamp(min=0)
    return dataclasses.replace(
        batch,
        depth=tree.depths[batch.sequence, batch.node],
        parent=batch.row_index[batch.sequence, parents],
        ancestors=tokens_above[batch.sequence, batch.node],
    )


def accept_tree(
    output: TargetOutput,
    tree: TokenTree,
    info: BatchInfo,
    sampling: SamplingBatch,
    *,
    max_depth: int,
    rule: str = "exact",
    masks: LogitMasks | None = None,
) -> TreeAcceptance:
    """The accept stage of a batch of trees. sampling comes from `tree_batch`; max_depth is D, known to the host.

    Every row emits, and has N logits rows in node order. Failed rows as in `chain.accept`.
    """
    logits = output.all_logits()
    processed = process(logits, tree.tokens[:, 1:], sampling, masks)
    target = Distribution(processed, sampling)
    path, newest = TREE_RULES[rule](target, tree, sampling, max_depth)
    num_accepted = (path >= 0).sum(-1) - 1
    nodes = path.clamp(min=0)
    kept = tree.tokens.gather(1, nodes).masked_fill(path < 0, -1)
    tokens = torch.cat([kept[:, 1:], torch.full_like(kept[:, :1], -1)], dim=1)
    tokens = tokens.scatter_(1, num_accepted[:, None], newest[:, None])
    last_node = nodes.gather(1, num_accepted[:, None])[:, 0]
    finite = usable_rows(target.finite(), processed, logits)
    rows = sampling.row_index.gather(1, nodes)
    acceptance = finish(logits, finite, info, sampling, tokens, num_accepted, rows, last_node)
    beyond = torch.arange(path.shape[1], device=path.device) > acceptance.num_accepted[:, None]
    return TreeAcceptance(acceptance=acceptance, path=path.masked_fill(beyond, -1))


def compaction_slots(path: torch.Tensor, info: BatchInfo) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat KV slots (source, target), i64[B * D] each, for `PagedKV.compact`: node path[b, d] goes to block row d.

    The root stays. Past the end of a path a slot moves to itself, so that the shape does not depend on the result.
    """
    steps = torch.arange(1, path.shape[1], device=path.device)
    first = info.qo_indptr[:-1].long()[:, None]
    source = torch.where(path[:, 1:] >= 0, path[:, 1:], steps)
    return info.write_slots[first + source].flatten(), info.write_slots[first + steps].flatten()


def _descend(next_node: torch.Tensor, max_depth: int) -> torch.Tensor:
    """next_node i64[B, N], the child that each node goes to or -1 -> path i64[B, D + 1]."""
    here = torch.zeros_like(next_node[:, :1])
    path = [here]
    for _ in range(max_depth):
        here = torch.where(here >= 0, next_node.gather(1, here.clamp(min=0)), here)
        path.append(here)
    return torch.cat(path, dim=1)


def _first(marked: torch.Tensor) -> torch.Tensor:
    """bool[..., N] -> index of the first marked entry, or -1."""
    return torch.where(marked.any(-1), marked.int().argmax(-1), -1)


def _children(tree: TokenTree) -> torch.Tensor:
    """bool[B, N, N]: [i, j] when j is a child of i, and no earlier child of i is the same token."""
    num_nodes = tree.tokens.shape[1]
    nodes = torch.arange(num_nodes, device=tree.tokens.device)
    real = (tree.tokens >= 0) & (nodes > 0)
    same = (tree.tokens[:, :, None] == tree.tokens[:, None, :]) & (tree.parents[:, :, None] == tree.parents[:, None, :])
    repeated = (same & (nodes[None, :] < nodes[:, None]) & real[:, None, :]).any(-1)
    return (tree.parents[:, None, :] == nodes[:, None]) & (real & ~repeated)[:, None, :]


def _match(
    target: Distribution, tree: TokenTree, batch: SamplingBatch, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    own = target.draw(purpose=Purpose.TARGET)[batch.row_index]  # [B, N]
    path = _descend(_first(_children(tree) & (tree.tokens[:, None, :] == own[:, :, None])), max_depth)
    last = path.amax(-1, keepdim=True)  # parents come first: the deepest node has the largest index
    return path, own.gather(1, last)[:, 0]


def _ratio(
    target: Distribution, tree: TokenTree, batch: SamplingBatch, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    p = target.probabilities()
    children = _children(tree)
    tokens = tree.tokens.clamp(min=0)
    p_children = p[batch.row_index[:, :, None], tokens[:, None, :]] * children  # [B, N, N]
    keys = position_keys(batch.keys, batch.emit_position, Purpose.ACCEPT)
    # Two nodes of one depth share a coin, but one of them at most is ever on the path.
    coins = uniform(keys)[batch.row_index]
    path = _descend(_first(children & (coins[:, :, None] < p_children.double().cumsum(-1))), max_depth)
    last = path.amax(-1, keepdim=True)
    last_rows = batch.row_index.gather(1, last)[:, 0]
    at_end = path[:, -1] >= 0  # max_depth reached: children there, if any, were never tried
    tried = children[torch.arange(len(path), device=path.device), last[:, 0]] & ~at_end[:, None]
    p_last = p[last_rows]
    weights = p_last * (torch.zeros_like(p_last).scatter_add_(1, tokens, tried.float()) == 0)
    weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, p_last)
    newest = race(weights, position_keys(batch.keys[last_rows], batch.emit_position[last_rows], Purpose.RECOVER))
    return path, newest


TREE_RULES: dict[str, TreeRule] = {"exact": _match, "ratio": _ratio}
