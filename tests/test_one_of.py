"""`oneOf`: what is proved to be an `anyOf`, never more than is true, and the path of what is not."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specd import one_of
from specd.grammar import Grammars
from specd.guidance import compile_matcher
from specd.one_of import Effort, settled
from tests.engines import EOS, tokenizer


def kind(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}, **more}, "required": ["kind"]}


def node(name: str) -> dict[str, Any]:
    return kind(name, child={"$ref": "#/$defs/node"})


TREE = {
    "$defs": {"a": node("a"), "b": node("b"), "node": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}},
    "$ref": "#/$defs/node",
}


@functools.cache
def grammars() -> Grammars:
    found = Grammars(tokenizer(), vocab_size=97, eos_ids=(EOS,))
    found.load()
    return found


def accepts(schema: Any, value: Any) -> bool:
    trie = grammars()._trie
    assert trie is not None
    matcher = compile_matcher(trie, "json_schema", json.dumps(schema))
    ids = tokenizer().encode(json.dumps(value), add_special=False)
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "value", "other"),
    [
        ({"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}]}, None, True),
        ({"oneOf": [{"enum": ["a", 1]}, {"const": "b"}]}, "b", "c"),
        ({"oneOf": [kind("a", x={"type": "null"}), kind("b")]}, {"kind": "a", "x": None}, {"kind": "a", "x": 1}),
        (TREE, {"kind": "a", "child": {"kind": "b"}}, {"kind": "a", "child": {"kind": "c"}}),
        ({"anyOf": [{"type": "null"}, {"const": 1}], "oneOf": [{"const": 1}, {"const": 2}]}, 1, 2),
    ],
)
def test_branches_that_exclude_each_other(schema: Any, value: Any, other: Any) -> None:
    assert accepts(schema, value)
    assert not accepts(schema, other)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "$.oneOf"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "$.oneOf"),
        ({"properties": {"p": {"oneOf": [kind("a"), {"type": "object"}]}}}, "$.properties.p.oneOf"),
        ({"properties": {"default": {"items": {"oneOf": [{}, {}]}}}}, "$.properties.default.items.oneOf"),
        ({"anyOf": [{"oneOf": [{"type": "null"}, {"const": 1}]}, {"oneOf": [{}, {}]}]}, "$.anyOf[1].oneOf"),
        ({"oneOf": [{"oneOf": [{"const": 1}, {"enum": [1, 2]}]}, {"const": "a"}]}, "$.oneOf[0].oneOf"),
        ({"oneOf": [{"properties": {"k": {"const": c}}, "required": ["k"]} for c in "ab"]}, "$.oneOf"),
        ({"oneOf": [{"type": "object", "properties": {"k": {"const": c}}} for c in "ab"]}, "$.oneOf"),
        ({"oneOf": [kind("a"), {"allOf": [kind("b")], "anyOf": [kind("a"), {}]}, kind("a")]}, "$.oneOf"),
        ({"oneOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {"x": {"enum": [None, 1]}}}, "$.oneOf"),
    ],
)
def test_others_are_refused_with_their_path(schema: Any, path: str) -> None:
    with pytest.raises(ValueError) as refused:
        accepts(schema, None)
    assert str(refused.value).startswith(path + ": its branches")


VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, 1.0, 1.5, "a", "b"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("pq"), inner, max_size=2),
    max_leaves=4,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keywords: dict[str, Any] = {
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
        "const": VALUES,
        "enum": st.lists(VALUES, min_size=1, max_size=2),
        "properties": st.dictionaries(st.sampled_from("pq"), inner, min_size=1),
        "required": st.lists(st.sampled_from("pq"), unique=True),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "$ref": st.sampled_from(["#/$defs/d", "#/$defs/none", "#"]),
    }
    some = st.lists(st.sampled_from(sorted(keywords)), max_size=2, unique=True)
    return some.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


SCHEMAS = st.recursive(st.booleans() | _schemas(st.just({})), _schemas, max_leaves=4)


@settings(max_examples=200)
@given(SCHEMAS, SCHEMAS, SCHEMAS, st.lists(VALUES, max_size=12))
def test_what_is_settled_shares_no_value(a: Any, b: Any, definition: Any, values: list[Any]) -> None:
    """A reference to the whole schema goes round in circles there, and is left out of the judge's sight."""
    defs = {"d": definition, "none": {"const": "none"}}
    text = json.dumps({"$defs": defs, "oneOf": [a, b]})
    if "oneOf" in json.loads(settled(text)) or '"#"' in text or '"#/$defs/d"' in json.dumps(definition):
        return
    judges = [jsonschema.Draft7Validator({"definitions": {}, "$defs": defs, "allOf": [part]}) for part in (a, b)]
    for value in (*values, None, True, 0, 1.5, "a", [], {}, {"p": 1}, {"p": "a", "q": "b"}):
        assert not all(judge.is_valid(value) for judge in judges)


def test_proofs_cost_what_they_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide branch is looked at once, and wide ones use up what may be done sooner."""
    seen: list[Any] = []
    plain = one_of._plain
    monkeypatch.setattr(one_of, "_plain", lambda value: seen.append(value) or plain(value))
    wide = {"enum": list(range(5000))}
    assert "oneOf" not in settled(json.dumps({"oneOf": [wide, *({"const": 9000 + i} for i in range(50))]}))
    assert len(seen) <= 5000 + 50
    names = [f"p{i}" for i in range(2000)]
    wide_ones = [{**kind(str(i)), "required": [*names, "kind"]} for i in range(60)]
    effort = Effort()
    assert "oneOf" in settled(json.dumps({"oneOf": wide_ones}), effort)
    assert effort.left < 0
