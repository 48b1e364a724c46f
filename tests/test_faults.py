"""When a stage fails: a failed draft costs drafts, a failed refill costs drafts, a failed row costs that row.

Everything runs on the successor rule, whose text cannot be right by accident.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from specd.assembly import Parts
from specd.engine import Engine
from specd.errors import EngineError, NonFiniteLogitsError
from specd.pipeline.plan import ScheduledStep
from specd.request import FinishReason
from specd.status import EngineState
from specd.step import RefillMode
from tests.engines import Result, ask, assert_nothing_owned, collect, generate, lm, make_parts, running
from tests.fakes import FailingDrafter, Failures, HeadDrafter, SuccessorModel, continuation

POISON = 2  # the rule never predicts it: only a prompt that holds it meets it
PROMPTS = {"a": [5, 6, 7], "b": list(range(10, 45)), "c": [60] * 18}
KINDS = ["lm", "exact", "padded"]


def parts_of(kind: str, failures: Failures | None = None, **changes: Any) -> Parts:
    """A draft that is always right, of either layout, and fails as told."""
    inner = lm(SuccessorModel()) if kind == "lm" else HeadDrafter(RefillMode(kind))
    drafter = FailingDrafter(inner, failures or Failures())
    fields: dict[str, Any] = {"target": SuccessorModel(), "draft_len": 3, "max_tokens": 16, "num_slots": 256} | changes
    return make_parts(drafter=drafter, **fields)


def failing(parts: Parts) -> FailingDrafter:
    assert isinstance(parts.drafter, FailingDrafter)
    return parts.drafter


def check(results: dict[str, list[Result]], prompts: dict[str, list[int]] = PROMPTS, count: int = 24) -> None:
    for name, prompt in prompts.items():
        assert results[name][0].tokens == continuation(prompt, count), name
        assert results[name][0].reason is FinishReason.LENGTH


def requests(count: int = 24) -> list[Any]:
    return [ask(name, prompt, max_tokens=count) for name, prompt in PROMPTS.items()]


# ---------------------------------------------------------------- draft and refill


@pytest.mark.parametrize("device", ["inline", "chaos-stages"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [0, 1, 2, 5])
async def test_a_failed_draft_means_no_drafts_in_that_step(kind: str, call: int, device: str) -> None:
    parts = parts_of(kind, Failures(extends=frozenset({call})), device=device)
    async with running(parts) as engine:
        check(await generate(engine, requests()))
        stats = engine.stats()
    lost = sum(stats.draft_tokens.values()) - sum(stats.accepted_tokens.values())
    assert failing(parts).num_extends > call
    # One step and no more, whose drafts count nowhere: its refill puts the drafter right again.
    assert (stats.failed_drafts, lost) == (1, 0)
    assert stats.drafts["drafter"] > 3


@pytest.mark.parametrize("device", ["inline", "chaos-paired"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [0, 1, 2, 5, 7])
async def test_a_failed_refill_puts_the_marks_back(
    kind: str, call: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(kind, Failures(refills=frozenset({call})), device=device)
    marks: list[int] = []
    original = parts.scheduler.refill_failed

    def refill_failed(scheduled: ScheduledStep) -> None:
        original(scheduled)
        marks.extend(sequence.drafter_len for sequence in parts.scheduler.running)
        marks.extend(page.drafter_len for page in parts.scheduler.pool._pages)

    monkeypatch.setattr(parts.scheduler, "refill_failed", refill_failed)
    async with running(parts) as engine:
        check(await generate(engine, requests()))
        first = engine.stats()
        check(await generate(engine, requests()))  # from the prefix cache, whose marks must not lie
        stats = engine.stats()
        failed = parts.scheduler.counters.failed_refills
    assert failed == 1
    assert marks
    assert not any(marks)
    # It recovers: drafts are made and kept afterwards, and only those of the failed state were lost.
    assert parts.scheduler.traits is not None
    assert sum(first.accepted_tokens.values()) > 0
    lost = sum(stats.draft_tokens.values()) - sum(stats.accepted_tokens.values())
    assert lost <= 3 * len(PROMPTS)


@pytest.mark.parametrize("device", ["inline", "chaos-stages"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_drafter_that_keeps_failing_is_given_up(kind: str, device: str) -> None:
    parts = parts_of(kind, Failures(all_refills_from=2), device=device)
    async with running(parts) as engine:
        check(await generate(engine, requests()))
        assert parts.scheduler.traits is None
        calls = failing(parts).num_refills
        check(await generate(engine, requests()))
        assert failing(parts).num_refills == calls, "it is asked no more"
    assert parts.scheduler.counters.failed_refills == 3


@pytest.mark.parametrize("kind", KINDS)
async def test_failures_are_counted_across_idle_times(kind: str) -> None:
    """Requests of one token each: the refill of a request's only step ends after its stream."""
    parts = parts_of(kind, Failures(all_refills_from=0))
    async with running(parts) as engine:
        for i in range(6):
            (result,) = await collect(engine, ask(str(i), [9, 8, 7], max_tokens=1))
            assert result.tokens == continuation([9, 8, 7], 1)
    assert failing(parts).num_refills == 3
    assert parts.scheduler.traits is None


async def test_three_failures_with_a_success_between_are_forgiven() -> None:
    parts = parts_of("lm", Failures(refills=frozenset({1, 4, 7})))
    async with running(parts) as engine:
        check(await generate(engine, requests()))
        check(await generate(engine, requests()))
    assert parts.scheduler.counters.failed_refills == 3
    assert parts.scheduler.traits is not None


# ---------------------------------------------------------------- verify and accept


POISONED = {"first": [POISON, 5, 6], "middle": [*range(20, 40), POISON, 7], "last": [70, 71, POISON]}


@pytest.mark.parametrize("device", ["inline", "chaos-stages"])
@pytest.mark.parametrize("kind", [*KINDS, "ngram"])
@pytest.mark.parametrize("fault", ["raises_on", "nan_on"])
@pytest.mark.parametrize("poisoned", [["middle"], ["first", "last"]])
async def test_a_poisoned_request_fails_alone(fault: str, kind: str, poisoned: list[str], device: str) -> None:
    target = SuccessorModel(**{fault: POISON})  # type: ignore[arg-type]
    if kind == "ngram":
        parts = make_parts(target=target, draft="ngram", draft_len=3, max_tokens=16, device=device)
    else:
        parts = parts_of(kind, target=target, device=device)
    async with running(parts) as engine:
        bad = [ask(name, POISONED[name], max_tokens=24) for name in poisoned]
        results = await generate(engine, [*bad, *requests()])
        check(results)
        check(await generate(engine, requests()))  # nothing of it stays behind
        stats = engine.stats()
    for name in poisoned:
        last = results[name][0].last
        assert last is not None
        assert last.finish_reason is FinishReason.ERROR
        assert isinstance(last.error, EngineError)
        assert isinstance(last.error, NonFiniteLogitsError) is (fault == "nan_on")
        assert results[name][0].tokens == []
    assert (stats.requests_failed, stats.requests_finished) == (len(poisoned), 6)


class Guessing(SuccessorModel):
    """A draft that proposes the poisoned token at one position."""

    def _hidden(self, seen: list[int]) -> list[float]:
        values = super()._hidden(seen)
        if len(seen) == 12:
            values[3] = float(POISON)
        return values


@pytest.mark.parametrize("fault", ["raises_on", "nan_on"])
async def test_a_poisoned_draft_costs_nothing(fault: str) -> None:
    """The target raises for a *draft*: the step is computed again without drafts. NaN behind a rejection is no NaN."""
    target = SuccessorModel(**{fault: POISON})  # type: ignore[arg-type]
    parts = make_parts(target=target, drafter=lm(Guessing()), draft_len=3, max_tokens=16)
    async with running(parts) as engine:
        check(await generate(engine, requests()))


@pytest.mark.parametrize("kind", KINDS)
async def test_poisoned_requests_do_not_cost_the_drafter(kind: str) -> None:
    """Four failed steps in a row are the target's, not the drafter's: it is kept, and works at once."""
    parts = parts_of(kind, target=SuccessorModel(raises_on=POISON))
    async with running(parts) as engine:
        for i in range(4):
            bad = ask(str(i), [POISON, 5], max_tokens=24)
            good = {f"{name}{i}": prompt for name, prompt in PROMPTS.items()}
            results = await generate(engine, [bad, *(ask(k, p, max_tokens=24) for k, p in good.items())])
            check(results, good)
        stats = engine.stats()
    assert parts.scheduler.traits is not None
    assert parts.scheduler.counters.failed_refills == 0
    assert stats.accepted_tokens == stats.draft_tokens


# ---------------------------------------------------------------- aborts


def in_flight(monkeypatch: pytest.MonkeyPatch, parts: Parts, act: Callable[[ScheduledStep], None]) -> None:
    """Calls `act` with each step that was scheduled, just before it is launched."""
    original = parts.scheduler.schedule

    def schedule(step: int) -> ScheduledStep | None:
        scheduled = original(step)
        if scheduled is not None:
            act(scheduled)
        return scheduled

    monkeypatch.setattr(parts.scheduler, "schedule", schedule)


PHASES: dict[str, Callable[[Any], bool]] = {
    "first chunk": lambda row: row.sequence.num_computed == 0 and not row.emits,
    "later chunk": lambda row: row.sequence.num_computed > 0 and not row.emits,
    "last chunk": lambda row: row.emits and row.sequence.num_output == 0,
    "first draft": lambda row: row.num_drafts > 0 and row.sequence.num_output == 1,
    "later": lambda row: row.num_drafts > 0 and row.sequence.num_output > 8,
    "preempted": lambda row: row.sequence.num_preemptions > 0,
}


@pytest.mark.parametrize("device", ["inline", "single"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_in_any_phase_frees_everything(
    kind: str, phase: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight: dict[str, Any] = {"num_slots": 80 if kind == "lm" else 64, "max_len": 64} if phase == "preempted" else {}
    parts = parts_of(kind, device=device, **tight)
    hits: list[str] = []
    engines: list[Engine] = []

    def act(scheduled: ScheduledStep) -> None:
        for row in scheduled.rows:
            name = row.sequence.request.request_id
            if not hits and (name == "b" or phase == "preempted") and PHASES[phase](row):
                hits.append(name)
                assert engines[0].abort(name)

    in_flight(monkeypatch, parts, act)
    async with running(parts) as engine:
        engines.append(engine)
        results = await generate(engine, requests())
        assert_nothing_owned(parts)
        assert not engine.abort(hits[0]), "it is gone"
        stats = engine.stats()
    whole = continuation(PROMPTS[hits[0]], 24)
    assert results[hits[0]][0].reason is FinishReason.ABORT
    assert whole[: len(results[hits[0]][0].tokens)] == results[hits[0]][0].tokens
    check(results, {name: prompt for name, prompt in PROMPTS.items() if name != hits[0]})
    assert (stats.requests_aborted, stats.requests_finished) == (1, 2)


async def test_an_abort_while_waiting_and_a_closed_stream() -> None:
    parts = parts_of("lm", max_running=1)
    async with running(parts) as engine:
        first = asyncio.create_task(collect(engine, ask("a", PROMPTS["a"], max_tokens=24)))
        second = engine.submit(ask("b", PROMPTS["b"], max_tokens=24))
        third = engine.submit(ask("c", PROMPTS["c"], max_tokens=24))
        assert engine.abort("b")
        await third.aclose()
        deltas = [delta async for delta in second]
        assert [delta.finish_reason for delta in deltas] == [FinishReason.ABORT]
        assert [delta async for delta in third] == []
        (result,) = await first
        assert result.tokens == continuation(PROMPTS["a"], 24)
    assert engine.stats().requests_aborted == 2


async def test_a_cancelled_reader_aborts_its_request() -> None:
    parts = parts_of("lm", device="single")
    async with running(parts) as engine:
        stream = engine.submit(ask("a", PROMPTS["a"], max_tokens=100))
        some = asyncio.Event()

        async def read() -> None:
            async for _ in stream:
                some.set()

        reader = asyncio.create_task(read())
        await asyncio.wait_for(some.wait(), 10)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await engine.drain(10)
        assert_nothing_owned(parts)
        assert engine.stats().requests_aborted == 1


# ---------------------------------------------------------------- a bug in the pipeline itself


@pytest.mark.parametrize("where", ["apply", "schedule", "reap"])
async def test_a_bug_ends_every_stream_with_an_error(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also streams whose last delta was made but not yet handed out when the pipeline broke."""
    parts = parts_of("lm", max_running=2)
    engine = await Engine.start(parts, warm=False)
    original = getattr(parts.scheduler, where)

    def broken(*args: Any) -> Any:
        done = sum(parts.scheduler.counters.finished.values())
        if done and where != "apply":
            raise ZeroDivisionError("a bug")
        value = original(*args)
        if where == "apply" and sum(parts.scheduler.counters.finished.values()) > done:
            raise ZeroDivisionError("a bug")
        return value

    monkeypatch.setattr(parts.scheduler, where, broken)
    try:
        short = ask("short", PROMPTS["a"], max_tokens=6)
        results = await generate(engine, [short, *requests(60)])
        assert engine.state is EngineState.FAILED
        for (result,) in results.values():
            assert result.reason is FinishReason.ERROR
            assert result.last is not None
            assert isinstance(result.last.error, EngineError)
        with pytest.raises(EngineError):
            engine.submit(ask("late", [5]))
        stats = engine.stats()
        assert stats.accepted_requests == stats.requests_failed == 4
    finally:
        await engine.close()
    assert engine.state is EngineState.FAILED


async def test_close_ends_streams_with_an_abort() -> None:
    parts = parts_of("lm", device="single")
    engine = await Engine.start(parts, warm=False)
    stream = engine.submit(ask("a", PROMPTS["a"], max_tokens=100))
    first = await anext(stream)
    assert first.finish_reason is None
    await engine.close()
    rest = [delta async for delta in stream]
    assert rest[-1].finish_reason is FinishReason.ABORT
    assert engine.state is EngineState.STOPPED
