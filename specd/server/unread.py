"""Names in a request that nobody reads, at any depth: those that the JSON Schema of its fields does not have.

    known      a name in `properties`: honoured where it is checked, or accepted without a change to the answer
    x-unsupported   a name that asks for what is not built: refused where it is checked, unless it asks for nothing
    const      a value that changes nothing; any other is not read
An object without `properties` is the client's own (a JSON Schema, arguments): nothing in it is looked at.
`null` means absent everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specd.server.checks import MAX_SHOWN, Schema


def unread(value: Any, schema: Schema, param: str) -> Iterator[str]:
    """Dotted paths below `param`. The value may be of any shape: what does not fit is refused by its check."""
    if isinstance(value, list):
        items: Schema = {"anyOf": [part["items"] for part in _parts(schema) if "items" in part]}
        for i, item in enumerate(value) if _has_objects(items) else ():
            yield from unread(item, items, f"{param}[{i}]")
    elif isinstance(value, dict):
        yield from _in_object(value, [part for part in _parts(schema) if _is_meant(part, value)], param)


def _in_object(value: Mapping[str, Any], parts: list[Schema], param: str) -> Iterator[str]:
    if not parts or any("properties" not in part for part in parts):
        return
    unsupported = {name for part in parts for name in part.get("x-unsupported", ())}
    for name, item in value.items():
        path = f"{param}.{name[:MAX_SHOWN]}"
        known = [part["properties"][name] for part in parts if name in part["properties"]]
        if item is None or name in unsupported:
            continue
        if not known or any(part.get("const", item) != item for part in known):
            yield path
        elif isinstance(item, dict | list):
            yield from unread(item, {"anyOf": known}, path)


def _parts(schema: Schema) -> list[Schema]:
    """The alternatives of a schema, flat."""
    if "anyOf" not in schema:
        return [schema]
    return [part for one in schema["anyOf"] for part in _parts(one)]


def _is_meant(schema: Schema, value: Mapping[str, Any]) -> bool:
    """Whether this alternative is about such an object: its kind (`role`, `type`) is one that it has.

    One without a kind is of those that need none.
    """
    if schema.get("type") != "object":
        return False
    enums = {name: part["enum"] for name, part in schema.get("properties", {}).items() if "enum" in part}
    return all(
        value[name] in enum if isinstance(value.get(name), str) else name not in schema.get("required", ())
        for name, enum in enums.items()
    )


def _has_objects(schema: Schema) -> bool:
    """Whether there can be names in such a value: a long list of token ids need not be walked through."""
    return any("properties" in part or ("items" in part and _has_objects(part["items"])) for part in _parts(schema))
