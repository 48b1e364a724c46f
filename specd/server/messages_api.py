"""Anthropic's Messages API: what its SDK and the agents on top of it need.

    message_start | a content block ..., ping | message_delta | message_stop      (blocks: see `message_blocks.py`)

A last message of the assistant is continued, as there. Cached prompt tokens are not part of `input_tokens`, as there.
Source of shapes and order: Anthropic's API reference, "Messages" and "Streaming messages".
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from specd.errors import RequestError
from specd.request import FinishReason, SequenceDelta
from specd.server.answer_format import output_config, output_format, output_paths
from specd.server.checks import (
    Check,
    anything,
    documented,
    integer,
    invalid_type,
    schema_of,
    stop_strings,
    sub_object,
    unsupported,
)
from specd.server.errors import json_response
from specd.server.fields import Endpoint, FieldTable, read_table
from specd.server.generation import REQUEST_ID_KEY, Generation
from specd.server.message_blocks import ContentBlocks, Event
from specd.server.messages_input import MESSAGES_SCHEMA, TEXTS_SCHEMA, chat_messages
from specd.server.responses import ChoiceText, ResponseWriter
from specd.server.translated_tools import MESSAGES_PATHS, MessagesChoice, messages_choice, messages_tools
from specd.server.translation import (
    MESSAGE_PREFIX,
    Translation,
    field_table,
    named_event,
    shared_values,
)

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
PATHS = (PATH, COUNT_PATH)
_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip

_THINKING = {"adaptive": True, "disabled": False}


_ASKED = sub_object(
    {"type": anything({"type": "string", "enum": list(_THINKING)})},
    unbuilt={"budget_tokens": (0,), "display": ("summarized",)},
)


@documented({**schema_of(_ASKED), "required": ["type"]})
def thinking(value: Any, param: str) -> bool:
    """Whether the answer shows what the model thought: it does so of its own accord, and takes no budget for it."""
    if not isinstance(value, dict):
        raise invalid_type(param, "an object", value)
    if not isinstance(value.get("type"), str) or value["type"] not in _THINKING:
        raise unsupported(f"{param}.type", value.get("type"))
    return _THINKING[_ASKED(value, param)["type"]]


_TURN = ("continue_final_message", "add_generation_prompt")
_PROMPT_FIELDS: dict[str, Check] = {
    "messages": anything(MESSAGES_SCHEMA),
    "system": anything(TEXTS_SCHEMA),
    "tools": messages_tools,
    "tool_choice": messages_choice,
}
_FORMAT_FIELDS: dict[str, Check] = {"output_config": output_config, "output_format": output_format}
_UNBUILT: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True, False),
    "container": (), "mcp_servers": (), "context_management": (),
    "service_tier": ("auto", "standard_only"), "n": (1,), "stop": (),
    "max_completion_tokens": (),
    **dict.fromkeys(_TURN, (True, False)),
}  # fmt: skip
FIELDS = field_table(
    {
        **_PROMPT_FIELDS,
        **_FORMAT_FIELDS,
        "max_tokens": integer(1),
        "stop_sequences": stop_strings,
        "thinking": thinking,
    },
    inert=("metadata", "cache_control"),
    unbuilt=_UNBUILT,
)
COUNT_FIELDS = FieldTable(
    {"model": FIELDS.honoured["model"], **_PROMPT_FIELDS, **_FORMAT_FIELDS}, FIELDS.inert | {"thinking"}, _UNBUILT
)


class MessagesApi:
    """Handlers of /v1/messages and /v1/messages/count_tokens, and the middleware that writes their errors."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def create(self, request: web.Request) -> web.StreamResponse:
        return await self._generation.translated(request, translate)

    async def count_tokens(self, request: web.Request) -> web.Response:
        _, prompts, *_ = await self._generation.read(request, Endpoint.CHAT, translate_count)
        return json_response({"input_tokens": len(prompts.ids[0])})

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """The request's name where Anthropic's SDK looks for it."""
        if request.path in PATHS:
            response.headers["request-id"] = request.get(REQUEST_ID_KEY, "")  # none where the protocol was wrong

    @property
    def middleware(self) -> Any:
        @web.middleware
        async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await handler(request)
            wrong = response.status >= 400 and request.path in PATHS
            return own_shape(request, response) if wrong else response

        return errors


def own_shape(request: web.BaseRequest, response: web.StreamResponse) -> web.Response:
    """An error response that says the same as Anthropic would say it."""
    assert isinstance(response, web.Response), "a stream that has begun breaks off otherwise"
    assert isinstance(response.body, bytes), "error bodies are small and whole"
    body = _error(orjson.loads(response.body), response.status) | {"request_id": request[REQUEST_ID_KEY]}
    kept = {k: v for k, v in response.headers.items() if k.lower() not in ("content-type", "content-length")}
    return json_response(body, status=response.status, headers=kept)


def _error(body: Mapping[str, Any], status: int) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


# ---------------------------------------------------------------- the request


def translate(body: dict[str, Any]) -> Translation:
    """Raises RequestError."""
    values, ignored = read_table(body, FIELDS)
    if "max_tokens" not in values:
        raise RequestError("'max_tokens' is required", code="missing_parameter", param="max_tokens")
    chat, places = _prompt(values)
    _check_turn(body, chat)
    chat |= {**shared_values(body), "max_tokens": body["max_tokens"], "stop": body.get("stop_sequences")}
    place = "output_format" if values.get("output_format") else "output_config.format"
    chat["response_format"] = _response_format(values)
    thinks = values.get("thinking", False)
    params = {"stop": "stop_sequences", **output_paths(place), **MESSAGES_PATHS, **places}
    return Translation(
        body=chat,
        encoder=functools.partial(MessagesEncoder, thinks=thinks),
        whole=functools.partial(_whole, thinks=thinks),
        ignored=ignored,
        params=params,
        reads_parts=True,
    )


def _response_format(values: Mapping[str, Any]) -> dict[str, Any] | None:
    older, newer = values.get("output_format"), values.get("output_config")
    if older and newer:
        raise RequestError(
            "'output_format' cannot be given together with 'output_config.format'",
            code="invalid_value",
            param="output_format",
        )
    return older or newer


def translate_count(body: dict[str, Any]) -> Translation:
    """The same prompt; nothing is generated."""
    values, ignored = read_table(body, COUNT_FIELDS)
    chat, places = _prompt(values)
    _check_turn(body, chat)
    chat["model"] = values.get("model")
    return Translation(
        body=chat, encoder=MessagesEncoder, whole=_whole, ignored=ignored, params={**MESSAGES_PATHS, **places}
    )


def _prompt(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of a chat's prompt, and where its messages were. Raises RequestError."""
    chat = chat_messages(values)
    last = f"messages[{len(values['messages']) - 1}]"
    begun = chat.messages[-1]["role"] == "assistant"
    if begun and "tool_calls" in chat.messages[-1]:
        text = f"'{last}' calls tools: a message with their results must follow"
        raise RequestError(text, code="invalid_value", param=last)
    turn = {"continue_final_message": begun, "add_generation_prompt": not begun}
    return {"messages": chat.messages, **turn, **_tools(values)}, {**chat.places, **dict.fromkeys(_TURN, last)}


def _tools(values: Mapping[str, Any]) -> dict[str, Any]:
    chosen: MessagesChoice = values.get("tool_choice", MessagesChoice(None, parallel=True))
    return {"tools": values.get("tools"), "tool_choice": chosen.chosen, "parallel_tool_calls": chosen.parallel}


def _check_turn(body: Mapping[str, Any], chat: Mapping[str, Any]) -> None:
    """Who is next follows from the last message. Raises RequestError where the body wants it otherwise."""
    for name in _TURN:
        if body.get(name) not in (None, chat[name]):
            raise unsupported(name, body[name])


# ---------------------------------------------------------------- the answer


def _message(
    writer: ResponseWriter, usage: dict[str, Any], content: list[dict[str, Any]], **end: str | None
) -> dict[str, Any]:
    return {
        "id": MESSAGE_PREFIX + writer.call.response_id.removeprefix("chatcmpl-"),
        "type": "message",
        "role": "assistant",
        "model": writer.call.model,
        "content": content,
        "stop_reason": end.get("stop_reason"),
        "stop_sequence": end.get("stop_sequence"),
        "usage": usage,
    }


def _usage(writer: ResponseWriter, choices: Sequence[ChoiceText]) -> dict[str, Any]:
    """Cached tokens are known, and told apart, when the answer ends."""
    usage = writer.usage(choices)
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "service_tier": "standard",
    }


def _end(choice: ChoiceText, blocks: ContentBlocks) -> dict[str, str | None]:
    if choice.finish_reason == FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "tool_use" if blocks.called else "end_turn", "stop_sequence": None}


def _whole(writer: ResponseWriter, choices: Sequence[ChoiceText], *, thinks: bool = False) -> dict[str, Any]:
    choice, blocks = choices[0], ContentBlocks(thinks=thinks)
    blocks.push(choice.take().parts)
    blocks.end()
    message = _message(writer, _usage(writer, choices), blocks.content, **_end(choice, blocks))
    return message | writer.metrics(choice.stats)


class MessagesEncoder:
    """The events of one streamed message; see the module for their order."""

    keep_alive = named_event("ping", {}, padded=False)

    def __init__(self, writer: ResponseWriter, *, thinks: bool = False) -> None:
        self.choices = writer.choices()
        self._writer = writer
        self._blocks = ContentBlocks(thinks=thinks)
        self._pinged = False
        self._event = functools.partial(named_event, padded=writer.call.obfuscated)

    def start(self) -> bytes:
        message = _message(self._writer, _usage(self._writer, self.choices), [])
        return self._event("message_start", {"message": message})

    def push(self, index: int, delta: SequenceDelta) -> bytes:
        choice = self.choices[index]
        choice.add(delta)
        return self._events(self._blocks.push(choice.take().parts))

    def end(self) -> bytes:
        choice = self.choices[0]
        last = self._events(self._blocks.end())
        usage, metrics = _usage(self._writer, self.choices), self._writer.metrics(choice.stats)
        end = {"delta": _end(choice, self._blocks), "usage": usage, **metrics}
        return last + self._event("message_delta", end) + self._event("message_stop", {})

    def failed(self, error: Mapping[str, Any], status: int) -> bytes:
        return self._event("error", {"error": _error(error, status)["error"]})

    def _events(self, events: Sequence[Event]) -> bytes:
        """One ping follows the first event, as there."""
        written = [self._event(name, fields) for name, fields in events]
        if written and not self._pinged:
            self._pinged = True
            written.insert(1, self.keep_alive)
        return b"".join(written)
