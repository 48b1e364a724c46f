"""Keeping the drafter up: what it lacks is refilled, in one step or several, and never more than that is believed."""

from __future__ import annotations

import dataclasses

import pytest

from specd.pipeline.draft_length import FixedLength
from specd.sequence import Sequence
from specd.step import DraftSource, DraftTraits, Refill
from tests.schedule_checks import row_of, run_until_decoding, steps_of
from tests.schedule_world import EXACT_HEAD, LM, PADDED_HEAD, PROMPT, Faults, World


class Moody(FixedLength):
    """Drafts and keeps up only while `willing`."""

    willing = True

    def wants_drafter(self, sequence: Sequence, source: DraftSource) -> bool:
        return self.willing


def moody(world: World) -> Moody:
    world.scheduler.length = policy = Moody(4)
    return policy


@pytest.mark.parametrize("traits", [LM, EXACT_HEAD, PADDED_HEAD])
def test_a_drafter_catches_up_in_one_refill_after_a_pause(traits: DraftTraits) -> None:
    world = World(traits=traits)
    policy = moody(world)
    (sequence,) = world.add(PROMPT[:6], max_tokens=40)
    run_until_decoding(world, sequence)
    policy.willing = False
    for _ in range(5):
        world.step()
    assert row_of(world.scheduled, sequence).num_drafts == 0
    assert not sequence.carry_valid
    behind, valid = len(sequence.tokens) - sequence.drafter_len, sequence.drafter_len
    assert behind > 3
    policy.willing = True
    world.step()  # this step was planned before
    row, plan = row_of(world.scheduled, sequence), world.scheduled.plan if world.scheduled else None
    assert plan is not None
    assert row.refill == Refill.NEWEST
    assert plan.refill_tokens.tolist() == sequence.tokens[valid:]
    world.step()
    assert row_of(world.scheduled, sequence).num_drafts == 4
    world.run()


@pytest.mark.parametrize("max_draft", [0, 2])
def test_the_policy_is_told_whether_anybody_wants_drafts(max_draft: int) -> None:
    told: list[bool] = []

    class Listening(FixedLength):
        def begin(self, num_sequences: int, *, may_draft: bool = True) -> None:
            told.append(may_draft)

    world = World(traits=LM)
    world.scheduler.length = Listening(4)
    (sequence,) = world.add(PROMPT[:6], max_tokens=8, max_draft=max_draft)
    run_until_decoding(world, sequence)
    told.clear()
    world.step()
    assert told == [max_draft > 0]
    world.run()


@pytest.mark.parametrize("traits", [LM, EXACT_HEAD, PADDED_HEAD])
def test_a_long_catch_up_takes_several_steps(traits: DraftTraits) -> None:
    world = World(traits=traits, max_tokens=4, page_size=4)
    policy = moody(world)
    policy.willing = False
    (sequence,) = world.add(PROMPT[:17], max_tokens=40)
    run_until_decoding(world, sequence)
    policy.willing = True
    world.step()
    marks = []
    while not sequence.carry_valid:
        row = row_of(world.scheduled, sequence)
        marks.append((row.refill, row.num_refill))
        world.step()
    assert marks[:4] == [(Refill.KNOWN, 4)] * 4
    assert marks[-1][0] == Refill.NEWEST
    world.run()


@pytest.mark.parametrize("traits", [LM, EXACT_HEAD, PADDED_HEAD])
def test_a_prefix_without_drafter_kv_is_caught_up(traits: DraftTraits) -> None:
    world = World(traits=traits, page_size=4)
    world.add(PROMPT[:12], max_tokens=4, max_draft=0)
    world.run()
    (sequence,) = world.add(PROMPT[:12], max_tokens=8)
    world.step()
    assert (sequence.num_cached, sequence.drafter_len) == (8, 0)
    row = row_of(world.scheduled, sequence)
    assert (row.num_known, row.num_refill, row.refill) == (4, 12, Refill.NEWEST)
    world.run()
    (third,) = world.add(PROMPT[:12], max_tokens=8)
    world.step()
    assert (third.num_cached, third.drafter_len) == (8, 8), "and the pages remember it"
    world.run()


@pytest.mark.parametrize("event", ["pause", "preemption", "failure"])
def test_pages_remember_a_catch_up(event: str) -> None:
    """Whatever set their marks back: who finds the prefix later does not refill it again."""
    world = World(traits=LM, page_size=4, num_pages=16)
    policy = moody(world)
    policy.willing = event != "pause"
    (sequence,) = world.add(PROMPT[:12], max_tokens=30)
    run_until_decoding(world, sequence)
    if event == "preemption":
        world.scheduler._preempt(sequence)
        world.pool.flush()
        world.scheduled = None
    elif event == "failure":
        world.step(Faults(refill=1.0))
        world.step()
    assert sequence.drafter_len == 0
    policy.willing = True
    while not sequence.carry_valid:
        assert world.step()
    world.step()
    sequence.abort_requested = True
    world.run()
    (later,) = world.add(PROMPT[:12], max_tokens=8)
    world.step()
    assert (later.num_cached, later.drafter_len) == (8, 8)
    world.run()


def test_a_failed_refill_sets_every_mark_back() -> None:
    world = World(traits=LM, page_size=4)
    (first,) = world.add(PROMPT[:9], max_tokens=30)
    run_until_decoding(world, first)
    (second,) = world.add(PROMPT[:9], max_tokens=30)
    world.step(Faults(refill=1.0))
    assert second.drafter_len == 8, "the failure is seen when the next report is there"
    world.step()
    assert (first.drafter_len, second.drafter_len) == (0, 0)
    assert world.pool.drafter_len(first.pages) == 0
    assert not first.carry_valid
    assert row_of(world.scheduled, first).num_refill == len(first.tokens)
    world.run()
    assert max(row.num_drafts for row in steps_of(world, second)) == 4


def test_without_its_drafter_an_engine_goes_on() -> None:
    world = World(traits=LM)
    (sequence,) = world.add(PROMPT[:9], max_tokens=20)
    run_until_decoding(world, sequence)
    world.step(Faults(refill=1.0))
    world.step(Faults(give_up=1.0))
    row = row_of(world.scheduled, sequence)
    assert (row.num_drafts, row.refill) == (0, Refill.NONE)
    world.run()


@pytest.mark.parametrize(("following", "cached"), [(0, 4), (PROMPT[8], 8)])
def test_a_heads_block_is_found_only_with_its_next_token(following: int, cached: int) -> None:
    """Its last slot holds the token after the block."""
    world = World(page_size=4, traits=EXACT_HEAD)
    world.add(PROMPT[:12], max_tokens=4)
    world.run()
    (sequence,) = world.add([*PROMPT[:8], following, 0, 0], max_tokens=4)
    world.step()
    assert sequence.num_cached == cached
    assert sequence.drafter_len == cached
    world.run()


@pytest.mark.parametrize("traits", [LM, EXACT_HEAD])
def test_a_drafter_stays_within_its_context(traits: DraftTraits) -> None:
    """Its own forwards, the refill included, never leave it; check_plan adds up every row."""
    world = World(traits=dataclasses.replace(traits, max_context=20), length=4)
    world.accuracy = 1.0
    (sequence,) = world.add(PROMPT[:10], max_tokens=30)
    world.run()
    rows = steps_of(world, sequence)
    assert [row.num_drafts for row in rows][1:3] == [4, 4 if traits.shifted else 3]
    assert {row.num_drafts for row in rows[3:]} == {0}
    assert {row.refill for row in rows[4:]} == {Refill.NONE}
