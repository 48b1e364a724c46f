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
from specd.server.checks import Schema, invalid_type, out_of_range, string, unsupported
from specd.server.structured import required
from specd.server.translation import text_part, text_parts

_ROLES = ("user", "assistant")
_MESSAGE_NAMES = frozenset({"role", "content"})
_BLOCK_NAMES = {
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
}
_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}

_STRING: Schema = {"type": "string"}


def _block_schema(kind: str, **properties: Schema) -> Schema:
    of_kind: Schema = {"type": {"type": "string", "enum": [kind]}}
    required = [name for name in properties if name not in ("input", "content")]
    return {"type": "object", "required": ["type", *required], "properties": {**of_kind, **properties}}


def _content_schema(*blocks: Schema) -> Schema:
    return {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": list(blocks)}}]}


_TEXT = _block_schema("text", text=_STRING)
TEXTS_SCHEMA = _content_schema(_TEXT)
_CONTENTS = {
    "user": _content_schema(_TEXT, _block_schema("tool_result", tool_use_id=_STRING, content=TEXTS_SCHEMA)),
    "assistant": _content_schema(
        _TEXT,
        _block_schema("tool_use", id=_STRING, name=_STRING, input={"type": "object"}),
        _block_schema("thinking"),
        _block_schema("redacted_thinking"),
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


def chat_messages(values: Mapping[str, Any]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Chat messages, and the names in messages that nobody reads. Raises RequestError."""
    if "messages" not in values:
        raise RequestError("'messages' is required", code="missing_parameter", param="messages")
    if not isinstance(values["messages"], list):
        raise invalid_type("messages", "a list of messages", values["messages"])
    if not values["messages"]:
        raise out_of_range("messages", "a list of at least one message", values["messages"])
    messages: list[dict[str, Any]] = []
    ignored: list[str] = []
    if values.get("system"):
        messages.append({"role": "system", "content": text_parts(values["system"], "system", ("text",), ignored)})
    for i, item in enumerate(values["messages"]):
        param = f"messages[{i}]"
        if not isinstance(item, dict):
            raise invalid_type(param, "an object", item)
        if item.get("role") not in _ROLES:
            raise out_of_range(f"{param}.role", "one of " + ", ".join(_ROLES), item.get("role"))
        messages += _messages(item["role"], item.get("content"), f"{param}.content", ignored)
        ignored += [f"{param}.{name}" for name in item if name not in _MESSAGE_NAMES]
    return messages, tuple(ignored)


def _messages(role: str, content: Any, param: str, ignored: list[str]) -> list[dict[str, Any]]:
    """One message, and before it the results of tools that it brings."""
    if not isinstance(content, list):
        return [{"role": role, "content": text_parts(content, param, ("text",), ignored)}]
    texts, calls, results = [], [], []
    for i, block in enumerate(content):
        where = f"{param}[{i}]"
        if not isinstance(block, dict):
            raise invalid_type(where, "an object", block)
        kind = block.get("type")
        if kind not in _OF_ROLE[role]:
            raise unsupported(f"{where}.type", kind)
        if kind == "text":
            texts.append(text_part(block, where, ("text",), ignored))
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "tool_result":
            results.append(_result(block, where, ignored))
        if kind != "text":  # whose names `text_part` looks at
            known = _BLOCK_NAMES[kind] if not block.get("is_error") else _BLOCK_NAMES[kind] - {"is_error"}
            ignored += [f"{where}.{name}" for name in block if name not in known]
    if calls:
        return [{"role": role, "content": texts or None, "tool_calls": calls}]
    return results if results and not texts else [*results, {"role": role, "content": texts}]


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


def _result(block: Mapping[str, Any], param: str, ignored: list[str]) -> dict[str, Any]:
    """What a tool said; that it failed (`is_error`) has no place in a chat's messages: its text says it."""
    call_id = string(required(block, "tool_use_id", param), f"{param}.tool_use_id")
    content = block.get("content")
    said = "" if content is None else text_parts(content, f"{param}.content", ("text",), ignored)
    return {"role": "tool", "tool_call_id": call_id, "content": said}
