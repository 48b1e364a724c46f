"""Incremental text: whole characters only, and nothing that may still become a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specd.errors import RequestError
from specd.text import Detokenizer, PaddedTokens, StopMatcher, Tokenizer
from tests.test_text import MERGES, gguf_metadata


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata())


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(256)}
    return [by_bytes[bytes([byte])] for byte in data]


def test_character_over_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    pieces = [detokenizer.push(i) for i in byte_ids(tokenizer, "a😀한".encode())]
    assert pieces == ["a", "", "", "", "😀", "", "", "한"]
    assert detokenizer.flush() == ""


def test_incomplete_character_becomes_a_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    assert [detokenizer.push(i) for i in byte_ids(tokenizer, "😀".encode()[:3])] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_are_skipped_on_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello<|im_end|>hello")
    assert tokenizer.decode(ids) == "hellohello"
    assert tokenizer.decode(ids, skip_special=False) == "hello<|im_end|>hello"


def test_ids_past_the_vocabulary_have_no_text_when_the_head_is_padded(tokenizer: Tokenizer) -> None:
    bare, padded = Detokenizer(tokenizer), Detokenizer(PaddedTokens(tokenizer))
    with pytest.raises(RequestError):
        bare.push(tokenizer.vocab_size)
    ids = [*byte_ids(tokenizer, b"a"), tokenizer.vocab_size, *byte_ids(tokenizer, b"b")]
    assert "".join(map(padded.push, ids)) == "ab"
    assert padded.push(tokenizer.eos_ids[0]) == ""


@given(st.lists(st.integers(0, 255 + len(MERGES) + 4), max_size=60), st.booleans())
def test_any_ids_decode_as_their_joined_bytes(ids: list[int], skip_special: bool) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    detokenizer = Detokenizer(tokenizer, skip_special)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    kept = [i for i in ids if not (skip_special and i in tokenizer.special_ids)]
    assert text == b"".join(map(tokenizer.token_bytes, kept)).decode(errors="replace")
    assert text == tokenizer.decode(ids, skip_special=skip_special)


# Stop strings


def run(stops: tuple[str, ...], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    text, matched = "", None
    for piece in pieces:
        released, stop = matcher.push(piece)
        text += released
        matched = matched or stop
    assert matcher.matched == matched
    return text + matcher.flush(), matched


def test_stop_prefix_is_held_back_until_it_cannot_match() -> None:
    matcher = StopMatcher(("DEFGHIJ",), False)
    assert [matcher.push(letter)[0] for letter in "ABCDEFGX"] == ["A", "B", "C", "", "", "", "", "DEFGX"]
    assert [matcher.push(letter) for letter in "DEFGHIJ"][-1] == ("", "DEFGHIJ")
    assert matcher.push("more") == ("", None)
    assert matcher.flush() == ""


def test_held_text_is_flushed_at_the_end() -> None:
    matcher = StopMatcher(("\n\nUser:", "Alice:"), False)
    assert matcher.push("text\n\nUse") == ("text", None)
    assert matcher.flush() == "\n\nUse"
    assert matcher.flush() == ""


def test_only_the_part_that_can_still_match_is_held() -> None:
    matcher = StopMatcher(("aab",), False)
    assert matcher.push("aaaa") == ("aa", None)
    assert matcher.push("b") == ("", "aab")


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("abc", "b"), "xabc", ("xa", "b")),  # b is completed first
        (("b", "ab"), "xab", ("x", "ab")),  # both by one character: the longest
        (("he", "she", "hers"), "ushers", ("u", "she")),
        (("aab", "aa"), "aab", ("", "aa")),
        (("x",), "no stop", ("no stop", None)),
        ((), "anything", ("anything", None)),
        (("😀",), "a😀b", ("a", "😀")),
    ],
)
def test_which_stop_wins(stops: tuple[str, ...], text: str, expected: tuple[str, str | None]) -> None:
    assert run(stops, [text]) == expected
    assert run(stops, list(text)) == expected


def test_include_keeps_the_stop_string() -> None:
    assert run(("END",), ["abcE", "ND tail"], include=True) == ("abcEND", "END")
    assert run(("END",), ["abcE", "ND tail"], include=False) == ("abc", "END")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))


def naive(stops: tuple[str, ...], text: str, include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=16).map(tuple)


@settings(max_examples=400)
@given(STOPS, st.lists(st.text("ab\n", max_size=6), max_size=12), st.booleans())
def test_stops_do_not_depend_on_grouping(stops: tuple[str, ...], pieces: list[str], include: bool) -> None:
    text = "".join(pieces)
    assert run(stops, pieces, include) == naive(stops, text, include)
    assert run(stops, list(text), include) == naive(stops, text, include)


@settings(max_examples=200)
@given(STOPS, st.lists(st.text("ab\n", max_size=6), max_size=12))
def test_released_text_never_has_to_be_taken_back(stops: tuple[str, ...], pieces: list[str]) -> None:
    """After each push exactly the longest suffix that begins a stop string is held."""
    matcher = StopMatcher(stops, False)
    seen = released = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        seen, released = seen + piece, released + text
        if stop is not None:
            return
        held = max((n for n in range(len(seen) + 1) for s in stops if n < len(s) and seen.endswith(s[:n])), default=0)
        assert released == seen[: len(seen) - held]


def test_choices_share_what_their_stop_strings_cost() -> None:
    """A thousand choices with a kilobyte of stop strings each took seconds of the event loop, and a gigabyte."""
    stops = ("x" * 1000, "y" * 1000)
    first, second = StopMatcher(stops), StopMatcher(("x" * 1000, "y" * 1000), include=True)
    assert first._automaton is second._automaton
    assert first.push("x" * 999) == ("", None)
    assert second.push("x") == ("", None)
    assert second.flush() == "x"
    assert first.push("x") == ("", stops[0])
