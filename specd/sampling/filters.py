"""Temperature, top-k, top-p and min-p: processed logits to the distribution that a token is drawn from.

Everything is decided by value: a token is kept when its logit or probability reaches its row's threshold, so tokens
tied at a boundary are all kept, and the result depends neither on an order of sorting nor on the other rows.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch

from specd.sampling.blocks import in_blocks

_DIGITS = ((20, 11), (10, 10), (0, 10))  # (shift, bits) of the 31 bits of a non-negative fp32, most significant first


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """Per-row parameters of rows that are drawn (never greedy ones), and what the host knows about all of them."""

    temperature: torch.Tensor  # f32[R, 1], > 0
    top_k: torch.Tensor  # i64[R, 1], V where off
    top_p: torch.Tensor  # f32[R, 1], +inf where off
    min_p: torch.Tensor  # f32[R, 1], 0 where off
    max_top_k: int  # widest top-k that is on, 0 when none is
    any_top_p: bool
    any_min_p: bool


def filtered_probabilities(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """f32[R, V] -> probabilities f32[R, V]: temperature, top-k, top-p (of what top-k left), min-p, in this order."""
    scaled = logits / filters.temperature
    if filters.max_top_k:
        scaled = _keep_top_k(scaled, filters.top_k, filters.max_top_k)
    probs = torch.softmax(scaled, dim=-1)
    if not (filters.any_top_p or filters.any_min_p):
        return probs
    if filters.any_top_p:
        probs = probs * (probs >= in_blocks(mass_threshold, probs, filters.top_p, width=probs.shape[1]))
    if filters.any_min_p:
        probs = probs * (probs >= filters.min_p * probs.amax(dim=-1, keepdim=True))
    return probs / probs.sum(dim=-1, keepdim=True)


def _keep_top_k(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    width = min(max_top_k, vocab_size)
    best = logits.topk(width, dim=-1).values
    last = best.gather(-1, (top_k - 1).clamp(max=width - 1))
    last = last.masked_fill(top_k >= vocab_size, float("-inf"))
    return logits.masked_fill(logits < last, float("-inf"))


def mass_threshold(probs: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The least probability t such that the tokens above t sum to less than `mass`: top-p keeps p >= t.

    probs f32[R, V] >= 0, mass f32[R, 1] > 0 (+inf keeps everything) -> f32[R, 1].
    A radix selection over the bits of p, which order like p itself: three histograms of mass, where a sort of the
    vocabulary costs about eight times as much on a CPU.
    """
    bits = probs.view(torch.int32)
    prefix = torch.zeros_like(mass, dtype=torch.int32)
    above = torch.zeros_like(mass)  # mass of the tokens whose bits exceed every value with this prefix
    weight = probs
    for shift, width in _DIGITS:
        size = 1 << width
        digit = (bits >> shift).bitwise_and_(size - 1).long()
        histogram = probs.new_zeros((len(probs), size)).scatter_add_(1, digit, weight)
        exceeding = above + (histogram.flip(-1).cumsum(-1) - histogram.flip(-1)).flip(-1)
        chosen = (size - (exceeding < mass).sum(-1, keepdim=True)).clamp(max=size - 1)
        above = exceeding.gather(1, chosen)
        prefix = (prefix << width) | chosen.int()
        if shift:
            weight = weight * (digit == chosen)
    return prefix.view(torch.float32)
