"""A request's body as an object, in a bounded time: no thread runs while orjson parses, the event loop's neither.

That time follows from how many values there are to be made more than from the body's length, so they are counted first.
Measured on two shared cores: 32 MiB of "[]," 0.75 s; as many bytes of text 0.08 s; the limits below 0.03 to 0.08 s.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from typing import Any

import orjson

from specd.errors import RequestError

MAX_VALUES = 1 << 20  # token ids, mostly
MAX_NODES = 1 << 17  # lists, objects and strings, names among them: each is dearer than a number
_SLICE = 1 << 18  # bytes that are looked at in one go, in less than a millisecond
# Of a string, up to its end or that of the slice; the characters of an escape stay together.
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


def parse_json(raw: bytes) -> dict[str, Any]:
    """Raises RequestError (request_too_large, invalid_json)."""
    check_counts(raw, "the body")
    try:
        with _uncollected():
            body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return body


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for garbage: a body of many small lists would be gone through again and again meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _slices(start: int, end: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + _SLICE, end)) for at in range(start, end, _SLICE))


def _is_surely_small(raw: bytes) -> bool:
    """By all commas, brackets and quotes, also those within strings: most bodies have too few to count closer."""
    commas = brackets = quotes = 0
    for start, end in _slices(0, len(raw)):
        commas += raw.count(b",", start, end)
        brackets += raw.count(b"[", start, end) + raw.count(b"{", start, end)
        quotes += raw.count(b'"', start, end)
    return commas <= MAX_VALUES and brackets + (quotes + 1) // 2 <= MAX_NODES


def check_counts(raw: bytes, what: str, param: str | None = None) -> None:
    """Raises RequestError for a JSON text with too many values; what is no JSON is its parser's to refuse.

    what: words for the text.
    """
    if len(raw) <= MAX_NODES or _is_surely_small(raw):
        return
    commas = nodes = at = 0
    while at < len(raw):
        quote = raw.find(b'"', at)
        begin = len(raw) if quote < 0 else quote
        for start, end in _slices(at, begin):
            commas += raw.count(b",", start, end)
            nodes += raw.count(b"[", start, end) + raw.count(b"{", start, end)
        nodes += quote >= 0
        for things, count, most in (("values", commas, MAX_VALUES), ("lists, objects and strings", nodes, MAX_NODES)):
            if count > most:
                text = f"{what} has more than {most} {things}, which is more than this server accepts"
                raise RequestError(text, code="request_too_large", param=param)
        at = _after_string(raw, begin + 1)


def _after_string(raw: bytes, at: int) -> int:
    """Where the string that `at` is in has ended."""
    while at < len(raw):
        match = _INSIDE.match(raw, at, at + _SLICE)
        assert match is not None, "it matches nothing at all, too"
        end = match.end()
        if raw[end : end + 1] == b'"':
            return end + 1
        if end == at:  # a lone backslash at the end of everything
            return len(raw)
        at = end
    return at
