"""Log-probabilities of a prompt's own tokens: which ones a step gives, and how they come back. Host only, no torch.

The logits at a prompt position say how likely the next prompt token was. They are computed for the positions of each
chunk as it is prefilled; the last position is the one that samples. A position whose KV is found in the prefix cache
has no logits, so a sequence that lacks some is given no more cached blocks than it has scored (`Sequence.reusable`).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from specd.request import TokenLogprob
from specd.sequence import Sequence
from specd.step import AcceptanceReport, PromptScores


def scores_of(sequence: Sequence, num_known: int) -> PromptScores | None:
    """What a row of `num_known` tokens from num_computed on is to score; None when there is nothing to."""
    wanted = sequence.sampling.prompt_logprobs
    if wanted is None:
        return None
    start = max(sequence.num_computed, len(sequence.prompt_logprobs))
    end = min(sequence.num_computed + num_known, sequence.num_prompt - 1)
    if start >= end:
        return None
    targets = np.asarray(sequence.tokens[start + 1 : end + 1], np.int32)
    return PromptScores(start - sequence.num_computed, targets, wanted)


def split_scores(report: AcceptanceReport, rows: Rows[PromptScores | None]) -> list[tuple[TokenLogprob, ...]]:
    """The report's prompt log-probabilities, row by row; rows as the plan had them."""
    found: list[tuple[TokenLogprob, ...]] = []
    offset = 0
    for scores in rows:
        if scores is None or report.prompt is None:
            found.append(())
            continue
        part = slice(offset, offset + len(scores.targets))
        offset = part.stop
        ids = report.prompt.top_ids[part, : scores.num_top].tolist()
        tops = report.prompt.top_logprobs[part, : scores.num_top].tolist()
        own = zip(scores.targets.tolist(), report.prompt.logprobs[part].tolist(), strict=True)
        found.append(
            tuple(
                TokenLogprob(token, logprob, tuple(zip(some, values, strict=True)))
                for (token, logprob), some, values in zip(own, ids, tops, strict=True)
            )
        )
    return found
