"""Tool calls in a model's text, as Hermes and Qwen models write them. No torch.

    text <tool_call>{"name": "f", "arguments": {...}}</tool_call> text

`HermesParser` walks the text character by character and keeps all it needs, so its events, joined, do not depend on how
the text was split. Text that only looks like a call stays text, to the last character: what had been held back is read
once more behind its marker. A marker inside a call's string is part of the string.

The work is linear: of two calls that are open at a time, one inside a string of the other, the outer one fails at the
first key of the inner one at the latest. Format: the chat templates of NousResearch/Hermes-2-Pro and Qwen2.5.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
from collections.abc import Collection

BEGIN, END = "<tool_call>", "</tool_call>"
_SPACE = " \t\r\n"
_KEYS = ("name", "arguments")
_CLOSERS = {"{": "}", "[": "]"}
_LITERAL = frozenset("0123456789+-.eEtrufalsn,:" + _SPACE)  # what JSON has outside of strings and brackets
_MAX_DEPTH = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Text that belongs to no call."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallBegin:
    """The next call; index counts from 0."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON as the model wrote it."""

    index: int
    text: str


Event = Text | CallBegin | CallArguments


class _Place(enum.Enum):
    """Where in a call the next character stands."""

    BODY = enum.auto()  # before {
    KEY_QUOTE = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    NAME = enum.auto()
    ARGUMENTS = enum.auto()
    NEXT = enum.auto()  # behind a value: comma or }
    END = enum.auto()


class _Verdict(enum.Enum):
    MORE = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()  # this character cannot follow


class _Call:
    """One call behind its marker, character by character.

    `held`: what is text after all when the call fails: all of it, or, where it has been announced, what stands behind
    the arguments.
    """

    def __init__(self, names: Collection[str], *, eager: bool) -> None:
        self.held: list[str] = []
        self.name = ""
        self.announced = False  # it may be given away
        self.index: int | None = None  # once it has been
        self._names = names
        self._eager = eager
        self._place = _Place.BODY
        self._word = ""  # of the key or the name that is being read, or of the end marker
        self._keys: list[str] = []
        self._arguments: list[str] = []
        self._num_taken = 0
        self._closers: list[str] = []
        self._in_string = self._escaped = False

    def push(self, character: str) -> _Verdict:
        given = self.announced and self._place is _Place.ARGUMENTS
        verdict = self._step(character)
        if verdict is _Verdict.FAILED:
            return verdict
        if not given:
            self.held.append(character)
        if verdict is _Verdict.DONE or (self._eager and not self.announced and self.name and self._arguments):
            self.announced = True
            self.held.clear()
        return verdict

    def taken(self) -> str:
        """The arguments, or what has been added to them since the last time. Not before it is announced."""
        text = "".join(self._arguments[self._num_taken :])
        self._num_taken = len(self._arguments)
        return text

    def _step(self, character: str) -> _Verdict:
        match self._place:
            case _Place.ARGUMENTS:
                return self._argument(character)
            case _Place.KEY:
                return self._key(character)
            case _Place.NAME:
                return self._name(character)
            case _Place.END if self._word:
                return self._end(character)
            case _ if character in _SPACE:
                return _Verdict.MORE
            case _Place.BODY:
                return self._go(_Place.KEY_QUOTE, character == "{")
            case _Place.KEY_QUOTE:
                return self._go(_Place.KEY, character == '"')
            case _Place.COLON:
                return self._go(_Place.VALUE, character == ":")
            case _Place.VALUE if self._keys[-1] == "name":
                return self._go(_Place.NAME, character == '"')
            case _Place.VALUE:
                return self._argument(character) if character == "{" else _Verdict.FAILED
            case _Place.NEXT if character == ",":
                return self._go(_Place.KEY_QUOTE, len(self._keys) < len(_KEYS))
            case _Place.NEXT:
                return self._close(character)
            case _:
                return self._end(character)

    def _go(self, place: _Place, allowed: bool) -> _Verdict:
        self._place = place
        return _Verdict.MORE if allowed else _Verdict.FAILED

    def _key(self, character: str) -> _Verdict:
        if character == '"':
            if self._word not in _KEYS or self._word in self._keys:
                return _Verdict.FAILED
            self._keys.append(self._word)
            self._word = ""
            return self._go(_Place.COLON, True)
        self._word += character
        return self._go(_Place.KEY, any(key.startswith(self._word) for key in _KEYS))

    def _name(self, character: str) -> _Verdict:
        if character == '"':
            self.name, self._word = self._word, ""
            return self._go(_Place.NEXT, self.name in self._names)
        self._word += character
        return self._go(_Place.NAME, any(name.startswith(self._word) for name in self._names))

    def _argument(self, character: str) -> _Verdict:
        """JSON's brackets and strings; the rest of its grammar is looked at when the last bracket closes."""
        if not self._allowed(character) or not (self._closers or _is_json("".join(self._arguments) + character)):
            return _Verdict.FAILED
        self._arguments.append(character)
        return self._go(_Place.ARGUMENTS if self._closers else _Place.NEXT, True)

    def _allowed(self, character: str) -> bool:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return character >= " "
        if character == '"':
            self._in_string = True
        elif character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
            return len(self._closers) <= _MAX_DEPTH
        elif character in "}]":
            return self._closers.pop() == character
        return character in _LITERAL or character in '"}]'

    def _close(self, character: str) -> _Verdict:
        if character != "}" or not self.name:
            return _Verdict.FAILED
        if "arguments" not in self._keys:  # a function without parameters
            self._arguments.append("{}")
        return self._go(_Place.END, True)

    def _end(self, character: str) -> _Verdict:
        self._word += character
        if not END.startswith(self._word):
            return _Verdict.FAILED
        return _Verdict.DONE if self._word == END else _Verdict.MORE


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str)  # numbers of any length
    except ValueError:
        return False
    return True


class HermesParser:
    """Text in, events out; `flush` once at the end.

    White space next to a call is part of the format and belongs to nobody. A call whose function is not in `names`, or
    whose body is not exactly a name and an object of arguments, is text.
    """

    def __init__(self, names: Collection[str], *, eager: bool = False, most: int | None = None) -> None:
        """eager: for text that a grammar made: arguments are given away while they are written. A call that breaks off
        then stays as it is, incomplete. Otherwise a call is given away once it is complete.
        most: calls after which all is text.
        """
        self.num_complete = 0
        self._names = frozenset(names)
        self._eager = eager
        self._most = most
        self._num_begun = 0
        self._events: list[Event] = []
        self._matched = 0  # characters of BEGIN that were read
        self._gap = ""  # white space that a call may follow
        self._after_call = False  # nothing but white space since a call
        self._call: _Call | None = None

    def push(self, text: str) -> list[Event]:
        self._read(text)
        if self._call is not None and self._call.announced:
            self._give(self._call)
        return self._take()

    def flush(self) -> list[Event]:
        """The end of the text: what was held back for a call that did not come is text."""
        while self._call is not None:
            call, self._call = self._call, None
            if not call.announced:
                self._plain(BEGIN)
                self._read("".join(call.held))
        self._plain(BEGIN[: self._matched])
        self._matched = 0
        if not self._after_call:
            self._text(self._gap)
        self._gap = ""
        return self._take()

    def _take(self) -> list[Event]:
        """Text that follows text as one."""
        found, self._events = self._events, []
        events: list[Event] = []
        for is_text, run in itertools.groupby(found, lambda event: isinstance(event, Text)):
            part = list(run)
            events += [Text("".join(event.text for event in part if isinstance(event, Text)))] if is_text else part
        return events

    def _read(self, text: str) -> None:
        chunks = [(text, 0)]  # and where to begin in it; the last one first
        while chunks:
            chunk, position = chunks.pop()
            while position < len(chunk):
                if self._call is None:
                    position = self._scan(chunk, position)
                    continue
                verdict = self._call.push(chunk[position])
                if verdict is _Verdict.FAILED:
                    chunks += [(chunk, position), (self._give_up(self._call), 0)]
                    break
                position += 1
                if self._call.announced and self._call.index is None:
                    self._begin(self._call)
                if verdict is _Verdict.DONE:
                    self._give(self._call)
                    self._call = None
                    self.num_complete += 1

    def _scan(self, chunk: str, position: int) -> int:
        """Reads text up to the end of a marker, of a character that ends a partial one, or of the chunk."""
        if self._matched:
            if chunk[position] != BEGIN[self._matched]:
                self._plain(BEGIN[: self._matched])
                self._matched = 0
                return position
            self._matched += 1
            if self._matched == len(BEGIN):
                self._matched = 0
                self._call = _Call(self._names, eager=self._eager)
            return position + 1
        if self.num_complete == self._most:
            self._plain(chunk[position:])
            return len(chunk)
        start = chunk.find(BEGIN, position)
        if start >= 0:
            self._plain(chunk[position:start])
            self._call = _Call(self._names, eager=self._eager)
            return start + len(BEGIN)
        longest = min(len(BEGIN) - 1, len(chunk) - position)
        self._matched = next((n for n in range(longest, 0, -1) if chunk.endswith(BEGIN[:n])), 0)
        self._plain(chunk[position : len(chunk) - self._matched])
        return len(chunk)

    def _give_up(self, call: _Call) -> str:
        """The characters of a failed call that are to be read as text."""
        self._call = None
        if call.announced:
            self._give(call)
        else:
            self._plain(BEGIN)
        return "".join(call.held)

    def _begin(self, call: _Call) -> None:
        call.index = self._num_begun
        self._num_begun += 1
        self._events.append(CallBegin(call.index, call.name))
        self._gap, self._after_call = "", True

    def _give(self, call: _Call) -> None:
        """What there is of its arguments."""
        text = call.taken()
        if text:
            assert call.index is not None
            self._events.append(CallArguments(call.index, text))

    def _plain(self, text: str) -> None:
        """Text outside of calls. White space at its end waits for what follows."""
        body = text.rstrip(_SPACE)
        if not body:
            self._gap += text
            return
        whole = self._gap + body
        self._gap = text[len(body) :]
        self._text(whole.lstrip(_SPACE) if self._after_call else whole)
        self._after_call = False

    def _text(self, text: str) -> None:
        if text:
            self._events.append(Text(text))
