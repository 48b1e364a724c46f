"""Calls in text: the same for every split of it, nothing lost, and no input that takes more than its length."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specd.hermes import BEGIN, END, CallArguments, CallBegin, Event, HermesParser, Text

NAMES = ("f", "get_weather", "get")
ARGUMENTS = '{"a": [1, {"b": "</tool_call> } \\" <tool_call>"}], "c": -2.5e3}'
CALL = f'{BEGIN}\n{{"name": "f", "arguments": {ARGUMENTS}}}\n{END}'
OTHER = f'{BEGIN}{{"arguments":{{}},"name":"get"}}{END}'


def parse(texts: Iterable[str], *, eager: bool = False, most: int | None = None) -> tuple[list[Event], int]:
    """(events with neighbours joined, complete calls)."""
    parser = HermesParser(NAMES, eager=eager, most=most)
    events = [event for text in texts for event in parser.push(text)] + parser.flush()
    found: list[Event] = []
    for event in events:
        assert not isinstance(event, Text | CallArguments) or event.text, "no empty events"
        last = found[-1] if found else None
        if isinstance(event, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            assert event.index == last.index
            found[-1] = CallArguments(last.index, last.text + event.text)
        else:
            found.append(event)
    return found, parser.num_complete


def whole(text: str, **how: bool | int | None) -> list[Event]:
    return parse([text], **how)[0]  # type: ignore[arg-type]


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallBegin(index, name), CallArguments(index, arguments)]


WELL_FORMED: list[tuple[str, list[Event]]] = [
    ("", []),
    ("plain < text > \n", [Text("plain < text > \n")]),
    (CALL, call(0, "f", ARGUMENTS)),
    (f" \n{CALL}\n", call(0, "f", ARGUMENTS)),
    (f"Sure.\n\n{CALL}\n{OTHER}", [Text("Sure."), *call(0, "f", ARGUMENTS), *call(1, "get", "{}")]),
    (CALL + OTHER, [*call(0, "f", ARGUMENTS), *call(1, "get", "{}")]),
    (f"{OTHER} and then", [*call(0, "get", "{}"), Text("and then")]),
    (f'{BEGIN}{{"name":"f"}}{END}', call(0, "f", "{}")),
    (f'{BEGIN} {{ "name" : "f" , "arguments" : {{ "x" : null }} }} {END}', call(0, "f", '{ "x" : null }')),
    (f'{BEGIN}{{"name":"f","arguments":{{"x":{"9" * 5000}}}}}{END}', call(0, "f", '{"x":' + "9" * 5000 + "}")),
]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("text", "events"), WELL_FORMED)
def test_calls_and_the_text_around_them(text: str, events: list[Event], eager: bool) -> None:
    assert whole(text, eager=eager) == events
    assert whole(text, eager=eager) == parse(text, eager=eager)[0]
    for event in events:
        assert not isinstance(event, CallArguments) or isinstance(json.loads(event.text, parse_int=str), dict)


MALFORMED = [
    '{"name": "unknown", "arguments": {}}',
    '{"name": "f", "arguments": {}, "id": 1}',
    '{"name": "f", "name": "f"}',
    '{"name": "f", "arguments": []}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": {"a": tru}}',
    '{"name": "f", "arguments": {"a": [}}',
    '{"name": "f", "arguments": {"a": 1,}}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": "\n"}}',
    '{"name": "f", "arguments": {' + '"a": {' * 300 + "}" * 301 + "}",
    '{"arguments": {}}',
    '[{"name": "f", "arguments": {}}]',
    '{"name": "f", "arguments": {}} and more',
    "{}",
    "",
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: body[:40])
def test_what_only_looks_like_a_call_is_text_to_the_last_character(body: str) -> None:
    text = f"a {BEGIN}{body}{END} b"
    assert whole(text) == [Text(text)]
    assert whole(f"{text}{CALL}") == [Text(text), *call(0, "f", ARGUMENTS)], "the next one is found all the same"


@pytest.mark.parametrize("cut", range(1, len(CALL)))
def test_a_call_that_breaks_off(cut: int) -> None:
    text = CALL[:cut]
    assert parse([text]) == ([Text(text)], 0)
    events, complete = parse([text], eager=True)
    assert complete == 0
    if isinstance(events[0], CallBegin):
        assert ARGUMENTS.startswith("".join(e.text for e in events if isinstance(e, CallArguments)))
    else:
        assert events == [Text(text)]


def test_an_eager_parser_gives_arguments_away_as_they_come() -> None:
    parser = HermesParser(NAMES, eager=True)
    assert parser.push(f'{BEGIN}{{"name": "f", "arguments": ') == []
    assert parser.push('{"a"') == [CallBegin(0, "f"), CallArguments(0, '{"a"')]
    assert parser.push(": 1") == [CallArguments(0, ": 1")]
    assert parser.push(f"}}}}{END}") == [CallArguments(0, "}")]
    patient = HermesParser(NAMES)
    assert patient.push(f'{BEGIN}{{"name": "f", "arguments": {{"a": 1}}}}{END[:-1]}') == []
    assert patient.push(END[-1]) == call(0, "f", '{"a": 1}')


def test_an_eager_call_that_goes_wrong_leaves_the_rest_as_text() -> None:
    text = f'{BEGIN}{{"name": "f", "arguments": {{"a": [}}}}{END}'
    assert whole(text, eager=True) == [CallBegin(0, "f"), CallArguments(0, '{"a": ['), Text(f"}}}}{END}")]


def test_most_calls() -> None:
    events, complete = parse([f"{CALL} {OTHER}"], most=1)
    assert (events, complete) == ([*call(0, "f", ARGUMENTS), Text(OTHER)], 1)


PIECES = (
    CALL, OTHER, BEGIN, END, "<tool_", '{"name": "f"', '{"name":"get","arguments":{"k":"v"', "}}", '"', "\\", " ", "\n",
    "text", "<", "{", ":", "1,",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@settings(max_examples=250, deadline=None)
@given(text=TEXTS, data=st.data(), eager=st.booleans(), most=st.sampled_from([None, 1]))
def test_any_split_gives_the_same(text: str, data: st.DataObject, eager: bool, most: int | None) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = parse([text], eager=eager, most=most)
    assert parse(parts, eager=eager, most=most) == expected
    assert parse(text, eager=eager, most=most) == expected, "character by character"


def spaceless(text: str) -> str:
    return "".join(text.split())


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_nothing_is_lost(text: str) -> None:
    """Text and calls, put together again, are the text that was read, but for white space and the order of keys."""
    events = whole(text)
    for index, event in enumerate(events):
        if isinstance(event, CallArguments):
            begin = events[index - 1]
            assert isinstance(begin, CallBegin)
            body = f'{{"name":"{begin.name}","arguments":{event.text}}}'
            swapped = f'{{"arguments":{event.text},"name":"{begin.name}"}}'
            found = [spaceless(BEGIN + each + END) for each in (body, swapped)]
            text = spaceless(text)
            places = [text.find(each) for each in found if each in text]
            assert places, "a call that is in the text"
            text = next(text.replace(each, "", 1) for each in found if text.find(each) == min(places))
    rest = "".join(event.text for event in events if isinstance(event, Text))
    assert spaceless(rest) == spaceless(text)


HOSTILE = [
    '<tool_call>{"name":"f","arguments":{"a":"', '<tool_call>{"name":"', "<tool_call>\n", '<tool_call>{"', "<",
    '<tool_call>{"name":"f","arguments":{"a":"\\"', '<tool_call>{"name":"f","arguments":{"a":{"b":[', "<tool_call",
]  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE)
def test_time_is_linear(unit: str) -> None:
    """Characters that are read more than once would make the fourfold text take sixteen times as long."""

    def seconds(count: int) -> float:
        times = []
        for _ in range(3):
            start = time.process_time()
            whole(unit * count)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(800) < 9 * seconds(200) + 0.02
