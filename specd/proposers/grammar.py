"""Drafts that a grammar forces: the rest of a property's name, the one text that a choice leaves. They cost nothing.

What is forced are bytes; that the target cuts them into the same tokens is likely and no more, hence drafts. What
stood behind the last forced text, as `": "` behind a name, is likely to stand behind the next: white space is free, but
an output keeps its style.
"""

from __future__ import annotations

from collections.abc import Sequence

from specd.corpora import Tally
from specd.grammar import GrammarMatcher
from specd.step import DraftSource

_BEHIND = 2  # tokens


class GrammarProposer:
    """Of one sequence, whose matcher stands behind its newest token when it is asked."""

    source = DraftSource.GRAMMAR
    tally: Tally | None = None

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self._forced: list[int] = []  # what is left of the text that is forced, its last token first
        self._since: list[int] | None = None  # tokens since such a text ended, _BEHIND at most
        self._behind: list[int] = []  # what stood behind the last one

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._forced:
                right = token == self._forced.pop()
                if not right:
                    self._forced.clear()
                self._since = [] if right and not self._forced else None
            elif self._since is None:
                return
            elif len(self._since) < _BEHIND:
                self._since.append(token)
                self._behind = self._since

    def propose(self, max_tokens: int) -> list[int]:
        """Also what the grammar may not allow, behind what it forces."""
        if not self._forced:
            self._forced = self._matcher.forced()[::-1]
        if not self._forced:
            return []
        return [*self._forced[: -max_tokens - 1 : -1], *self._behind][:max_tokens]
