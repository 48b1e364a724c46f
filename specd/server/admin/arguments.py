"""Arguments of a call, from its JSON body or its query: every name is known, every value is in range."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from typing import Any

from specd.errors import RequestError

MAX_SECONDS = 86400.0


class Arguments:
    """Taken out one by one; `end` refuses what is left. `null` counts as absent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self._known: list[str] = []

    def take(self, name: str) -> Any:
        self._known.append(name)
        return self._left.pop(name, None)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def seconds(self, name: str, *, low: float = 0.0, high: float = MAX_SECONDS) -> float | None:
        value = self.take(name)
        if isinstance(value, str):  # of a query
            try:
                value = float(value)
            except ValueError as error:
                raise _wrong(name, value, "a number") from error
        if value is None:
            return None
        if type(value) not in (int, float):
            raise _wrong(name, value, "a number")
        if not low <= value <= high:  # nan is not either
            raise RequestError(f"{name} = {value}: must be in {low:g}..{high:g}", code="out_of_range", param=name)
        return float(value)

    def choice(self, name: str, *choices: str) -> str | None:
        value = self.take(name)
        if value is not None and value not in choices:
            raise _wrong(name, value, "one of " + ", ".join(choices))
        return None if value is None else str(value)

    def text(self, name: str, *, most: int = 256) -> str | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
            raise _wrong(name, value, f"printable text of 1..{most} characters")
        return value

    def end(self) -> None:
        """Raises RequestError for a name that nobody has asked for."""
        for name in self._left:
            close = difflib.get_close_matches(name, self._known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(self._known) or 'none'}"
            raise RequestError(f"unknown argument {name[:64]}; {hint}", code="unknown_parameter", param=name[:64])


def _wrong(name: str, value: object, kind: str) -> RequestError:
    """The value is clipped in depth as in length: a caller may nest it deeper than `repr` goes."""
    return RequestError(f"{name} = {reprlib.repr(value)}: must be {kind}", code="invalid_type", param=name)
