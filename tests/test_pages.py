"""Pages: counts that add up, keys that mean prefixes, marks that never promise too much."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.pages import BlockKeys, PagePool

TOKENS = st.lists(st.integers(0, 3), max_size=20)


def keys_of(tokens: list[int], *, size: int = 2, salt: bytes = b"", lookahead: bool = False) -> list[bytes]:
    return list(BlockKeys(secret=b"k", salt=salt, page_size=size, lookahead=lookahead).update(tokens, len(tokens)))


# Keys


@given(TOKENS, TOKENS, st.sampled_from([1, 2, 4]), st.booleans())
def test_equal_keys_mean_equal_prefixes(one: list[int], two: list[int], size: int, lookahead: bool) -> None:
    first, second = (keys_of(tokens, size=size, lookahead=lookahead) for tokens in (one, two))
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        end = (i + 1) * size + lookahead
        assert (a == b) == (one[:end] == two[:end])
    assert len(set(first)) == len(first)


@given(TOKENS, st.sampled_from([1, 2, 4]), st.booleans(), st.lists(st.integers(0, 20), max_size=5))
def test_keys_do_not_depend_on_when_they_are_asked_for(
    tokens: list[int], size: int, lookahead: bool, stops: list[int]
) -> None:
    keys = BlockKeys(secret=b"k", salt=b"", page_size=size, lookahead=lookahead)
    for stop in sorted(stops):
        known = tokens[: stop + 1]
        assert len(keys.update(known, min(stop, len(known)))) <= len(known) // size
    assert keys.update(tokens, len(tokens)) == keys_of(tokens, size=size, lookahead=lookahead)


def test_only_blocks_whose_tokens_are_final_have_keys() -> None:
    keys = BlockKeys(secret=b"k", salt=b"", page_size=4, lookahead=False)
    assert [len(keys.update(list(range(9)), n)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_lookahead_covers_the_token_after_the_block() -> None:
    """A head's last slot of a block holds the next token: without it there is no key, with another one another key."""
    assert keys_of([1, 2, 3, 4], size=4, lookahead=True) == []
    one, two = keys_of([1, 2, 3, 4, 5], size=4, lookahead=True), keys_of([1, 2, 3, 4, 6], size=4, lookahead=True)
    assert len(one) == len(two) == 1
    assert one != two
    # The chain goes on over the block's own tokens, so what follows both is still told apart by all of them.
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9], size=4, lookahead=True)[0] == one[0]


def test_salts_and_secrets_part_the_caches() -> None:
    tokens = [1, 2, 3, 4]
    assert set(keys_of(tokens)).isdisjoint(keys_of(tokens, salt=b"tenant"))
    other = BlockKeys(secret=b"another process", salt=b"", page_size=2, lookahead=False)
    assert set(keys_of(tokens)).isdisjoint(other.update(tokens, 4))


# The pool


def test_allocate_gives_all_or_nothing() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    pages = pool.allocate(3)
    assert sorted(pages or []) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.release(pages or [])
    assert pool.num_free == 3
    pool.check()


def test_a_page_released_twice_is_a_bug() -> None:
    pool = PagePool(num_pages=1, page_size=4)
    pages = pool.allocate(1)
    assert pages == [0]
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def published(pool: PagePool, names: list[bytes]) -> list[int]:
    pages = pool.allocate(len(names))
    assert pages is not None
    for page, name in zip(pages, names, strict=True):
        pool.publish(page, name)
    return pages


def test_released_prefix_is_found_again_and_shared() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    pages = published(pool, [b"a", b"b"])
    pool.release(pages)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.match([b"a", b"b", b"c"]) == pages
    assert pool.match([b"a"]) == pages[:1]
    assert [pool.refs(page) for page in pages] == [2, 1]
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.check()


def test_a_match_ends_at_the_first_hole() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    pages = published(pool, [b"a", b"b", b"c"])
    assert pool.match([b"a", b"x", b"c"]) == pages[:1]
    assert pool.match([b"x", b"a"]) == []


def test_the_first_page_of_a_content_keeps_the_key() -> None:
    pool = PagePool(num_pages=2, page_size=4)
    first, second = published(pool, [b"a"]), pool.allocate(1)
    assert second is not None
    pool.publish(second[0], b"a")
    pool.publish(first[0], b"other")  # and a page keeps its first key
    pool.release(second)
    assert pool.num_cached == 0, "a page without a key of its own is free, not cached"
    assert pool.match([b"a"]) == first
    assert pool.match([b"other"]) == []
    pool.check()


def test_eviction_takes_the_oldest_and_a_prefix_last() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    old, new = published(pool, [b"a", b"b"]), published(pool, [b"c", b"d"])
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]], "the end of a prefix goes before its beginning"
    assert pool.match([b"a", b"b"]) == [old[0]]
    assert pool.allocate(1) == [new[1]]
    pool.check()


def test_free_pages_are_used_before_cached_ones() -> None:
    pool = PagePool(num_pages=2, page_size=4)
    pages = published(pool, [b"a"])
    pool.release(pages)
    assert pool.allocate(1) != pages
    assert pool.match([b"a"]) == pages


def test_flush_forgets_what_nobody_owns() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    kept, dropped = published(pool, [b"a"]), published(pool, [b"b"])
    pool.release(dropped)
    pool.flush()
    assert (pool.num_free, pool.num_cached) == (2, 0)
    assert pool.match([b"b"]) == []
    assert pool.match([b"a"]) == kept
    pool.check()


def test_what_is_in_doubt_is_not_found_again() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    pages, private = published(pool, [b"a", b"b"]), pool.allocate(1)
    assert private is not None
    assert pool.match([b"a"]) == pages[:1]
    pool.raise_drafter_len(pages[0], 4)
    pool.unpublish([*pages, *private])
    assert pool.match([b"a", b"b"]) == []
    assert pool.drafter_len(pages) == 0
    pool.check()
    for owned in (pages, pages[:1], private):
        pool.release(owned)
    assert (pool.num_free, pool.num_cached) == (3, 0)
    pool.check()


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pool = PagePool(num_pages=1, page_size=4, prefix_cache=False)
    pages = published(pool, [b"a"])
    assert pool.match([b"a"]) == []
    pool.release(pages)
    assert (pool.num_free, pool.num_cached) == (1, 0)


# Drafter marks


def test_marks_are_clipped_and_only_rise() -> None:
    pool = PagePool(num_pages=1, page_size=4)
    pages = pool.allocate(1)
    assert pages is not None
    seen = []
    for length in (-8, 2, 9, 1):
        pool.raise_drafter_len(pages[0], length)
        seen.append(pool.drafter_len(pages))
    assert seen == [0, 2, 4, 4]


def test_marks_count_up_to_the_first_hole() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    pages = pool.allocate(3)
    assert pages is not None
    for page, length in zip(pages, (4, 3, 4), strict=True):
        pool.raise_drafter_len(page, length)
    assert [pool.drafter_len(pages[:n]) for n in range(4)] == [0, 4, 7, 7]
    pool.forget_drafter()
    assert pool.drafter_len(pages) == 0


@pytest.mark.parametrize("cached", [False, True])
def test_marks_do_not_outlive_a_pages_content(cached: bool) -> None:
    pool = PagePool(num_pages=1, page_size=4)
    pages = published(pool, [b"a"]) if cached else pool.allocate(1)
    assert pages is not None
    pool.raise_drafter_len(pages[0], 4)
    pool.release(pages)
    if cached:
        assert pool.match([b"a"]) == pages
        assert pool.drafter_len(pages) == 4, "a cached page keeps its mark"
        pool.release(pages)
    assert pool.allocate(1) == pages
    assert pool.drafter_len(pages) == 0


# The check, and everything at random


def test_check_can_fail() -> None:
    pool = PagePool(num_pages=2, page_size=4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check()
    pool = PagePool(num_pages=2, page_size=4)
    pages = published(pool, [b"a"])
    pool._pages[pages[0]].key = None
    with pytest.raises(AssertionError, match="stale"):
        pool.check()


@given(st.integers(0, 2**32), st.booleans())
def test_pages_always_add_up(seed: int, prefix_cache: bool) -> None:
    rng = random.Random(seed)
    pool = PagePool(num_pages=6, page_size=4, prefix_cache=prefix_cache)
    names = [bytes([i]) for i in range(5)]
    held: list[list[int]] = []
    for _ in range(60):
        action = rng.randrange(4)
        if action == 0:
            free, pages = pool.num_free, pool.allocate(count := rng.randint(0, 4))
            assert (pages is None) == (count > free)
            held += [pages] if pages else []
        elif action == 1 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif action == 2 and held:
            pool.publish(rng.choice(rng.choice(held)), rng.choice(names))
        else:
            found = pool.match(rng.sample(names, rng.randint(1, 3)))
            held += [found] if found else []
        owned = [page for pages in held for page in pages]
        assert [pool.refs(page) for page in range(6)] == [owned.count(page) for page in range(6)]
        assert pool.num_free == 6 - len(set(owned))
        pool.check()
    for pages in held:
        pool.release(pages)
    pool.flush()
    assert (pool.num_free, pool.num_cached) == (6, 0)
