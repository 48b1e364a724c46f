"""A head's drafts in mixed batches: neighbours that sample come and go, and nothing of a row changes.

Carries hold logits only while some row of the batch samples; what a greedy row drafts must not come of old ones.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specd.engine import Engine
from specd.request import Request
from specd.sampling import chain
from specd.sampling.process import Distribution
from tests.engines import Result, ask, collect, running
from tests.test_mtp_engine import KERNELS, drafter_of, parts_of

RULES = ["exact", "ratio", "literal", "threshold", "typical"]
ROOMY: dict[str, Any] = {"num_slots": 1024, "max_len": 128, "max_running": 8, "max_tokens": 512}
GREEDY = ask("greedy", [5, 6, 7], max_tokens=48)
# Each comes when the greedy row has so many tokens: first it drafts alone, then beside rows that sample, then alone.
NEIGHBOURS = {
    8: ask("short", [60] * 18, max_tokens=8, temperature=0.5, seed=3),
    9: ask("plain", [9, 8], max_tokens=5, temperature=1.2, seed=4),
    26: ask("late", [33], max_tokens=10, temperature=0.9, top_k=20, seed=5),
}

Row = tuple[list[int], tuple[int, ...]]


def row_of(result: Result) -> Row:
    """Its tokens, and how many drafts each of its steps kept."""
    assert result.last is not None
    assert result.last.stats is not None
    return result.tokens, result.last.stats.per_step_accepted


async def alone(engine: Engine) -> dict[str, Row]:
    found = {}
    for request in (GREEDY, *NEIGHBOURS.values()):
        (result,) = await collect(engine, request)
        found[request.request_id] = row_of(result)
    return found


async def in_company(engine: Engine) -> dict[str, Row]:
    result, waiting = Result(), dict(NEIGHBOURS)
    tasks: dict[str, asyncio.Task[list[Result]]] = {}

    def join(request: Request) -> None:
        tasks[request.request_id] = asyncio.create_task(collect(engine, request))

    async for delta in engine.submit(GREEDY):
        result.add(delta)
        for mark in [mark for mark in waiting if mark <= len(result.tokens)]:
            join(waiting.pop(mark))
    found = {name: row_of((await task)[0]) for name, task in tasks.items()}
    return found | {GREEDY.request_id: row_of(result)}


async def both(kernels: str, **changes: Any) -> tuple[dict[str, Row], dict[str, Row]]:
    async with running(parts_of(kernels, drafter_of(kernels), **(ROOMY | changes))) as engine:
        apart = await alone(engine)
    async with running(parts_of(kernels, drafter_of(kernels), **(ROOMY | changes))) as engine:
        return apart, await in_company(engine)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kernels", KERNELS)
async def test_neighbours_that_sample_change_no_draft(kernels: str, rule: str) -> None:
    apart, together = await both(kernels, acceptance=rule)
    assert together == apart
    assert sum(apart["greedy"][1]) > 0


async def test_old_logits_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a greedy row that is drafted from the carry's logits, which nobody has refreshed."""
    monkeypatch.setattr(chain, "Distribution", lambda processed, batch, best=None: Distribution(processed, batch))
    apart, together = await both("torch", acceptance="ratio")
    assert together["greedy"][0] == apart["greedy"][0]
    assert together["greedy"][1] != apart["greedy"][1]


async def test_a_threshold_of_nothing_still_keeps_no_impossible_draft() -> None:
    """A greedy row has p = 0 everywhere but at its best token, alone and beside rows that sample."""
    apart, together = await both("torch", acceptance="threshold", threshold=0.0)
    assert together["greedy"] == apart["greedy"]
