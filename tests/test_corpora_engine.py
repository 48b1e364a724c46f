"""Corpora under the whole engine: the tokens stay the target's own, and no key is drafted from another's text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specd.engine import Engine
from specd.request import Request, TokenOrigin
from tests.engines import Result, ask, collect, generate, greedy_answer, make_parts, running, target_model
from tests.test_identity import ALONE, LONG, REPETITIVE

OUTPUT = 40
PROMPTS = {"alone": ALONE, "long": LONG, "repetitive": REPETITIVE}


def of(tenant: bytes, name: str, **sampling: Any) -> Request:
    return dataclasses.replace(ask(f"{tenant!r} {name}", PROMPTS[name], max_tokens=OUTPUT, **sampling), tenant=tenant)


async def put(engine: Engine, name: str, tokens: list[int], salt: bytes | None) -> None:
    await engine.corpora.put(name, tokens, key=None if salt is None else "k", salt=salt, ttl_s=None)


async def origins(engine: Engine, request: Request) -> list[TokenOrigin]:
    return [origin async for delta in engine.submit(request) for origin, _, _ in delta.origins]


@pytest.mark.parametrize("draft", ["ngram", "lm"])
async def test_greedy_tokens_are_the_targets_own(draft: str) -> None:
    """A corpus that is right, one that is wrong half of the time, chunked prompts, more tokens than pages."""
    answers = {name: greedy_answer(target_model(), prompt, OUTPUT) for name, prompt in PROMPTS.items()}
    parts = make_parts(draft=draft, draft_len="adaptive", num_slots=240, max_running=5, max_tokens=32)
    async with running(parts) as engine:
        await put(engine, "right", [*LONG[-5:], *answers["long"]], b"a")
        await put(engine, "wrong", [t for i, t in enumerate(answers["alone"]) if i % 5], None)
        results = await generate(engine, [of(tenant, name) for tenant in (b"a", b"b") for name in PROMPTS])
        counts = engine.stats()
        rows = {row["name"]: row for row in engine.corpora.describe()}
    for key, (result,) in results.items():
        assert result.tokens == answers[key.split()[1]], key
    assert counts.accepted_tokens["corpus"] > 0
    assert sum(row["hits"] for row in rows.values()) == counts.accepted_tokens["corpus"]
    assert sum(row["drafted"] for row in rows.values()) == counts.draft_tokens["corpus"]


async def test_seeded_tokens_do_not_depend_on_corpora() -> None:
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 11}
    async with running(make_parts(draft="none")) as engine:
        (plain,) = await collect(engine, of(b"", "alone", **sampled))
    for draft_len in (3, "adaptive"):
        async with running(make_parts(draft="ngram", draft_len=draft_len)) as engine:
            await put(engine, "right", plain.tokens, None)
            await put(engine, "half", [*plain.tokens[:20], *plain.tokens[:20]], None)
            (result,) = await collect(engine, of(b"", "alone", **sampled))
            assert engine.stats().accepted_tokens["corpus"] > 0
        assert result.tokens == plain.tokens


async def test_another_key_never_drafts_from_it() -> None:
    """The control: the same corpus for everybody is drafted from."""
    answer = greedy_answer(target_model(), ALONE, OUTPUT)
    found = {}
    for salt in (b"a", None):
        async with running(make_parts(draft="layers", draft_len="adaptive")) as engine:
            await put(engine, "secret", answer, salt)
            found[salt] = [await origins(engine, of(tenant, "alone")) for tenant in (b"b", b"", b"a")]
    for stranger in found[b"a"][:2]:
        assert TokenOrigin.CORPUS not in stranger
    assert all(TokenOrigin.CORPUS in one for one in (found[b"a"][2], *found[None]))


async def test_a_deleted_corpus_is_left_by_those_who_run() -> None:
    answer = greedy_answer(target_model(), ALONE, OUTPUT)
    async with running(make_parts(draft="ngram", draft_len="adaptive", ngram_min=5)) as engine:
        await put(engine, "right", answer, None)
        result, before, after = Result(), 0, 0
        async for delta in engine.submit(of(b"", "alone")):
            kept = sum(origin is TokenOrigin.CORPUS for origin, _, _ in delta.origins)
            if before and engine.corpora.num_tokens:
                await engine.corpora.delete("right")
                step = delta.origins[0][1] + 1  # its plan was made before the deletion
            elif before and delta.origins[0][1] > step:
                after += kept
            before += kept
            result.add(delta)
    assert result.tokens == answer
    assert before > 0
    assert after == 0


async def test_speculation_off_is_off() -> None:
    answer = greedy_answer(target_model(), ALONE, OUTPUT)
    async with running(make_parts(draft="none")) as engine:
        assert engine.corpora.max_tokens == 0
    async with running(make_parts(draft="ngram")) as engine:
        await put(engine, "right", answer, None)
        request = of(b"", "alone")
        off = dataclasses.replace(request, speculation=dataclasses.replace(request.speculation, mode="off"))
        (result,) = await collect(engine, off)
        assert engine.stats().draft_tokens == {}
    assert result.tokens == answer
