"""Checks of single values of a request, each with the JSON Schema that says the same.

`null` never gets here: it means absent.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import orjson

from specd.errors import RequestError
from specd.http_refusals import REQUEST_ID

Check = Callable[[Any, str], Any]  # (value, dotted path) -> the value to use; raises RequestError
Schema = Mapping[str, Any]
Read = TypeVar("Read", covariant=True)

INT64_MAX = 2**63 - 1
_EXACT = 2**53  # floats beyond it are no longer every whole number
MAX_SHOWN = 64  # characters of a client's value that an error message repeats
# Stop strings are walked character by character and bad words are matched at every draft: both cost every step.
_MAX_STOP_CHARS = 1024
_MAX_SALT_CHARS = 1024
MOST_TIMEOUT_S = 86400.0
_MAX_BAD_WORDS, _MAX_BAD_WORD_CHARS = 128, 128


@dataclasses.dataclass(frozen=True, slots=True)
class Documented(Generic[Read]):
    """A check together with the JSON Schema that says the same: the API's description is made of these."""

    read: Callable[[Any, str], Read]
    schema: Schema

    def __call__(self, value: Any, param: str) -> Read:
        return self.read(value, param)


def documented(schema: Schema) -> Callable[[Callable[[Any, str], Read]], Documented[Read]]:
    """Decorates a check."""
    return lambda read: Documented(read, schema)


def schema_of(check: Check) -> Schema:
    """Raises TypeError for a check that nobody described."""
    if not isinstance(check, Documented):
        raise TypeError(f"{check!r} has no schema; decorate it with `documented`")
    return check.schema


def show(value: Any) -> str:
    """A value as JSON for a message, clipped; containers by kind and size alone (they may be huge or deep)."""
    if isinstance(value, list):
        return "[]" if not value else f"a list of {len(value)}"
    if isinstance(value, dict):
        return "{}" if not value else "an object with " + ", ".join(show(key) for key in list(value)[:3])
    if isinstance(value, str):  # of a header: its bytes may be no text
        value = value[:MAX_SHOWN].encode(errors="backslashreplace").decode()
    text = orjson.dumps(value).decode()
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def invalid_type(param: str, wanted: str, value: Any) -> RequestError:
    return RequestError(f"'{param}' must be {wanted}; got {show(value)}", code="invalid_type", param=param)


def out_of_range(param: str, wanted: str, value: Any) -> RequestError:
    return RequestError(f"'{param}' must be {wanted}; got {show(value)}", code="out_of_range", param=param)


def unsupported(param: str, value: Any) -> RequestError:
    return RequestError(
        f"'{param}' is not supported by this server (got {show(value)}); leave it out",
        code="unsupported_parameter",
        param=param,
    )


@documented({"type": "boolean"})
def boolean(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise invalid_type(param, "true or false", value)
    return value


def integer(low: int, high: int = INT64_MAX) -> Documented[int]:
    """A whole number in low..high. `4.0` is one; `true` and `4.5` are not.

    JSON numbers past 64 bits arrive as floats, rounded: a float that is not exact is none.
    """

    @documented({"type": "integer", "minimum": low, "maximum": high})
    def check(value: Any, param: str) -> int:
        whole = type(value) is int or (type(value) is float and value.is_integer())
        if not whole:
            raise invalid_type(param, "a whole number", value)
        if not low <= value <= high or (type(value) is float and abs(value) > _EXACT):
            raise out_of_range(param, f"between {low} and {high}", value)
        return int(value)

    return check


def number(low: float, high: float) -> Documented[float]:
    """A number in low..high."""

    @documented({"type": "number", "minimum": low, "maximum": high})
    def check(value: Any, param: str) -> float:
        if type(value) not in (int, float):
            raise invalid_type(param, "a number", value)
        if not low <= value <= high:
            raise out_of_range(param, f"at least {low} and at most {high}", value)
        return float(value)

    return check


@documented({"type": "string"})
def string(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise invalid_type(param, "a string", value)
    return value


def choice(*allowed: str) -> Documented[str]:
    @documented({"type": "string", "enum": list(allowed)})
    def check(value: Any, param: str) -> str:
        if value not in allowed or not isinstance(value, str):
            raise out_of_range(param, "one of " + ", ".join(allowed), value)
        return value

    return check


@documented({"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"})
def request_id(value: Any, param: str) -> str:
    if REQUEST_ID.fullmatch(string(value, param)) is None:
        raise out_of_range(param, "1 to 128 characters of A-Z a-z 0-9 . _ -", value)
    return str(value)


@documented({"type": "string", "minLength": 1, "maxLength": _MAX_SALT_CHARS})
def cache_salt(value: Any, param: str) -> str:
    if not 1 <= len(string(value, param)) <= _MAX_SALT_CHARS:
        raise out_of_range(param, f"1 to {_MAX_SALT_CHARS} characters", value)
    return str(value)


@documented({"type": "array", "items": {"type": "string", "minLength": 1}})
def strings(value: Any, param: str) -> tuple[str, ...]:
    """A list of non-empty strings."""
    if not isinstance(value, list):
        raise invalid_type(param, "a list of strings", value)
    for i, item in enumerate(value):
        if not string(item, f"{param}[{i}]"):
            raise out_of_range(f"{param}[{i}]", "a non-empty string", item)
    return tuple(value)


_STOP_SCHEMA: Schema = {"type": "string", "minLength": 1, "maxLength": _MAX_STOP_CHARS}


@documented({"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA}]})
def stop_strings(value: Any, param: str) -> tuple[str, ...]:
    stops = strings([value] if isinstance(value, str) else value, param)
    _check_lengths(stops, param, _MAX_STOP_CHARS)
    return stops


def _check_lengths(texts: tuple[str, ...], param: str, longest: int) -> None:
    for i, text in enumerate(texts):
        if len(text) > longest:
            raise out_of_range(f"{param}[{i}]", f"at most {longest} characters long", text)


@documented(
    {
        "type": "array",
        "maxItems": _MAX_BAD_WORDS,
        "items": {"type": "string", "minLength": 1, "maxLength": _MAX_BAD_WORD_CHARS, "pattern": r"\S"},
    }
)
def bad_words(value: Any, param: str) -> tuple[str, ...]:
    words = strings(value, param)
    if len(words) > _MAX_BAD_WORDS:
        raise out_of_range(param, f"a list of at most {_MAX_BAD_WORDS} words", value)
    _check_lengths(words, param, _MAX_BAD_WORD_CHARS)
    for i, word in enumerate(words):
        if not word.strip():
            raise out_of_range(f"{param}[{i}]", "a word with a character that is not white space", word)
    return words


@documented({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT64_MAX}})
def token_ids(value: Any, param: str) -> tuple[int, ...]:
    """A list of token ids; whether the model has them is checked where the vocabulary is known."""
    if not isinstance(value, list):
        raise invalid_type(param, "a list of token ids", value)
    one = integer(0)  # its message names the place; plain ids take the short way
    return tuple(v if type(v) is int and v >= 0 else one(v, f"{param}[{i}]") for i, v in enumerate(value))


@documented(
    {
        "type": "object",
        "maxProperties": 300,
        "propertyNames": {"pattern": "^[0-9]{1,12}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }
)
def logit_bias(value: Any, param: str) -> tuple[tuple[int, float], ...]:
    """{"token id": -100..100}, at most 300 entries, sorted by id."""
    if not isinstance(value, dict):
        raise invalid_type(param, "an object of token ids and numbers", value)
    if len(value) > 300:
        raise out_of_range(param, "an object of at most 300 entries", value)
    bias = number(-100, 100)
    found: dict[int, float] = {}
    for key, item in value.items():
        if not re.fullmatch(r"[0-9]{1,12}", key) or int(key) in found:
            raise out_of_range(param, "an object whose keys are distinct token ids", key)
        found[int(key)] = bias(item, f"{param}.{key[:12]}")
    return tuple(sorted(found.items()))


def asks_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Whether an unbuilt field's value is one of its empty forms. Types count: 0 is not false."""
    if value is None or any(type(value) is type(item) and value == item for item in harmless):
        return True
    if type(value) in (int, float) and any(type(item) in (int, float) and value == item for item in harmless):
        return True
    if value is False:  # a flag that is on by default asks for something when it is off
        return not any(item is True for item in harmless)
    return isinstance(value, str | list | dict) and not value


def sub_object(
    checks: Mapping[str, Check], *, inert: Iterable[str] = (), unbuilt: Mapping[str, tuple[Any, ...]] | None = None
) -> Documented[dict[str, Any]]:
    """An object as its honoured fields; null values are absent. Names that are not known are `unread`'s to report.

    inert and unbuilt: as in `fields.py`.
    """
    refused = unbuilt or {}

    @documented(object_schema({name: schema_of(check) for name, check in checks.items()}, inert, refused))
    def check(value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid_type(param, "an object", value)
        for key, harmless in refused.items():
            if not asks_nothing(value.get(key), harmless):
                raise unsupported(f"{param}.{key}", value[key])
        given = {key: item for key, item in value.items() if key in checks and item is not None}
        return {key: checks[key](item, f"{param}.{key}") for key, item in given.items()}

    return check


def object_schema(
    properties: Mapping[str, Schema],
    inert: Iterable[str] = (),
    unbuilt: Iterable[str] = (),
    required: Sequence[str] = (),
) -> Schema:
    """An object with every name that is known in it; others are ignored and reported."""
    accepted = {name: {"description": "accepted; changes nothing"} for name in sorted(inert)}
    schema: dict[str, Any] = {"type": "object", "properties": {**properties, **accepted}}
    needed = {"required": list(required)} if required else {}
    return schema | needed | ({"x-unsupported": sorted(unbuilt)} if unbuilt else {})


def anything(schema: Schema) -> Documented[Any]:
    """A value that is checked where it is read."""
    return Documented(lambda value, param: value, schema)
