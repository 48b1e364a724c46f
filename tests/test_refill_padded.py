"""What the drafter's KV holds after every step: exactly what an uncached run would hold, in every slot below its mark.

Heads: slot i is the pair (h_i, t_i+1), PADDED and EXACT. LM drafts: slot i is the key and value of t_i. On the inline
device a step's refill has run when the step is committed, so the marks can be checked against the tensors then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specd.assembly import Parts
from specd.drafters.lm import LMDrafter
from specd.engine import Engine
from specd.kv import PagedKV
from specd.models.llama import Llama
from specd.request import SpeculationParams
from specd.sequence import Sequence
from specd.step import DraftTraits, RefillMode
from tests.engines import after_each_step, ask, generate, lm, make_parts, noisy_model, running, target_model
from tests.fakes import HeadDrafter, SuccessorModel, continuation, feature
from tests.tiny import make_batch, make_kv

Lies = Callable[[int], bool]
LIES: dict[str, Lies] = {
    "all kept": lambda position: False,
    "none kept": lambda position: True,
    "some kept": lambda position: position % 5 == 0 or position % 7 == 3,
}
LONG = [5 + i * 7 % 90 for i in range(41)]
FAMILY = [5 + i * 11 % 90 for i in range(20)]
PROMPTS = {
    "family": FAMILY,
    "cousin": [*FAMILY, 50, 51],
    "twin": FAMILY[:17],  # its first block continues otherwise only in what follows the block
    "long": LONG,
    "short": [9],
    "nephew": [*FAMILY[:16], 33, 34],
}
OUTPUT = 22


async def scenario(engine: Engine, wishes: dict[str, SpeculationParams] | None = None) -> None:
    """A family member alone, then everybody: chunks of at most 16 tokens, prefix hits, preemption."""
    wishes = wishes or {}
    requests = [ask(name, PROMPTS[name], max_tokens=OUTPUT, speculation=wishes.get(name)) for name in PROMPTS]
    results = await generate(engine, requests[:1]) | await generate(engine, requests[1:])
    for name, (result,) in results.items():
        assert result.tokens == continuation(PROMPTS[name], OUTPUT), name


def head_parts(head: HeadDrafter, **changes: Any) -> Parts:
    fields: dict[str, Any] = {"draft_len": 4, "num_slots": 64, "max_len": 64, "max_running": 5, "max_tokens": 16}
    return make_parts(target=SuccessorModel(), drafter=head, **(fields | changes))


def expected_pairs(sequence: Sequence) -> list[tuple[list[int], int]]:
    tokens = sequence.tokens
    return [(feature(tokens[: i + 1]), tokens[i + 1]) for i in range(sequence.drafter_len)]


def check_pairs(parts: Parts, head: HeadDrafter, checked: list[int]) -> None:
    for sequence in parts.scheduler.running:
        assert head.pairs(sequence.pages, sequence.drafter_len) == expected_pairs(sequence)
        if sequence.carry_valid:
            assert sequence.drafter_len == len(sequence.tokens) - 1
        checked.append(sequence.drafter_len)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("mode", list(RefillMode))
@pytest.mark.parametrize("draft_len", [1, 4])
async def test_every_slot_below_the_mark_holds_its_pair(
    mode: RefillMode, lies: str, draft_len: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = HeadDrafter(mode, lies=LIES[lies])
    parts = head_parts(head, draft_len=draft_len, page_size=page_size)
    checked: list[int] = []
    after_each_step(monkeypatch, parts, lambda: check_pairs(parts, head, checked))
    async with running(parts) as engine:
        await scenario(engine)
        stats = engine.stats()
    assert max(checked) > 40
    assert stats.preemptions > 0
    assert stats.cached_tokens >= 16
    kept, drafted = sum(stats.accepted_tokens.values()), sum(stats.draft_tokens.values())
    assert drafted > 0
    assert {"all kept": kept == drafted, "none kept": kept == 0, "some kept": 0 < kept < drafted}[lies]


def test_the_check_of_pairs_can_fail() -> None:
    """Negative control: one pair with the token of its own position, the unshifted layout, is found."""
    head = HeadDrafter(RefillMode.EXACT)
    head.allocate(num_pages=2, page_size=4)
    tokens = [5, 6, 7, 8]
    batch = make_batch([(3, 3, [1])], page_size=4)
    features = torch.tensor([feature(tokens[: i + 1]) for i in range(3)]).float()
    right = [(feature(tokens[: i + 1]), tokens[i + 1]) for i in range(3)]
    head.refill(torch.tensor(tokens[1:]), features, batch, torch.tensor([2]), logits=True)
    assert head.pairs([1], 3) == right
    head.refill(torch.tensor(tokens[:3]), features, batch, torch.tensor([2]), logits=True)
    assert head.pairs([1], 3) != right


async def test_padded_is_used_when_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without preemption and prefix hits no step of a PADDED drafter falls back to EXACT."""
    head = HeadDrafter(RefillMode.PADDED, lies=LIES["some kept"])
    parts = head_parts(head, num_slots=1024)
    assert parts.refill is not None
    calls: list[str] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            calls.append(name)
            return original(*args)

        return launch

    for name in ("launch_exact", "launch_padded"):
        monkeypatch.setattr(parts.refill, name, counted(name, getattr(parts.refill, name)))
    async with running(parts) as engine:
        await generate(engine, [ask("long", LONG), ask("short", [9])])
    assert set(calls) == {"launch_padded"}


@pytest.mark.parametrize("mode", list(RefillMode))
async def test_catching_up_after_a_phase_without_drafts(mode: RefillMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that is computed without the drafter leaves blocks without its KV; the next catches up from there."""
    head = HeadDrafter(mode)
    parts = head_parts(head, num_slots=256)
    checked: list[int] = []
    after_each_step(monkeypatch, parts, lambda: check_pairs(parts, head, checked))
    off = SpeculationParams(mode="off")
    async with running(parts) as engine:
        await scenario(engine, {"family": off, "short": off})
        stats = engine.stats()
    assert stats.cached_tokens >= 16
    assert stats.accepted_tokens == stats.draft_tokens
    assert sum(stats.draft_tokens.values()) > 0


@pytest.mark.parametrize("mode", [*RefillMode, None])
async def test_a_catch_up_longer_than_a_step_may_be(mode: RefillMode | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prefix hits of 48 tokens without drafter KV, 16 tokens a step: refills in parts, each pair right."""
    prompt = [5 + i * 13 % 90 for i in range(50)]
    head = None if mode is None else HeadDrafter(mode)
    drafter = head or lm(SuccessorModel())
    parts = make_parts(target=SuccessorModel(), drafter=drafter, draft_len=3, max_tokens=16, num_slots=512)
    checked: list[int] = []
    if head is not None:
        after_each_step(monkeypatch, parts, lambda: check_pairs(parts, head, checked))
    async with running(parts) as engine:
        await generate(engine, [ask("off", prompt, max_tokens=2, speculation=SpeculationParams(mode="off"))])
        requests = [ask(str(i), [*prompt, 5 + i], max_tokens=24) for i in range(2)]
        results = await generate(engine, requests)
        stats = engine.stats()
    for i in range(2):
        assert results[str(i)][0].tokens == continuation([*prompt, 5 + i], 24)
    assert stats.cached_tokens == 96
    assert stats.accepted_tokens == stats.draft_tokens
    assert sum(stats.draft_tokens.values()) > 20


# ---------------------------------------------------------------- LM drafts


def uncached(model: Llama, tokens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """KV of every layer [S, 2, Hkv, D] and the logits after the last token, from one forward."""
    pages = list(range(-(-len(tokens) // 16)))
    kv = make_kv(model, num_pages=len(pages))
    with torch.inference_mode():
        hidden, _ = model.forward(torch.tensor(tokens), make_batch([(len(tokens), len(tokens), pages)]), kv)
        return gather(kv, pages, len(tokens)), model.logits(hidden[-1])


def gather(kv: PagedKV, pages: list[int], length: int) -> list[torch.Tensor]:
    return [layer[pages].transpose(1, 2).flatten(0, 1)[:length] for layer in kv.layers]


def check_lm(parts: Parts, draft: Llama, engine: Engine, checked: list[int]) -> None:
    """Drafter KV below the mark and the carry of every sequence."""
    assert isinstance(parts.drafter, LMDrafter)
    carry = engine._pipeline._carry  # the pipeline owns it; nothing else shows it
    assert carry is not None
    for sequence in parts.scheduler.running:
        if sequence.drafter_len == 0:
            continue
        want, logits = uncached(draft, sequence.tokens[: sequence.drafter_len])
        have = gather(parts.drafter.kv, sequence.pages, sequence.drafter_len)
        for layer, reference in zip(have, want, strict=True):
            torch.testing.assert_close(layer, reference, rtol=1e-3, atol=1e-4)
        if sequence.carry_valid:
            assert sequence.drafter_len == len(sequence.tokens)
            best = int(carry.result().best[sequence.slot])
            torch.testing.assert_close(logits[best], logits.max(), rtol=1e-3, atol=1e-4)
        checked.append(sequence.drafter_len)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("draft_len", [0, 1, 2, 5])
async def test_the_kv_of_an_lm_draft_is_that_of_an_uncached_run(
    draft_len: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 8, prompts of 20 and more, prefix hits, preemption; K = 0 keeps the drafter at rest."""
    draft = noisy_model()
    parts = make_parts(
        drafter=lm(draft),
        draft_len=draft_len,
        page_size=page_size,
        num_slots=80,
        max_len=64,
        max_running=5,
        max_tokens=8,
    )
    checked: list[int] = []
    async with running(parts) as engine:
        after_each_step(monkeypatch, parts, lambda: check_lm(parts, draft, engine, checked))
        await generate(engine, [ask("family", FAMILY, max_tokens=OUTPUT)])
        await generate(engine, [ask(name, PROMPTS[name], max_tokens=OUTPUT) for name in PROMPTS if name != "family"])
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens >= 16
    if draft_len:
        assert max(checked) > 50
        assert 0 < sum(stats.accepted_tokens.values()) < sum(stats.draft_tokens.values())
    else:
        assert not checked


async def test_target_kv_is_that_of_an_uncached_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_parts(draft="lm", draft_len=3, num_slots=80, max_len=64, max_running=5, max_tokens=8)
    target = target_model()
    checked: list[int] = []

    def check() -> None:
        for sequence in parts.scheduler.running:
            if sequence.num_computed:
                want, _ = uncached(target, sequence.tokens[: sequence.num_computed])
                have = gather(parts.verify._kv, sequence.pages, sequence.num_computed)
                for layer, reference in zip(have, want, strict=True):
                    torch.testing.assert_close(layer, reference, rtol=1e-3, atol=1e-4)
                checked.append(sequence.num_computed)

    after_each_step(monkeypatch, parts, check)
    async with running(parts) as engine:
        await generate(engine, [ask(name, PROMPTS[name], max_tokens=OUTPUT) for name in PROMPTS])
    assert max(checked) > 50


async def test_a_draft_model_never_computes_a_position_beyond_its_context() -> None:
    draft = SuccessorModel()
    drafter = lm(draft, max_context=30)
    parts = make_parts(target=SuccessorModel(), drafter=drafter, draft_len=5)
    async with running(parts) as engine:
        results = await generate(engine, [ask("x", [9, 8, 7], max_tokens=60), ask("long", LONG)])
        stats = engine.stats()
    assert results["x"][0].tokens == continuation([9, 8, 7], 60)
    assert results["long"][0].tokens == continuation(LONG, 16)
    assert sum(stats.draft_tokens.values()) > 15
    assert draft.highest_position < 30


def test_traits_name_the_extra_slot() -> None:
    assert DraftTraits(name="lm", max_depth=1).extra_slots == 1
    assert DraftTraits(name="head", max_depth=1, shifted=True).extra_slots == 0
