"""The request field `prediction`: a text that the output is likely to be. It changes the speed, never the tokens."""

from __future__ import annotations

from typing import Any

from specd.errors import RequestError
from specd.server.checks import anything, choice, documented, invalid_type, out_of_range, schema_of, string, sub_object
from specd.server.context import least_tokens
from specd.server.structured import required
from specd.text import Tokenizer

_PART = sub_object({"type": choice("text"), "text": string})
_PARTS = {"type": "array", "minItems": 1, "items": {**schema_of(_PART), "required": ["type", "text"]}}
_PREDICTION = sub_object(
    {"type": choice("content"), "content": anything({"anyOf": [{"type": "string"}, _PARTS]})},
)


@documented({**schema_of(_PREDICTION), "required": ["type", "content"]})
def prediction(value: Any, param: str) -> str:
    """{"type": "content", "content": text or text parts} as one text; parts follow each other without a gap."""
    given = _PREDICTION(value, param)
    required(given, "type", param)
    content = required(given, "content", param)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_type(f"{param}.content", "a string or a list of text parts", content)
    if not content:
        raise out_of_range(f"{param}.content", "a string, or a list that is not empty", content)
    return "".join(_text(part, f"{param}.content[{i}]") for i, part in enumerate(content))


def _text(part: Any, param: str) -> str:
    given = _PART(part, param)
    required(given, "type", param)
    return str(required(given, "text", param))


def prediction_ids(text: str, tokenizer: Tokenizer, max_len: int) -> tuple[int, ...]:
    """A checked prediction's tokens. May be slow. Raises RequestError when no output could be that long."""
    least = least_tokens(text, tokenizer)
    ids = tuple(tokenizer.encode(text, add_special=False)) if least <= max_len else None
    if ids is None or len(ids) > max_len:
        has = f"at least {least}" if ids is None else len(ids)
        raise RequestError(
            f"'prediction.content' has {has} tokens; this model's maximum context length is {max_len} tokens, "
            "prompt and output together, and no output is longer",
            code="context_length_exceeded",
            param="prediction.content",
        )
    return ids
