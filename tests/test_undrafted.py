"""Every decode step of a sequence has drafts, or a reason why not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specd.pipeline.plan import Row
from specd.pipeline.undrafted import count_undrafted
from specd.request import SpeculationParams
from specd.status import UNDRAFTED
from specd.step import DraftSource
from tests.engines import ask, generate, lm, make_parts, running, target_model
from tests.fakes import FailingDrafter, Failures


async def reasons(*, wish: SpeculationParams | None = None, k: int | None = None, **parts: Any) -> dict[str, int]:
    """Of one request of 12 tokens."""
    async with running(make_parts(**{"draft": "layers", "draft_len": 2} | parts)) as engine:
        if k is not None:
            engine.set_draft_length(k)
        await generate(engine, [ask("a", [5, 6, 7], max_tokens=12, speculation=wish)])
        stats = engine.stats()
    assert set(stats.undrafted) <= set(UNDRAFTED)
    decoded = sum(stats.drafts.values()) + sum(stats.undrafted.values())
    # All steps but the prompt's, and but a last one that had one token to emit.
    assert stats.steps - 2 <= decoded <= stats.steps - 1
    return dict(stats.undrafted)


async def test_a_fixed_length_drafts_always() -> None:
    assert await reasons() == {}


@pytest.mark.parametrize("wish", [SpeculationParams(mode="off"), SpeculationParams(max_draft=0)])
async def test_a_request_may_not_want_any(wish: SpeculationParams) -> None:
    assert await reasons(wish=wish) == {"request": 10}
    assert await reasons(wish=wish, k=0) == {"request": 10}, "it would not have drafted anyway"


async def test_an_operator_may_switch_them_off() -> None:
    assert await reasons(k=0) == {"admin": 10}
    async with running(make_parts(draft="layers", draft_len=2)) as engine:
        engine.set_draft_length(0)
        engine.set_draft_length(None)
        await generate(engine, [ask("a", [5, 6, 7], max_tokens=12)])
        assert engine.stats().undrafted == {}


async def test_proposers_may_have_nothing_to_propose() -> None:
    found = await reasons(draft="ngram", draft_len="adaptive")
    assert found["no_proposal"] > 0


async def test_where_no_drafts_are_configured_nothing_is_missing() -> None:
    async with running(make_parts(draft="none")) as engine:
        await generate(engine, [ask("a", [5, 6, 7], max_tokens=12)])
        assert engine.stats().undrafted == {}


async def test_a_drafter_that_was_given_up() -> None:
    async with running(make_parts(draft="layers", draft_len=2)) as engine:
        engine._scheduler.give_up_drafter()
        await generate(engine, [ask("a", [5, 6, 7], max_tokens=12)])
        assert engine.stats().undrafted == {"failing": 10}


async def test_a_drafter_that_fails_made_no_drafts() -> None:
    """`reasons` adds up: each of its steps has drafts or a reason."""
    drafter = FailingDrafter(lm(target_model()), Failures(extends=frozenset({1})))
    assert (await reasons(drafter=drafter))["failing"] == 1


@pytest.mark.parametrize(
    ("row", "carry", "mixed", "wants", "reason"),
    [
        ({"source": DraftSource.DRAFTER}, True, False, True, "not_paying"),
        ({"source": DraftSource.DRAFTER, "num_wanted": 2}, True, False, True, "no_room"),
        ({}, False, False, True, "catching_up"),
        ({}, False, False, False, "not_paying"),  # the drafter rests, so it does not catch up
        ({}, True, False, True, "context"),
        ({}, True, True, True, "mixed_batch"),
        ({"source": DraftSource.DRAFTER, "num_drafts": 2, "num_wanted": 2}, True, False, True, None),
    ],
)
async def test_what_the_schedule_decides(
    row: dict[str, Any], carry: bool, mixed: bool, wants: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(make_parts(draft="layers", draft_len=2)) as engine:
        scheduler = engine._scheduler
        sequence = engine._sequence(ask("a", [5, 6, 7], max_tokens=12), 0)
        sequence.carry_valid = carry
        monkeypatch.setattr(scheduler.length, "wants_drafter", lambda *_: wants)
        one = dataclasses.replace(Row(sequence, num_known=1, emits=True), **row)
        count_undrafted([one], scheduler, mixed=mixed)
        assert engine.stats().undrafted == ({} if reason is None else {reason: 1})
        sequence.limit = len(sequence.tokens) + 1  # one token is left: there is nothing to draft for
        count_undrafted([dataclasses.replace(one, num_drafts=0)], scheduler, mixed=mixed)
        assert sum(engine.stats().undrafted.values()) == (reason is not None)
