"""Prompt lookup against a scan of the whole text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from specd.proposers.base import Proposer
from specd.proposers.ngram import NgramIndex, NgramProposer
from specd.step import DraftSource

TEXT = st.lists(st.integers(0, 3), max_size=40)
SIZES = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def scan(text: Sequence[int], tail: Sequence[int], min_n: int, max_n: int, last: int) -> int | None:
    """Where the latest occurrence of the longest suffix of `tail` ends in text, at or before offset `last`."""
    for n in range(min(max_n, len(tail)), min_n - 1, -1):
        for end in range(last, n - 1, -1):
            if list(text[end - n : end]) == list(tail[-n:]):
                return end
    return None


def proposer(text: Sequence[int], *, min_n: int = 1, max_n: int = 3) -> NgramProposer:
    made = NgramProposer(min_n=min_n, max_n=max_n)
    made.extend(text)
    return made


@given(TEXT, SIZES, st.integers(1, 8), st.lists(st.integers(1, 40), max_size=6))
def test_a_proposal_is_what_followed(text: list[int], sizes: tuple[int, int], count: int, cuts: list[int]) -> None:
    """The same as a scan, however the text came in and whenever it was asked in between."""
    min_n, max_n = sizes
    guesser = NgramProposer(min_n=min_n, max_n=max_n)
    done = 0
    for cut in [*sorted(cuts), len(text)]:
        guesser.extend(text[done:cut])
        done = max(done, min(cut, len(text)))
        seen = text[:done]
        start = scan(seen, seen, min_n, max_n, len(seen) - 1)
        found = guesser.propose(count)
        if start is None:
            assert found == []
        else:
            longer = seen + found
            assert len(found) == count
            assert found == [longer[start + i] for i in range(count)], "what followed, read on through the guess"


def test_the_longest_match_comes_first() -> None:
    #     [1 2 3] -> 7 is older than [3] -> 9, but longer
    assert proposer([1, 2, 3, 7, 3, 9, 1, 2, 3]).propose(1) == [7]
    assert proposer([1, 2, 3, 7, 3, 9, 1, 2, 3], max_n=1).propose(1) == [9]


def test_the_latest_of_equal_matches_wins() -> None:
    assert proposer([1, 2, 5, 1, 2, 6, 1, 2]).propose(2) == [6, 1]


def test_a_short_match_can_be_forbidden() -> None:
    assert proposer([1, 2, 3, 4, 2], min_n=2).propose(4) == []
    assert proposer([1, 2, 3, 4, 1, 2], min_n=2).propose(2) == [3, 4]


def test_the_end_does_not_find_itself() -> None:
    assert proposer([1, 2, 3]).propose(4) == []
    assert proposer([]).propose(4) == []
    assert proposer([5]).propose(4) == []


def test_a_period_is_continued_past_the_end() -> None:
    assert proposer([1, 2, 3, 1, 2, 3]).propose(7) == [1, 2, 3, 1, 2, 3, 1]
    assert proposer([9, 4, 4]).propose(3) == [4, 4, 4]


def test_nothing_asked_nothing_given() -> None:
    assert proposer([1, 1, 1]).propose(0) == []


def test_a_proposal_is_the_callers_own() -> None:
    """The scheduler pads it in place."""
    guesser = proposer([1, 2, 1, 2])
    first = guesser.propose(2)
    first += [9, 9]
    assert guesser.propose(2) == [1, 2]


def test_the_next_token_counts() -> None:
    guesser = proposer([1, 2, 3, 4])
    assert guesser.propose(2) == []
    guesser.extend([2])
    assert guesser.propose(2) == [3, 4]
    guesser.extend([3, 9])
    assert guesser.propose(2) == []


# Other texts


def other(text: Sequence[int], *, min_n: int = 1, max_n: int = 3) -> NgramIndex:
    index = NgramIndex(min_n=min_n, max_n=max_n)
    index.extend(text)
    return index


def test_other_texts_are_looked_up_after_the_own() -> None:
    guesser = NgramProposer(min_n=1, max_n=3, others=[other([1, 2, 7, 8, 9]), other([3, 6])])
    guesser.extend([5, 1, 2])
    assert guesser.propose(2) == [7, 8]
    guesser.extend([3])
    assert guesser.propose(2) == [6]
    guesser.extend([5])
    assert guesser.propose(2) == [1, 2], "the own text first"


def test_another_texts_end_is_the_end() -> None:
    """What a finished text does not say is not guessed from it."""
    guesser = NgramProposer(min_n=1, max_n=2, others=[other([1, 2, 7])])
    guesser.extend([2])
    assert guesser.propose(5) == [7]
    guesser.extend([7])
    assert guesser.propose(5) == []


@given(TEXT, TEXT, SIZES)
def test_another_text_is_found_by_a_scan_too(text: list[int], tail: list[int], sizes: tuple[int, int]) -> None:
    min_n, max_n = sizes
    index = other(text, min_n=min_n, max_n=max_n)
    assert index.find(tail, own=False) == scan(text, tail, min_n, max_n, len(text))


def test_the_source_is_named() -> None:
    made: Proposer = proposer([])
    assert made.source is DraftSource.NGRAM


def test_a_long_prompt_is_indexed_over_several_proposals() -> None:
    """The event loop waits for each: 100,000 tokens at once took it a third of a second."""
    text = [*range(30_000), 7, 8, 9]
    guesser = proposer(text, min_n=2, max_n=5)
    sizes = []
    for _ in range(12):
        found = guesser.propose(2)
        sizes.append(len(guesser._own._ends))
    assert max(late - early for early, late in zip([0, *sizes], sizes, strict=False)) <= 4 * 4096
    assert sizes[-1] == sizes[-2] > 4 * 29_000
    assert found == [10, 11]
