"""Pages: who owns which, and the prefix index. Pure Python; the tensors they index live in `kv.py`.

A page is free, owned (reference count > 0), or cached (count 0, but its content is a full block that can be found again
by its key; the least recently used one is taken when no free page is left). Only full blocks of tokens whose target KV
is final are published, and a published page's target KV is never written again.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import struct
from collections.abc import Sequence


class BlockKeys:
    """Keys of a sequence's full blocks: keyed BLAKE2b, chained, over a salt and token ids.

    Keyed with a secret of this process, so that a client can neither guess nor collide a key; a hash of the parent
    key, so that equal keys mean equal prefixes. With `lookahead` (a drafter that reads hidden states) a block's key
    also covers the first token after it, because the head's last slot of the block holds that token.
    """

    __slots__ = ("_chain", "_keys", "_lookahead", "_page_size", "_secret")

    def __init__(self, *, secret: bytes, salt: bytes, page_size: int, lookahead: bool) -> None:
        self._secret = secret
        self._page_size = page_size
        self._lookahead = lookahead
        self._chain = [self._hash(b"", salt)]
        self._keys: list[bytes] = []

    def update(self, tokens: Sequence[int], num_final: int) -> list[bytes]:
        """Keys of all blocks that end at or before num_final (with lookahead: whose next token is known too)."""
        size = self._page_size
        while (end := (len(self._keys) + 1) * size) <= num_final and end + self._lookahead <= len(tokens):
            block = tokens[end - size : end]
            link = self._hash(self._chain[-1], struct.pack(f"<{size}i", *block))
            self._chain.append(link)
            self._keys.append(self._hash(link, struct.pack("<i", tokens[end]), b"ahead") if self._lookahead else link)
        return self._keys

    def _hash(self, parent: bytes, data: bytes, kind: bytes = b"link") -> bytes:
        return hashlib.blake2b(parent + data, key=self._secret, digest_size=16, person=kind).digest()


@dataclasses.dataclass(slots=True)
class _Page:
    refs: int = 0
    key: bytes | None = None
    drafter_len: int = 0  # leading slots of the page that hold valid drafter KV


class PagePool:
    """All pages of the target's and the drafter's KV (they share ids)."""

    def __init__(self, *, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._pages = [_Page() for _ in range(num_pages)]
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()  # oldest first
        self._index: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and nothing happens) when there are not so many."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._pages[page].refs = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Gives one reference of each page back. The last pages of a sequence are evicted before the first."""
        for page in reversed(pages):
            record = self._pages[page]
            assert record.refs > 0, f"page {page} released twice"
            record.refs -= 1
            if record.refs == 0:
                if record.key is None:
                    record.drafter_len = 0
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The longest run of cached or shared pages for the leading keys; takes a reference of each."""
        pages = []
        for key in keys:
            page = self._index.get(key)
            if page is None:
                break
            self._pages[page].refs += 1
            self._cached.pop(page, None)
            pages.append(page)
        return pages

    def publish(self, page: int, key: bytes) -> None:
        """Makes a full block findable. Another page with the same content keeps the key."""
        if self.prefix_cache and key not in self._index and self._pages[page].key is None:
            self._index[key] = page
            self._pages[page].key = key

    def unpublish(self, pages: Sequence[int]) -> None:
        """Nobody finds these owned pages any more: what they hold is in doubt."""
        for page in pages:
            record = self._pages[page]
            if record.key is not None:
                del self._index[record.key]
                record.key, record.drafter_len = None, 0

    def raise_drafter_len(self, page: int, length: int) -> None:
        """The page's first `length` slots hold valid drafter KV (clipped to the page; a mark never sinks here)."""
        record = self._pages[page]
        record.drafter_len = max(record.drafter_len, min(length, self.page_size))

    def drafter_len(self, pages: Sequence[int]) -> int:
        """Leading slots of a page list that hold valid drafter KV without a hole."""
        total = 0
        for page in pages:
            total += self._pages[page].drafter_len
            if self._pages[page].drafter_len < self.page_size:
                break
        return total

    def forget_drafter(self) -> None:
        """No page holds valid drafter KV any more (a refill failed, or the drafter was exchanged)."""
        for record in self._pages:
            record.drafter_len = 0

    def refs(self, page: int) -> int:
        return self._pages[page].refs

    def occupancy(self) -> tuple[list[int], list[int]]:
        """How many own each page, by page; and the pages that are nobody's but hold a reusable prefix."""
        return [record.refs for record in self._pages], list(self._cached)

    def flush(self) -> None:
        """Forgets every cached page that nobody owns."""
        while self._cached:
            self._free.append(self._evict())

    def check(self) -> None:
        """Raises AssertionError when free, cached and owned pages do not add up. For tests."""
        owned = {i for i, page in enumerate(self._pages) if page.refs > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert owned.isdisjoint(free | cached), "an owned page is free or cached"
        assert free.isdisjoint(cached), "a page is free and cached"
        assert len(owned) + len(free) + len(cached) == self.num_pages, "a page is lost"
        assert all(self._pages[page].key is not None for page in cached), "a cached page has no key"
        assert all(self._pages[page].key == key for key, page in self._index.items()), "the index is stale"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        record = self._pages[page]
        assert record.key is not None
        del self._index[record.key]
        record.key, record.drafter_len = None, 0
        return page
