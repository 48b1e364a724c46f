"""Who runs, how many drafts, which pages: one case after another. All at once: test_schedule_machine.py."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from specd.errors import EngineError
from specd.request import FinishReason
from specd.sequence import Phase
from specd.step import DraftSource, DraftTraits, Refill
from tests.schedule_checks import check, reason, row_of, run_until_decoding, steps_of
from tests.schedule_world import EXACT_HEAD, LM, PROMPT, Faults, World

# Who runs


def test_nothing_to_do_is_no_step() -> None:
    assert World().scheduler.schedule(1) is None


def test_first_come_first_served() -> None:
    world = World(max_running=1)
    sequences = [world.add(PROMPT[:n], max_tokens=3)[0] for n in (3, 5, 4)]
    world.run()
    order = [scheduled.rows[0].sequence for scheduled in world.history]
    assert [sequence for sequence, _ in itertools.groupby(order)] == sequences


def test_a_small_request_does_not_overtake_one_that_waits_for_pages() -> None:
    world = World(page_size=4, num_pages=5, prefix_cache=False)
    first, big, small = (world.add(PROMPT[:n], max_tokens=4)[0] for n in (11, 12, 1))
    world.step()
    world.step()
    assert world.scheduler.running == [first]
    assert list(world.scheduler.waiting) == [big, small]
    world.run()


@pytest.mark.parametrize("mixed", ["speculate", "plain"])
def test_long_prompts_do_not_hold_up_decoding(mixed: str) -> None:
    world = World(max_tokens=8, max_running=8, num_pages=200, mixed=mixed, length=0)
    (first,) = world.add(PROMPT[:2], max_tokens=12)
    run_until_decoding(world, first)
    for number in range(4):
        world.add([number, *PROMPT[:20]], max_tokens=2)
    before = len(world.history)
    while first.phase is not Phase.FINISHED:
        assert world.step()
    emitted = [delta.token_ids for delta in world.deltas[id(first)][1:]]
    assert [len(tokens) for tokens in emitted] == [1] * (len(world.history) - before)
    world.run()


def test_the_token_budget_is_used_and_never_exceeded() -> None:
    """check_plan holds every step under it; here it is also shown to be filled."""
    world = World(max_tokens=10, traits=LM, length=4)
    first, second = world.add(PROMPT[:4], max_tokens=20)[0], world.add([0, *PROMPT[:24]], max_tokens=4)[0]
    world.run()
    sizes = [scheduled.plan.num_tokens for scheduled in world.history]
    assert max(sizes) == 10
    assert sum(row.num_known for row in steps_of(world, second) if not row.emits) > 10
    assert any(row.num_drafts == 4 for row in steps_of(world, first))


def test_a_prompt_is_cut_into_chunks() -> None:
    world = World(max_tokens=8, traits=LM, length=4)
    (sequence,) = world.add(PROMPT[:20], max_tokens=1)
    world.run()
    rows = steps_of(world, sequence)
    assert [(row.num_known, row.emits) for row in rows] == [(8, False), (8, False), (4, True)]
    assert [row.refill for row in rows] == [Refill.KNOWN, Refill.KNOWN, Refill.NEWEST]
    plans = [scheduled.plan for scheduled in world.history]
    assert [plan.next_prompt_tokens.tolist() for plan in plans] == [[PROMPT[8]], [PROMPT[16]], [-1]]
    assert [plan.sampling[0] is None for plan in plans] == [True, True, False]
    assert [scheduled.num_prefill_tokens for scheduled in world.history] == [8, 8, 4]


@pytest.mark.parametrize("mixed", ["speculate", "plain"])
def test_whether_decode_rows_speculate_beside_a_prompt(mixed: str) -> None:
    world = World(traits=LM, mixed=mixed)
    (first,) = world.add(PROMPT[:3], max_tokens=20)
    run_until_decoding(world, first)
    assert row_of(world.scheduled, first).num_drafts == 4
    world.add([0, *PROMPT[:5]], max_tokens=20)
    world.step()
    assert world.scheduled is not None
    assert len(world.scheduled.rows) == 2
    assert row_of(world.scheduled, first).num_drafts == (4 if mixed == "speculate" else 0)
    world.run()


def test_drafts_that_pay_do_not_hold_up_prompts() -> None:
    """Three rows want more drafts than fit: a quarter of what they leave is kept for the prompt."""
    world = World(max_tokens=15, traits=LM, length=8, max_len=100)
    for number in range(3):
        world.add([number], max_tokens=90)
    world.accuracy = 0.0
    while not (len(world.scheduler.running) == 3 and all(s.carry_valid for s in world.scheduler.running)):
        assert world.step()
    (late,) = world.add(PROMPT[:9], max_tokens=2)
    world.step()
    while not late.num_output:
        assert row_of(world.scheduled, late).num_known == 3
        assert world.scheduled is not None
        assert world.scheduled.plan.num_tokens == 15
        world.step()
    world.run()


def test_a_row_carries_what_its_next_token_depends_on() -> None:
    world = World(length=0)
    (sequence,) = world.add(PROMPT[:5], max_tokens=9, n=1)
    params = dataclasses.replace(
        sequence.sampling, presence_penalty=1.0, repetition_penalty=1.1, seed=77, bad_words_ids=((1, 2, 3),)
    )
    sequence.request = dataclasses.replace(sequence.request, sampling=params, prompt_index=2)
    run_until_decoding(world, sequence)
    world.step()
    assert world.scheduled is not None
    (state,) = world.scheduled.plan.sampling
    said = sequence.tokens[5:]
    assert state is not None
    assert (state.position, state.num_output) == (len(sequence.tokens), len(said)) == (7, 2)
    assert state.noise_key == (77, 2, 0), "seed, prompt, choice"
    assert state.tail == tuple(sequence.tokens[-2:])
    assert state.prompt_ids is not None
    assert state.prompt_ids.tolist() == sorted(set(PROMPT[:5]))
    assert state.output_ids is not None
    assert state.output_counts is not None
    counts = dict(zip(state.output_ids.tolist(), state.output_counts.tolist(), strict=True))
    assert counts == {token: said.count(token) for token in said}
    world.step()
    assert sum(state.output_counts.tolist()) == 2, "a snapshot"


# Drafts


def test_a_length_can_be_pinned_for_a_while() -> None:
    world = World(traits=LM, length=6)
    (sequence,) = world.add(PROMPT[:3], max_tokens=40)
    run_until_decoding(world, sequence)
    with world.scheduler.pinned(2):
        world.step()
        assert row_of(world.scheduled, sequence).num_drafts == 2
    world.step()
    assert row_of(world.scheduled, sequence).num_drafts == 6
    world.run()


def test_drafts_end_where_the_sequence_ends() -> None:
    world = World(traits=LM, length=8)
    world.accuracy = 1.0
    (sequence,) = world.add(PROMPT[:3], max_tokens=5)
    world.run()
    assert [row.num_drafts for row in steps_of(world, sequence)] == [0, 3], (
        "the target's own token takes the last place"
    )


@pytest.mark.parametrize("max_draft", [0, 1, 2, 8])
def test_a_request_may_want_less(max_draft: int) -> None:
    world = World(traits=LM, length=6)
    (sequence,) = world.add(PROMPT[:3], max_draft=max_draft, max_tokens=20)
    world.run()
    assert max(row.num_drafts for row in steps_of(world, sequence)) == min(max_draft, 6)
    if max_draft == 0:
        assert not any(row.refill for row in steps_of(world, sequence)), "nobody keeps up with what is never drafted"


def test_a_proposer_is_asked_before_the_drafter() -> None:
    world = World(traits=LM, length=4)
    (sequence,) = world.add(PROMPT[:3], guesses=True, max_tokens=40)
    world.run()
    rows = [row for row in steps_of(world, sequence) if row.num_drafts]
    assert {row.source for row in rows} == {DraftSource.NGRAM, DraftSource.DRAFTER}
    assert all(bool(row.host_drafts) == (row.source is DraftSource.NGRAM) for row in rows)


def test_short_proposals_are_padded_when_the_length_is_fixed() -> None:
    world = World(pad_proposals=True, length=5)
    (sequence,) = world.add(PROMPT[:3], guesses=True, max_tokens=40)
    world.run()
    assert {row.num_drafts for row in steps_of(world, sequence)[1:-8]} == {5}


def test_a_guess_that_is_not_verified_is_kept_to_be_compared() -> None:
    world = World(length=0)
    (sequence,) = world.add(PROMPT[:3], guesses=True, max_tokens=30)
    world.run()
    rows = steps_of(world, sequence)
    assert any(row.host_drafts for row in rows)
    assert {row.num_drafts for row in rows} == {0}


# Pages


@pytest.mark.parametrize("traits", [None, LM, EXACT_HEAD])
def test_pages_are_there_before_the_launch(traits: DraftTraits | None) -> None:
    """Root and drafts, and one more for the newest token with a draft model: at every distance from a page's edge."""
    for prompt_len in range(1, 9):
        world = World(page_size=4, traits=traits, length=3)
        (sequence,) = world.add(PROMPT[:prompt_len], max_tokens=20, guesses=traits is None)
        run_until_decoding(world, sequence)
        row = row_of(world.scheduled, sequence)
        needed = prompt_len + 1 + row.num_drafts + (traits is LM)
        assert len(sequence.pages) == -(-needed // 4)
        world.run()


def test_the_youngest_makes_room_and_says_the_same() -> None:
    world = World(page_size=4, num_pages=8, prefix_cache=False, length=0)
    old, young = world.add(PROMPT[:10], max_tokens=16)[0], world.add(PROMPT[1:11], max_tokens=16)[0]
    world.run()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert world.scheduler.counters.preemptions == 1
    assert world.scheduler.counters.prompt_tokens == 20, "a second admission is not a second prompt"
    again = [row.num_known for row in steps_of(world, young) if row.num_known > 1]
    assert again[0] == 10
    assert len(again) == 2
    assert again[1] > 10, "it computes its own tokens again"


def test_what_was_preempted_is_first_in_line() -> None:
    world = World(page_size=4, num_pages=8, prefix_cache=False, length=0)
    sequences = [world.add(PROMPT[i : i + 10], max_tokens=16)[0] for i in range(3)]
    while not sequences[1].num_preemptions:
        assert world.step()
    assert list(world.scheduler.waiting) == sequences[1:]
    world.run()


@pytest.mark.parametrize(("num_pages", "drafts"), [(6, [8, 0]), (7, [8, 4]), (8, [8, 8])])
def test_drafts_take_no_pages_from_others(num_pages: int, drafts: list[int]) -> None:
    """They shrink to what is free; nobody is preempted for a guess."""
    world = World(page_size=4, num_pages=num_pages, prefix_cache=False, length=8, pad_proposals=True)
    pair = [world.add(PROMPT[i : i + 7], max_tokens=12, guesses=True)[0] for i in range(2)]
    run_until_decoding(world, pair[1])
    assert [row_of(world.scheduled, sequence).num_drafts for sequence in pair] == drafts
    assert [sequence.num_preemptions for sequence in pair] == [0, 0]
    world.run()


def test_a_prompt_that_fills_the_context_gets_one_token() -> None:
    world = World(page_size=4, num_pages=5, max_len=16, traits=LM, length=4)
    (sequence,) = world.add(PROMPT[:15], max_tokens=100)
    world.run()
    assert len(sequence.tokens) == 16
    assert reason(world, sequence) is FinishReason.LENGTH
    assert [row.num_drafts for row in steps_of(world, sequence)] == [0]


# The prefix cache


@pytest.mark.parametrize(("prompt_len", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_hit_leaves_a_token_to_compute(prompt_len: int, cached: int) -> None:
    world = World(page_size=4, length=0)
    for expected in (0, cached):
        (sequence,) = world.add(PROMPT[:prompt_len], max_tokens=2)
        world.run()
        assert sequence.num_cached == expected
        assert steps_of(world, sequence)[0].num_known == prompt_len - expected
    assert world.scheduler.counters.cached_tokens == cached


def test_salts_do_not_share() -> None:
    world = World(page_size=4, length=0)
    for salt, cached in ((b"a", 0), (b"b", 0), (b"a", 8)):
        (sequence,) = world.add(PROMPT[:9], max_tokens=2, salt=salt)
        world.run()
        assert sequence.num_cached == cached


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_share_the_prompts_pages(prefix_cache: bool) -> None:
    world = World(page_size=4, prefix_cache=prefix_cache, length=0)
    first, *others = world.add(PROMPT[:10], max_tokens=6, n=3)
    world.step()
    assert world.scheduled is not None
    assert len(world.scheduled.rows) == (1 if prefix_cache else 3), "the others wait for what the first one computes"
    world.step()
    world.step()
    for other in others:
        assert other.num_cached == (8 if prefix_cache else 0)
        assert (other.pages[:2] == first.pages[:2]) == prefix_cache
        assert set(other.pages[2:]).isdisjoint(first.pages)
    world.run()


def test_a_choice_does_not_wait_for_one_that_failed() -> None:
    world = World(page_size=4, length=0)
    first, second = world.add(PROMPT[:10], max_tokens=3, n=2)
    world.step()
    world.step(Faults(nan=1.0))
    assert isinstance(world.deltas[id(first)][-1].error, EngineError)
    assert second.num_cached == 0, "what a failed row computed is not found by others"
    world.run()
    assert reason(world, second) is FinishReason.LENGTH


def test_chunks_of_a_prompt_that_failed_in_the_end_are_not_found() -> None:
    """What made it fail may stand in the first one."""
    world = World(page_size=4, max_tokens=8, length=0)
    first, second = world.add(PROMPT[:20], max_tokens=3, n=2)
    while first.num_computed < 16:
        world.step()
    world.step(Faults(nan=1.0))
    assert first.phase is Phase.FINISHED
    assert second.num_cached == 0
    world.run()


def test_a_row_that_fails_with_drafts_is_computed_again_without_them() -> None:
    """What fails may stand behind the end of the text, which a step with drafts would never get to tell."""
    world = World()
    world.accuracy = 1.0
    (sequence,) = world.add(PROMPT[:5], max_tokens=30, guesses=True)
    while world.scheduled is None or not world.scheduled.rows[0].num_drafts:
        world.step()
    world.step(Faults(nan=1.0))
    assert world.scheduled is not None
    assert [row.num_drafts for row in world.scheduled.rows] == [0]
    world.run()
    assert sequence.tokens[sequence.num_prompt :] == world.expected(sequence)


def test_a_row_that_fails_without_drafts_too_has_failed() -> None:
    world = World()
    (sequence,) = world.add(PROMPT[:5], max_tokens=30, guesses=True)
    while world.scheduled is None or not world.scheduled.rows[0].num_drafts:
        world.step()
    world.step(Faults(nan=1.0))
    world.step(Faults(nan=1.0))
    assert isinstance(world.deltas[id(sequence)][-1].error, EngineError)
    world.run()


def test_short_prompts_have_nothing_to_share_and_do_not_wait() -> None:
    world = World(page_size=4, length=0)
    world.add(PROMPT[:4], n=3)
    world.step()
    assert world.scheduled is not None
    assert len(world.scheduled.rows) == 3
    world.run()


# Leaving


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("which", [[0], [1], [2], [0, 1, 2, 3]])
def test_aborts_at_any_moment_free_everything(steps: int, which: list[int]) -> None:
    """Waiting, in the middle of a prompt, decoding, or over: pages and slots are back before the next step."""
    world = World(page_size=4, max_running=2, max_tokens=6, traits=LM)
    sequences = [*world.add(PROMPT[:9], max_tokens=6, n=2), world.add(PROMPT[:2])[0], world.add(PROMPT[:20])[0]]
    for _ in range(steps):
        world.step()
    gone = [sequences[i] for i in which if sequences[i].phase is not Phase.FINISHED]
    for sequence in gone:
        sequence.abort_requested = True
    world.step()
    assert all(sequence.phase is Phase.FINISHED for sequence in gone)
    world.run()
    aborted = [sequence for sequence in gone if reason(world, sequence) is FinishReason.ABORT]
    assert len(gone) - len(aborted) <= 1, "at most one ended by itself in the step that was running"
    assert world.scheduler.counters.finished["abort"] == len(aborted)


def test_an_error_ends_one_row_alone() -> None:
    world = World(traits=LM)
    broken, fine = world.add(PROMPT[:5])[0], world.add(PROMPT[1:6])[0]
    run_until_decoding(world, fine)
    scheduled = world.scheduled
    assert scheduled is not None
    drafts = world.draft(scheduled, fails=False)
    report = world.verify(scheduled.plan, drafts)
    rows = world._rows(scheduled, report, Faults())
    error = EngineError("x")
    deltas = world.scheduler.apply(
        scheduled, [error if row.sequence is broken else rows[i] for i, row in enumerate(scheduled.rows)]
    )
    assert [(delta.finish_reason, delta.error) for delta in deltas] == [(FinishReason.ERROR, error), (None, None)]
    assert not broken.pages
    assert fine.decoding
    world.scheduler.refill_failed(scheduled)
    check(world)
