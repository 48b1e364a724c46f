"""How the Responses and the Messages API ask for structured output, as chat's `response_format`.

    Responses   text.format            {"type": "json_schema", "name", "schema", "strict", "description"}
    Messages    output_config.format   {"type": "json_schema", "schema"}        (also `output_format`, its older place)

What is in the schema is checked where a chat completion's is; `PATHS` say where a refusal points to.
"""

from __future__ import annotations

from typing import Any

from specd.server.checks import (
    anything,
    boolean,
    choice,
    documented,
    out_of_range,
    schema_of,
    string,
    sub_object,
)
from specd.server.structured import required

_NAME = "output"  # chat asks for one, Messages has none
_SCHEMA = anything({"type": "object"})
_TEXT_FIELDS = {"name": string, "schema": _SCHEMA, "strict": boolean, "description": string}
_TEXT_FORMAT = sub_object({"type": choice("text", "json_object", "json_schema"), **_TEXT_FIELDS})
_OUTPUT_FORMAT = sub_object({"type": choice("json_schema"), "schema": _SCHEMA})

TEXT_PATHS = {"response_format": "text.format", "response_format.json_schema": "text.format"}


def output_paths(place: str) -> dict[str, str]:
    """place: "output_config.format" or "output_format"."""
    return {"response_format": place, "response_format.json_schema": place}


_TEXT = sub_object(
    {"format": anything({**schema_of(_TEXT_FORMAT), "required": ["type"]})}, unbuilt={"verbosity": ("medium",)}
)


@documented(schema_of(_TEXT))
def text(value: Any, param: str) -> dict[str, Any] | None:
    """Responses' `text` as a `response_format`; None for plain text. Raises RequestError."""
    given = _TEXT(value, param)
    if "format" not in given:
        return None
    where = f"{param}.format"
    wanted = _TEXT_FORMAT(given["format"], where)
    kind = required(wanted, "type", where)
    del wanted["type"]
    if kind == "json_schema":
        required(wanted, "name", where)
        required(wanted, "schema", where)
        return {"type": kind, kind: wanted}
    if wanted:
        name = min(wanted)
        raise out_of_range(f"{where}.{name}", "left out unless the type is json_schema", wanted[name])
    return None if kind == "text" else {"type": kind}


@documented({**schema_of(_OUTPUT_FORMAT), "required": ["type", "schema"]})
def output_format(value: Any, param: str) -> dict[str, Any]:
    """Messages' format as a `response_format`. Raises RequestError."""
    wanted = _OUTPUT_FORMAT(value, param)
    kind = required(wanted, "type", param)
    return {"type": kind, kind: {"name": _NAME, "schema": required(wanted, "schema", param)}}


_CONFIG = sub_object({"format": output_format}, unbuilt={"effort": (), "task_budget": ()})


@documented(schema_of(_CONFIG))
def output_config(value: Any, param: str) -> dict[str, Any] | None:
    """Messages' `output_config` as a `response_format`; None where it asks for none. Raises RequestError."""
    format_: dict[str, Any] | None = _CONFIG(value, param).get("format")
    return format_
