"""The output items of one answer of the Responses API while they grow, and the events that tell of it.

    text        message         output_item.added | content_part.added | output_text.delta ... | output_text.done |
                                content_part.done | output_item.done
    a thought   reasoning       the same with reasoning_text
    a call      function_call   output_item.added | function_call_arguments.delta ... | function_call_arguments.done |
                                output_item.done

Source of shapes and order: the OpenAI API reference, "Responses" and "Streaming events".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from specd.hermes import CallArguments, CallBegin, Text
from specd.server.parts import Part, new_call_id
from specd.server.translation import MESSAGE_PREFIX

Event = tuple[str, dict[str, Any]]  # name and fields
Status = Literal["completed", "incomplete"]

_PREFIXES = {"message": MESSAGE_PREFIX, "reasoning": "rs_", "function_call": "fc_"}
_CONTENT = {"message": "output_text", "reasoning": "reasoning_text"}  # the kind of an item's only part


class OutputItems:
    """Parts in, events out. `output` holds the items that are finished."""

    def __init__(self, name: str) -> None:
        """name: what their ids are made of."""
        self.output: list[dict[str, Any]] = []
        self._name = name
        self._kind: str | None = None  # of the item that grows
        self._item: dict[str, Any] = {}
        self._text: list[str] = []  # or arguments

    def push(self, parts: Sequence[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            match part:
                case CallBegin(_, name):
                    events += self._open("function_call", call_id=new_call_id(), name=name, arguments="")
                case CallArguments(_, text):
                    events.append(self._delta(text))
                case Text(text):
                    events += [*self._turn_to("message"), self._delta(text)]
                case _:
                    events += [*self._turn_to("reasoning"), self._delta(part.text)]
        return events

    def end(self, status: Status) -> list[Event]:
        """Ends the last item; an answer without any is an empty message."""
        begun = [] if self._kind or self.output else self._turn_to("message")
        return begun + self._close(status)

    def _turn_to(self, kind: str) -> list[Event]:
        if self._kind == kind:
            return []
        own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        return self._open(kind, content=[], **own)

    def _open(self, kind: str, **fields: Any) -> list[Event]:
        events = self._close("completed")
        index = len(self.output)
        item_id = _PREFIXES[kind] + self._name + (f"_{index}" if index else "")
        self._kind = kind
        self._item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        events.append(("response.output_item.added", {"output_index": index, "item": self._item}))
        if kind in _CONTENT:
            events.append(self._about("response.content_part.added", part=self._part("")))
        return events

    def _close(self, status: Status) -> list[Event]:
        if self._kind is None:
            return []
        kind, text = self._kind, "".join(self._text)
        if kind == "function_call":
            done = {"name": self._item["name"], "arguments": text}
            events = [self._about("response.function_call_arguments.done", **done)]
            finished: dict[str, Any] = {"arguments": text}
        else:
            part = self._part(text)
            events = [
                self._about(f"response.{_CONTENT[kind]}.done", text=text, **_scores(kind)),
                self._about("response.content_part.done", part=part),
            ]
            finished = {"content": [part]}
        item = {**self._item, "status": status, **finished}
        events.append(("response.output_item.done", {"output_index": len(self.output), "item": item}))
        self.output.append(item)
        self._kind = None
        self._text.clear()
        return events

    def _delta(self, text: str) -> Event:
        self._text.append(text)
        assert self._kind is not None
        if self._kind == "function_call":
            return self._about("response.function_call_arguments.delta", delta=text)
        return self._about(f"response.{_CONTENT[self._kind]}.delta", delta=text, **_scores(self._kind))

    def _about(self, name: str, /, **fields: Any) -> Event:
        place = {"content_index": 0} if self._kind in _CONTENT else {}
        return name, {"item_id": self._item["id"], "output_index": len(self.output), **place, **fields}

    def _part(self, text: str) -> dict[str, Any]:
        extra: dict[str, Any] = {"annotations": [], "logprobs": []} if self._kind == "message" else {}
        return {"type": _CONTENT[self._kind or "message"], "text": text, **extra}


def _scores(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}
