"""The parts of an answer: its text, its calls of tools and its thinking, read from one text, and their shapes in chat.

    text of a choice -> ThinkingSplitter -> HermesParser -> parts -> delta of a chunk, or message

The readers know nothing of an API: others than chat completions can write the same parts in their own shapes.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from specd.config import ChatConfig
from specd.hermes import BEGIN, END, CallArguments, CallBegin, HermesParser, Text
from specd.request import FinishReason, Grammar, SequenceDelta
from specd.server.reasoning import CLOSE, OPEN, Thinking, ThinkingCounter, ThinkingSplitter, Thought
from specd.server.structured import grammar_of
from specd.server.tools import choice_of, offered_tools
from specd.text import Tokenizer

Part = Text | Thought | CallBegin | CallArguments


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What to look for in the text of a call's choices."""

    names: frozenset[str] = frozenset()  # functions that may be called; none: no calls are looked for
    exact: bool = False  # a grammar makes the calls
    forced: bool = False  # and there is nothing but calls
    named: bool = False  # one call of a given function: its end is an ordinary one
    once: bool = False  # one call at most
    thinking: Thinking | None = None  # where the output begins; None: no thinking is looked for
    reasoning_field: str = "reasoning_content"


PLAIN = Reading()


def reading_of(
    values: Mapping[str, Any], thinking: Thinking | None, chat: ChatConfig, grammar: Grammar | None
) -> Reading:
    """From checked fields. thinking: as in `Prompts`; grammar: of the whole output, `tool_grammar.output_grammar`.

    An output that a grammar begins has no thinking: its first character is the format's.
    """
    chosen = choice_of(values)
    begun = chosen.mode in ("required", "named") or grammar_of(values) is not None
    return Reading(
        names=frozenset(tool.name for tool in offered_tools(values)),
        exact=chosen.mode != "none" and grammar is not None,
        forced=chosen.mode in ("required", "named"),
        named=chosen.mode == "named",
        once=chosen.mode != "none" and not values.get("parallel_tool_calls", True),
        thinking=Thinking.CLOSED if begun and thinking is not None else thinking,
        reasoning_field=chat.reasoning_field,
    )


def marker_ids(reading: Reading, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Markers that are special tokens of a model: their text must be there to be found."""
    markers = ((BEGIN, END) if reading.names else ()) + ((OPEN, CLOSE) if reading.thinking is not None else ())
    special = [tokenizer.encode(marker, add_special=False) for marker in markers if marker in tokenizer.special_tokens]
    return tuple(token_id for ids in special for token_id in ids)


class PartReader:
    """The parts of one choice, in order. Any grouping of the same tokens gives the same parts, when joined."""

    def __init__(self, reading: Reading, tokenizer: Tokenizer) -> None:
        self._reading = reading
        self._splitter = ThinkingSplitter(reading.thinking or Thinking.CLOSED)
        self._counter = None if reading.thinking is None else ThinkingCounter(reading.thinking, tokenizer)
        most = 1 if reading.once else None
        self._parser = HermesParser(reading.names, eager=reading.exact, most=most) if reading.names else None

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None where no thinking was looked for."""
        return None if self._counter is None else self._counter.num_tokens

    def read(self, delta: SequenceDelta) -> list[Part]:
        """What a delta adds."""
        if self._counter is not None:
            for token_id in delta.token_ids:
                self._counter.push(token_id)
        events = self._splitter.push(delta.text)
        if delta.finish_reason is not None:
            events += self._splitter.flush()
        parts: list[Part] = []
        for event in events:
            parts += self._parser.push(event.text) if self._parser and isinstance(event, Text) else [event]
        if delta.finish_reason is not None and self._parser:
            parts += self._parser.flush()
        return joined(parts)

    def finish(self, delta: SequenceDelta) -> tuple[str | None, str | int | None]:
        """The finish and stop reasons of chat completions, once a delta with a finish reason was read."""
        called = self._parser is not None and self._parser.num_complete > 0 and not self._reading.named
        if called and delta.finish_reason is FinishReason.STOP:
            return "tool_calls", delta.stop_reason
        return delta.finish_reason, delta.stop_reason


def joined(parts: Sequence[Part]) -> list[Part]:
    """Consecutive parts that continue each other as one."""
    if len(parts) < 2:
        return list(parts)
    found: list[Part] = []
    for _, run in itertools.groupby(parts, key=lambda part: (type(part), getattr(part, "index", None))):
        group = list(run)
        first = group[0]
        if isinstance(first, CallBegin):
            found += group
        else:
            text = "".join(part.text for part in group if not isinstance(part, CallBegin))
            found.append(dataclasses.replace(first, text=text))
    return found


def text_of(parts: Sequence[Part]) -> str:
    """The answer's text alone."""
    return "".join(part.text for part in parts if isinstance(part, Text))


# ---------------------------------------------------------------- shapes of chat completions


def chat_delta(part: Part, reading: Reading) -> dict[str, Any]:
    """The `delta` of a chunk."""
    match part:
        case Text(text):
            return {"content": text}
        case Thought(text):
            return {reading.reasoning_field: text}
        case CallBegin(index, name):
            return {"tool_calls": [{"index": index, **_call(name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def chat_message(parts: Sequence[Part], reading: Reading) -> dict[str, Any]:
    """The `message` of a whole answer: what its chunks would add up to."""
    text = text_of(parts)
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append(_call(part.name, ""))
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if thoughts:
        message[reading.reasoning_field] = thoughts
    return message | ({"tool_calls": calls} if calls else {})


def new_call_id(prefix: str = "call_") -> str:
    return prefix + secrets.token_hex(12)


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": new_call_id(),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
