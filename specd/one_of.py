"""`oneOf` in JSON schemas: it is `anyOf` where no value can match two of its branches. No torch.

llguidance proves that for many schemas, but not through a reference that comes back to where it started (a node whose
children are nodes again). Here the same is proved by what unions are told apart by in practice: types, constants, and
a property that one branch requires and whose values differ. What neither proves is refused, with its path.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

_TYPES = frozenset({"null", "boolean", "string", "array", "object", "integer", "number"})  # number: with a fraction
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # names -> schemas
_DATA = ("const", "enum", "default", "examples")
_MAX_COMPARISONS = 10_000  # of two schemas, in all; 20 ms
_WIDTH = 32  # entries of two schemas that take as long to look at as another comparison
_MAX_DEPTH = 8  # references and properties that one comparison follows


@dataclasses.dataclass(slots=True)
class Effort:
    """What may still be done for the proofs of one request, however many schemas it has."""

    left: int = _MAX_COMPARISONS


def settled(text: str, effort: Effort | None = None) -> str:
    """The schema with `anyOf` for every `oneOf` whose branches are proved to exclude each other."""
    root = json.loads(text)
    if '"oneOf"' not in text or text.count('"$id"') > (isinstance(root, dict) and "$id" in root):
        return text  # an $id inside gives references another meaning
    prover = _Prover(root, effort or Effort())
    for holder, _ in list(_holders(root, "$", named=False)):
        branches = holder["oneOf"]
        if all(prover.excludes(a, b) for i, a in enumerate(branches) for b in branches[:i]):
            del holder["oneOf"]
            if "anyOf" in holder:
                holder["allOf"] = [*holder.get("allOf", ()), {"anyOf": branches}]
            else:
                holder["anyOf"] = branches
    return json.dumps(root)


def alone(text: str) -> Iterator[tuple[str, str]]:
    """(path, schema) of each `oneOf`, the inner ones first: the schema says that and nothing else."""
    root = json.loads(text)
    shared = {name: root[name] for name in ("$schema", "$id", "$defs", "definitions") if name in root}
    for holder, path in _holders(root, "$", named=False):
        yield path, json.dumps({**shared, "oneOf": holder["oneOf"]})


def _holders(node: Any, path: str, *, named: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """Every schema with a `oneOf`, and the path of that. named: node's names are not keywords."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from _holders(item, f"{path}[{i}]", named=False)
    if not isinstance(node, dict):
        return
    for name, item in node.items():
        if named or name not in _DATA:
            yield from _holders(item, f"{path}.{name}", named=not named and name in _NAMED)
    if not named and isinstance(node.get("oneOf"), list):
        yield node, f"{path}.oneOf"


class _Prover:
    """Whether two schemas of one document share no value. Says no when it does not know."""

    def __init__(self, root: Any, effort: Effort) -> None:
        self._root = root
        self._effort = effort
        self._values: dict[int, frozenset[str] | None] = {}  # by id of the schema, which `root` keeps alive

    def excludes(self, a: Any, b: Any, depth: int = _MAX_DEPTH) -> bool:
        self._effort.left -= 1 + (_width(a) + _width(b)) // _WIDTH
        if self._effort.left < 0 or depth == 0:
            return False
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        for one, other in ((a, b), (b, a)):
            if "$ref" in one:  # what stands beside it does not count in old drafts
                return self.excludes(self._resolve(one["$ref"]), other, depth - 1)
        parts = any(self._part_excludes(one, other, depth) for one, other in ((a, b), (b, a)))
        return parts or self._plainly(a, b, depth)

    def _part_excludes(self, one: dict[str, Any], other: Any, depth: int) -> bool:
        """Whether a conjunct of `one` excludes `other`, or all alternatives do."""
        if any(self.excludes(part, other, depth - 1) for part in _list(one, "allOf")):
            return True
        choices = [_list(one, name) for name in ("anyOf", "oneOf")]
        return any(found and all(self.excludes(p, other, depth - 1) for p in found) for found in choices)

    def _plainly(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        """By types, by values, or by a property that is there in whatever matches both."""
        types = _types(a) & _types(b)
        if not types:
            return True
        values, others = self._values_of(a), self._values_of(b)
        if values is not None and others is not None and not values & others:
            return True
        ours, theirs = a.get("properties"), b.get("properties")
        if types != {"object"} or not isinstance(ours, dict) or not isinstance(theirs, dict):
            return False
        required = {name for name in (*_list(a, "required"), *_list(b, "required")) if isinstance(name, str)}
        return any(self.excludes(ours[p], theirs[p], depth - 1) for p in ours if p in theirs and p in required)

    def _values_of(self, schema: dict[str, Any]) -> frozenset[str] | None:
        if id(schema) not in self._values:
            self._values[id(schema)] = _values(schema)
        return self._values[id(schema)]

    def _resolve(self, pointer: Any) -> Any:
        """What a reference into this document means; True, which excludes nothing, where it cannot be followed."""
        if not isinstance(pointer, str) or not pointer.startswith("#") or "%" in pointer:
            return True
        node = self._root
        for token in pointer.removeprefix("#").split("/")[1:]:
            name = token.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, dict) or name not in node:
                return True
            node = node[name]
        return node if pointer in ("#", "") or pointer.startswith("#/") else True


def _width(schema: Any) -> int:
    """Entries of a schema and of what stands right in it."""
    if not isinstance(schema, dict):
        return 0
    return len(schema) + sum(len(item) for item in schema.values() if isinstance(item, list | dict))


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _given(schema: dict[str, Any]) -> list[Any] | None:
    """The values that a schema is limited to."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _types(schema: dict[str, Any]) -> frozenset[str]:
    wanted = schema.get("type", [])
    names = {wanted} if isinstance(wanted, str) else {name for name in wanted if isinstance(name, str)}
    found = frozenset(names | ({"integer"} if "number" in names else set())) or _TYPES
    values = _given(schema)
    return found if values is None else found & {_type(value) for value in values}


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    return {str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]


def _values(schema: dict[str, Any]) -> frozenset[str] | None:
    values = _given(schema)
    return None if values is None else frozenset(json.dumps(_plain(value), sort_keys=True) for value in values)


def _plain(value: Any) -> Any:
    """Equal values of JSON Schema are equal texts then: 1.0 is 1."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
