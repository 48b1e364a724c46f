"""Streams with random delays and poisoned inputs: a wait that is missing, or a buffer used too late, changes a token.

The same plans run in every stream layout under several seeds; aborts fall on random moments.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from specd.assembly import Parts
from specd.device import Handle, chaos_device
from specd.drafters.base import Drafter
from specd.engine import Engine
from specd.pipeline.refill import RefillStage
from specd.request import FinishReason
from specd.step import RefillMode
from tests.engines import Result, ask, assert_nothing_owned, generate, greedy_answer, lm, make_parts, running
from tests.engines import target_model as tiny_target
from tests.fakes import HeadDrafter, SuccessorModel, continuation

LAYOUTS = ["single", "paired", "stages"]
PROMPTS = {"a": [5, 6, 7], "b": list(range(10, 50)), "c": [60] * 18, "d": [*[60] * 16, 9], "e": [33]}
OUTPUT = 20


def drafter_of(kind: str) -> Drafter | None:
    """A draft of the successor rule that is wrong at every fourth position, or the n-gram proposer (None)."""
    if kind in ("exact", "padded"):
        return HeadDrafter(RefillMode(kind), lies=lambda position: position % 4 == 1)
    return lm(SuccessorModel(lies=lambda position: position % 4 == 1)) if kind == "lm" else None


def parts_of(kind: str, layout: str, seed: int, **changes: Any) -> Parts:
    fields = {"draft_len": 3, "num_slots": 64, "max_len": 63, "max_running": 4, "max_tokens": 16} | changes
    return make_parts(
        target=SuccessorModel(),
        drafter=drafter_of(kind),
        draft="ngram",
        device=chaos_device(seed, layout=layout),
        **fields,
    )


def requests() -> list[Any]:
    return [ask(name, prompt, max_tokens=OUTPUT) for name, prompt in PROMPTS.items()]


def check(results: dict[str, list[Result]]) -> None:
    for name, prompt in PROMPTS.items():
        assert results[name][0].tokens == continuation(prompt, OUTPUT), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["ngram", "lm", "exact", "padded"])
async def test_the_same_tokens(kind: str, layout: str, seed: int) -> None:
    parts = parts_of(kind, layout, seed)
    async with running(parts) as engine:
        check(await generate(engine, requests()))
        stats = engine.stats()
    assert stats.preemptions > 0
    if kind != "ngram":
        assert 0 < sum(stats.accepted_tokens.values()) < sum(stats.draft_tokens.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draft", ["lm", "layers"])
async def test_the_same_tokens_of_a_llama(draft: str, layout: str) -> None:
    prompts = {"a": [5, 6, 7], "b": list(range(10, 40))}
    parts = make_parts(draft=draft, draft_len=3, max_tokens=16, device=chaos_device(5, layout=layout))
    async with running(parts) as engine:
        results = await generate(engine, [ask(name, prompt) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert results[name][0].tokens == greedy_answer(tiny_target(), prompt, 16)


async def read_until_aborted(engine: Engine, name: str, after: int) -> tuple[str, list[int], FinishReason | None]:
    """Reads a stream and aborts it once `after` tokens have come."""
    tokens: list[int] = []
    reason = None
    async for delta in engine.submit(ask(name, PROMPTS[name[0]], max_tokens=OUTPUT)):
        tokens += delta.token_ids
        reason = delta.finish_reason
        if len(tokens) >= after:
            engine.abort(name)
    return name, tokens, reason


async def abort_later(engine: Engine, name: str, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    engine.abort(name)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["ngram", "lm", "padded"])
async def test_aborts_at_random_moments(kind: str, layout: str, seed: int) -> None:
    """By the number of tokens, by time, and not at all; whatever was sent is a prefix of the right answer."""
    source = random.Random(seed)
    parts = parts_of(kind, layout, seed)
    async with running(parts) as engine:
        names = [f"{name}{i}" for name in PROMPTS for i in range(2)]
        readers = [read_until_aborted(engine, name, source.choice([1, 5, 12, 999])) for name in names]
        timers = [abort_later(engine, name, source.random() * 0.2) for name in source.sample(names, 4)]
        done = await asyncio.wait_for(asyncio.gather(*readers, *timers), 60)
        assert_nothing_owned(parts)
        check(await generate(engine, requests()))
        stats = engine.stats()
    aborted = 0
    for name, tokens, reason in (entry for entry in done if entry is not None):
        answer = continuation(PROMPTS[name[0]], OUTPUT)
        assert answer[: len(tokens)] == tokens
        assert (reason is FinishReason.LENGTH) is (len(tokens) == OUTPUT)
        aborted += reason is FinishReason.ABORT
    assert stats.requests_aborted == aborted > 0
    assert stats.accepted_requests == stats.requests_finished + stats.requests_aborted


async def test_a_missing_wait_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a draft stage that does not wait for the refill reads stale carry and loses drafts."""
    kept = {}
    for broken in (False, True):
        parts = make_parts(
            target=SuccessorModel(),
            drafter=lm(SuccessorModel()),
            draft_len=3,
            device=chaos_device(1, layout="stages"),
        )
        if broken:
            original = parts.draft.launch

            def launch(plan: Any, carry: Handle[Any] | None, original: Any = original, parts: Parts = parts) -> Any:
                stale = Handle[Any]()
                stale._set(parts.make_carry() if carry is None or not carry.done() else carry.result())
                return original(plan, stale)

            monkeypatch.setattr(parts.draft, "launch", launch)
        async with running(parts) as engine:
            check(await generate(engine, requests()))
            stats = engine.stats()
        kept[broken] = sum(stats.accepted_tokens.values()) / sum(stats.draft_tokens.values())
    assert kept[False] == 1.0
    assert kept[True] < 0.9


async def test_a_buffer_that_is_read_after_its_step_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a PADDED refill that is launched with the batch of the step before meets poison."""
    failures = []
    batches: list[Any] = []
    original = RefillStage.launch_padded

    def late(self: RefillStage, plan: Any, batch: Any, *args: Any) -> Any:
        batches.append(batch)
        if len(batches) < 4:
            return original(self, plan, batch, *args)
        failures.append(original(self, plan, batches[-3], *args))
        return failures[-1]

    monkeypatch.setattr(RefillStage, "launch_padded", late)
    parts = parts_of("padded", "stages", 0, num_slots=512)
    async with running(parts) as engine:
        check(await generate(engine, requests()))
    errors = [repr(handle.error()) for handle in failures]
    assert errors
    assert all("Error" in error for error in errors)


def test_chaos_poisons() -> None:
    device = chaos_device(0)
    try:
        assert device.frames is not None
        assert device.torch_device == torch.device("cpu")
    finally:
        device.close()
