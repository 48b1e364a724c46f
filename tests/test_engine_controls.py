"""An operator's hand on a running engine: pause, drain and resume, abort with a reason, drafts a step, cached pages."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from specd.engine import Engine
from specd.errors import AdminAbortedError, DrainingError, EngineError, RequestError
from specd.pipeline.draft_length import AdaptiveLength
from specd.request import FinishReason, Request, SequenceDelta
from specd.selfcheck import compare_with_plain
from specd.status import EngineState
from tests.engines import ask, collect, greedy_answer, make_parts, running, target_model

PROMPT = (5, 6, 7, 5, 6, 7, 5, 6)
TOKENS = 40


async def take(stream: AsyncIterator[SequenceDelta], count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += (await anext(stream)).token_ids
    return tokens


async def settle(engine: Engine) -> int:
    """Steps when nothing is on its way any more."""
    for _ in range(20):
        await asyncio.sleep(0)
    return engine.stats().steps


async def test_a_paused_stream_waits_and_goes_on() -> None:
    async with running(make_parts(draft="lm")) as engine:
        stream = engine.submit(ask("a", PROMPT, max_tokens=TOKENS))
        tokens = await take(stream, 5)
        engine.pause()
        steps = await settle(engine)
        late = asyncio.ensure_future(collect(engine, ask("b", PROMPT, max_tokens=4)))  # accepted, and waits
        assert await settle(engine) == steps
        stats = engine.stats()
        assert (stats.paused, stats.last_progress_s, stats.state) == (True, 0.0, EngineState.READY)
        assert engine.abort("a", AdminAbortedError("by hand")) is True
        engine.unpause()
        rest = [delta async for delta in stream]
        assert isinstance(rest[-1].error, AdminAbortedError)
        assert rest[-1].finish_reason is FinishReason.ABORT
        tokens += [token for delta in rest for token in delta.token_ids]
        assert tokens == greedy_answer(target_model(), PROMPT, TOKENS)[: len(tokens)]
        ((result,),) = await asyncio.gather(late)
        assert result.tokens == greedy_answer(target_model(), PROMPT, 4)


async def test_having_had_nothing_to_do_is_no_stall() -> None:
    """Not even for the moment until the first step begins: after an idle hour, and after a long pause."""
    async with running(make_parts()) as engine:
        for paused in (False, True):
            await collect(engine, ask("before", PROMPT, max_tokens=1))
            await settle(engine)
            if paused:
                engine.pause()
                stream = engine.submit(ask("a", PROMPT, max_tokens=4))
                await settle(engine)
            engine._pipeline.last_step_s -= 3600
            if paused:
                engine.unpause()
            else:
                stream = engine.submit(ask("a", PROMPT, max_tokens=4))
            stats = engine.stats()
            assert stats.running + stats.waiting == 1
            assert stats.last_progress_s < 60
            [delta async for delta in stream]


async def test_a_step_that_never_ends_is_a_stall_whatever_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(make_parts()) as engine:
        stream = engine.submit(ask("a", PROMPT, max_tokens=40))
        await take(stream, 3)
        engine._pipeline.last_step_s -= 3600
        other = engine.submit(ask("b", PROMPT, max_tokens=4))
        assert engine.stats().last_progress_s > 3500
        for each in (stream, other):
            [delta async for delta in each]


async def test_drain_ends_a_pause_and_resume_takes_requests_again() -> None:
    async with running(make_parts()) as engine:
        engine.pause()
        waiting = asyncio.ensure_future(collect(engine, ask("a", PROMPT, max_tokens=4)))
        await asyncio.sleep(0)
        assert await engine.drain(10)
        assert (await waiting)[0].reason is FinishReason.LENGTH
        with pytest.raises(DrainingError):
            engine.submit(ask("b", PROMPT))
        engine.pause()  # nothing is left to pause for
        assert not engine.stats().paused
        engine.resume()
        assert (await collect(engine, ask("b", PROMPT, max_tokens=4)))[0].reason is FinishReason.LENGTH


@pytest.mark.parametrize("draft", ["ngram", "lm"])
async def test_drafts_a_step_change_at_the_next_one(draft: str) -> None:
    """A request that runs is changed under way. A drafter that had nothing to do catches up first, for one step."""
    async with running(make_parts(draft=draft, draft_len=4)) as engine:
        stream = engine.submit(ask("a", PROMPT, max_tokens=100))
        await take(stream, 3)
        for k in (0, 2, 4, 1, 0):
            engine.pause()
            begun = await settle(engine)
            engine.set_draft_length(k)
            engine.unpause()
            while engine.stats().steps < begun + 3:  # noqa: ASYNC110  steps have no event
                await asyncio.sleep(0)
            engine.pause()
            await settle(engine)
            (detail,) = engine.request("a")
            changed = [step.drafted for step in detail.steps if step.step >= begun]
            assert changed[1:] == [k] * (len(changed) - 1)
            assert changed[0] in (0, k)
        engine.unpause()
        rest = [delta async for delta in stream]
        assert rest[-1].finish_reason is FinishReason.LENGTH


async def test_the_text_does_not_depend_on_the_changes() -> None:
    async with running(make_parts(draft="lm", draft_len=4)) as engine:
        stream = engine.submit(ask("a", PROMPT, max_tokens=TOKENS))
        tokens: list[int] = []
        for k in (0, 3, "adaptive", None, 1, 0, 4):
            tokens += (await anext(stream)).token_ids
            engine.set_draft_length(k)
        tokens += [token for delta in [delta async for delta in stream] for token in delta.token_ids]
    assert tokens == greedy_answer(target_model(), PROMPT, TOKENS)


async def test_what_the_configured_policy_learnt_is_kept_and_nothing_leaks() -> None:
    parts = make_parts(draft="lm", draft_len="adaptive", max_draft=4)
    configured = parts.scheduler.length
    assert isinstance(configured, AdaptiveLength)
    async with running(parts) as engine:
        await collect(engine, ask("a", PROMPT, max_tokens=TOKENS))
        stream = engine.submit(ask("b", PROMPT, max_tokens=TOKENS))
        await take(stream, 20)
        engine.set_draft_length(2)
        [delta async for delta in stream]
        assert engine.draft_length.overridden
        engine.set_draft_length("adaptive")
        assert parts.scheduler.length is configured
        assert configured._rates == {}


async def test_lengths_that_cannot_be_had() -> None:
    async with running(make_parts(draft="ngram", draft_len=4, max_running=8, max_tokens=40)) as engine:
        for k, message in ((5, r"0\.\.4"), (-1, r"0\.\.4")):
            with pytest.raises(RequestError, match=message):
                engine.set_draft_length(k)
    async with running(make_parts(draft="none")) as engine:
        for wish in (1, "adaptive"):
            with pytest.raises(RequestError, match="no drafter"):
                engine.set_draft_length(wish)
        engine.set_draft_length(0)
        assert engine.draft_length.mode == "off"
    tight = make_parts(draft="ngram", draft_len="adaptive", max_draft=8, max_running=8, max_tokens=40)
    async with running(tight) as engine:
        with pytest.raises(RequestError, match="need 72 tokens a step"):
            engine.set_draft_length(8)


async def test_flush_forgets_only_what_nobody_uses() -> None:
    async with running(make_parts(page_size=4)) as engine:
        await collect(engine, ask("a", PROMPT * 3, max_tokens=4))
        stream = engine.submit(ask("b", (9, 8) * 8, max_tokens=TOKENS))
        await take(stream, 6)
        before = engine.kv()
        assert before.cached > 0
        assert before.free + before.cached + before.owned == before.total
        assert engine.flush_kv() == before.cached
        after = engine.kv()
        assert (after.cached, after.owned) == (0, before.owned)
        tokens = [token for delta in [delta async for delta in stream] for token in delta.token_ids]
        assert tokens == greedy_answer(target_model(), (9, 8) * 8, TOKENS)[-len(tokens) :]
        assert (await collect(engine, ask("c", PROMPT * 3, max_tokens=4)))[0].last.stats.cached_tokens == 0  # type: ignore[union-attr]


async def test_selftest_compares_and_leaves_nothing() -> None:
    async with running(make_parts(draft="lm", draft_len=4, max_len=128)) as engine:
        found = await compare_with_plain(engine.submit, engine.info, engine.tokenizer)
        assert all(comparison.identical and comparison.drafted for comparison in found)
        assert engine.stats().live_requests == 0


@pytest.mark.parametrize("draft", ["lm", "ngram"])
async def test_selftest_drafts_though_drafting_was_given_up(draft: str) -> None:
    """Others draft no more than the policy lets them, then as before."""
    async with running(make_parts(draft=draft, draft_len="adaptive", max_len=128)) as engine:
        engine.set_draft_length(0)
        stream = engine.submit(ask("other", PROMPT, max_tokens=TOKENS))
        found = await compare_with_plain(engine.submit, engine.info, engine.tokenizer)
        last = [delta async for delta in stream][-1]
    assert all(comparison.identical and comparison.drafted >= 32 for comparison in found)
    assert last.stats is not None
    assert last.stats.num_draft_tokens == 0


async def test_selftest_needs_somebody_who_drafts() -> None:
    async with running(make_parts(draft="none", max_len=128)) as engine:
        with pytest.raises(RequestError, match="nothing drafts here"):
            await compare_with_plain(engine.submit, engine.info, engine.tokenizer)


async def test_selftest_fails_where_nothing_could_be_drafted() -> None:
    async with running(make_parts(draft="lm", max_len=128)) as engine:
        engine._scheduler.give_up_drafter()
        with pytest.raises(EngineError, match="made no draft for any prompt"):
            await compare_with_plain(engine.submit, engine.info, engine.tokenizer)


async def test_selftest_sees_another_text() -> None:
    async with running(make_parts(draft="lm", draft_len=4, max_len=128)) as engine:

        def submit(request: Request) -> AsyncIterator[SequenceDelta]:
            if request.speculation.mode == "auto":
                request = dataclasses.replace(request, prompt_ids=request.prompt_ids[:-1])
            return engine.submit(request)

        found = await compare_with_plain(submit, engine.info, engine.tokenizer)
    assert any(not comparison.identical and comparison.split is not None for comparison in found)
