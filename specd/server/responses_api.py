"""OpenAI's Responses API, the part without state: nothing is stored, so nothing can be continued by name.

    created | in_progress | an item ... | completed or incomplete        (items: see `response_items.py`)

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
)
from specd.server.fields import read_table
from specd.server.generation import Generation
from specd.server.response_items import Event, OutputItems, Status
from specd.server.responses import ChoiceText, ResponseWriter
from specd.server.responses_input import INPUT_SCHEMA, input_messages
from specd.server.sse import KEEP_ALIVE
from specd.server.translated_tools import RESPONSES_PATHS, responses_choice, responses_tools
from specd.server.translation import RESPONSE_PREFIX, Translation, field_table, named_event, shared_values

PATH = "/v1/responses"
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
        "input": anything(INPUT_SCHEMA),
        "instructions": string,
        "max_output_tokens": integer(1),
        "stop": stop_strings,
        "tools": responses_tools,
        "tool_choice": responses_choice,
        "parallel_tool_calls": boolean,
        "text": text,
        "stream_options": sub_object({"include_obfuscation": boolean}),
        # What changes nothing and is repeated in the answer.
        "metadata": metadata,
        "prompt_cache_key": string,
        "safety_identifier": string,
        "user": string,
    },
    inert=(),
    unbuilt={
        "store": (False,), "background": (False,), "previous_response_id": (), "conversation": (), "prompt": (),
        "max_tool_calls": (), "include": (), "truncation": ("disabled",),
        "reasoning": ({"effort": None, "summary": None},),
        "top_logprobs": (0,), "n": (1,), "service_tier": ("auto",), "context_management": (),
        "messages": (), "max_tokens": (), "max_completion_tokens": (),
    },
)  # fmt: skip


_PATHS = {"messages": "input", "max_completion_tokens": "max_output_tokens", **TEXT_PATHS, **RESPONSES_PATHS}


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
    translated = input_messages(values["input"], values.get("instructions"))
    chat = {**shared_values(body), "messages": translated.messages}
    chat |= {"stop": body.get("stop"), "max_completion_tokens": body.get("max_output_tokens")}
    chat |= {name: values.get(name) for name in ("tools", "tool_choice", "parallel_tool_calls", "stream_options")}
    chat["response_format"] = values.get("text")
    return Translation(
        body=chat,
        encoder=functools.partial(ResponsesEncoder, body=body),
        whole=functools.partial(_whole, body),
        ignored=ignored,
        reads_parts=True,
        params={**_PATHS, **translated.places},
    )


# ---------------------------------------------------------------- the answer


class _Shapes:
    """The objects that answers are made of."""

    def __init__(self, writer: ResponseWriter, body: Mapping[str, Any]) -> None:
        self.name = writer.call.response_id.removeprefix("chatcmpl-")
        self._writer = writer
        self._body = body

    def response(self, choices: Sequence[ChoiceText], output: list[dict[str, Any]] | None) -> dict[str, Any]:
        """output: the items of the finished answer; None while it is in progress."""
        call, body = self._writer.call, self._body
        sampling = call.requests[0].sampling
        status = "in_progress" if output is None else item_status(choices[0])
        return {
            "id": RESPONSE_PREFIX + self.name,
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
            "output": output or [],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.get("prompt_cache_key"),
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.get("safety_identifier"),
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_logprobs": 0,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "truncation": "disabled",
            "usage": None if output is None else self._usage(choices),
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


def item_status(choice: ChoiceText) -> Status:
    return "incomplete" if choice.finish_reason == FinishReason.LENGTH else "completed"


def _whole(body: Mapping[str, Any], writer: ResponseWriter, choices: Sequence[ChoiceText]) -> dict[str, Any]:
    shapes = _Shapes(writer, body)
    items = OutputItems(shapes.name)
    items.push(choices[0].take().parts)
    items.end(item_status(choices[0]))
    return shapes.response(choices, items.output) | writer.metrics(choices[0].stats)


class ResponsesEncoder:
    """The events of one streamed response; see the module for their order."""

    keep_alive = KEEP_ALIVE

    def __init__(self, writer: ResponseWriter, *, body: Mapping[str, Any]) -> None:
        self.choices = writer.choices()
        self._writer = writer
        self._shapes = _Shapes(writer, body)
        self._items = OutputItems(self._shapes.name)
        self._sequence = 0

    def start(self) -> bytes:
        response = self._shapes.response(self.choices, None)
        names = "response.created", "response.in_progress"
        return b"".join(self._event(name, response=response) for name in names)

    def push(self, index: int, delta: SequenceDelta) -> bytes:
        choice = self.choices[index]
        choice.add(delta)
        return self._events(self._items.push(choice.take().parts))

    def end(self) -> bytes:
        status = item_status(self.choices[0])
        last = self._events(self._items.end(status))
        response = self._shapes.response(self.choices, self._items.output)
        response |= self._writer.metrics(self.choices[0].stats)
        return last + self._event(f"response.{status}", response=response)

    def failed(self, error: Mapping[str, Any], status: int) -> bytes:
        """`error` is told twice: in the event's own fields, and where the SDKs look before they raise."""
        told = error["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"], error=told)

    def _events(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._event(name, **fields) for name, fields in events)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        body = {"sequence_number": self._sequence, **fields}
        self._sequence += 1
        return named_event(name, body, padded=self._writer.call.obfuscated)
