"""The request fields `response_format` and vLLM's `structured_outputs`: what an output must be, as one grammar.

Whether it can be compiled is known later, where the vocabulary is; sizes and shapes are checked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from specd.errors import RequestError
from specd.request import Grammar
from specd.server.checks import (
    Check,
    Schema,
    anything,
    boolean,
    choice,
    documented,
    invalid_type,
    object_schema,
    out_of_range,
    schema_of,
    show,
    string,
    strings,
    sub_object,
)

MAX_TEXT_BYTES = 64 << 10
MAX_DEPTH = 32
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANY_OBJECT = '{"type":"object"}'


def too_complex(param: str, limit: str) -> RequestError:
    return RequestError(f"'{param}' is too large: {limit}", code="schema_too_complex", param=param)


def schema_text(value: Any, param: str) -> str:
    """A JSON Schema as text, its order of properties kept: an object that is not too large and not too deep."""
    if not isinstance(value, dict):
        raise invalid_type(param, "a JSON Schema object", value)
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise too_complex(param, f"it is nested more than {MAX_DEPTH} levels deep")
        level = [item for node in level for item in _children(node) if isinstance(item, dict | list)]
    return _limited(orjson.dumps(value).decode(), param)


def _children(node: dict[str, Any] | list[Any]) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node


def _limited(text: str, param: str) -> str:
    size = len(text.encode())
    if size > MAX_TEXT_BYTES:
        raise too_complex(param, f"it has {size} bytes, at most {MAX_TEXT_BYTES} are allowed")
    return text


@documented({"type": "string", "pattern": f"^{_NAME.pattern}$"})
def identifier(value: Any, param: str) -> str:
    """OpenAI's names of schemas and functions."""
    if _NAME.fullmatch(string(value, param)) is None:
        raise out_of_range(param, "1 to 64 characters of A-Z a-z 0-9 _ -", value)
    return str(value)


_JSON_SCHEMA = sub_object(
    {"name": identifier, "description": string, "schema": anything({"type": "object"}), "strict": boolean}
)
_FORMATS: dict[str, Mapping[str, Check]] = {
    "text": {},
    "json_object": {},
    "json_schema": {"json_schema": _JSON_SCHEMA},
}
# Where peers have the schema or another grammar; a schema that is of no use to the kind is refused, too.
_ELSEWHERE = ("schema", "value", "regex", "grammar", "structures", "triggers")
_UNBUILT: dict[str, dict[str, tuple[Any, ...]]] = {
    kind: dict.fromkeys((*_ELSEWHERE, *({"json_schema"} - fields.keys())), ()) for kind, fields in _FORMATS.items()
}
_KIND = choice(*_FORMATS)
_FORMAT_SCHEMA: Schema = {
    "anyOf": [
        object_schema(
            {
                "type": {"type": "string", "enum": [kind]},
                **{name: {**schema_of(check), "required": ["name", "schema"]} for name, check in fields.items()},
            },
            unbuilt=_UNBUILT[kind],
            required=("type", *fields),
        )
        for kind, fields in _FORMATS.items()
    ]
}


def required(fields: Mapping[str, Any], name: str, param: str) -> Any:
    """One field of an object that must have it. Raises RequestError."""
    if fields.get(name) is None:
        raise RequestError(f"'{param}.{name}' is required", code="missing_parameter", param=f"{param}.{name}")
    return fields[name]


@documented(_FORMAT_SCHEMA)
def response_format(value: Any, param: str) -> Grammar | None:
    """OpenAI's field; None for plain text. A schema is enforced to the letter, `strict` or not."""
    if not isinstance(value, dict):
        raise invalid_type(param, "an object", value)
    given = {name: item for name, item in value.items() if item is not None}
    kind = _KIND(required(given, "type", param), f"{param}.type")
    fields = sub_object({"type": _KIND, **_FORMATS[kind]}, unbuilt=_UNBUILT[kind])(given, param)
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", _ANY_OBJECT, param)
    wanted = required(fields, "json_schema", param)
    required(wanted, "name", f"{param}.json_schema")
    schema = required(wanted, "schema", f"{param}.json_schema")
    where = f"{param}.json_schema.schema"
    return Grammar("json_schema", schema_text(schema, where), where)


@documented({"anyOf": [{"type": "object"}, {"type": "string", "description": "the same as JSON text"}]})
def _json(value: Any, param: str) -> Grammar:
    if isinstance(value, str):
        try:
            value = orjson.loads(_limited(value, param))
        except orjson.JSONDecodeError as error:
            raise RequestError(f"'{param}' is not JSON: {error}", code="invalid_schema", param=param) from error
    return Grammar("json_schema", schema_text(value, param), param)


@documented({"type": "string", "minLength": 1})
def _regex(value: Any, param: str) -> Grammar:
    return Grammar("regex", _text(value, param), param)


@documented({"type": "string", "minLength": 1, "description": "a Lark grammar as llguidance reads it"})
def _grammar(value: Any, param: str) -> Grammar:
    return Grammar("lark", _text(value, param), param)


@documented({**schema_of(strings), "minItems": 1})
def _choice(value: Any, param: str) -> Grammar:
    options = strings(value, param)
    if not options:
        raise out_of_range(param, "a list of at least one string", value)
    return Grammar("choice", _limited(orjson.dumps(options).decode(), param), param)


def _text(value: Any, param: str) -> str:
    if not string(value, param):
        raise out_of_range(param, "a text that is not empty", value)
    return _limited(str(value), param)


_OUTPUTS = sub_object(
    {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar},
    unbuilt=dict.fromkeys(
        ("structural_tag", "json_object", "whitespace_pattern", "disable_fallback", "disable_any_whitespace",
         "disable_additional_properties"), (),
    ),
)  # fmt: skip


@documented({**schema_of(_OUTPUTS), "maxProperties": 1})
def structured_outputs(value: Any, param: str) -> Grammar | None:
    """vLLM's field: exactly one of its kinds; None for an object in which nothing stands.

    A misspelt kind is no unknown name that may be passed over: the output would be free.
    """
    found: dict[str, Grammar] = _OUTPUTS(value, param)
    given = list(found) or [name for name, part in value.items() if part is not None]
    if given and len(found) != 1:
        raise RequestError(
            f"'{param}' must have exactly one of json, regex, choice, grammar; got {show(', '.join(given))}",
            code="invalid_value",
            param=param,
        )
    return next(iter(found.values()), None)


def grammar_of(values: Mapping[str, Any]) -> Grammar | None:
    """The grammar of a request's checked fields. Raises RequestError where it cannot be what both say."""
    asked = values.get("response_format")
    grammar: Grammar | None = asked or values.get("structured_outputs")
    if asked is not None and "structured_outputs" in values:
        raise RequestError(
            "'structured_outputs' cannot be combined with a 'response_format' other than text",
            code="invalid_value",
            param="structured_outputs",
        )
    check_end(values, grammar)
    return grammar


def check_end(values: Mapping[str, Any], grammar: Grammar | None) -> None:
    """Raises RequestError for `ignore_eos` together with a grammar."""
    if grammar is not None and values.get("ignore_eos"):
        raise RequestError(
            f"'ignore_eos' cannot be true together with '{grammar.param}': an output ends where its grammar does",
            code="invalid_value",
            param="ignore_eos",
        )
