"""Drafts out of the texts that an operator has given (`specd.corpora`): the output quotes one, and goes on to.

The place is sought by the last tokens, prompt included. While the output agrees with what stands there it is followed,
one comparison a token; where it leaves, the place is sought anew. A short match is often an accident: from one only a
few tokens are proposed, and none while short ones were mostly wrong for this sequence. What is not proposed is compared
with what comes all the same, so a sequence that begins to quote is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence

from specd.corpora import LONGEST, SHORTEST, Corpora, Corpus, Tally
from specd.step import DraftSource

_SURE = 8  # tokens in a row after which a place is no accident
_ENOUGH = 0.4  # of guesses by less must be right
_PRIOR, _PRIOR_WEIGHT, _MEMORY = 0.6, 3.0, 16.0  # of the average that tells


class CorpusProposer:
    """Of one sequence; tenant: whose corpora it may be drafted from, beside everybody's."""

    source = DraftSource.CORPUS

    def __init__(self, corpora: Corpora, tenant: bytes) -> None:
        self._corpora = corpora
        self._tenant = tenant
        self._tail: list[int] = []
        self._corpus: Corpus | None = None  # what is followed, at ...
        self._next = 0  # ... this place
        self._matched = 0  # tokens before it that the sequence has too
        self._guess: int | None = None  # the first token of what was found last
        self._rate, self._weight = _PRIOR, _PRIOR_WEIGHT

    @property
    def tally(self) -> Tally | None:
        """Of the corpus that was proposed from last."""
        return None if self._corpus is None else self._corpus.tally

    def extend(self, tokens: Sequence[int]) -> None:
        if self._guess is not None and tokens:
            self._weight = min(self._weight + 1, _MEMORY)
            self._rate += ((tokens[0] == self._guess) - self._rate) / self._weight
            self._guess = None
        for token in tokens:
            if self._corpus is None:
                break
            self._follow(self._corpus, token)
        self._tail = [*self._tail, *tokens[-LONGEST:]][-LONGEST:]

    def _follow(self, corpus: Corpus, token: int) -> None:
        if self._next < len(corpus.index.tokens) and corpus.index.tokens[self._next] == token:
            self._next, self._matched = self._next + 1, self._matched + 1
        else:
            self._corpus = None

    def propose(self, max_tokens: int) -> list[int]:
        allowed = self._corpora.allowed(self._tenant)
        if self._corpus not in allowed or self._next == len(self._corpus.index.tokens):
            self._search(allowed)
        if self._corpus is None:
            return []
        count = min(max_tokens, 2 * self._matched)
        found: list[int] = self._corpus.index.tokens[self._next : self._next + count].tolist()
        self._guess = found[0] if found else None
        return found if self._matched >= _SURE or self._rate >= _ENOUGH else []

    def _search(self, allowed: tuple[Corpus, ...]) -> None:
        self._corpus, self._matched = None, 0
        for corpus in allowed:
            place, length = corpus.index.find(self._tail)
            if length > max(self._matched, SHORTEST - 1):
                self._corpus, self._next, self._matched = corpus, place, length
