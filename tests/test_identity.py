"""Greedy output is the target's own, token for token, whoever drafts, however many, wherever the pages lie.

The reference keeps no KV at all: each token is the argmax of one forward over everything before it.
"""

from __future__ import annotations

import pytest
import torch

from specd.drafters.base import Drafter
from specd.engine import Engine
from specd.request import FinishReason, SpeculationParams, TokenOrigin
from tests.engines import (
    CONFIG,
    VOCAB,
    Result,
    ask,
    collect,
    drafter_of,
    generate,
    greedy_answer,
    lm,
    make_parts,
    noisy_model,
    running,
    target_model,
)
from tests.tiny import padded, tiny_config, tiny_llama, tiny_weights

OUTPUT = 18


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


ALONE = prompt(1, 9)
LONG = prompt(2, 45)  # three chunks of at most 16 tokens
FAMILY = prompt(3, 20)  # a prefix that others share
REPETITIVE = prompt(4, 5) * 3
PROMPTS = {
    "alone": ALONE,
    "family": FAMILY,
    "cousin": FAMILY + prompt(6, 3),
    "long": LONG,
    "short": prompt(5, 1),
    "repetitive": REPETITIVE,
    "again": LONG[:40],
}


async def scenario(engine: Engine) -> dict[str, list[Result]]:
    """Alone, then mixed with chunked prompts, prefix hits and more tokens than there are pages."""
    first = await generate(engine, [ask("alone", ALONE, max_tokens=OUTPUT), ask("family", FAMILY, max_tokens=OUTPUT)])
    others = [ask(name, PROMPTS[name], max_tokens=OUTPUT) for name in PROMPTS if name not in first]
    return first | await generate(engine, others)


def check(results: dict[str, list[Result]]) -> None:
    for name, (result,) in results.items():
        assert result.tokens == greedy_answer(target_model(), PROMPTS[name], OUTPUT), name
        assert result.reason is FinishReason.LENGTH


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("draft_len", range(1, 9))
@pytest.mark.parametrize("draft", ["ngram", "layers", "lm"])
async def test_matrix(draft: str, draft_len: int, page_size: int) -> None:
    """One run of 7 requests: alone, mixed batches, chunked prefill, prefix hits, preemption."""
    parts = make_parts(
        draft=draft, draft_len=draft_len, page_size=page_size, num_slots=80, max_len=64, max_running=5, max_tokens=16
    )
    async with running(parts) as engine:
        check(await scenario(engine))
        stats = engine.stats()
    assert stats.cached_tokens > 0, "no prefix was found again"
    assert stats.preemptions > 0, "the pool never ran out of pages"
    assert sum(stats.draft_tokens.values()) > 0
    assert 0 < sum(stats.accepted_tokens.values()) < sum(stats.draft_tokens.values())


@pytest.mark.parametrize("page_size", [1, 16])
async def test_plain(page_size: int) -> None:
    parts = make_parts(draft="none", page_size=page_size, num_slots=80, max_len=64, max_running=5, max_tokens=16)
    async with running(parts) as engine:
        check(await scenario(engine))
        stats = engine.stats()
    assert stats.cached_tokens > 0
    assert stats.preemptions > 0
    assert not stats.draft_tokens


def test_the_reference_can_disagree() -> None:
    """Negative control: another model's answers are not the target's."""
    other = greedy_answer(noisy_model(0.2), ALONE, OUTPUT)
    assert other != greedy_answer(target_model(), ALONE, OUTPUT)


@pytest.mark.parametrize("device", ["single", "paired", "stages"])
@pytest.mark.parametrize("draft", ["ngram", "lm"])
async def test_threads(draft: str, device: str) -> None:
    parts = make_parts(draft=draft, draft_len=3, device=device, num_slots=80, max_len=64, max_running=5, max_tokens=16)
    async with running(parts) as engine:
        check(await scenario(engine))


@pytest.mark.parametrize("draft", ["ngram", "layers", "lm"])
@pytest.mark.parametrize("mixed", ["plain", "speculate"])
async def test_adaptive_length_and_both_rules_of_mixing(draft: str, mixed: str) -> None:
    parts = make_parts(
        draft=draft, draft_len="adaptive", mixed=mixed, num_slots=80, max_len=64, max_running=5, max_tokens=16
    )
    async with running(parts) as engine:
        check(await scenario(engine))


@pytest.mark.parametrize("draft_len", [1, 2, 4, 7])
async def test_the_target_as_its_own_draft_is_always_right(draft_len: int) -> None:
    """Every step keeps all K drafts, so every refill takes two tokens: [d_K, newest]."""
    parts = make_parts(draft="lm-self", draft_len=draft_len)
    async with running(parts) as engine:
        results = await generate(engine, [ask(name, PROMPTS[name], max_tokens=33) for name in PROMPTS])
    for name, (result,) in results.items():
        assert result.tokens == greedy_answer(target_model(), PROMPTS[name], 33)
        assert result.last is not None
        assert result.last.stats is not None
        stats = result.last.stats
        # One token comes of the prompt; then K + 1 a step, the last step shortened to what may still be emitted.
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
        assert stats.num_spec_steps == -(-(33 - 1) // (draft_len + 1))
        assert set(stats.per_step_drafted[:-1]) == {draft_len}


@pytest.mark.parametrize("draft_len", [1, 4])
async def test_no_draft_of_the_target_itself_is_lost_to_chunks_or_preemption(draft_len: int) -> None:
    parts = make_parts(draft="lm-self", draft_len=draft_len, num_slots=80, max_len=64, max_running=5, max_tokens=16)
    async with running(parts) as engine:
        check(await scenario(engine))
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.accepted_tokens == stats.draft_tokens


def padded_vocabulary() -> Drafter:
    """The noisy draft behind 14 rows of padding, as checkpoints ship them; their logits are 0, often the largest."""
    generator = torch.Generator().manual_seed(5)
    weights = {k: v + 0.01 * torch.randn(v.shape, generator=generator) for k, v in tiny_weights(CONFIG).items()}
    config = tiny_config(vocab_size=VOCAB + 14, rope=CONFIG.rope, **_sizes())
    return lm(tiny_llama(config=config, weights=padded(weights, VOCAB + 14)))


def _sizes() -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_layers", "head_dim")
    return {name: getattr(CONFIG, name) for name in names}


def narrow_vocabulary() -> Drafter:
    """A draft that cannot say the last 30 tokens, but is asked to read them."""
    weights = {k: v for k, v in tiny_weights(CONFIG).items() if k != "lm_head.weight"}
    model = tiny_llama(config=CONFIG, weights=weights | {"lm_head.weight": tiny_weights(CONFIG)["lm_head.weight"]})
    model.head = model.head[: VOCAB - 30]
    return lm(model)


def random_model() -> Drafter:
    return lm(tiny_llama(config=CONFIG, weights=tiny_weights(CONFIG, 77)))


@pytest.mark.parametrize(
    ("make", "some", "all_kept"),
    [(padded_vocabulary, True, False), (narrow_vocabulary, True, False), (random_model, False, False)],
)
async def test_drafts_of_other_widths_and_a_useless_one(make: object, some: bool, all_kept: bool) -> None:
    assert callable(make)
    parts = make_parts(drafter=make(), draft_len=4, num_slots=80, max_len=64, max_running=5, max_tokens=16)
    async with running(parts) as engine:
        check(await scenario(engine))
        stats = engine.stats()
    kept, drafted = sum(stats.accepted_tokens.values()), sum(stats.draft_tokens.values())
    assert drafted > 0
    assert (kept > drafted // 10) is some
    assert (kept == drafted) is all_kept


async def test_a_draft_model_is_not_used_beyond_its_context() -> None:
    """max_context 40: prompts beyond it are plain, and no draft is asked for that would pass it."""
    drafter = lm(target_model(), max_context=40)
    parts = make_parts(drafter=drafter, draft_len=4)
    async with running(parts) as engine:
        results = await generate(engine, [ask("long", LONG), ask("alone", ALONE, max_tokens=50)])
    assert results["long"][0].tokens == greedy_answer(target_model(), LONG, 16)
    assert results["alone"][0].tokens == greedy_answer(target_model(), ALONE, 50)
    for name, drafted in (("long", False), ("alone", True)):
        last = results[name][0].last
        assert last is not None
        assert last.stats is not None
        assert (last.stats.num_draft_tokens > 0) is drafted


# ---------------------------------------------------------------- where a sequence ends


@pytest.mark.parametrize("draft", ["none", "lm-self", "lm", "ngram"])
async def test_eos_inside_an_accepted_run(draft: str) -> None:
    """Each token of the answer is made EOS once, so that the end falls on every place of a run of 6."""
    prefix = ALONE
    answer = greedy_answer(target_model(), prefix, 14)
    for end in range(14):
        eos = answer[end]
        length = answer.index(eos) + 1
        parts = make_parts(draft=draft, draft_len=5, eos=(eos,))
        async with running(parts) as engine:
            (result,) = await collect(engine, ask("x", prefix, max_tokens=40, ignore_eos=False))
        assert result.tokens == answer[:length]
        assert result.reason is FinishReason.STOP
        assert result.last is not None
        assert result.last.stats is not None
        assert result.last.stats.completion_tokens == length
        # What stands behind the end is not counted as kept.
        assert result.last.stats.num_accepted_tokens <= length - 1


@pytest.mark.parametrize("draft", ["lm-self", "lm", "ngram"])
async def test_max_tokens_in_the_middle_of_a_run(draft: str) -> None:
    requests = [ask(str(n), ALONE, max_tokens=n) for n in range(1, 15)]
    async with running(make_parts(draft=draft, draft_len=5, max_running=4)) as engine:
        results = await generate(engine, requests)
    for n in range(1, 15):
        (result,) = results[str(n)]
        assert result.tokens == greedy_answer(target_model(), ALONE, n)
        assert result.reason is FinishReason.LENGTH


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("draft", ["none", "lm-self", "ngram"])
async def test_the_context_limit_ends_a_sequence(draft: str, page_size: int) -> None:
    """max_len counts prompt and output; a pool of exactly one such sequence is enough."""
    parts = make_parts(
        draft=draft, draft_len=5, max_len=48, num_slots=64 if page_size == 16 else 49, page_size=page_size
    )
    async with running(parts) as engine:
        results = await generate(engine, [ask("long", LONG, max_tokens=99), ask("full", [*LONG, 5, 6], max_tokens=9)])
    for name, tokens in (("long", LONG), ("full", [*LONG, 5, 6])):
        assert results[name][0].tokens == greedy_answer(target_model(), tokens, 48 - len(tokens))
        assert results[name][0].reason is FinishReason.LENGTH


async def test_speculation_off_and_limited_by_the_request() -> None:
    off, two = SpeculationParams(mode="off"), SpeculationParams(max_draft=2, detail="detailed")
    requests = [
        ask("off", ALONE, speculation=off),
        ask("two", ALONE, speculation=two),
        ask("auto", ALONE),
    ]
    async with running(make_parts(draft="lm-self", draft_len=5)) as engine:
        results = await generate(engine, requests)
    drafted = {}
    for name, (result,) in results.items():
        assert result.tokens == greedy_answer(target_model(), ALONE, 16)
        assert result.last is not None
        assert result.last.stats is not None
        drafted[name] = max(result.last.stats.per_step_drafted, default=0)
    assert drafted == {"off": 0, "two": 2, "auto": 5}


async def test_origins_say_who_proposed() -> None:
    origins: list[TokenOrigin] = []
    async with running(make_parts(draft="lm-self", draft_len=3)) as engine:
        async for delta in engine.submit(ask("x", ALONE, max_tokens=9)):
            origins += [origin for origin, _, _ in delta.origins]
    draft, bonus = TokenOrigin.DRAFT, TokenOrigin.BONUS
    assert origins == [TokenOrigin.TARGET, *[draft] * 3, bonus, *[draft] * 3, bonus]


def test_drafters_of_the_matrix_are_what_they_say() -> None:
    assert drafter_of("none", target_model()) is None
    assert drafter_of("ngram", target_model()) is None
    assert drafter_of("lm", target_model()) is not None
