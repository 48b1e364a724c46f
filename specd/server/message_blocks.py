"""The content blocks of one answer of the Messages API while they grow, and the events that tell of them.

    text        text        content_block_start | content_block_delta (text_delta) ... | content_block_stop
    a thought   thinking    the same with thinking_delta
    a call      tool_use    the same with input_json_delta

Source of shapes and order: Anthropic's API reference, "Messages" and "Streaming messages".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson

from specd.hermes import CallArguments, CallBegin, Text
from specd.server.parts import Part, new_call_id
from specd.server.reasoning import Thought

Event = tuple[str, dict[str, Any]]  # name and fields

_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_CALL_DELTA = ("input_json_delta", "partial_json")
_TOOL_ID = "toolu_"


class ContentBlocks:
    """Parts in, events out. `content` holds the blocks that are finished."""

    def __init__(self, *, thinks: bool) -> None:
        """thinks: thoughts are told, too."""
        self._thinks = thinks
        self.content: list[dict[str, Any]] = []
        self._block: dict[str, Any] | None = None  # the one that grows
        self._text: list[str] = []  # or arguments

    @property
    def called(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.content)

    def push(self, parts: Sequence[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            match part:
                case CallBegin(_, name):
                    events += self._open({"type": "tool_use", "id": new_call_id(_TOOL_ID), "name": name, "input": {}})
                case CallArguments(_, text):
                    events.append(self._delta(text))
                case Text(text):
                    events += [*self._turn_to("text"), self._delta(text)]
                case Thought(text) if self._thinks:
                    events += [*self._turn_to("thinking", signature=""), self._delta(text)]
        return events

    def end(self) -> list[Event]:
        """Ends the last block; an answer without any is an empty text."""
        begun = [] if self._block or self.content else self._turn_to("text")
        return begun + self._close()

    def _turn_to(self, kind: str, **fields: str) -> list[Event]:
        if self._block is not None and self._block["type"] == kind:
            return []
        return self._open({"type": kind, kind: "", **fields})

    def _open(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._block = block
        events.append(("content_block_start", {"index": len(self.content), "content_block": block}))
        return events

    def _close(self) -> list[Event]:
        if self._block is None:
            return []
        kind, text = self._block["type"], "".join(self._text)
        finished = {"input": arguments(text)} if kind == "tool_use" else {kind: text}
        self.content.append({**self._block, **finished})
        self._block = None
        self._text.clear()
        return [("content_block_stop", {"index": len(self.content) - 1})]

    def _delta(self, text: str) -> Event:
        assert self._block is not None
        self._text.append(text)
        kind, field = _DELTAS.get(self._block["type"], _CALL_DELTA)
        return "content_block_delta", {"index": len(self.content), "delta": {"type": kind, field: text}}


def arguments(text: str) -> orjson.Fragment | dict[str, Any]:
    """A call's arguments as the model wrote them: numbers of any length, and characters that are none.

    One that was cut off has none: its text is no JSON, and the answer says why.
    """
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except ValueError:
        return {}
    return orjson.Fragment(text)
