"""`system` and `messages` of the Messages API as the messages of a chat.

text         text
tool_use     a call in the assistant's message
tool_result  a message of the role tool, before what else the user says
thinking     nothing: what a model thought is not part of a later prompt
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specd.errors import RequestError
from specd.server.checks import Schema, invalid_type, object_schema, out_of_range, string, unsupported
from specd.server.message_schemas import content_schema, part_schema
from specd.server.structured import required
from specd.server.translation import TranslatedChat, text_part, text_parts

_ROLES = ("user", "assistant")
_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}

_STRING: Schema = {"type": "string"}
_TEXT = part_schema("text")
TEXTS_SCHEMA = content_schema(_TEXT)


def _block_schema(kind: str, properties: Mapping[str, Schema], *inert: str) -> Schema:
    of_kind: Schema = {"type": {"type": "string", "enum": [kind]}}
    needed = [name for name in properties if name not in ("input", "content", "is_error")]
    return object_schema({**of_kind, **properties}, inert, required=("type", *needed))


_FAILED: Schema = {"const": False, "description": "true is not told to the model: the text says it"}
_RESULT: dict[str, Schema] = {"tool_use_id": _STRING, "content": TEXTS_SCHEMA, "is_error": _FAILED}
_USE: dict[str, Schema] = {"id": _STRING, "name": _STRING, "input": {"type": "object"}}
_CONTENTS = {
    "user": content_schema(_TEXT, _block_schema("tool_result", _RESULT, "cache_control")),
    "assistant": content_schema(
        _TEXT,
        _block_schema("tool_use", _USE, "cache_control", "caller"),
        _block_schema("thinking", {}, "thinking", "signature"),
        _block_schema("redacted_thinking", {}, "data"),
    ),
}
MESSAGES_SCHEMA: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"type": "string", "enum": [role]}, "content": content},
            }
            for role, content in _CONTENTS.items()
        ]
    },
}


def chat_messages(values: Mapping[str, Any]) -> TranslatedChat:
    """`system` and `messages` as chat messages. Raises RequestError."""
    if "messages" not in values:
        raise RequestError("'messages' is required", code="missing_parameter", param="messages")
    if not isinstance(values["messages"], list):
        raise invalid_type("messages", "a list of messages", values["messages"])
    if not values["messages"]:
        raise out_of_range("messages", "a list of at least one message", values["messages"])
    chat = TranslatedChat()
    if values.get("system"):
        texts = text_parts(values["system"], "system", ("text",))
        chat.add({"role": "system", "content": texts}, {"": "system", ".content": "system"})
    for i, item in enumerate(values["messages"]):
        param = f"messages[{i}]"
        if not isinstance(item, dict):
            raise invalid_type(param, "an object", item)
        if item.get("role") not in _ROLES:
            raise out_of_range(f"{param}.role", "one of " + ", ".join(_ROLES), item.get("role"))
        _add(chat, item["role"], item.get("content"), param)
    return chat


def _add(chat: TranslatedChat, role: str, content: Any, param: str) -> None:
    """One message, and before it the results of tools that it brings."""
    if not isinstance(content, list):
        chat.add({"role": role, "content": text_parts(content, f"{param}.content", ("text",))}, {"": param})
        return
    texts: list[dict[str, str]] = []
    calls: list[dict[str, Any]] = []
    results = 0
    places = {"": param, ".tool_calls": f"{param}.content"}
    for i, block in enumerate(content):
        where = f"{param}.content[{i}]"
        if not isinstance(block, dict):
            raise invalid_type(where, "an object", block)
        kind = block.get("type")
        if kind not in _OF_ROLE[role]:
            raise unsupported(f"{where}.type", kind)
        if kind == "text":
            places[f".content[{len(texts)}]"] = where
            texts.append(text_part(block, where, ("text",)))
        elif kind == "tool_use":
            place = f".tool_calls[{len(calls)}]"
            places |= {place: where, f"{place}.function": where, f"{place}.function.arguments": f"{where}.input"}
            calls.append(_call(block, where))
        elif kind == "tool_result":
            results += 1
            chat.add(_result(block, where), {"": where, ".tool_call_id": f"{where}.tool_use_id"})
    if calls:
        chat.add({"role": role, "content": texts or None, "tool_calls": calls}, places)
    elif texts or not results:
        chat.add({"role": role, "content": texts}, places)


def _call(block: Mapping[str, Any], param: str) -> dict[str, Any]:
    name, call_id = (string(required(block, field, param), f"{param}.{field}") for field in ("name", "id"))
    arguments = block.get("input")
    if not isinstance(arguments, dict | None):
        raise invalid_type(f"{param}.input", "an object", arguments)
    try:
        text = json.dumps(arguments or {}, ensure_ascii=False)
    except RecursionError as error:
        raise out_of_range(f"{param}.input", "an object that is not nested so deep", arguments) from error
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _result(block: Mapping[str, Any], param: str) -> dict[str, Any]:
    """What a tool said; that it failed (`is_error`) has no place in a chat's messages: its text says it."""
    call_id = string(required(block, "tool_use_id", param), f"{param}.tool_use_id")
    content = block.get("content")
    said = "" if content is None else text_parts(content, f"{param}.content", ("text",))
    return {"role": "tool", "tool_call_id": call_id, "content": said}
