"""Every known field is honoured, inert or refused; checks of single values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.errors import RequestError
from specd.server.checks import integer, number, show
from specd.server.fields import ENDPOINT_FIELDS, Endpoint, asks_nothing, read_fields, report_names
from specd.server.json_body import parse_json

BOTH = list(Endpoint)
# A value that asks for something, for every refused field.
ASKING: dict[str, Any] = {
    "tools": [{"type": "function"}], "tool_choice": "required", "functions": [{}], "function_call": {"name": "f"},
    "modalities": ["audio"], "length_penalty": 0.5,
    "spaces_between_special_tokens": False, "typical_p": 0.5, "mirostat": 2, "repeat_penalty": 1.1, "best_of": 2,
    "add_special_tokens": False, "include_reasoning": False, "prompt_logprobs": 0,
    "truncate_prompt_tokens": 4, "n_predict": 5, "store": True, "reasoning_effort": "low",
}  # fmt: skip
HARMLESS: list[tuple[str, Any]] = [
    ("tools", []), ("response_format", {"type": "text"}),
    ("best_of", 1), ("best_of", 1.0), ("store", False), ("modalities", ["text"]), ("suffix", ""),
    ("functions", []), ("structured_outputs", {}), ("guided_json", None), ("use_beam_search", False),
    ("spaces_between_special_tokens", True), ("length_penalty", 1.0), ("logits_processors", []),
]  # fmt: skip
REFUSED = [(endpoint, name) for endpoint in BOTH for name in ENDPOINT_FIELDS[endpoint].unbuilt]


def test_the_contract_s_refusals_are_in_the_table() -> None:
    """Named in the contract as known but not built."""
    names = (
        "guided_json guided_regex guided_choice guided_grammar"
        " reasoning_effort verbosity suffix best_of store audio modalities web_search_options functions function_call"
        " prompt_logprobs"
    )
    for endpoint in BOTH:
        table = ENDPOINT_FIELDS[endpoint]
        assert set(names.split()) <= set(table.unbuilt)
        assert ({"tools", "tool_choice"} <= set(table.unbuilt)) == (endpoint is Endpoint.COMPLETIONS)
        classes = [set(table.honoured), set(table.inert), set(table.unbuilt)]
        assert sum(map(len, classes)) == len(set.union(*classes)), "a name is in one class only"


@pytest.mark.parametrize(("endpoint", "name"), REFUSED)
def test_every_unbuilt_field_is_refused_by_name(endpoint: Endpoint, name: str) -> None:
    value = ASKING.get(name, "something")
    if (endpoint, name) == (Endpoint.CHAT, "add_special_tokens"):
        value = True  # off by default here, on for completions
    with pytest.raises(RequestError) as caught:
        read_fields({name: value}, endpoint)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)
    assert show(value) in str(caught.value)
    assert read_fields({name: None}, endpoint) == ({}, ())


@pytest.mark.parametrize(("name", "value"), HARMLESS)
def test_empty_forms_are_absent(name: str, value: Any) -> None:
    for endpoint in BOTH:
        assert read_fields({name: value}, endpoint) == ({}, ())


def test_best_of_equal_to_n_is_absent() -> None:
    assert read_fields({"best_of": 3, "n": 3}, Endpoint.COMPLETIONS)[0] == {"n": 3}
    with pytest.raises(RequestError):
        read_fields({"best_of": 3, "n": 2}, Endpoint.COMPLETIONS)


def test_types_count_in_empty_forms() -> None:
    assert not asks_nothing(0, ())
    assert not asks_nothing(True, (0,))
    assert not asks_nothing(True, (1,))
    assert asks_nothing(0.0, (0,))


@pytest.mark.parametrize("endpoint", BOTH)
def test_inert_fields_take_anything(endpoint: Endpoint) -> None:
    body = {name: {"a": [1]} for name in ENDPOINT_FIELDS[endpoint].inert}
    assert read_fields(body, endpoint) == ({}, ())


@pytest.mark.parametrize("endpoint", BOTH)
def test_null_is_absent_everywhere(endpoint: Endpoint) -> None:
    table = ENDPOINT_FIELDS[endpoint]
    body = dict.fromkeys([*table.honoured, *table.inert, *table.unbuilt])
    assert read_fields(body, endpoint) == ({}, ())


def test_integers() -> None:
    check = integer(0, 10)
    assert check(4, "p") == 4
    assert check(4.0, "p") == 4
    assert type(check(4.0, "p")) is int
    bad: tuple[Any, ...] = (True, False, "4", 4.5, None, [], float("inf"))
    for value in bad:
        with pytest.raises(RequestError) as caught:
            check(value, "p")
        assert caught.value.code == "invalid_type"
    for value in (-1, 11, 1e30, 2**63):
        with pytest.raises(RequestError) as caught:
            check(value, "p")
        assert caught.value.code == "out_of_range"


def test_big_integers_are_out_of_range_not_rounded() -> None:
    """orjson gives floats beyond u64 and ints between i64 and u64."""
    for text in ("9223372036854775808", "18446744073709551615", "18446744073709551616", "1180591620717411303424"):
        body = parse_json(b'{"seed": ' + text.encode() + b"}")
        with pytest.raises(RequestError, match="seed"):
            read_fields(body, Endpoint.CHAT)
    assert read_fields(parse_json(b'{"seed": 9223372036854775807}'), Endpoint.CHAT)[0]["seed"] == 2**63 - 1


def test_numbers() -> None:
    assert number(0, 1)(1, "p") == 1.0
    assert type(number(0, 1)(1, "p")) is float
    with pytest.raises(RequestError):
        number(0, 1)(True, "p")
    with pytest.raises(RequestError, match="at least 0 and at most 1"):
        number(0, 1)(1e300, "p")


def test_messages_stay_small() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    for value in ("x" * 10_000_000, ["y"] * 1_000_000, {"k" * 100_000: 1}, deep):
        assert len(show(value)) < 200
    assert len(report_names(tuple("n" * 1000 for _ in range(1000)))) < 2000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
NAMES = sorted({name for table in ENDPOINT_FIELDS.values() for name in (*table.honoured, *table.unbuilt, *table.inert)})


@given(
    body=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=10), JSON, max_size=8),
    endpoint=st.sampled_from(BOTH),
)
def test_any_body_is_read_or_refused(body: dict[str, Any], endpoint: Endpoint) -> None:
    refused: RequestError | None = None
    try:
        values, unknown = read_fields(body, endpoint)
    except RequestError as error:
        refused = error
    if refused is not None:
        codes = {"invalid_type", "out_of_range", "unsupported_parameter", "unknown_parameter", "missing_parameter"}
        codes |= {"invalid_value", "invalid_schema", "schema_too_complex"}
        assert refused.code in codes
        assert refused.param is not None
        return
    assert set(values) <= set(ENDPOINT_FIELDS[endpoint].honoured)
    table = ENDPOINT_FIELDS[endpoint]
    assert set(unknown).isdisjoint({*table.honoured, *table.inert, *table.unbuilt})
