"""Three failed steps in a minute with nothing computed between them: the device is gone, not the requests bad."""

from __future__ import annotations

import pytest

from specd.engine import Engine
from specd.errors import EngineError
from specd.pipeline.failures import FailureLimit
from specd.request import FinishReason
from specd.status import EngineState
from tests.engines import ask, collect, generate, make_parts
from tests.fakes import SuccessorModel, continuation
from tests.test_waiting import Clock

POISON = 2


def test_only_failures_in_a_row_and_within_a_minute_count() -> None:
    clock = Clock()
    limit = FailureLimit(clock)
    for computed in (False, False, True, False, False):
        limit.note(computed=computed)
    clock.now = 61.0  # the two are out of sight at the next one
    limit.note(computed=False)
    clock.now = 62.0
    limit.note(computed=False)
    clock.now = 120.0
    with pytest.raises(EngineError, match="3 steps within 60 s"):
        limit.note(computed=False)


async def test_a_lost_device_fails_the_engine() -> None:
    engine = await Engine.start(make_parts(target=SuccessorModel(raises_on=POISON), max_tokens=16), warm=False)
    try:
        for number in range(3):
            assert engine.state is EngineState.READY
            (result,) = await collect(engine, ask(str(number), [5, POISON]))
            assert result.reason is FinishReason.ERROR
        assert engine.state is EngineState.FAILED
        with pytest.raises(EngineError):
            engine.submit(ask("late", [5]))
        stats = engine.stats()
        assert stats.accepted_requests == stats.requests_failed == 3
    finally:
        await engine.close()


async def test_bad_requests_among_good_ones_do_not() -> None:
    engine = await Engine.start(make_parts(target=SuccessorModel(raises_on=POISON), max_tokens=16), warm=False)
    try:
        for number in range(6):
            bad, good = ask(f"bad{number}", [5, POISON]), ask(f"good{number}", [5, 6], max_tokens=4)
            results = await generate(engine, [bad, good] if number % 2 else [bad])
            if number % 2:
                assert results[f"good{number}"][0].tokens == continuation([5, 6], 4)
        assert engine.state is EngineState.READY
        assert engine.stats().requests_failed == 6
    finally:
        await engine.close()
