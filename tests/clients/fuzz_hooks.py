"""What schemathesis does before each call (SCHEMATHESIS_HOOKS)."""

from __future__ import annotations

from typing import Any

import schemathesis

_LONG_S = 60


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """A request that gives itself no time is an honest 503: it gets some, unless its time is not valid at all."""
    body = case.body
    if isinstance(body, dict) and type(body.get("timeout")) in (int, float) and 0.001 <= body["timeout"] < _LONG_S:
        body["timeout"] = _LONG_S
