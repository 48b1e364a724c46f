"""From token ids to text that can be sent: whole characters only, and nothing that may still become a stop string.

Both are incremental and forget nothing they need: any grouping of the same tokens gives the same text.
"""

from __future__ import annotations

import codecs
import enum
import functools
from collections import deque
from collections.abc import Collection
from typing import Protocol


class LeadingSpace(enum.StrEnum):
    """What a full decode does with the space that SentencePiece puts before the first word."""

    KEEP = "keep"
    STRIP_ONE = "strip_one"  # one space at the start of the text is dropped
    STRIP_FIRST_TOKEN = "strip_first_token"  # every space of the first token is dropped


class TokenBytes(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def special_ids(self) -> Collection[int]: ...

    @property
    def leading_space(self) -> LeadingSpace: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class SizedTokenBytes(TokenBytes, Protocol):
    """A tokenizer that raises for ids from `vocab_size` on."""

    @property
    def vocab_size(self) -> int: ...


class PaddedTokens:
    """Bytes of every id that a model can emit: a head may be padded past the vocabulary, and padding has no text."""

    __slots__ = ("_tokenizer", "leading_space", "special_ids")

    def __init__(self, tokenizer: SizedTokenBytes, *, keep_space: bool = False, shown: Collection[int] = ()) -> None:
        """keep_space: also of the first word, because a grammar asked for it. shown: special tokens that are text."""
        self._tokenizer = tokenizer
        self.special_ids = frozenset(tokenizer.special_ids).difference(shown)
        self.leading_space = LeadingSpace.KEEP if keep_space else tokenizer.leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""


class TokenReadings:
    """One `PaddedTokens` for all requests that read tokens alike: what each step reads fits the processor's caches."""

    def __init__(self, tokenizer: SizedTokenBytes) -> None:
        self._tokenizer = tokenizer
        self._readings: dict[tuple[bool, tuple[int, ...]], PaddedTokens] = {}

    def get(self, *, keep_space: bool, shown: tuple[int, ...]) -> PaddedTokens:
        known = self._readings.get((keep_space, shown))
        if known is None:
            known = PaddedTokens(self._tokenizer, keep_space=keep_space, shown=shown)
            self._readings[keep_space, shown] = known
        return known


class Detokenizer:
    """Incremental UTF-8 over token bytes. History is never decoded again, a character is never split.

    Malformed bytes become U+FFFD as in `bytes.decode(errors="replace")`; bytes that end in the middle of a character
    are held until the next token, or until `flush`. Errors: RequestError for an id outside the vocabulary.
    """

    __slots__ = ("_at_start", "_decoder", "_skip_special", "_tokenizer")

    def __init__(self, tokenizer: TokenBytes, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty."""
        data = self._tokenizer.token_bytes(token_id)
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        if self._at_start and data:
            self._at_start = False
            if self._tokenizer.leading_space is LeadingSpace.STRIP_FIRST_TOKEN:
                data = data.replace(b" ", b"")
            elif self._tokenizer.leading_space is LeadingSpace.STRIP_ONE:
                data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds the stop string that is completed first and holds back every text that could still become one.

    Of stops completed by the same character the longest one wins. Text is walked character by character (an
    Aho-Corasick automaton, linear time), so the result does not depend on how it was grouped. After a match nothing
    more is released. With `include` the stop string itself is released too.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "matched")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._include = include
        self._automaton = _automaton(stops)
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to release, the stop string this text completed or None)."""
        state, automaton = self._state, self._automaton
        if automaton.empty:
            return text, None
        if self.matched is not None:
            return "", None
        for index, character in enumerate(text):
            state = automaton.step(state, character)
            stop = automaton.stop[state]
            if stop is not None:
                return self._finish(self._held + text[: index + 1], stop)
        self._state = state
        whole = self._held + text
        cut = len(whole) - automaton.depth[state]
        self._held = whole[cut:]
        return whole[:cut], None

    def flush(self) -> str:
        """At the end: the text that was held back for a stop string that did not come."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _finish(self, whole: str, stop: str) -> tuple[str, str]:
        self.matched, self._held, self._state = stop, "", 0
        return (whole if self._include else whole[: -len(stop)]), stop


class _Automaton:
    """Of some stop strings; it has a state for each of their characters. Not changed once it is made."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._next: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.stop: list[str | None] = [None]  # longest stop string that ends in this state
        self.empty = not stops
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            target = self._next[state].get(character)
            if target is None:
                target = len(self._next)
                self._next[state][character] = target
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.stop.append(None)
            state = target
        self.stop[state] = stop

    def _link(self) -> None:
        """Failure links, breadth first: the longest proper suffix of a state that is a state too."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, target in self._next[state].items():
                queue.append(target)
                fail = self._fail[state]
                while fail and character not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[target] = self._next[fail].get(character, 0)
                if self.stop[target] is None:
                    self.stop[target] = self.stop[self._fail[target]]


@functools.lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """One for all choices of a request: long ones have a megabyte."""
    return _Automaton(stops)
