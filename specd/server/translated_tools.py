"""Tools of the Responses and the Messages API as chat completions' `tools` and `tool_choice`.

    Responses   tools  {"type": "function", "name", "description", "parameters", "strict"}
                choice none | auto | required | {"type": "function", "name"}
    Messages    tools  {"name", "description", "input_schema", "strict"}
                choice {"type": "auto" | "any" | "none" | "tool", "name", "disable_parallel_tool_use"}

Shapes are checked here; names, schemas and limits where a chat completion's are, and PATHS say where refusals point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specd.server.checks import (
    Schema,
    anything,
    boolean,
    choice,
    documented,
    invalid_type,
    schema_of,
    string,
    sub_object,
    unsupported,
)
from specd.server.structured import required
from specd.server.tools import MAX_TOOLS, TOOL_INERT, TOOL_UNBUILT

RESPONSES_PATHS = {"tools[*].function": "tools[*]", "tool_choice.function": "tool_choice"}
MESSAGES_PATHS = {
    **RESPONSES_PATHS,
    "tools[*].function.parameters": "tools[*].input_schema",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}

_ANY_OBJECT = anything({"type": "object"})
_FUNCTION = sub_object(
    {
        "type": choice("function"),
        "name": string,
        "description": string,
        "parameters": _ANY_OBJECT,
        "strict": boolean,
    },
    unbuilt=TOOL_UNBUILT,
)
_CUSTOM = sub_object(
    {
        "type": choice("custom"),
        "name": string,
        "description": string,
        "input_schema": _ANY_OBJECT,
        "strict": boolean,
    },
    inert=TOOL_INERT,
    unbuilt=TOOL_UNBUILT,
)
_NAMED = sub_object({"type": choice("function"), "name": string})
_MODES = ("none", "auto", "required")
_MESSAGES_MODES = {"none": "none", "auto": "auto", "any": "required", "tool": "named"}
_MESSAGES_CHOICE = sub_object({"type": choice(*_MESSAGES_MODES), "name": string, "disable_parallel_tool_use": boolean})


def _needing(schema: Schema, *names: str) -> Schema:
    return {**schema, "required": list(names)}


def _list(value: Any, param: str) -> list[Any]:
    if not isinstance(value, list):
        raise invalid_type(param, "a list of tools", value)
    return value


def _kind(item: Any, param: str, *known: str) -> None:
    """Refuses tools that are not functions of the client: those that a provider runs."""
    if not isinstance(item, dict):
        raise invalid_type(param, "an object", item)
    if isinstance(item.get("type"), str) and item["type"] not in known:
        raise unsupported(f"{param}.type", item["type"])


@documented({"type": "array", "maxItems": MAX_TOOLS, "items": _needing(schema_of(_FUNCTION), "type", "name")})
def responses_tools(value: Any, param: str) -> list[dict[str, Any]]:
    return [_function(item, f"{param}[{i}]") for i, item in enumerate(_list(value, param))]


def _function(item: Any, param: str) -> dict[str, Any]:
    _kind(item, param, "function")
    fields = _FUNCTION(item, param)
    required(fields, "type", param)
    return _chat_tool({**fields, "name": required(fields, "name", param)})


@documented({"type": "array", "maxItems": MAX_TOOLS, "items": _needing(schema_of(_CUSTOM), "name", "input_schema")})
def messages_tools(value: Any, param: str) -> list[dict[str, Any]]:
    return [_custom(item, f"{param}[{i}]") for i, item in enumerate(_list(value, param))]


def _custom(item: Any, param: str) -> dict[str, Any]:
    _kind(item, param, "custom")
    fields = _CUSTOM(item, param)
    name, schema = required(fields, "name", param), required(fields, "input_schema", param)
    return _chat_tool({**fields, "name": name, "parameters": schema})


def _chat_tool(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same tool is the same prompt, whatever API it came by."""
    function = {name: fields[name] for name in ("name", "description", "parameters", "strict") if name in fields}
    return {"type": "function", "function": function}


@documented({"anyOf": [{"type": "string", "enum": list(_MODES)}, _needing(schema_of(_NAMED), "type", "name")]})
def responses_choice(value: Any, param: str) -> str | dict[str, Any]:
    if isinstance(value, str):
        return choice(*_MODES)(value, param)
    _kind(value, param, "function")
    fields = _NAMED(value, param)
    required(fields, "type", param)
    return {"type": "function", "function": {"name": required(fields, "name", param)}}


@dataclasses.dataclass(frozen=True, slots=True)
class MessagesChoice:
    """Messages' `tool_choice` in chat's words."""

    chosen: str | dict[str, Any] | None
    parallel: bool


@documented(_needing(schema_of(_MESSAGES_CHOICE), "type"))
def messages_choice(value: Any, param: str) -> MessagesChoice:
    fields = _MESSAGES_CHOICE(value, param)
    mode = _MESSAGES_MODES[required(fields, "type", param)]
    parallel = not fields.get("disable_parallel_tool_use", False)
    if mode != "named":
        return MessagesChoice(mode, parallel)
    name = required(fields, "name", param)
    return MessagesChoice({"type": "function", "function": {"name": name}}, parallel)
