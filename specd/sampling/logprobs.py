"""Log-probabilities of what was emitted: of the raw logits, before temperature and every other parameter.

A row's log-sum-exp has one definition for each device and dtype (`top_tokens`), and `Model.top` gives the same bits
without whole logits: a log-probability does not depend on who shares the batch, nor on what they need of theirs.

Legend: B rows of the plan, L rows that ask, W = K + 1 tokens a row, R logits rows, N alternatives, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from specd.kernels import draw as kernel
from specd.kernels.top import top_of_rows
from specd.sampling.batch import Logprobs
from specd.sampling.blocks import in_blocks
from specd.tensors import PromptLogprobs, PromptRows, TopTokens

_PROMPT_ROWS = 64


def top_tokens(logits: torch.Tensor, k: int, rows: torch.Tensor | None = None) -> TopTokens:
    """The k largest logits of each row (1 <= k <= V) and their log-sum-exp. logits [*, V], rows i64[R] (None = all)."""
    if kernel.takes(logits):
        return top_of_rows(logits, rows, k)
    return torch_top_tokens(logits if rows is None else logits.index_select(0, rows), k)


def torch_top_tokens(logits: torch.Tensor, k: int) -> TopTokens:
    """`top_tokens` of all rows by torch. log_softmax takes each row by itself, as a sum over columns would not."""
    scores = logits.float()
    ids = in_blocks(partial(_top_ids, num_top=k), scores, width=scores.shape[-1])
    peaks = scores.amax(-1, keepdim=True)  # NaN where the row has any
    at_peak = torch.log_softmax(scores, dim=-1).gather(-1, ids[:, :1])
    values = scores.gather(-1, ids).masked_fill(peaks.isnan(), float("nan"))
    return TopTokens(values, ids, (peaks.double() - at_peak.double())[:, 0])


def emitted_logprobs(
    scores: torch.Tensor | TopTokens, rows: torch.Tensor, tokens: torch.Tensor, wanted: Logprobs
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Only the rows that ask are computed.

    scores: raw logits [R, V], or their largest where each token is its row's best. rows i64[B, W] the logits row that
    gave each token, tokens i64[B, W] (-1 = none)
    -> logprobs f32[B, W] (0 where there is no token or nobody asked), top ids i64[B, W, N] (-1 there), top logprobs
    f32[B, W, N]; the last two are None when N = 0.
    """
    asked = rows.index_select(0, wanted.sequences).flatten()  # [L * W]
    chosen = tokens.index_select(0, wanted.sequences).flatten()
    some = (chosen >= 0)[:, None]
    if isinstance(scores, TopTokens):
        top = scores.rows(asked)
        own = top.values[:, :1]
    else:
        top = top_tokens(scores, wanted.width(scores.shape[-1]), asked)
        own = scores[asked, chosen.clamp(min=0)][:, None].float()

    def spread(values: torch.Tensor, nothing: float) -> torch.Tensor:
        """[L * W, N] -> [B, W, N]."""
        out = values.new_full((*tokens.shape, values.shape[-1]), nothing)
        kept = torch.where(some, values, nothing).view(-1, *out.shape[1:])
        return out.index_copy_(0, wanted.sequences, kept)

    logprobs = spread(top.logprobs(own), 0.0)[..., 0]
    if wanted.num_top == 0:
        return logprobs, None, None
    return logprobs, spread(top.tokens, -1), spread(top.logprobs(top.values), 0.0)


def prompt_logprobs(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, rows: PromptRows
) -> PromptLogprobs:
    """logits: `Model.logits`; hidden [T, H] of the batch. A few rows at a time: a whole prompt's logits are large."""
    parts = []
    for start in range(0, len(rows.targets), _PROMPT_ROWS):
        block = slice(start, start + _PROMPT_ROWS)
        scores = logits(hidden[rows.positions[block]])
        top = top_tokens(scores, max(rows.num_top, 1))
        own = scores.gather(-1, rows.targets[block, None]).float()
        parts.append((top.logprobs(own)[:, 0], top.tokens, top.logprobs(top.values)))
    chosen, ids, tops = (torch.cat(part) for part in zip(*parts, strict=True))
    return PromptLogprobs(chosen, ids[:, : rows.num_top], tops[:, : rows.num_top])


def _top_ids(scores: torch.Tensor, num_top: int) -> torch.Tensor:
    """The largest scores f32[..., V] first, the lowest id first among equals (which topk itself leaves open)."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: -0.0 is an equal of 0.0
    ordered = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)  # an integer that orders like the float
    keys = ordered.long().bitwise_left_shift_(32).sub_(torch.arange(scores.shape[-1], device=scores.device))
    return keys.topk(num_top, dim=-1).indices
