"""Who proposes for a request. No torch."""

from __future__ import annotations

from specd.config import SpeculationConfig
from specd.proposers.base import Proposer
from specd.proposers.ngram import NgramProposer
from specd.proposers.prediction import PredictionProposer
from specd.request import Request


def proposers_of(request: Request, speculation: SpeculationConfig, *, uses_ngram: bool) -> tuple[Proposer, ...]:
    """In the order in which they are asked: the client's prediction, then the text's own n-grams.

    Each belongs to one choice: it follows that choice's tokens.
    """
    proposers: list[Proposer] = []
    if request.prediction:
        proposers.append(PredictionProposer(request.prediction, num_prompt=len(request.prompt_ids)))
    if uses_ngram:
        proposers.append(NgramProposer(min_n=speculation.ngram_min, max_n=speculation.ngram_max))
    return tuple(proposers)
