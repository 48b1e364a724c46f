"""JSON Schemas of a chat's messages: what `prompts.py` reads of them, and what it accepts without reading."""

from __future__ import annotations

from specd.server.checks import Schema, object_schema

ROLES = ("system", "developer", "user", "assistant", "tool")
PART_INERT = ("annotations", "cache_control", "citations", "logprobs")  # of text: comes back with answers, or is advice
MESSAGE_INERT = ("annotations", "refusal")
MESSAGE_UNBUILT = ("audio", "function_call")  # SDKs send them back empty
THOUGHTS = ("reasoning", "reasoning_content")

_STRING: Schema = {"type": "string"}


def part_schema(kind: str, field: str = "text") -> Schema:
    """A text part whose `type` is `kind`."""
    kinds: Schema = {"type": "string", "enum": [kind]}
    return object_schema({"type": kinds, field: _STRING}, PART_INERT, required=("type", field))


def content_schema(*parts: Schema) -> Schema:
    """A text, or a list of such parts."""
    return {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": list(parts)}}]}


_CONTENT = content_schema(part_schema("text"), part_schema("refusal", "refusal"))
_ARGUMENTS: Schema = {"type": "string", "description": "the JSON text of an object"}
_TOOL_CALL = object_schema(
    {
        "id": _STRING,
        "type": {"type": "string", "enum": ["function"]},
        "function": object_schema({"name": _STRING, "arguments": _ARGUMENTS}, required=("name",)),
    },
    required=("function",),
)
_THOUGHT: Schema = {"type": "string", "description": "for templates that read it"}
_OF_ALL: dict[str, Schema] = {"content": _CONTENT, "name": _STRING, "tool_call_id": _STRING}


def _role(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


MESSAGES_SCHEMA: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            object_schema(
                {"role": _role(*(role for role in ROLES if role != "assistant")), **_OF_ALL},
                MESSAGE_INERT,
                (*MESSAGE_UNBUILT, "tool_calls"),
                required=("role", "content"),
            ),
            *(
                object_schema(
                    {
                        "role": _role("assistant"),
                        **_OF_ALL,
                        "tool_calls": {"type": "array", "minItems": 1, "items": _TOOL_CALL},
                        **dict.fromkeys(THOUGHTS, _THOUGHT),
                    },
                    MESSAGE_INERT,
                    MESSAGE_UNBUILT,
                    required=("role", said),
                )
                for said in ("content", "tool_calls")
            ),
        ]
    },
}
