"""The seam for proposers: host code that guesses tokens without KV or carry. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from specd.corpora import Tally
from specd.step import DraftSource


class Proposer(Protocol):
    """One request's own guesser. It sees the tokens as they are committed and is asked once a step."""

    source: DraftSource

    @property
    def tally(self) -> Tally | None:
        """Who is told what became of the latest proposal; None: nobody."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens appended to the sequence (the prompt first), in order."""
        ...

    def propose(self, max_tokens: int) -> list[int]:
        """At most max_tokens guesses for what follows; empty when it has none. The list is the caller's own."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """What a row could verify this step, and whose it is."""

    source: DraftSource
    tokens: list[int]
    num_guessed: int  # of the tokens; what follows fills up to a pinned length
    tally: Tally | None = None  # is told what became of the guessed ones
