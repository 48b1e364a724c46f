"""Adaptive lengths against every number of drafts there is, priced by the policy's own estimates."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specd.pipeline.draft_length import AdaptiveLength
from specd.step import DraftSource
from tests.test_draft_length import Name, request, stats_of

COSTS = (0.0, 0.002, 0.01, 0.05, 0.3, 1.0)  # of one more token in a step of one row, as a share of the step
SOURCES = ([DraftSource.NGRAM], [DraftSource.DRAFTER], [DraftSource.NGRAM, DraftSource.DRAFTER])


def taught(draw: random.Random, names: list[Any], sources: list[DraftSource], cost: float) -> AdaptiveLength:
    """It knows what steps cost, and how often each row's drafts are kept."""
    policy, rows = AdaptiveLength(), len(names)
    policy.begin(rows)
    for size in (rows, rows * 9):
        for _ in range(30):
            policy.observe_step(
                stats_of(num_rows=rows, num_tokens=size, verify_s=1 + cost / rows * (size - rows), refill_s=0.05,
                         num_refill_rows=rows)
            )  # fmt: skip
    policy._trial._trial.probes = 0  # else drafts are made to see what they bring
    policy._trial._trial.drafting = True
    for name, source in zip(names, sources, strict=True):
        for _ in range(draw.randint(0, 12)):
            policy.observe_row(name, source, drafted=4, accepted=draw.choice([0, 0, 1, 2, 4]))
    return policy


@pytest.mark.parametrize(("rows", "share"), [(1, 1.0), (3, 1.0), (12, 1.0), (31, 1.0), (48, 0.97), (200, 0.97)])
@pytest.mark.parametrize("among", SOURCES)
@pytest.mark.parametrize("cost", COSTS)
def test_no_number_of_drafts_promises_more(rows: int, share: float, among: list[DraftSource], cost: float) -> None:
    """Of many rows not every number is looked at, and next to nothing is lost by that."""
    draw = random.Random(rows)
    names: list[Any] = [Name() for _ in range(rows)]
    sources = [draw.choice(among) for _ in names]
    policy = taught(draw, names, sources, cost)
    num_plain = draw.randint(0, rows - 1)
    asked = list(zip(names, sources, [draw.randint(0, 8) for _ in names], strict=True))[num_plain:]
    chosen = policy.choose([request(*one) for one in asked], num_plain)
    assert all(0 <= length <= most for length, (_, _, most) in zip(chosen, asked, strict=True))

    likeliest = sorted(
        (-(policy._rate(name, source).rate ** depth), depth, i)
        for i, (name, source, most) in enumerate(asked)
        for depth in range(1, most + 1)
    )

    def speed(drafts: list[tuple[float, int, int]]) -> float:
        drafters = [(depth, i) for _, depth, i in drafts if asked[i][1] is DraftSource.DRAFTER]
        deepest, drafting = max((depth for depth, _ in drafters), default=0), len({i for _, i in drafters})
        price = policy._cost(rows + len(drafts), deepest, drafting)
        assert price
        return (rows - sum(loss for loss, _, _ in drafts)) / price * (1 if drafts else policy.GAIN)

    best = max(speed(likeliest[:count]) for count in range(len(likeliest) + 1))
    taken = [draft for draft in likeliest if draft[1] <= chosen[draft[2]]]
    assert speed(taken) >= share * best * (1 - 1e-9)


def _choose_in(costs: list[tuple[int, float]], *, rows: int, rate: float, most: int) -> list[int]:
    """What is chosen where these sizes cost so many seconds, well measured, and every draft is kept at `rate`."""
    policy, names = AdaptiveLength(), [Name() for _ in range(rows)]
    for size, seconds in costs:
        for _ in range(20):
            policy.observe_step(stats_of(num_rows=rows, num_tokens=size, verify_s=seconds))
    for name in names:
        policy._rate(name, DraftSource.NGRAM).rate = rate  # type: ignore[arg-type]
    return policy.choose([request(name, DraftSource.NGRAM, most) for name in names], 0)


def test_a_cheap_size_between_dear_ones_is_found_among_many_rows() -> None:
    """Two accidents beside it, and nothing would ever be drafted again: hopes of 96 rows promise nothing."""
    chosen = _choose_in([(96, 1.0), (137, 3.0), (141, 1.0), (145, 3.0)], rows=96, rate=0.9, most=1)
    assert sum(chosen) == 141 - 96


def test_a_full_tile_behind_slow_sizes_is_found() -> None:
    """Nine sizes in a row at which nothing pays, then one at which a draft of every row is nearly free."""
    costs = [(16, 1.0), *((odd, 1.6) for odd in range(17, 26)), (32, 1.02)]
    assert _choose_in(costs, rows=16, rate=0.3, most=2) == [1] * 16
