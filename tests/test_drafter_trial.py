"""Whether the drafter takes part: tried out by tokens a second, in windows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from specd.pipeline.draft_length import AdaptiveLength
from specd.pipeline.drafter_trial import LONGEST_REST, OPENING, PROBES, SETTLING, SHORTEST_REST, WINDOW, DrafterTrial
from specd.step import DraftSource
from tests.test_draft_length import MAX_DRAFT, Name, request, stats_of


def run(
    trial: DrafterTrial, steps: int, speed: Callable[[bool], float], *, rows: int = 1, noise: float = 0.0
) -> list[bool]:
    """The mode of each step, where a step emits two tokens a row at `speed(drafting)` tokens a second."""
    rng, modes = random.Random(steps), []
    for _ in range(steps):
        trial.begin(rows)
        modes.append(trial.drafting)
        trial.observe(2 * rows, 2 * rows / speed(trial.drafting) * (1 + noise * rng.random()))
    return modes


def windows(modes: list[bool]) -> list[tuple[bool, int]]:
    out: list[tuple[bool, int]] = []
    for mode in modes:
        if out and out[-1][0] == mode:
            out[-1] = mode, out[-1][1] + 1
        else:
            out.append((mode, 1))
    return out


def test_the_windows_alternate_then_the_better_mode_goes_on_and_the_other_is_tried_ever_more_rarely() -> None:
    assert windows(run(DrafterTrial(), 4000, lambda on: 110.0 if on else 100.0))[:8] == [
        (True, WINDOW),
        (False, WINDOW),
        (True, WINDOW),
        (False, WINDOW),
        (True, SHORTEST_REST),
        (False, WINDOW),
        (True, 2 * SHORTEST_REST),
        (False, WINDOW),
    ]
    assert max(steps for _, steps in windows(run(DrafterTrial(), 40_000, lambda on: 1.0 + on))) == LONGEST_REST


def test_a_drafter_that_does_not_pay_at_first_rests_at_once() -> None:
    assert windows(run(DrafterTrial(), 4000, lambda on: 90.0 if on else 100.0))[:5] == [
        (True, WINDOW),
        (False, WINDOW + SHORTEST_REST),
        (True, WINDOW),
        (False, 2 * SHORTEST_REST),
        (True, WINDOW),
    ]


@pytest.mark.parametrize("gain", [0.5, 0.9, 1.1, 2.0])
def test_the_faster_mode_is_found_through_noise(gain: float) -> None:
    modes = run(DrafterTrial(), 6000, lambda on: 100.0 * gain if on else 100.0, noise=0.3)
    assert modes.count(gain > 1) / len(modes) > 0.9


def test_a_change_is_noticed() -> None:
    trial = DrafterTrial()
    run(trial, 600, lambda on: 120.0 if on else 100.0)
    later = run(trial, 4000, lambda on: 80.0 if on else 100.0)
    assert later[-2000:].count(True) < 200


def test_each_class_of_batch_sizes_has_its_own_verdict() -> None:
    trial = DrafterTrial()
    for _ in range(40):
        run(trial, 20, lambda on: 120.0 if on else 100.0, rows=1)
        run(trial, 20, lambda on: 80.0 if on else 100.0, rows=8)
    assert run(trial, 1, lambda on: 120.0 if on else 100.0, rows=1) == [True]
    assert run(trial, 1, lambda on: 80.0 if on else 100.0, rows=9) == [False]


def test_the_steps_in_which_the_drafter_catches_up_do_not_count() -> None:
    trial, since, before = DrafterTrial(), -1, True
    for _ in range(OPENING * WINDOW + 1):
        trial.begin(1)
        since = since + 1 if trial.drafting == before else 0
        before = trial.drafting
        slow = 50 if since < SETTLING else 1
        trial.observe(1, slow * (0.010 if trial.drafting else 0.012))
    assert trial.drafting


def test_one_slow_step_is_no_verdict() -> None:
    trial = DrafterTrial()
    for step in range(OPENING * WINDOW + 1):
        trial.begin(1)
        trial.observe(1, 2.0 if step == SETTLING + 5 else 0.010 if trial.drafting else 0.013)
    assert trial.drafting


def test_a_drafter_at_rest_is_tried_again() -> None:
    trial = DrafterTrial()
    run(trial, OPENING * WINDOW + 1, lambda on: 120.0 if on else 100.0)
    assert trial.drafting
    trial.rest()
    modes = run(trial, SHORTEST_REST + WINDOW + 1, lambda on: 120.0 if on else 100.0)
    assert windows(modes)[0] == (False, SHORTEST_REST)
    assert trial.drafting


def test_a_trial_that_ends_early_stands_as_a_verdict() -> None:
    trial = DrafterTrial()
    rests = []
    for _ in range(3):
        trial.rest()
        rests.append(windows(run(trial, LONGEST_REST, lambda on: 100.0))[0][1])
        trial = trial if trial.drafting else _until_drafting(trial)
    assert rests == sorted(rests)
    assert rests[0] >= SHORTEST_REST


def test_a_window_with_the_drafter_begins_with_probes() -> None:
    trial = DrafterTrial()
    for _ in range(PROBES):
        assert trial.probing
        trial.probed(1)
    assert not trial.probing
    trial.rest()
    assert not trial.probing
    _until_drafting(trial)
    assert trial.probing


def _until_drafting(trial: DrafterTrial) -> DrafterTrial:
    while not trial.drafting:
        run(trial, 1, lambda on: 100.0)
    return trial


@pytest.mark.parametrize("seconds", [0.0, 5e-324])
def test_a_clock_that_stands_still_ends_nothing(seconds: float) -> None:
    policy, sequence = AdaptiveLength(), Name()
    for step in range(400):
        policy.begin(1)
        (drafts,) = policy.choose([request(sequence)], 0)
        times = dict.fromkeys(("verify_s", "draft_s", "refill_s", "duration_s"), seconds)
        counts = {"num_rows": 1, "num_tokens": 1 + drafts, "num_emitted": 1 + drafts, "num_draft_steps": step % 2}
        policy.observe_step(stats_of(**times, **counts))
        assert 0 <= drafts <= MAX_DRAFT


@pytest.mark.parametrize("may_draft", [False, True])
def test_steps_whose_requests_want_no_drafts_are_no_verdict_on_the_drafter(may_draft: bool) -> None:
    """A client that turned speculation off must not have it at rest for those that come after."""
    policy, sequence = AdaptiveLength(), Name()
    for _ in range(20_000):
        policy.begin(1, may_draft=may_draft)
        policy.choose([], 1)
        policy.observe_step(stats_of(num_rows=1, num_tokens=1, num_emitted=1, verify_s=0.010, duration_s=0.011))
    policy.begin(1)
    assert policy.wants_drafter(sequence, DraftSource.NONE) != may_draft
