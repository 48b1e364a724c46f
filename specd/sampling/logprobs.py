"""Log-probabilities of what was emitted: of the raw logits, before temperature and every other parameter.

Legend: B rows of the plan, L rows that ask, W = K + 1 tokens a row, R logits rows, N alternatives, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch

from specd.sampling.batch import Logprobs
from specd.sampling.blocks import in_blocks


def emitted_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, wanted: Logprobs
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Only the rows that ask are computed.

    logits [R, V] raw, rows i64[B, W] the logits row that gave each token, tokens i64[B, W] (-1 = none)
    -> logprobs f32[B, W] (0 where there is no token or nobody asked), top ids i64[B, W, N] (-1 there), top logprobs
    f32[B, W, N]; the last two are None when N = 0.
    """
    width = tokens.shape[1]
    chosen = tokens.index_select(0, wanted.sequences)
    some = chosen >= 0
    scores = logits[rows.index_select(0, wanted.sequences)].float()  # [L, W, V]
    scores = torch.log_softmax(scores, dim=-1)
    own = scores.gather(-1, chosen.clamp(min=0)[..., None])[..., 0]
    logprobs = scores.new_zeros(tokens.shape).index_copy_(0, wanted.sequences, own * some)
    if wanted.num_top == 0:
        return logprobs, None, None
    flat_ids = in_blocks(partial(_top_ids, num_top=wanted.num_top), scores.flatten(0, 1), width=scores.shape[-1])
    ids = flat_ids.view(*chosen.shape, -1)
    values = scores.gather(-1, ids)
    shape = (len(tokens), width, ids.shape[-1])
    top_ids = torch.full(shape, -1, dtype=torch.int64, device=tokens.device)
    top_ids.index_copy_(0, wanted.sequences, torch.where(some[..., None], ids, -1))
    top_logprobs = scores.new_zeros(shape).index_copy_(0, wanted.sequences, values.masked_fill(~some[..., None], 0.0))
    return logprobs, top_ids, top_logprobs


def _top_ids(scores: torch.Tensor, num_top: int) -> torch.Tensor:
    """The largest scores f32[..., V] first, the lowest id first among equals (which topk itself leaves open)."""
    vocab_size = scores.shape[-1]
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: -0.0 is an equal of 0.0
    ordered = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)  # an integer that orders like the float
    keys = ordered.long().bitwise_left_shift_(32).sub_(torch.arange(vocab_size, device=scores.device))
    return keys.topk(min(num_top, vocab_size), dim=-1).indices
