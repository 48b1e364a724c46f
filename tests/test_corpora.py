"""Corpora alone: what an index finds, who may be drafted from what, quotas, expiry, replacement."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.corpora import LONGEST, MAX_CORPORA, SHORTEST, Corpora, CorpusIndex
from specd.errors import RequestError
from specd.proposers.choose import proposers_of
from specd.proposers.corpus import CorpusProposer
from specd.step import DraftSource
from tests.engines import ask, make_parts, tokenizer

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on until the fox is gone"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def corpora(*, max_tokens: int = 10_000, clock: Clock | None = None) -> Corpora:
    return Corpora(tokenizer(), vocab_size=97, max_tokens=max_tokens, clock=clock or Clock())


async def put(
    held: Corpora,
    name: str,
    given: str | Sequence[int] = TEXT,
    *,
    key: str | None = None,
    salt: bytes | None = None,
    ttl_s: float | None = None,
) -> dict[str, Any]:
    return await held.put(name, given, key=key, salt=salt, ttl_s=ttl_s)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False)


def proposer(held: Corpora, prompt: str, *, tenant: bytes = b"") -> CorpusProposer:
    made = CorpusProposer(held, tenant)
    made.extend(ids(prompt))
    return made


def proposed(guesser: CorpusProposer, count: int = 64) -> str:
    return tokenizer().decode(guesser.propose(count))


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=12))
def test_an_index_finds_a_longest_match(text: list[int], tail: list[int]) -> None:
    """Compared with a scan of every place that something stands at."""
    place, length = CorpusIndex(np.asarray(text, np.int32)).find(tail)

    def matched(at: int) -> int:
        lengths = range(min(at, len(tail), LONGEST), 0, -1)
        return next((n for n in lengths if text[at - n : at] == tail[-n:]), 0)

    longest = max((matched(at) for at in range(len(text))), default=0)
    assert length == (longest if longest >= SHORTEST else 0)
    if length:
        assert matched(place) == length


def test_memory_is_counted() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    assert CorpusIndex(tokens).num_bytes == 16 * len(tokens) - 12 * SHORTEST


async def test_it_is_followed_as_far_as_it_is_believed() -> None:
    held = corpora()
    await put(held, "fox")
    guesser = proposer(held, "so the qui")
    assert proposed(guesser) == "ck brown fox j"  # twice the 7 tokens that agree
    assert proposed(guesser, 3) == "ck "
    guesser.extend(ids("ck brown"))
    assert proposed(guesser).startswith(" fox jumps over the lazy dog")
    guesser.extend(ids("X"))
    assert proposed(guesser) == "", "it is left where the output leaves it"
    guesser.extend(ids("lazy"))
    assert proposed(guesser) == " dog, an"
    assert proposed(proposer(held, "is gone")) == "", "nothing stands behind its end"


async def test_bad_short_matches_are_not_proposed_any_more() -> None:
    held = corpora()
    await put(held, "the", "the fox the fox the fox ")
    guesser = proposer(held, "in the")
    offered = []
    for _ in range(8):
        offered.append(proposed(guesser) != "")
        guesser.extend(ids("y and the"))
    assert offered[0]
    assert not offered[-1]
    guesser.extend(ids(" fox the f"))  # sure now
    assert proposed(guesser).startswith("ox the fox")


async def test_who_is_drafted_from_what() -> None:
    held = corpora()
    await put(held, "own", TEXT, key="0123456789ab", salt=b"a")
    await put(held, "all", "colourless green ideas sleep furiously")

    def names(tenant: bytes) -> list[str]:
        return [corpus.name for corpus in held.allowed(tenant)]

    assert (names(b"a"), names(b"b"), names(b"")) == (["own", "all"], ["all"], ["all"])
    assert proposed(proposer(held, "the quick", tenant=b"a")).startswith(" brown")
    assert proposed(proposer(held, "the quick", tenant=b"b")) == ""
    assert proposed(proposer(held, "the quick")) == ""
    assert proposed(proposer(held, "less green", tenant=b"b")).startswith(" ideas")


async def test_a_change_counts_for_those_who_run() -> None:
    held = corpora()
    await put(held, "fox")
    guesser = proposer(held, "the quick")
    assert proposed(guesser).startswith(" brown")
    await put(held, "fox", "the quick response")
    assert proposed(guesser).startswith(" response")
    assert (await held.delete("fox"))["name"] == "fox"
    assert proposed(guesser) == ""
    with pytest.raises(RequestError, match="no corpus 'fox'"):
        await held.delete("fox")


async def test_a_replacement_that_fails_replaces_nothing() -> None:
    held = corpora(max_tokens=100)
    await put(held, "fox")
    with pytest.raises(RequestError, match="100 are left"):
        await put(held, "fox", TEXT + TEXT)
    with pytest.raises(RequestError, match=r"token_ids\[1\] = 97"):
        await put(held, "fox", [1, 97])
    assert proposed(proposer(held, "the quick")).startswith(" brown")


async def test_quotas() -> None:
    held = corpora(max_tokens=100)
    assert (await put(held, "a", [1] * 60))["tokens"] == 60
    with pytest.raises(RequestError, match="61 tokens or more; 40 are left") as refused:
        await put(held, "b", [1] * 61)
    assert refused.value.code == "quota_exceeded"
    await put(held, "b", [1] * 40)
    await put(held, "a", [2] * 60)  # what it replaces does not count
    assert held.num_tokens == 100
    held = corpora()
    for i in range(MAX_CORPORA):
        await put(held, str(i), [1])
    with pytest.raises(RequestError, match="delete one first"):
        await put(held, "more", [1])
    await put(held, "0", [1, 2])


async def test_expiry_frees_the_quota_and_ends_drafting() -> None:
    clock = Clock()
    held = corpora(max_tokens=100, clock=clock)
    await put(held, "short", TEXT, ttl_s=5.0)
    guesser = proposer(held, "the quick")
    clock.now_s = 4.0
    assert proposed(guesser).startswith(" brown")
    assert held.find("short")["ttl_left_s"] == 1.0
    clock.now_s = 5.0
    assert proposed(guesser) == ""
    assert held.describe() == []
    assert held.num_tokens == 0


async def test_a_long_text_is_tokenised_in_parts_off_the_loop() -> None:
    lines = "".join(f"line {i} of a long text\n" for i in range(5000))
    held = corpora(max_tokens=1 << 20)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    row = await put(held, "long", lines.replace("\n", " "))
    counting.cancel()
    assert row["tokens"] == len(ids(lines.replace("\n", " ")))
    assert turns > 7


def test_who_proposes_for_a_request() -> None:
    speculation = make_parts(draft="ngram").config.speculation

    def sources(max_tokens: int) -> list[DraftSource]:
        held = corpora(max_tokens=max_tokens)
        made = proposers_of(ask("r", [1, 2]), speculation, uses_ngram=True, corpora=held)
        return [one.source for one in made]

    assert sources(10) == [DraftSource.CORPUS, DraftSource.NGRAM]
    assert sources(0) == [DraftSource.NGRAM]
