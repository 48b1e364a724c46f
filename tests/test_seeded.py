"""Sampled text is a function of prompt, parameters and seed: the same for every drafter, K, batch and preemption."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from specd.engine import Engine
from specd.request import FinishReason, Request
from specd.sampling.noise import Purpose, exponential, position_keys, row_key
from tests.engines import EOS, Result, ask, collect, full_logits, generate, make_parts, running, target_model, tokenizer

PROMPT = [*[40, 41, 42, 43] * 4, 40, 41]  # a whole block, which all variants find again
OTHER = [60 + i % 7 for i in range(30)]  # two chunks of at most 16 tokens
LENGTH = 20
TIGHT: dict[str, Any] = {"num_slots": 80, "max_len": 64, "max_running": 5, "max_tokens": 16}
Outcome = tuple[list[int], str, FinishReason | None, str | int | None]


@functools.cache
def reference_answer(
    prompt: tuple[int, ...], seed: int, temperature: float, choice: int = 0, index: int = 0
) -> list[int]:
    """Plain sampling without KV, batch or pipeline: the race of softmax(logits / T) against keyed noise."""
    tokens = list(prompt)
    for _ in range(LENGTH):
        probs = torch.softmax(full_logits(target_model(), tokens) / temperature, -1)
        keys = torch.tensor([row_key(seed, index, choice)]), torch.tensor([len(tokens)])
        tokens.append(int((probs / exponential(position_keys(*keys, Purpose.TARGET), len(probs))[0]).argmax()))
    return tokens[len(prompt) :]


PLAIN = reference_answer(tuple(PROMPT), 7, 1.0)


def text_of(tokens: list[int]) -> str:
    return tokenizer().decode(tokens)


# Each variant is built so that it has something to do well inside a run of drafts; see `test_variants_matter`.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3, "temperature": 1.5},
    "presence": {"presence_penalty": 1.9, "temperature": 0.5},
    "frequency": {"frequency_penalty": 1.1, "temperature": 0.8},
    "repetition": {"repetition_penalty": 1.7, "temperature": 0.7},
    "greedy and penalised": {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    "bias": {"logit_bias": ((PLAIN[3], -100.0), (50, 3.0))},
    "bad word": {"bad_words_ids": ((PLAIN[4],),)},
    "bad sequence": {"bad_words_ids": (tuple(PLAIN[6:8]), tuple(PLAIN[9:12]))},
    "allowed": {"allowed_token_ids": tuple(range(20, 60))},
    "stop token": {"stop_token_ids": (PLAIN[9],)},
    "min_tokens": {"stop_token_ids": (PLAIN[1], PLAIN[2]), "min_tokens": 6},
    "stop string": {"stop": (text_of(PLAIN[7:10]),)},
    "stop kept": {"stop": (text_of(PLAIN[5:7]), "###"), "include_stop_str_in_output": True},
    "eos": {"ignore_eos": False, "logit_bias": ((EOS, 6.0),), "min_tokens": 4},
    "all": {
        "temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.3,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": ((30, 2.0),),
        "bad_words_ids": ((PLAIN[0],), (30, 31)), "min_tokens": 3, "stop_token_ids": (88,),
    },
}  # fmt: skip


def variant(name: str, prompt: list[int] = PROMPT, **changes: Any) -> Request:
    return ask(name, prompt, **({"max_tokens": LENGTH, "temperature": 1.0} | VARIANTS[name] | changes))


def batch() -> list[Request]:
    """Every variant, and between them prompts of other lengths and a greedy request."""
    out = [variant(name) for name in VARIANTS]
    for i in range(0, len(out), 6):
        out.insert(i, ask(f"other {i}", OTHER[: 30 - i], max_tokens=LENGTH, temperature=1.0 if i % 2 else 0.0, seed=i))
    return out


_plain: dict[str, Outcome] = {}


async def plain_outcomes() -> dict[str, Outcome]:
    """Each request alone in an engine without drafter, prefix hits or neighbours."""
    if not _plain:
        for request in batch():
            async with running(make_parts(draft="none")) as engine:
                (result,) = await collect(engine, request)
            _plain[request.request_id] = result.outcome
    return _plain


async def check(engine: Engine) -> None:
    want = await plain_outcomes()
    results = await generate(engine, batch())
    for name, (result,) in results.items():
        assert result.outcome == want[name], name


async def test_plain_sampling_is_what_the_reference_draws() -> None:
    requests = [ask(str(t), PROMPT, temperature=t, max_tokens=LENGTH, n=2, prompt_index=3) for t in (0.6, 1.0, 1.7)]
    async with running(make_parts(draft="ngram", draft_len=3)) as engine:
        results = await generate(engine, requests)
    for request in requests:
        for choice, result in enumerate(results[request.request_id]):
            t = request.sampling.temperature
            assert result.tokens == reference_answer(tuple(PROMPT), 7, t, choice=choice, index=3)


async def test_variants_matter() -> None:
    """Negative control: every parameter changes the text, behind its beginning where it is meant to."""
    want = await plain_outcomes()
    assert want["plain"][0] == PLAIN
    assert len({(*want[name][0], want[name][1]) for name in VARIANTS}) == len(VARIANTS)
    assert want["bad sequence"][0][:7] == PLAIN[:7] != want["bad sequence"][0]
    assert want["bad word"][0][:4] == PLAIN[:4] != want["bad word"][0]
    assert want["stop token"][0] == PLAIN[: PLAIN.index(PLAIN[9]) + 1]
    assert want["stop token"][2:] == (FinishReason.STOP, PLAIN[9])
    assert len(want["min_tokens"][0]) > 6
    assert want["stop string"][2:] == (FinishReason.STOP, text_of(PLAIN[7:10]))
    assert want["stop string"][1] == text_of(PLAIN[:7])
    assert want["stop kept"][1] == text_of(PLAIN[:7])
    assert want["eos"][2:] == (FinishReason.STOP, None)
    assert set(want["allowed"][0]) <= set(range(20, 60))


@pytest.mark.parametrize("draft_len", [*range(9), "adaptive"])
@pytest.mark.parametrize("draft", ["ngram", "layers", "lm"])
async def test_the_same_text_for_every_drafter_and_length(draft: str, draft_len: int | str) -> None:
    """One mixed batch of all variants, chunked, with prefix hits and preemption."""
    parts = make_parts(draft=draft, draft_len=draft_len, **TIGHT)
    async with running(parts) as engine:
        await check(engine)
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    if isinstance(draft_len, int) and draft_len > 0:
        assert 0 < sum(stats.accepted_tokens.values()) < sum(stats.draft_tokens.values())
    elif draft_len == 0:
        assert not stats.draft_tokens


@pytest.mark.parametrize("page_size", [1, 4])
async def test_the_same_text_for_other_page_sizes(page_size: int) -> None:
    async with running(make_parts(draft="lm", draft_len=4, page_size=page_size, **TIGHT)) as engine:
        await check(engine)


@pytest.mark.parametrize("device", ["single", "paired", "stages"])
async def test_the_same_text_on_threads(device: str) -> None:
    async with running(make_parts(draft="lm", draft_len=3, device=device, **TIGHT)) as engine:
        await check(engine)


@pytest.mark.parametrize("changes", [{"mixed": "plain"}, {"draft_sampling": "greedy"}])
async def test_the_same_text_under_other_policies(changes: dict[str, Any]) -> None:
    async with running(make_parts(draft="layers", draft_len=3, **TIGHT, **changes)) as engine:
        await check(engine)


async def test_a_draft_that_is_the_target_shares_its_noise() -> None:
    """The same logits and the same noise give the same draws: every sampled draft is kept."""
    names = ["plain", "cool", "top_k", "top_p", "min_p"]
    async with running(make_parts(draft="lm-self", draft_len=4)) as engine:
        results = await generate(engine, [variant(name) for name in names])
        stats = engine.stats()
    want = await plain_outcomes()
    assert all(results[name][0].outcome == want[name] for name in names)
    assert stats.accepted_tokens == stats.draft_tokens
    assert sum(stats.draft_tokens.values()) > 50


@pytest.mark.parametrize("draft", ["none", "lm"])
async def test_choices_differ_and_repeat(draft: str) -> None:
    request = ask("n", PROMPT, n=4, temperature=1.0, max_tokens=LENGTH)
    async with running(make_parts(draft=draft, draft_len=3)) as engine:
        first = await collect(engine, request)
        second = await collect(engine, request)
        other_prompt = await collect(engine, ask("i", PROMPT, n=4, prompt_index=1, temperature=1.0, max_tokens=LENGTH))
        other_seed = await collect(engine, ask("s", PROMPT, n=4, seed=8, temperature=1.0, max_tokens=LENGTH))
    assert [r.outcome for r in first] == [r.outcome for r in second]
    texts = [tuple(r.tokens) for r in (*first, *other_prompt, *other_seed)]
    assert len(set(texts)) == len(texts)
    for choice, result in enumerate(first):
        assert result.tokens == reference_answer(tuple(PROMPT), 7, 1.0, choice=choice)


# ---------------------------------------------------------------- log-probabilities


def close(a: Result, b: Result) -> None:
    assert a.tokens == b.tokens
    assert len(a.logprobs) == len(b.logprobs) == len(a.tokens)
    for left, right, token in zip(a.logprobs, b.logprobs, a.tokens, strict=True):
        assert left.token_id == right.token_id == token
        assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
        assert [i for i, _ in left.top] == [i for i, _ in right.top]
        assert [p for _, p in left.top] == pytest.approx([p for _, p in right.top], abs=1e-4)


def logprob_requests() -> list[Request]:
    names = ("plain", "all", "greedy and penalised")
    return [variant(name, logprobs=count) for name, count in zip(names, (0, 4, 2), strict=True)]


@pytest.mark.parametrize("draft", ["ngram", "lm", "lm-self"])
async def test_logprobs_do_not_depend_on_speculation(draft: str) -> None:
    async with running(make_parts(draft="none")) as engine:
        want = await generate(engine, logprob_requests())
    async with running(make_parts(draft=draft, draft_len=4, **TIGHT)) as engine:
        have = await generate(engine, [*logprob_requests(), variant("cool")])
    assert not have["cool"][0].logprobs
    for name in want:
        close(have[name][0], want[name][0])


async def test_logprobs_are_the_raw_ones_of_the_model() -> None:
    """Before temperature and penalties, from one forward over everything."""
    async with running(make_parts(draft="lm", draft_len=4)) as engine:
        results = await generate(engine, logprob_requests())
    for (result,) in results.values():
        for i, entry in enumerate(result.logprobs):
            scores = torch.log_softmax(full_logits(target_model(), [*PROMPT, *result.tokens[:i]]).float(), -1)
            assert entry.logprob == pytest.approx(float(scores[entry.token_id]), abs=1e-4)
            best = scores.topk(len(entry.top)).indices.tolist() if entry.top else []
            assert [token for token, _ in entry.top] == best
