"""The thinking of a model, apart from its answer: `<think>...</think>` at the beginning of what it says.

`ThinkingSplitter` keeps what it needs between two texts, so its events, joined, do not depend on how the text was
split. White space inside the markers and behind the closing one is part of the format and belongs to nobody.
"""

from __future__ import annotations

import dataclasses
import enum

from specd.hermes import Text
from specd.text import Detokenizer, PaddedTokens, Tokenizer

OPEN, CLOSE = "<think>", "</think>"
_SPACE = " \t\r\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Thought:
    """Text of the thinking."""

    text: str


class Thinking(enum.Enum):
    """Where an output stands."""

    EXPECTED = enum.auto()  # a marker may open it
    OPEN = enum.auto()
    CLOSED = enum.auto()  # whatever comes is the answer


def after_prompt(prompt_end: str) -> Thinking:
    """Where an output begins, by the end of a prompt that the template wrote: some open the thinking there, some close
    it at once."""
    end = prompt_end.rstrip(_SPACE)
    if end.endswith(OPEN):
        return Thinking.OPEN
    return Thinking.CLOSED if end.endswith(CLOSE) else Thinking.EXPECTED


def after_message(text: str) -> Thinking:
    """Where the continuation of a message stands that begins with `text`."""
    begun = text.lstrip(_SPACE)
    if begun.startswith(OPEN):
        return Thinking.CLOSED if CLOSE in begun else Thinking.OPEN
    return Thinking.CLOSED if begun else Thinking.EXPECTED


class ThinkingSplitter:
    """Text in, events out; `flush` once at the end."""

    def __init__(self, place: Thinking) -> None:
        self.place = place
        self.opened = place is Thinking.OPEN  # whether there is, or was, any thinking
        self._held = ""  # of a marker
        self._gap = ""  # white space before that, whose place is not known yet
        self._fresh = place is Thinking.OPEN  # white space is dropped that comes next

    def push(self, text: str) -> list[Text | Thought]:
        events: list[Text | Thought] = []
        while text:
            if self.place is Thinking.EXPECTED:
                text = self._expect(text)
            elif self.place is Thinking.OPEN:
                text = self._think(text, events)
            else:
                answer = text.lstrip(_SPACE) if self._fresh else text
                self._fresh = self._fresh and not answer
                events += [Text(answer)] if answer else []
                break
        return events

    def flush(self) -> list[Text | Thought]:
        held, self._held, self._gap = self._gap + self._held, "", ""
        if not held:
            return []
        return [Thought(held) if self.place is Thinking.OPEN else Text(held)]

    def _expect(self, text: str) -> str:
        """What is left to be read once the place is known; "" while it is not."""
        if not self._held:
            begun = text.lstrip(_SPACE)
            self._gap += text[: len(text) - len(begun)]
            text = begun
        begun = self._held + text
        if begun.startswith(OPEN):
            self._held = self._gap = ""
            self.place = Thinking.OPEN
            self.opened = self._fresh = True
            return begun[len(OPEN) :]
        if OPEN.startswith(begun):
            self._held = begun
            return ""
        whole, self._held, self._gap = self._gap + begun, "", ""
        self.place = Thinking.CLOSED
        return whole

    def _think(self, text: str, events: list[Text | Thought]) -> str:
        """What follows the closing marker."""
        whole = self._held + text
        if self._fresh:
            whole = whole.lstrip(_SPACE)
            self._fresh = not whole
        end = whole.find(CLOSE)
        body = whole[:end] if end >= 0 else whole[: len(whole) - _begun_marker(whole)]
        self._held = "" if end >= 0 else whole[len(body) :]
        thought = body.rstrip(_SPACE)
        if thought:
            events.append(Thought(self._gap + thought))
            self._gap = ""
        self._gap += body[len(thought) :]
        if end < 0:
            return ""
        self._gap = ""
        self._fresh, self.place = True, Thinking.CLOSED
        return whole[end + len(CLOSE) :]


def _begun_marker(text: str) -> int:
    """Characters at its end that may belong to the closing marker."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)


class ThinkingCounter:
    """Counts the tokens of the thinking, its markers included, one by one: the count does not depend on grouping."""

    def __init__(self, place: Thinking, tokenizer: Tokenizer) -> None:
        self.num_tokens = 0
        self._splitter = ThinkingSplitter(place)
        self._detokenizer = Detokenizer(PaddedTokens(tokenizer), skip_special=False)
        self._num_pending = 0  # tokens before it is known whether there is any thinking

    def push(self, token_id: int) -> None:
        if self._splitter.place is Thinking.CLOSED:
            return
        self._splitter.push(self._detokenizer.push(token_id))
        self._num_pending += 1
        if self._splitter.opened:
            self.num_tokens += self._num_pending
            self._num_pending = 0
