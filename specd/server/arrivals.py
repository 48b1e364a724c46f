"""What arrives for one answer: deltas to deliver, and the failure that ends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specd.errors import (
    AbortedError,
    AdminAbortedError,
    DeadlineError,
    EngineError,
    QueueTimeoutError,
    ShutdownError,
)
from specd.request import FinishReason, SequenceDelta
from specd.server.record import RequestRecord

_ABORTED_BY: dict[type[Exception], str] = {
    QueueTimeoutError: "deadline",
    DeadlineError: "deadline",
    ShutdownError: "drain",
    AdminAbortedError: "admin",
}


def split_failed(
    batch: Sequence[tuple[int, SequenceDelta]], record: RequestRecord
) -> tuple[list[tuple[int, SequenceDelta]], Exception | None]:
    """Counts a batch of deltas: what there is to deliver, and the first failure, which ends the whole answer."""
    good: list[tuple[int, SequenceDelta]] = []
    failure: Exception | None = None
    for choice, delta in batch:
        record.observe(choice, delta)
        if delta.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT):
            good.append((choice, delta))
            continue
        if delta.token_ids or delta.text:
            good.append((choice, dataclasses.replace(delta, finish_reason=None, error=None, stats=None)))
        if failure is None and delta.finish_reason is FinishReason.ERROR:
            failure = delta.error or EngineError("the engine gave no reason")
        elif failure is None:
            failure = delta.error or AbortedError("ended by the server")
            record.aborted_by = _ABORTED_BY.get(type(failure), "server")
    return good, failure
