"""Texts that outputs are likely to quote, given by an operator while the daemon runs: draft sources of some requests.

A corpus belongs to one API key or to everybody. Drafts tell by their speed what they were taken from, so a request
sees those of its own key and those of everybody, and no others. All of them live in memory until a restart.

    text -> tokens -> places, sorted by what stands before them       (once, in a thread)
    last tokens of a sequence -> the place after their longest match  (each look-up takes microseconds)

Source: He et al., "REST: Retrieval-Based Speculative Decoding" (2023), which looks drafts up in a suffix array.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from specd.errors import RequestError
from specd.text import Tokenizer

MAX_CORPORA = 32  # a look-up asks each of them
SHORTEST, LONGEST = 3, 9  # tokens of a match: fewer are found everywhere, more do not tell places apart
_BITS = 21  # of a token id in a key of three
_SLICE = 1 << 14  # characters or ids that become tokens at a time: the GIL is held meanwhile

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class CorpusIndex:
    """Tokens of one text and its places, sorted by the LONGEST tokens before each, the nearest one first."""

    def __init__(self, tokens: I32) -> None:
        """tokens i32[N], each below 2 ** 21. Sorts them: about a second for a million."""
        places = np.arange(SHORTEST, len(tokens), dtype=np.int32)  # what stands at a place is the first guess
        keys = [_keys(tokens, places, distance) for distance in range(0, LONGEST, SHORTEST)]
        order = np.lexsort(keys[::-1])
        self._places = places[order]
        self._nearest = keys[0][order]  # i64, sorted: the three tokens before each place
        self.tokens = tokens
        self.num_bytes = tokens.nbytes + self._places.nbytes + self._nearest.nbytes
        # Views are quicker than arrays where elements are read one by one.
        self._token_at, self._place_at, self._nearest_at = tokens.data, self._places.data, self._nearest.data

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """(place, length) of a longest match of the end of `tail`; length 0: there is none."""
        if len(tail) < SHORTEST:
            return 0, 0
        key = (tail[-1] << _BITS | tail[-2]) << _BITS | tail[-3]
        low = bisect.bisect_left(self._nearest_at, key)
        high = bisect.bisect_right(self._nearest_at, key, low)
        if low == high:
            return 0, 0
        found, length = self._place_at[low], SHORTEST
        while length < min(LONGEST, len(tail)):
            before, token = self._before(length + 1), tail[-1 - length]
            low = bisect.bisect_left(self._place_at, token, low, high, key=before)
            if low == high or before(self._place_at[low]) != token:
                break
            found, length = self._place_at[low], length + 1
            if before(self._place_at[high - 1]) != token:
                high = bisect.bisect_right(self._place_at, token, low, high, key=before)
        return found, length

    def _before(self, distance: int) -> Callable[[int], int]:
        """The token that stands so many tokens before a place; -1 in front of the text."""
        tokens = self._token_at
        return lambda place: tokens[place - distance] if place >= distance else -1


def _keys(tokens: I32, places: I32, distance: int) -> I64:
    """i64[len(places)]: the three tokens that end `distance` before each place, the nearest one first.

    Beyond the first three a token counts one more: 0 is in front of the text.
    """
    key = np.zeros(len(places), np.int64)
    for i in range(SHORTEST):
        at = places - (distance + i + 1)
        known = tokens[np.maximum(at, 0)].astype(np.int64) + (distance > 0)
        key = key << _BITS | np.where(at >= 0, known, 0)
    return key


@dataclasses.dataclass(slots=True)
class Tally:
    """What became of the drafts of one source."""

    drafted: int = 0
    kept: int = 0

    def add(self, drafted: int, kept: int) -> None:
        self.drafted += drafted
        self.kept += kept


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """One text as it was put; a text that replaces it is another Corpus."""

    name: str
    key: str | None  # id of the API key that it belongs to; None: everybody's
    salt: bytes | None  # of that key, as in `Request.tenant`
    index: CorpusIndex
    put_s: float  # time.monotonic()
    expires_s: float | None
    tally: Tally = dataclasses.field(default_factory=Tally)

    def describe(self, now_s: float) -> dict[str, object]:
        drafted, kept = self.tally.drafted, self.tally.kept
        return {
            "name": self.name,
            "key": self.key,
            "tokens": len(self.index.tokens),
            "bytes": self.index.num_bytes,
            "drafted": drafted,
            "hits": kept,
            "kept_rate": kept / drafted if drafted else None,
            "age_s": now_s - self.put_s,
            "ttl_left_s": None if self.expires_s is None else self.expires_s - now_s,
        }


class Corpora:
    """All of them. Lives on the event loop; what takes long is done in threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_tokens: of all together; 0: none are taken."""
        self.max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._vocab_size = min(vocab_size, (1 << _BITS) - 1)  # one more means: in front of the text
        self._clock = clock
        self._corpora: dict[str, Corpus] = {}
        self._allowed: dict[bytes, tuple[Corpus, ...]] = {}  # by tenant, made anew after every change
        self._next_expiry_s = float("inf")
        self._turn = asyncio.Lock()  # one is indexed at a time

    @property
    def num_tokens(self) -> int:
        return sum(len(corpus.index.tokens) for corpus in self._corpora.values())

    def allowed(self, tenant: bytes) -> tuple[Corpus, ...]:
        """Those that a request of this tenant may be drafted from, now."""
        if self._clock() >= self._next_expiry_s:
            self._expire()
        found = self._allowed.get(tenant)
        if found is None:
            found = tuple(c for c in self._corpora.values() if c.salt is None or c.salt == tenant)
            self._allowed[tenant] = found
        return found

    def describe(self) -> list[dict[str, object]]:
        self._expire()
        return [corpus.describe(self._clock()) for corpus in self._corpora.values()]

    def find(self, name: str) -> dict[str, object]:
        """Raises RequestError(not_found)."""
        self._expire()
        if name not in self._corpora:
            raise RequestError(f"there is no corpus {name!r}", code="not_found", param="name")
        return self._corpora[name].describe(self._clock())

    async def put(
        self, name: str, given: str | Sequence[int], *, key: str | None, salt: bytes | None, ttl_s: float | None
    ) -> dict[str, object]:
        """A text or token ids as the corpus of that name; one that has the name already is there until this one is.

        Raises RequestError(quota_exceeded, out_of_range).
        """
        async with self._turn:
            self._expire()
            others = self.num_tokens - len(self._corpora[name].index.tokens) if name in self._corpora else None
            if others is None and len(self._corpora) >= MAX_CORPORA:
                text = f"there are {MAX_CORPORA} corpora; delete one first"
                raise RequestError(text, code="quota_exceeded", param="name")
            room = self.max_tokens - (self.num_tokens if others is None else others)
            tokens = await self._tokens(given, room)
            index = await asyncio.to_thread(CorpusIndex, tokens)
            now_s = self._clock()
            expires_s = None if ttl_s is None else now_s + ttl_s
            self._corpora[name] = Corpus(name, key, salt, index, now_s, expires_s)
            self._changed()
            return self._corpora[name].describe(now_s)

    async def delete(self, name: str) -> dict[str, object]:
        """Nothing is drafted from it any more, by running requests either. Raises RequestError(not_found)."""
        async with self._turn:
            gone = self.find(name)
            del self._corpora[name]
            self._changed()
            return gone

    def _expire(self) -> None:
        now_s = self._clock()
        left = {n: c for n, c in self._corpora.items() if c.expires_s is None or now_s < c.expires_s}
        if len(left) < len(self._corpora):
            self._corpora = left
            self._changed()

    def _changed(self) -> None:
        self._allowed = {}
        ends = (c.expires_s for c in self._corpora.values() if c.expires_s is not None)
        self._next_expiry_s = min(ends, default=float("inf"))

    async def _tokens(self, given: str | Sequence[int], room: int) -> I32:
        """Raises RequestError for ids that are none, and as soon as there are more than `room`."""
        parts, count = [], 0
        for piece in _slices(given):
            parts.append(await asyncio.to_thread(self._part, piece, count))
            count += len(parts[-1])
            self._check_room(count, room)
        return await asyncio.to_thread(np.concatenate, parts)

    def _part(self, piece: str | Sequence[int], before: int) -> I32:
        ids = self._tokenizer.encode(piece, add_special=False) if isinstance(piece, str) else piece
        for i, token in enumerate(ids, before):
            if not 0 <= token < self._vocab_size:
                text = f"token_ids[{i}] = {token}: must be in 0..{self._vocab_size - 1}"
                raise RequestError(text, code="out_of_range", param="token_ids")
        return np.asarray(ids, np.int32)

    def _check_room(self, count: int, room: int) -> None:
        if count > room:
            raise RequestError(
                f"it has {count} tokens or more; {room} are left of speculation.corpora_tokens = {self.max_tokens}",
                code="quota_exceeded",
            )


def _slices(given: str | Sequence[int]) -> Iterator[str | Sequence[int]]:
    """Parts of about 16 Ki characters, or ids; those of a text end with a line, where there are lines."""
    start = 0
    while start < len(given):
        end = start + _SLICE
        if isinstance(given, str) and end < len(given):
            end = given.rfind("\n", start, end) + 1 or end
        yield given[start:end]
        start = end
