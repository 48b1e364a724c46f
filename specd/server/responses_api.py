"""OpenAI's Responses API, the part without state: nothing is stored, so nothing can be continued by name.

    created | in_progress | output_item.added | content_part.added | output_text.delta ... | output_text.done |
    content_part.done | output_item.done | completed or incomplete

Source of shapes and order: the OpenAI API reference, "Responses" and "Streaming events".
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from specd.errors import RequestError
from specd.request import FinishReason, SequenceDelta
from specd.server.answer_format import TEXT_PATHS, text
from specd.server.checks import (
    MAX_SHOWN,
    anything,
    boolean,
    documented,
    integer,
    invalid_type,
    out_of_range,
    stop_strings,
    string,
    sub_object,
    unsupported,
)
from specd.server.fields import asks_nothing, read_table
from specd.server.generation import Generation
from specd.server.responses import ChoiceText, ResponseWriter
from specd.server.sse import KEEP_ALIVE
from specd.server.translation import (
    MESSAGE_PREFIX,
    RESPONSE_PREFIX,
    Translation,
    field_table,
    named_event,
    shared_values,
    text_parts,
)

PATH = "/v1/responses"
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_KINDS = ("input_text", "output_text", "text")
_ITEM_NAMES = frozenset({"type", "role", "content", "id", "status", "phase"})
_MAX_METADATA = 16


@documented({"type": "object", "maxProperties": _MAX_METADATA, "additionalProperties": {"type": "string"}})
def metadata(value: Any, param: str) -> dict[str, str]:
    """A flat map of at most 16 strings: it is repeated in the answer."""
    if not isinstance(value, dict):
        raise invalid_type(param, "an object of strings", value)
    if len(value) > _MAX_METADATA:
        raise out_of_range(param, f"an object of at most {_MAX_METADATA} entries", value)
    return {name: string(item, f"{param}.{name[:MAX_SHOWN]}") for name, item in value.items()}


FIELDS = field_table(
    {
        "input": anything({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1}]}),
        "instructions": string,
        "max_output_tokens": integer(1),
        "stop": stop_strings,
        "text": text,
        "stream_options": sub_object({"include_obfuscation": boolean}),
        # What changes nothing and is repeated in the answer.
        "metadata": metadata,
        "parallel_tool_calls": boolean,
        "prompt_cache_key": string,
        "safety_identifier": string,
        "user": string,
    },
    inert=(),
    unbuilt={
        "store": (False,), "background": (False,), "previous_response_id": (), "conversation": (), "prompt": (),
        "tools": (), "tool_choice": ("none", "auto"), "max_tool_calls": (), "include": (), "truncation": ("disabled",),
        "reasoning": ({"effort": None, "summary": None},),
        "top_logprobs": (0,), "n": (1,), "service_tier": ("auto",), "context_management": (),
        "messages": (), "max_tokens": (), "max_completion_tokens": (),
    },
)  # fmt: skip


class ResponsesApi:
    """The handler of /v1/responses."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def create(self, request: web.Request) -> web.StreamResponse:
        return await self._generation.translated(request, translate)


def translate(body: dict[str, Any]) -> Translation:
    """Raises RequestError."""
    values, ignored = read_table(body, FIELDS)
    if "input" not in values:
        raise RequestError("'input' is required", code="missing_parameter", param="input")
    messages, unread = _messages(values["input"])
    if "instructions" in values:
        messages.insert(0, {"role": "system", "content": values["instructions"]})
    chat = {**shared_values(body), "messages": messages}
    chat |= {name: body.get(name) for name in ("stop", "stream_options")}
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    chat["response_format"] = values.get("text")
    return Translation(
        body=chat,
        encoder=functools.partial(ResponsesEncoder, body=body),
        whole=functools.partial(_whole, body),
        ignored=ignored + unread,
        params={"messages": "input", "max_completion_tokens": "max_output_tokens", **TEXT_PATHS},
    )


def _messages(value: Any) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """`input` as chat messages, and the names in it that nobody reads."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}], ()
    if not isinstance(value, list):
        raise invalid_type("input", "a string or a list of messages", value)
    if not value:
        raise out_of_range("input", "a string, or a list of at least one message", value)
    found: list[dict[str, Any]] = []
    ignored: list[str] = []
    for i, item in enumerate(value):
        param = f"input[{i}]"
        if not isinstance(item, dict):
            raise invalid_type(param, "an object", item)
        if not asks_nothing(item.get("type"), ("message",)):
            raise unsupported(f"{param}.type", item["type"])
        if item.get("role") not in _ROLES:
            raise out_of_range(f"{param}.role", "one of " + ", ".join(_ROLES), item.get("role"))
        content = text_parts(item.get("content"), f"{param}.content", _TEXT_KINDS)
        found.append({"role": item["role"], "content": content})
        ignored += [f"{param}.{name}" for name in item if name not in _ITEM_NAMES]
    return found, tuple(ignored)


# ---------------------------------------------------------------- the answer


class _Shapes:
    """The objects that answers are made of."""

    def __init__(self, writer: ResponseWriter, body: Mapping[str, Any]) -> None:
        name = writer.call.response_id.removeprefix("chatcmpl-")
        self.id, self.item_id = RESPONSE_PREFIX + name, MESSAGE_PREFIX + name
        self._writer = writer
        self._body = body

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def item(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [self.part(text)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def response(self, choices: Sequence[ChoiceText], text: str | None) -> dict[str, Any]:
        """text: of the finished answer; None while it is in progress."""
        call, body = self._writer.call, self._body
        sampling = call.requests[0].sampling
        status = "in_progress" if text is None else item_status(choices[0])
        return {
            "id": self.id,
            "object": "response",
            "created_at": call.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "max_tool_calls": None,
            "model": call.model,
            "output": [] if text is None else [self.item(text, status)],
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "prompt_cache_key": body.get("prompt_cache_key"),
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.get("safety_identifier"),
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "truncation": "disabled",
            "usage": None if text is None else self._usage(choices),
            "user": body.get("user"),
            "metadata": body.get("metadata") or {},
        }

    def _usage(self, choices: Sequence[ChoiceText]) -> dict[str, Any]:
        usage = self._writer.usage(choices)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **usage.get("completion_tokens_details", {})},
            "total_tokens": usage["total_tokens"],
        }


def item_status(choice: ChoiceText) -> str:
    return "incomplete" if choice.finish_reason is FinishReason.LENGTH else "completed"


def _whole(body: Mapping[str, Any], writer: ResponseWriter, choices: Sequence[ChoiceText]) -> dict[str, Any]:
    response = _Shapes(writer, body).response(choices, choices[0].take().text)
    return response | writer.metrics(choices[0].stats)


class ResponsesEncoder:
    """The events of one streamed response; see the module for their order."""

    keep_alive = KEEP_ALIVE

    def __init__(self, writer: ResponseWriter, *, body: Mapping[str, Any]) -> None:
        self.choices = writer.choices()
        self._writer = writer
        self._shapes = _Shapes(writer, body)
        self._text: list[str] = []
        self._sequence = 0

    def start(self) -> bytes:
        response = self._shapes.response(self.choices, None)
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=self._shapes.item(None, "in_progress")),
                self._part_event("response.content_part.added", part=self._shapes.part("")),
            )
        )

    def push(self, index: int, delta: SequenceDelta) -> bytes:
        choice = self.choices[index]
        choice.add(delta)
        text = choice.take().text
        if not text:
            return b""
        self._text.append(text)
        return self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def end(self) -> bytes:
        text, status = "".join(self._text), item_status(self.choices[0])
        response = self._shapes.response(self.choices, text) | self._writer.metrics(self.choices[0].stats)
        return b"".join(
            (
                self._part_event("response.output_text.done", text=text, logprobs=[]),
                self._part_event("response.content_part.done", part=self._shapes.part(text)),
                self._event("response.output_item.done", output_index=0, item=self._shapes.item(text, status)),
                self._event(f"response.{status}", response=response),
            )
        )

    def failed(self, error: Mapping[str, Any]) -> bytes:
        """`error` is told twice: in the event's own fields, and where the SDKs look before they raise."""
        told = error["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"], error=told)

    def _part_event(self, name: str, **fields: Any) -> bytes:
        return self._event(name, item_id=self._shapes.item_id, output_index=0, content_index=0, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        body = {"sequence_number": self._sequence, **fields}
        self._sequence += 1
        return named_event(name, body, padded=self._writer.call.obfuscated)
