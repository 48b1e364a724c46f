"""The check at start: a drafter that is next to never right is named, and only that one."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import pytest
import structlog

from specd.request import FinishReason, Request, SequenceDelta
from specd.selfcheck import self_check
from tests.daemons import INFO
from tests.fake_engine import byte_tokenizer
from tests.test_cli import STATS


@pytest.mark.parametrize(
    ("drafted", "accepted", "warned"),
    [(40, 1, True), (32, 0, True), (31, 0, False), (40, 2, False), (0, 0, False)],
)
async def test_a_drafter_that_is_rarely_right(drafted: int, accepted: int, warned: bool) -> None:
    stats = dataclasses.replace(STATS, num_draft_tokens=drafted, num_accepted_tokens=accepted)

    async def submit(request: Request) -> AsyncIterator[SequenceDelta]:
        yield SequenceDelta(request.request_id, 0, finish_reason=FinishReason.LENGTH, stats=stats)

    with structlog.testing.capture_logs() as lines:
        await self_check(submit, INFO, byte_tokenizer())
    assert [line["event"] for line in lines] == ["drafter_checked", *["drafter_rarely_right"] * warned]
    assert all((line["drafted"], line["accepted"]) == (drafted, accepted) for line in lines)
