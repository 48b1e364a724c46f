"""Headers of a request that say the same as a field of its body could."""

from __future__ import annotations

import math
from typing import Any

from specd.server.checks import MOST_TIMEOUT_S, out_of_range
from specd.server.fields import SPECULATION


def request_timeout(header: str | None) -> float | None:
    """The seconds that `x-request-timeout` gives. Raises RequestError."""
    if header is None:
        return None
    try:
        seconds = math.nan if "_" in header else float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_TIMEOUT_S:
        raise out_of_range("x-request-timeout", f"seconds above 0 and at most {MOST_TIMEOUT_S:g}", header)
    return seconds


def strict_header(header: str | None) -> bool:
    """Whether `x-specd-strict` has names refused that nobody reads. Raises RequestError."""
    if header not in (None, "0", "1"):
        raise out_of_range("x-specd-strict", "0 or 1", header)
    return header == "1"


def speculation_header(values: dict[str, Any], header: str | None) -> None:
    """`x-specd-speculation: off` (or auto) is `speculation.mode` for clients that cannot add fields.

    Raises RequestError for another value, and where the body says otherwise.
    """
    if header is None:
        return
    mode = SPECULATION({"mode": header}, "x-specd-speculation")["mode"]
    given = values.setdefault("speculation", {})
    if given.setdefault("mode", mode) != mode:
        raise out_of_range("x-specd-speculation", f"{given['mode']}, as 'speculation.mode' says", header)
