"""The request field `prediction`: a text that the output is likely to be. It changes the speed, never the tokens."""

from __future__ import annotations

from typing import Any

from specd.errors import RequestError
from specd.server.checks import MAX_SHOWN, Schema, documented, invalid_type, out_of_range, string
from specd.text import Tokenizer

_PART_SCHEMA: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["type", "text"],
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
}


@documented(
    {
        "type": "object",
        "additionalProperties": False,
        "required": ["type", "content"],
        "properties": {
            "type": {"type": "string", "enum": ["content"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _PART_SCHEMA}]},
        },
    }
)
def prediction(value: Any, param: str) -> str:
    """{"type": "content", "content": text or text parts} as one text; parts follow each other without a gap."""
    content = _typed(value, param, kind="content", name="content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_type(f"{param}.content", "a string or a list of text parts", content)
    if not content:
        raise out_of_range(f"{param}.content", "a string, or a list that is not empty", content)
    places = [f"{param}.content[{i}]" for i in range(len(content))]
    parts = [_typed(part, place, kind="text", name="text") for part, place in zip(content, places, strict=True)]
    return "".join(string(part, f"{place}.text") for part, place in zip(parts, places, strict=True))


def _typed(value: Any, param: str, *, kind: str, name: str) -> Any:
    """Field `name` of an object {"type": kind, name: ...} that has no other."""
    if not isinstance(value, dict):
        raise invalid_type(param, "an object", value)
    for key in value:
        if key not in ("type", name):
            path = f"{param}.{key[:MAX_SHOWN]}"
            raise RequestError(f"'{path}' is not known; known are type, {name}", code="unknown_parameter", param=path)
    for key in ("type", name):
        if value.get(key) is None:
            raise RequestError(f"'{param}.{key}' is required", code="missing_parameter", param=f"{param}.{key}")
    if value["type"] != kind:
        raise out_of_range(f"{param}.type", f'"{kind}"', value["type"])
    return value[name]


def prediction_ids(text: str, tokenizer: Tokenizer, max_len: int) -> tuple[int, ...]:
    """A checked prediction's tokens. May be slow. Raises RequestError when no output could be that long."""
    ids = tuple(tokenizer.encode(text, add_special=False))
    if len(ids) > max_len:
        raise RequestError(
            f"'prediction.content' has {len(ids)} tokens; this model's maximum context length is {max_len} tokens, "
            "prompt and output together, and no output is longer",
            code="context_length_exceeded",
            param="prediction.content",
        )
    return ids
