"""W3C Trace Context: which trace a request belongs to, as its `traceparent` and `tracestate` headers say. No SDK."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MOST_STATE = 512  # characters of a tracestate that are passed on, as the specification asks for at least
_SAMPLED = 0x01


@dataclasses.dataclass(frozen=True, slots=True)
class TraceContext:
    """The caller's span. Identifiers are lower-case hexadecimal."""

    trace_id: str  # 32 digits, not all 0
    span_id: str  # 16 digits, not all 0
    sampled: bool
    state: str = ""  # the tracestate header as it came


def trace_context(headers: Mapping[str, str]) -> TraceContext | None:
    """None without a valid traceparent: a trace then begins here (https://www.w3.org/TR/trace-context/, 3.2)."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = headers.get("tracestate", "")
    return TraceContext(
        trace_id, span_id, sampled=bool(int(flags, 16) & _SAMPLED), state=state if len(state) <= _MOST_STATE else ""
    )
