"""Values that a JSON Schema of the API allows, and values next to them that it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

WRONG_TYPES: dict[str, tuple[Any, ...]] = {
    "boolean": ("yes", 1, [True]),
    "integer": (True, 1.5, "1", [1]),
    "number": (False, "1", {}),
    "string": (1, True, [["x"]], {"a": 1}),
    "array": (5, True, {"a": 1}),
    "object": (5, "x", [1]),
}


def samples(schema: Mapping[str, Any]) -> list[Any]:
    """A few values that the schema allows: its ends, each of an enum."""
    if "anyOf" in schema:
        return [value for part in schema["anyOf"] for value in samples(part)]
    if "enum" in schema:
        return list(schema["enum"])
    match schema.get("type"):
        case "boolean":
            return [True, False]
        case "integer" | "number":
            return [schema["minimum"], schema["maximum"]]
        case "string":
            return ["x" * max(schema.get("minLength", 0), 1)]
        case "array":
            return [[samples(schema["items"])[0]]]
        case "object":
            properties = schema.get("properties", {})
            needed = schema.get("required", ())
            least = {name: samples(properties[name])[0] for name in needed}
            return [least, *({**least, name: samples(part)[0]} for name, part in properties.items())]
        case _:
            return ["x"]


def counterexamples(schema: Mapping[str, Any]) -> list[Any]:
    """Values that the schema does not allow."""
    kinds = [part["type"] for part in schema.get("anyOf", [schema]) if "type" in part]
    found = [value for kind in kinds for value in WRONG_TYPES[kind] if not _fits(value, kinds)]
    if "enum" in schema:
        found.append("neither of them")
    if schema.get("type") in ("integer", "number"):
        found += [schema["minimum"] - 1, schema["maximum"] + 1]
    if schema.get("type") == "array":
        found += [[value] for value in counterexamples(schema["items"])]
        found += [[samples(schema["items"])[0]] * (schema["maxItems"] + 1)] if "maxItems" in schema else []
    if schema.get("maxLength"):
        found.append("x" * (schema["maxLength"] + 1))
    for name, part in schema.get("properties", {}).items():
        found += [{name: value} for value in counterexamples(part)]
    if schema.get("additionalProperties") is False:
        found.append({"unheard of": 1})
    return found


def _fits(value: Any, kinds: list[str]) -> bool:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)] in kinds or (isinstance(value, list) and "array" in kinds)


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Any value that the schema allows, and now and then another."""
    return st.one_of(_allowed(schema), _allowed(schema), _allowed(schema), ANY_JSON)


def _allowed(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "anyOf" in schema:
        return st.one_of([_allowed(part) for part in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = schema["minimum"], schema["maximum"]
            return st.integers(low, high) | st.integers(max(low, 0), min(high, 20))
        case "number":
            return st.floats(schema["minimum"], schema["maximum"])
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=12)
        case "array":
            return st.lists(_allowed(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=3)
        case "object":
            optional = {name: values(part) for name, part in schema.get("properties", {}).items()}
            needed = {name: optional.pop(name) for name in schema.get("required", ()) if name in optional}
            return st.fixed_dictionaries(needed, optional=optional)
        case _:
            return ANY_JSON


ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
