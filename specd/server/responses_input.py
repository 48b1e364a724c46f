"""`input` of the Responses API as the messages of a chat.

message               a message
function_call         a call in the assistant's message before it, or in one of its own
function_call_output  a message of the role tool
reasoning             nothing: what a model thought is not part of a later prompt
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specd.server.checks import Schema, invalid_type, out_of_range, string, unsupported
from specd.server.fields import asks_nothing
from specd.server.structured import required
from specd.server.tools import call_arguments
from specd.server.translation import text_parts

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_KINDS = ("input_text", "output_text", "text", "refusal")
_NAMES = {
    "message": frozenset({"type", "role", "content", "id", "status", "phase"}),
    "function_call": frozenset({"type", "call_id", "name", "arguments", "id", "status"}),
    "function_call_output": frozenset({"type", "call_id", "output", "id", "status"}),
    "reasoning": frozenset({"type", "id", "summary", "content", "encrypted_content", "status"}),
}

_STRING: Schema = {"type": "string"}
_TEXTS: Schema = {
    "anyOf": [
        _STRING,
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type"],
                "properties": {
                    "type": {"type": "string", "enum": list(_TEXT_KINDS)},
                    "text": _STRING,
                    "refusal": _STRING,
                },
            },
        },
    ]
}


def _item_schema(kind: str, properties: Schema, *required: str) -> Schema:
    of_kind = {"type": {"type": "string", "enum": [kind]}}
    return {"type": "object", "required": [*required], "properties": {**of_kind, **properties}}


_CALL_SCHEMA = {
    "call_id": _STRING,
    "name": _STRING,
    "arguments": {**_STRING, "description": "the JSON text of an object"},
}
INPUT_SCHEMA: Schema = {
    "anyOf": [
        _STRING,
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    _item_schema(
                        "message", {"role": {**_STRING, "enum": list(_ROLES)}, "content": _TEXTS}, "role", "content"
                    ),
                    _item_schema("function_call", _CALL_SCHEMA, "type", *_CALL_SCHEMA),
                    _item_schema(
                        "function_call_output", {"call_id": _STRING, "output": _TEXTS}, "type", "call_id", "output"
                    ),
                    _item_schema("reasoning", {}, "type"),
                ]
            },
        },
    ]
}


def input_messages(value: Any) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """`input` as chat messages, and the names in it that nobody reads. Raises RequestError."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}], ()
    if not isinstance(value, list):
        raise invalid_type("input", "a string or a list of items", value)
    if not value:
        raise out_of_range("input", "a string, or a list of at least one item", value)
    messages: list[dict[str, Any]] = []
    ignored: list[str] = []
    for i, item in enumerate(value):
        param = f"input[{i}]"
        if not isinstance(item, dict):
            raise invalid_type(param, "an object", item)
        given = {name: field for name, field in item.items() if field is not None}
        kind = given.get("type", "message")
        if not isinstance(kind, str) or (kind not in _NAMES and not asks_nothing(kind, ())):
            raise unsupported(f"{param}.type", kind)
        _add(messages, kind or "message", given, param, ignored)
        ignored += [f"{param}.{name}" for name in item if name not in _NAMES[kind or "message"]]
    if not messages:
        raise out_of_range("input", "a list with more than reasoning in it", value)
    return messages, tuple(ignored)


def _add(messages: list[dict[str, Any]], kind: str, item: Mapping[str, Any], param: str, ignored: list[str]) -> None:
    match kind:
        case "message":
            if item.get("role") not in _ROLES:
                raise out_of_range(f"{param}.role", "one of " + ", ".join(_ROLES), item.get("role"))
            content = text_parts(item.get("content"), f"{param}.content", _TEXT_KINDS, ignored)
            messages.append({"role": item["role"], "content": content})
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(item, param))
        case "function_call_output":
            call_id = string(required(item, "call_id", param), f"{param}.call_id")
            output = text_parts(item.get("output"), f"{param}.output", _TEXT_KINDS, ignored)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})


def _call(item: Mapping[str, Any], param: str) -> dict[str, Any]:
    name, arguments, call_id = (
        string(required(item, field, param), f"{param}.{field}") for field in ("name", "arguments", "call_id")
    )
    call_arguments(arguments, f"{param}.arguments")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
