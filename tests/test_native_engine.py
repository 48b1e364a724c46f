"""Engines on specd's own CPU kernels: speculative output is plain output bit for bit, log-probabilities included.

The reference is each request alone in an engine of the same arithmetic without drafts, prefix hits or neighbours.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specd.assembly import Parts
from specd.engine import Engine
from specd.models.native import Activations
from specd.request import Request
from tests.engines import Result, ask, collect, devices, generate, make_parts, native_model, running
from tests.native import needs_kernels
from tests.test_identity import PROMPTS

pytestmark = needs_kernels
MODES: list[Activations] = ["fast", "exact"]
OUTPUT = 18
TIGHT: dict[str, Any] = {"num_slots": 80, "max_len": 64, "max_running": 5, "max_tokens": 16}
# Every way of drawing, and one request whose logits are changed first.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "top_k": {"temperature": 0.9, "top_k": 5},
    "top_p": {"temperature": 1.1, "top_p": 0.7},
    "min_p": {"temperature": 1.4, "min_p": 0.1},
    "penalised": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "frequency_penalty": 0.8, "logit_bias": ((5, 2.0),)},
}
Bits = list[tuple[int, float, tuple[tuple[int, float], ...]]]


def requests() -> list[Request]:
    kinds = list(SAMPLING.items())
    return [
        ask(f"{kind}/{name}", prompt, **({"max_tokens": OUTPUT, "logprobs": 3} | sampling))
        for i, (name, prompt) in enumerate(PROMPTS.items())
        for kind, sampling in (kinds[i % len(kinds)], kinds[(i + 1) % len(kinds)])
    ]


def bits(result: Result) -> Bits:
    return [(entry.token_id, entry.logprob, tuple(entry.top)) for entry in result.logprobs]


_plain: dict[str, dict[str, Bits]] = {}


async def plain(mode: Activations, kv_dtype: str = "auto") -> dict[str, Bits]:
    key = f"{mode} {kv_dtype}"
    if key not in _plain:
        found: dict[str, Bits] = {}
        for request in requests():
            async with running(make_parts(target=native_model(mode), kv_dtype=kv_dtype)) as engine:
                (result,) = await collect(engine, request)
            found[request.request_id] = bits(result)
        _plain[key] = found
    return _plain[key]


async def check(engine: Engine, mode: Activations, kv_dtype: str = "auto") -> None:
    want = await plain(mode, kv_dtype)
    first, *others = requests()
    results = await generate(engine, [first]) | await generate(engine, others)
    for name, (result,) in results.items():
        assert bits(result) == want[name], name
        assert len(result.tokens) == OUTPUT


def parts_of(mode: Activations, draft: str, **changes: Any) -> Parts:
    return make_parts(target=native_model(mode), draft=draft, **(TIGHT | {"draft_len": 3} | changes))


@pytest.mark.parametrize("draft_len", [1, 4, "adaptive"])
@pytest.mark.parametrize("draft", ["none", "ngram", "layers", "lm", "lm-self"])
@pytest.mark.parametrize("mode", MODES)
async def test_matrix(mode: Activations, draft: str, draft_len: int | str) -> None:
    """Alone, mixed batches, chunked prefill, prefix hits, preemption."""
    async with running(parts_of(mode, draft, draft_len=draft_len)) as engine:
        await check(engine, mode)
        stats = engine.stats()
    assert stats.cached_tokens > 0, "no prefix was found again"
    assert stats.preemptions > 0, "the pool never ran out of pages"
    if draft in ("layers", "lm", "lm-self"):
        assert sum(stats.accepted_tokens.values()) > 0


@pytest.mark.parametrize("layout", ["single", "paired", "stages", "chaos-single", "chaos-paired", "chaos-stages"])
@pytest.mark.parametrize("draft", ["ngram", "lm"])
async def test_layouts(draft: str, layout: str) -> None:
    async with running(parts_of("fast", draft, device=devices(layout, seed=3))) as engine:
        await check(engine, "fast")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", MODES)
async def test_threads(mode: Activations, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        async with running(parts_of(mode, "layers", page_size=1, max_tokens=7)) as engine:
            await check(engine, mode)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
async def test_narrow_keys_and_values(kv_dtype: str) -> None:
    parts = parts_of("fast", "lm", kv_dtype=kv_dtype)
    async with running(parts) as engine:
        await check(engine, "fast", kv_dtype)
        kv_bytes = engine.info.kv_bytes
    whole = parts_of("fast", "lm", kv_dtype="auto")
    whole.device.close()
    drafter = whole.drafter
    assert drafter is not None
    own = drafter.kv_bytes_per_page(16) * 5
    half = 1 if kv_dtype == "float32" else 2
    assert kv_bytes - own == (whole.info.kv_bytes - own) // half
    assert (parts.info.fingerprint == whole.info.fingerprint) == (kv_dtype == "float32")


async def test_narrow_values_change_what_is_computed() -> None:
    wide, narrow = await plain("fast"), await plain("fast", "bfloat16")
    assert wide != narrow


async def test_the_two_modes_differ() -> None:
    """Negative control: other arithmetic gives other log-probabilities."""
    assert await plain("fast") != await plain("exact")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
async def test_narrow_values_on_the_torch_path(kv_dtype: str) -> None:
    async with running(make_parts(draft="none", kv_dtype=kv_dtype)) as engine:
        want = await generate(engine, [ask(name, prompt) for name, prompt in PROMPTS.items()])
    async with running(make_parts(draft="layers", draft_len=3, kv_dtype=kv_dtype, **TIGHT)) as engine:
        got = await generate(engine, [ask(name, prompt) for name, prompt in PROMPTS.items()])
    for name in PROMPTS:
        assert got[name][0].tokens == want[name][0].tokens
