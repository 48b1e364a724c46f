"""The request fields `tools` and `tool_choice`, and how a chat whose template knows no tools is told of them.

Such a chat gets the tools in its system message, earlier calls in the assistant's messages and results in messages of
the user, all as the chat template of Qwen2.5 writes them, which follows Hermes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from specd.errors import RequestError
from specd.hermes import BEGIN, END
from specd.server.checks import (
    Schema,
    anything,
    boolean,
    choice,
    documented,
    invalid_type,
    out_of_range,
    schema_of,
    show,
    string,
    sub_object,
    unsupported,
)
from specd.server.json_body import check_counts
from specd.server.structured import identifier, required, schema_text, too_complex

MAX_TOOLS = 128
MAX_BYTES = 1 << 20  # of all of them
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_BLOCK = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{specs}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call."""

    name: str
    spec: Mapping[str, Any]  # what a template shows: as the client sent it, in known names
    parameters: Mapping[str, Any]  # JSON Schema of the arguments: of an object, always
    strict: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["none", "auto", "required", "named"]
    name: str = ""  # of the function, where it is named


_FUNCTION = sub_object(
    {"name": identifier, "description": string, "parameters": anything({"type": "object"}), "strict": boolean}
)
TOOL_INERT = ("cache_control",)  # what is cached follows from the prompt alone
TOOL_UNBUILT: dict[str, tuple[Any, ...]] = {"defer_loading": (), "allowed_callers": (["direct"],), "input_examples": ()}
_TOOL = sub_object({"type": choice("function"), "function": _FUNCTION}, inert=TOOL_INERT, unbuilt=TOOL_UNBUILT)
_CHOSEN = sub_object({"name": identifier})
_NAMED = sub_object({"type": choice("function"), "function": _CHOSEN})
_FUNCTION_NAMES = frozenset(schema_of(_FUNCTION)["properties"])
_MODE = choice("none", "auto", "required")


def _of_function(outer: Any, inner: Any) -> Schema:
    """The JSON Schema of {"type": "function", "function": ...} around a function that must have a name."""
    schema = schema_of(outer)
    function = {**schema_of(inner), "required": ["name"]}
    return {**schema, "required": ["type", "function"], "properties": {**schema["properties"], "function": function}}


@documented({"type": "array", "maxItems": MAX_TOOLS, "items": _of_function(_TOOL, _FUNCTION)})
def tools(value: Any, param: str) -> tuple[Tool, ...] | None:
    """Function tools with names of their own; None for an empty list."""
    if not isinstance(value, list):
        raise invalid_type(param, "a list of tools", value)
    if len(value) > MAX_TOOLS:
        raise out_of_range(param, f"a list of at most {MAX_TOOLS} tools", value)
    found: dict[str, Tool] = {}
    size = 0
    for i, item in enumerate(value):
        tool = _tool(item, f"{param}[{i}]")
        size += len(json.dumps(item))
        if size > MAX_BYTES:
            raise too_complex(param, f"up to tool {i} they have {size} bytes, at most {MAX_BYTES} are allowed")
        if tool.name in found:
            where = f"{param}[{i}].function.name"
            text = f"'{where}' is {show(tool.name)}, the name of an earlier tool: names must differ"
            raise RequestError(text, code="invalid_value", param=where)
        found[tool.name] = tool
    return tuple(found.values()) or None


def _tool(item: Any, param: str) -> Tool:
    if not isinstance(item, dict):
        raise invalid_type(param, "an object", item)
    kind = required(item, "type", param)
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"{param}.type", kind)
    function = required(_TOOL(item, param), "function", param)
    name = required(function, "name", f"{param}.function")
    parameters = function.get("parameters", _NO_PARAMETERS)
    where = f"{param}.function.parameters"
    schema_text(parameters, where)
    if parameters.get("type", "object") != "object":
        raise out_of_range(f"{where}.type", "object: arguments have names", parameters["type"])
    return Tool(name, _known(item), {**parameters, "type": "object"}, function.get("strict", False))


def _known(item: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the client sent it, without the names that are not read: they must not reach the prompt."""
    function = {name: value for name, value in item["function"].items() if name in _FUNCTION_NAMES}
    return {name: function if name == "function" else item[name] for name in item if name in ("type", "function")}


@documented({"anyOf": [schema_of(_MODE), _of_function(_NAMED, _CHOSEN)]})
def tool_choice(value: Any, param: str) -> ToolChoice:
    """One of none, auto and required, or one function by its name."""
    if isinstance(value, str):
        mode: Any = _MODE(value, param)
        return ToolChoice(mode)
    if not isinstance(value, dict):
        raise invalid_type(param, "none, auto, required or an object that names a function", value)
    kind = required(value, "type", param)
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"{param}.type", kind)
    function = required(_NAMED(value, param), "function", param)
    return ToolChoice("named", required(function, "name", f"{param}.function"))


def choice_of(values: Mapping[str, Any]) -> ToolChoice:
    """The tool choice of checked fields. Raises RequestError where there is nothing to choose from."""
    chosen: ToolChoice | None = values.get("tool_choice")
    offered: tuple[Tool, ...] = values.get("tools", ())
    if not offered:
        if chosen is not None and chosen.mode in ("required", "named"):
            text = "'tool_choice' asks for a call, but there are no 'tools'"
            raise RequestError(text, code="invalid_value", param="tool_choice")
        return ToolChoice("none")
    if chosen is None:
        return ToolChoice("auto")
    if chosen.mode == "named" and all(tool.name != chosen.name for tool in offered):
        names = ", ".join(tool.name for tool in offered[:10])
        text = f"'tool_choice.function.name' is {show(chosen.name)}, which is none of the tools: {names}"
        raise RequestError(text, code="invalid_value", param="tool_choice.function.name")
    return chosen


def offered_tools(values: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The tools that the model is told of: none where it may not call any. Raises RequestError."""
    return () if choice_of(values).mode == "none" else values["tools"]


# ---------------------------------------------------------------- earlier calls in messages


def tool_calls(value: Any, param: str) -> list[dict[str, Any]]:
    """`tool_calls` of an assistant's message as templates want them, arguments as objects."""
    if not isinstance(value, list):
        raise invalid_type(param, "a list of tool calls", value)
    return [_tool_call(item, f"{param}[{i}]") for i, item in enumerate(value)]


def _tool_call(item: Any, param: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise invalid_type(param, "an object", item)
    given = {name: field for name, field in item.items() if field is not None}
    if given.get("type", "function") != "function":
        raise unsupported(f"{param}.type", given["type"])
    function = required(given, "function", param)
    where = f"{param}.function"
    if not isinstance(function, dict):
        raise invalid_type(where, "an object", function)
    name = string(required(function, "name", where), f"{where}.name")
    arguments = call_arguments(function.get("arguments"), f"{where}.arguments")
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if "id" in given:
        call["id"] = string(given["id"], f"{param}.id")
    return call


def call_arguments(value: Any, param: str) -> dict[str, Any]:
    """Arguments as they were sent: JSON text of an object; nothing is the empty object.

    Numbers beyond every float and halves of surrogate pairs have no place in a prompt.
    """
    if value is None or value == "":
        return {}
    check_counts(string(value, param).encode(errors="surrogatepass"), f"'{param}'", param)
    try:
        found = json.loads(value)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # as the prompt will have it
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise out_of_range(param, "the JSON text of an object", value)
    return found


# ---------------------------------------------------------------- a template that knows no tools


def hermes_messages(messages: Sequence[Mapping[str, Any]], offered: Sequence[Tool]) -> list[dict[str, Any]]:
    """Messages for such a template; offered: the tools to tell of."""
    found: list[dict[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{content_text(message['content'])}\n</tool_response>")
            continue
        _add_results(found, results)
        found.append(_spelled_out(message))
    _add_results(found, results)
    if offered:
        _add_block(found, _BLOCK.format(specs="\n".join(_dumps(tool.spec) for tool in offered)))
    return found


def _add_results(found: list[dict[str, Any]], results: list[str]) -> None:
    """Consecutive results are one message."""
    if results:
        found.append({"role": "user", "content": "\n".join(results)})
        results.clear()


def _spelled_out(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its calls in its content."""
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [_dumps(call["function"]) for call in message.get("tool_calls", ())]
    if calls:
        texts = [f"{BEGIN}\n{call}\n{END}" for call in calls]
        rest["content"] = "\n".join([text for text in (content_text(message["content"]),) if text] + texts)
    return rest


def _add_block(messages: list[dict[str, Any]], block: str) -> None:
    if messages[0]["role"] == "system":
        messages[0]["content"] = content_text(messages[0]["content"]) + "\n\n" + block
    else:
        messages.insert(0, {"role": "system", "content": block})


def content_text(content: str | Sequence[Mapping[str, str]] | None) -> str:
    """Content as templates see it: parts joined by a newline."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
