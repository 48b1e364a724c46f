"""Prompt lookup: the latest earlier occurrence of the last tokens, and what followed it.

Source: Saxena, "Prompt Lookup Decoding" (2023); here with an incremental index, so that a proposal costs a few
dictionary look-ups instead of a scan, and with the longest match first.
"""

from __future__ import annotations

from collections.abc import Sequence

from specd.corpora import Tally
from specd.step import DraftSource

_AT_ONCE = 4096  # tokens that one look-up indexes: 10 ms, of the event loop's


class NgramIndex:
    """Tokens of one text and, for each n-gram of min_n..max_n tokens, where it last ended *before* the end.

    A long prompt is indexed over several look-ups, from its beginning: until then they find less.
    """

    __slots__ = ("_ends", "_indexed", "max_n", "min_n", "tokens")

    def __init__(self, *, min_n: int, max_n: int) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams that end at or before this offset are in the index

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)

    def find(self, tail: Sequence[int], *, own: bool) -> int | None:
        """Offset of what followed the latest occurrence of the longest suffix of `tail`, or None.

        own: tail is this text's own end, whose n-grams must not find themselves.
        """
        self._index_to(len(self.tokens) - 1 if own else len(self.tokens))
        longest = None
        for n in range(self.min_n, min(self.max_n, len(tail)) + 1):
            end = self._ends.get(tuple(tail[-n:]))
            if end is None:
                break  # nor is there a longer one, which would end in this
            longest = end
        return longest

    def _index_to(self, stop: int) -> None:
        stop = min(stop, self._indexed + _AT_ONCE)
        tokens, ends = self.tokens, self._ends
        for end in range(self._indexed + 1, stop + 1):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                ends[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, stop)


class NgramProposer:
    """Looks the sequence's last tokens up in its own text, then in other texts (the seam for predictions, corpora)."""

    source = DraftSource.NGRAM
    tally: Tally | None = None

    def __init__(self, *, min_n: int, max_n: int, others: Sequence[NgramIndex] = ()) -> None:
        self._own = NgramIndex(min_n=min_n, max_n=max_n)
        self._others = tuple(others)

    def extend(self, tokens: Sequence[int]) -> None:
        self._own.extend(tokens)

    def propose(self, max_tokens: int) -> list[int]:
        tail = self._own.tokens[-self._own.max_n :]
        for index in (self._own, *self._others):
            own = index is self._own
            start = index.find(tail, own=own)
            if start is not None and start < len(index.tokens):
                return self._continue(index, start, max_tokens) if own else index.tokens[start : start + max_tokens]
        return []

    @staticmethod
    def _continue(index: NgramIndex, start: int, count: int) -> list[int]:
        """What followed, read on through the guess itself: a text that repeats itself is continued past its end."""
        period = len(index.tokens) - start
        if count <= period:
            return index.tokens[start : start + count]
        return [index.tokens[start + i % period] for i in range(count)]
