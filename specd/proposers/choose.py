"""Who proposes for a request. No torch."""

from __future__ import annotations

from specd.config import SpeculationConfig
from specd.corpora import Corpora
from specd.grammar import GrammarMatcher
from specd.proposers.base import Proposer
from specd.proposers.corpus import CorpusProposer
from specd.proposers.grammar import GrammarProposer
from specd.proposers.ngram import NgramProposer
from specd.proposers.prediction import PredictionProposer
from specd.request import Request


def proposers_of(
    request: Request,
    speculation: SpeculationConfig,
    *,
    uses_ngram: bool,
    corpora: Corpora | None = None,
    grammar: GrammarMatcher | None = None,
) -> tuple[Proposer, ...]:
    """In the order in which they are asked: what the grammar forces, the client's prediction, the operator's corpora,
    then the text's own n-grams.

    Each belongs to one choice: it follows that choice's tokens. grammar: the choice's own.
    """
    proposers: list[Proposer] = []
    if grammar is not None:
        proposers.append(GrammarProposer(grammar))
    if request.prediction:
        proposers.append(PredictionProposer(request.prediction, num_prompt=len(request.prompt_ids)))
    if corpora is not None and corpora.max_tokens:
        proposers.append(CorpusProposer(corpora, request.tenant))
    if uses_ngram:
        proposers.append(NgramProposer(min_n=speculation.ngram_min, max_n=speculation.ngram_max))
    return tuple(proposers)
