"""What the host's proposers would have a row verify. No torch."""

from __future__ import annotations

from specd.proposers.base import Proposal
from specd.sequence import Sequence
from specd.step import DraftSource


def propose(sequence: Sequence, most: int, *, pad: bool, invent: bool) -> Proposal | None:
    """At most `most` tokens of the first proposer that has any, as far as the sequence's grammar allows them.

    What the grammar itself forces is asked first, and gives way to a longer proposal: as that is allowed, it says the
    same and goes on. pad: it is filled up to a pinned length, with `invent` even out of nothing.
    """
    found: Proposal | None = None
    for proposer in sequence.proposers if most else ():
        guess = proposer.propose(most)
        if guess and sequence.grammar is not None:
            guess = guess[: sequence.grammar.num_allowed(guess)]
        if found is None or len(guess) >= len(found.tokens):
            found = Proposal(proposer.source, guess, len(guess), proposer.tally)
        if guess and proposer.source is not DraftSource.GRAMMAR:
            break
    if found is None or not (found.tokens or (pad and invent)):
        return None
    if pad:
        filler = (found.tokens or sequence.tokens)[-1]
        found.tokens.extend([filler] * (most - found.num_guessed))
    return found
