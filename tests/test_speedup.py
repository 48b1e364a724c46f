"""The speed-up over plain decoding: steps with known times, and a real engine's."""

from __future__ import annotations

from typing import Any

import pytest

from specd.pipeline.counters import Counters
from specd.pipeline.speedup import SpeedUp
from specd.request import SpeculationParams
from specd.step import StepStats
from tests.engines import ask, generate, make_parts, running

PLAIN_S = 0.010


def step(rows: int = 1, drafts: int = 0, kept: int = 0, **changes: Any) -> StepStats:
    """A decode step; `rows` rows of which each emits its own token, and those that are kept."""
    fields: dict[str, Any] = {
        "step": 0,
        "num_rows": rows,
        "num_tokens": rows + drafts,
        "num_prefill_tokens": 0,
        "num_draft_tokens": drafts,
        "num_draft_steps": 0,
        "num_accepted": kept,
        "num_emitted": rows + kept,
        "num_refill_rows": 0,
        "verify_s": PLAIN_S,
        "draft_s": 0.0,
        "refill_s": 0.0,
        "duration_s": PLAIN_S * rows,
    }
    return StepStats(**fields | changes)


def after(*steps: StepStats) -> float | None:
    speedup = SpeedUp()
    for stats in steps:
        speedup.observe(stats)
    return speedup.value


def test_nothing_is_known_without_plain_steps() -> None:
    assert after() is None
    assert after(*[step(drafts=3, kept=2)] * 50) is None
    assert after(*[step(drafts=3, kept=2), step()] * 50) is None, "after drafts one plain step is not yet a measure"
    assert after(*[step(num_prefill_tokens=9)] * 50) is None
    assert after(*[step(refill_s=0.001)] * 50) is None, "the drafter keeps up: its cost is in the step"


def test_plain_decoding_is_1() -> None:
    assert after(*[step()] * 50) == pytest.approx(1.0)


@pytest.mark.parametrize(("kept", "duration_s", "expected"), [(2, PLAIN_S, 3.0), (2, 0.015, 2.0), (0, 0.02, 0.5)])
def test_tokens_a_step_and_its_time_both_count(kept: int, duration_s: float, expected: float) -> None:
    """The plain steps themselves fade away: 3000 steps later they do not show."""
    drafted = [step(drafts=2, kept=kept, duration_s=duration_s)] * 3000
    assert after(step(), step(), *drafted) == pytest.approx(expected, rel=0.01)
    half = after(step(), *[step()] * 256, *drafted[:256])
    assert half is not None
    assert min(1.0, expected) < half < max(1.0, expected), "both kinds of step are in it"


def test_between_two_batch_sizes_it_is_in_proportion_and_beyond_them_unknown() -> None:
    plain = [step(1), step(1), step(5), step(5)]  # 10 ms for one row, 50 ms for five
    one = SpeedUp()
    for stats in plain:
        one.observe(stats)
    before = one.value
    one.observe(step(8, drafts=8, kept=8, duration_s=0.001))
    assert one.value == before
    for _ in range(5000):
        one.observe(step(3, drafts=6, kept=3, duration_s=0.015))  # 6 tokens: two plain steps of 30 ms
    assert one.value == pytest.approx(4.0, rel=0.01)


def test_one_accident_is_no_trend() -> None:
    found = after(*[step()] * 40, step(duration_s=60.0), *[step(drafts=1, kept=1)] * 3000)
    assert found == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_stall_shows_for_no_longer_than_a_few_slow_steps(kept: int) -> None:
    """A machine that was suspended for a minute: neither a plain step nor one with drafts stands for all of it."""
    usual = [step()] * 40 + [step(drafts=1, kept=1)] * 500
    before = after(*usual)
    stalled = after(*usual, step(drafts=kept, kept=kept, duration_s=60.0), *[step(drafts=1, kept=1)] * 10)
    assert stalled == pytest.approx(before, rel=0.02)


def test_a_stall_at_the_beginning_is_no_reference() -> None:
    stalled = step(duration_s=100 * PLAIN_S)
    drafted = [step(drafts=2, kept=2)] * 20
    assert after(step(), stalled, step(), *drafted) == pytest.approx(after(step(), step(), *drafted), rel=0.1)


def test_steps_that_always_take_long_are_believed() -> None:
    found = after(*[step()] * 3, *[step(drafts=8, kept=1, duration_s=0.2)] * 3000)  # twenty times a plain step
    assert found == pytest.approx(0.1, rel=0.02)


def test_what_was_computed_in_vain() -> None:
    counters = Counters(4)
    counters.measured(step(rows=2, drafts=6, kept=3, verify_s=0.08, draft_s=0.02))
    assert counters.wasted_s == pytest.approx(0.08 * 3 / 8 + 0.02 * 3 / 6)
    counters.measured(step(drafts=2, kept=2))
    counters.measured(step())
    assert counters.wasted_s == pytest.approx(0.04)


async def test_an_engine_measures_itself() -> None:
    async with running(make_parts(draft="layers", draft_len=2)) as engine:
        off = SpeculationParams(mode="off")
        await generate(engine, [ask("drafts", [5, 6, 7], max_tokens=40)])
        assert engine.stats().speedup is None
        assert engine.stats().wasted_s > 0
        await generate(engine, [ask("plain", [5, 6, 7], max_tokens=20, speculation=off)])
        await generate(engine, [ask("again", [5, 6, 7], max_tokens=40)])
        found = engine.stats().speedup
    assert found is not None
    assert 0.05 < found < 20
