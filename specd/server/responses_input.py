"""`input` of the Responses API as the messages of a chat.

message               a message
function_call         a call in the assistant's message before it, or in one of its own
function_call_output  a message of the role tool
reasoning             nothing: what a model thought is not part of a later prompt
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specd.server.checks import Schema, asks_nothing, invalid_type, object_schema, out_of_range, string, unsupported
from specd.server.message_schemas import content_schema, part_schema
from specd.server.structured import required
from specd.server.tools import call_arguments
from specd.server.translation import TranslatedChat, text_parts

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_KINDS = ("input_text", "output_text", "text", "refusal")
# What comes back with an item of an earlier answer, and changes nothing.
_INERT = {
    "message": ("id", "status", "phase"),
    "function_call": ("id", "status"),
    "function_call_output": ("id", "status"),
    "reasoning": ("id", "summary", "content", "encrypted_content", "status"),
}

_STRING: Schema = {"type": "string"}
_TEXTS = content_schema(
    *(part_schema(kind) for kind in _TEXT_KINDS if kind != "refusal"), part_schema("refusal", "refusal")
)


def _item_schema(kind: str, properties: Mapping[str, Schema], *required: str) -> Schema:
    kinds: Schema = {"type": "string", "enum": [kind]}
    return object_schema({"type": kinds, **properties}, _INERT[kind], required=required)


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


def input_messages(value: Any, instructions: str | None) -> TranslatedChat:
    """`input` as chat messages, after the instructions. Raises RequestError."""
    chat = TranslatedChat()
    if instructions is not None:
        chat.add({"role": "system", "content": instructions}, {"": "instructions", ".content": "instructions"})
    if isinstance(value, str):
        chat.add({"role": "user", "content": value}, {"": "input", ".content": "input"})
        return chat
    if not isinstance(value, list):
        raise invalid_type("input", "a string or a list of items", value)
    if not value:
        raise out_of_range("input", "a string, or a list of at least one item", value)
    before = len(chat.messages)
    for i, item in enumerate(value):
        param = f"input[{i}]"
        if not isinstance(item, dict):
            raise invalid_type(param, "an object", item)
        given = {name: field for name, field in item.items() if field is not None}
        kind = given.get("type", "message")
        if not isinstance(kind, str) or (kind not in _INERT and not asks_nothing(kind, ())):
            raise unsupported(f"{param}.type", kind)
        _add(chat, kind or "message", given, param)
    if len(chat.messages) == before:
        raise out_of_range("input", "a list with more than reasoning in it", value)
    return chat


def _add(chat: TranslatedChat, kind: str, item: Mapping[str, Any], param: str) -> None:
    match kind:
        case "message":
            if item.get("role") not in _ROLES:
                raise out_of_range(f"{param}.role", "one of " + ", ".join(_ROLES), item.get("role"))
            content = text_parts(item.get("content"), f"{param}.content", _TEXT_KINDS)
            chat.add({"role": item["role"], "content": content}, {"": param})
        case "function_call":
            if not chat.messages or chat.messages[-1]["role"] != "assistant":
                chat.add({"role": "assistant", "content": None}, {"": param})
            calls = chat.messages[-1].setdefault("tool_calls", [])
            place = f".tool_calls[{len(calls)}]"
            chat.place({".tool_calls": param} if not calls else {})
            chat.place({place: param, f"{place}.function": param, f"{place}.id": f"{param}.call_id"})
            calls.append(_call(item, param))
        case "function_call_output":
            call_id = string(required(item, "call_id", param), f"{param}.call_id")
            output = text_parts(item.get("output"), f"{param}.output", _TEXT_KINDS)
            places = {"": param, ".content": f"{param}.output", ".tool_call_id": f"{param}.call_id"}
            chat.add({"role": "tool", "tool_call_id": call_id, "content": output}, places)


def _call(item: Mapping[str, Any], param: str) -> dict[str, Any]:
    name, arguments, call_id = (
        string(required(item, field, param), f"{param}.{field}") for field in ("name", "arguments", "call_id")
    )
    call_arguments(arguments, f"{param}.arguments")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
