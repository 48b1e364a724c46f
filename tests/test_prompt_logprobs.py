"""Log-probabilities of prompt tokens are those of one forward over the prompt, however the prompt is computed."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import random
from typing import Any

import pytest
import torch

from specd.deltas import join
from specd.engine import Engine
from specd.request import FinishReason, Request, SequenceDelta, TokenLogprob
from tests.engines import VOCAB, ask, collect, full_logits, generate, make_parts, running, target_model


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed).randrange(2, VOCAB) for _ in range(length)]


LONG = prompt(1, 45)  # three chunks of at most 16 tokens


def expected(tokens: list[int]) -> torch.Tensor:
    """f32[len(tokens) - 1, V]"""
    rows = [full_logits(target_model(), tokens[: i + 1]).float().log_softmax(-1) for i in range(len(tokens) - 1)]
    return torch.stack(rows)


def check(found: tuple[TokenLogprob, ...] | None, tokens: list[int], num_top: int) -> None:
    assert found is not None
    assert [item.token_id for item in found] == tokens[1:], "one entry for each prompt token but the first"
    for item, row in zip(found, expected(tokens), strict=True):
        assert item.logprob == pytest.approx(row[item.token_id].item(), abs=1e-4)
        best = row.topk(num_top) if num_top else None
        assert len(item.top) == num_top
        for (token, logprob), want in zip(item.top, best.values.tolist() if best else [], strict=True):
            assert logprob == pytest.approx(want, abs=1e-4)
            assert logprob == pytest.approx(row[token].item(), abs=1e-4)


async def scores(engine: Engine, request: Request) -> list[tuple[TokenLogprob, ...] | None]:
    """What the deltas of each choice say; more than one delta that says something is a failure."""
    found: list[list[tuple[TokenLogprob, ...]]] = [[] for _ in range(request.n)]
    tokens = [0] * request.n
    async for delta in engine.submit(request):
        if delta.prompt_logprobs is not None:
            assert tokens[delta.index] == 0, "they come with the first token"
            found[delta.index].append(delta.prompt_logprobs)
        tokens[delta.index] += len(delta.token_ids)
    assert all(len(parts) <= 1 for parts in found)
    return [parts[0] if parts else None for parts in found]


@pytest.mark.parametrize("num_top", [0, 3])
async def test_chunks_and_neighbours(num_top: int) -> None:
    """Three chunks, beside rows that decode with drafts and a prompt that asks for nothing."""
    async with running(make_parts(draft="layers", max_tokens=16, max_running=4)) as engine:
        other = asyncio.create_task(generate(engine, [ask("a", prompt(2, 9), max_tokens=40), ask("b", LONG)]))
        await asyncio.sleep(0)
        (found,) = await scores(engine, ask("c", LONG, prompt_logprobs=num_top, max_tokens=3))
        check(found, LONG, num_top)
        assert await other


async def test_a_prefix_hit_hides_nothing() -> None:
    async with running(make_parts(page_size=4)) as engine:
        await collect(engine, ask("a", LONG))
        (found,) = await scores(engine, ask("b", LONG, prompt_logprobs=1, max_tokens=1))
        check(found, LONG, 1)
        plain = (await collect(engine, ask("c", LONG)))[0]
        assert plain.last is not None
        assert plain.last.stats is not None
        assert plain.last.stats.cached_tokens > 0, "others still hit"


async def test_preempted_in_the_middle_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that has scored two chunks takes these from the cache, and no more than these."""
    parts = make_parts(page_size=4, max_tokens=16)
    scheduler = parts.scheduler
    schedule = scheduler.schedule
    admissions: list[int] = []

    def preempting(step: int):  # type: ignore[no-untyped-def]
        victim = next((s for s in scheduler.running if 32 <= s.num_computed < 45 and not s.num_preemptions), None)
        if victim is not None:
            scheduler._preempt(victim)
        planned = schedule(step)
        if planned is not None and planned.rows[0].sequence.num_preemptions:
            admissions.append(planned.rows[0].sequence.num_computed)
        return planned

    monkeypatch.setattr(scheduler, "schedule", preempting)
    async with running(parts) as engine:
        await collect(engine, ask("warm", LONG))
        (found,) = await scores(engine, ask("a", LONG, prompt_logprobs=2, max_tokens=4))
        check(found, LONG, 2)
    assert admissions[0] == 32, "what was computed before is found again"


async def test_every_choice_has_its_own() -> None:
    async with running(make_parts(page_size=4, max_tokens=16)) as engine:
        found = await scores(engine, ask("a", LONG, prompt_logprobs=1, n=2, max_tokens=2))
        for one in found:
            check(one, LONG, 1)


async def test_a_prompt_of_one_token_has_none_and_nobody_who_did_not_ask_has_any() -> None:
    async with running(make_parts()) as engine:
        assert await scores(engine, ask("a", [5], prompt_logprobs=1)) == [()]
        assert await scores(engine, ask("b", LONG, logprobs=1)) == [None]


async def test_running_stats_are_on_every_delta() -> None:
    async with running(make_parts(draft="lm-self")) as engine:
        request = dataclasses.replace(ask("a", LONG, max_tokens=20), running_stats=True)
        counts = [delta.stats.completion_tokens async for delta in engine.submit(request) if delta.stats]
        deltas = [delta async for delta in engine.submit(ask("b", LONG, max_tokens=20))]
    assert len(counts) == len(deltas) > 1
    assert counts == sorted(counts)
    assert counts[-1] == 20
    assert [delta.stats is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_joined_deltas_keep_them() -> None:
    """What a slow reader gets in one piece says as much as its parts."""
    scored = (TokenLogprob(5, -1.0),)
    parts = [
        SequenceDelta("a", 0, (1,), prompt_logprobs=scored),
        SequenceDelta("a", 0, (2,)),
        SequenceDelta("a", 0, (3,)),
    ]
    assert join(parts).prompt_logprobs == scored
    assert join(parts[1:]).prompt_logprobs is None


async def test_rows_of_a_failed_step_are_scored_when_they_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour whose forward fails costs the others nothing: each gets its own scores, once."""
    model = copy.copy(target_model())
    forward = model.forward
    poison = 96

    def failing(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (tokens == poison).any():
            raise RuntimeError("poisoned")
        return forward(tokens, *args, **kwargs)

    monkeypatch.setattr(model, "forward", failing)
    prompts = [[token % 90 + 2 for token in prompt(seed, length)] for seed, length in ((3, 9), (4, 20), (5, 12))]
    async with running(make_parts(target=model, max_tokens=64)) as engine:
        asked = [ask(str(i), tokens, prompt_logprobs=i, max_tokens=2) for i, tokens in enumerate(prompts)]
        bad = ask("bad", [5, poison, 7], max_tokens=2)
        *found, failed = await asyncio.gather(*(scores(engine, one) for one in asked), collect(engine, bad))
    assert failed[0].reason is FinishReason.ERROR
    for i, (tokens, (one,)) in enumerate(zip(prompts, found, strict=True)):
        check(one, tokens, i)
