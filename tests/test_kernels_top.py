"""The k largest logits and the log-sum-exp: exact, ordered, a function of the row alone, whole logits or none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specd.errors import ModelError
from specd.kernels.library import load_library
from specd.kernels.top import top_of_rows
from specd.models.native import Activations, NativeLlama, TensorSource
from specd.request import Request
from specd.sampling.logprobs import top_tokens, torch_top_tokens
from specd.tensors import TopTokens
from tests.engines import ask, collect, generate, make_parts, native_model, running
from tests.native import LEVELS, native_llama, needs_kernels
from tests.test_native_engine import Bits, bits
from tests.tiny import tiny_config, tiny_llama, tiny_weights

pytestmark = needs_kernels
MODES = pytest.mark.parametrize("activations", ["fast", "exact"])
VOCABULARIES = pytest.mark.parametrize("vocabulary", [32, 97, 256, 1203])  # whole and broken strips and segments
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def hidden_rows(count: int = 17) -> torch.Tensor:
    return 2.0 * torch.randn(count, 64, generator=torch.Generator().manual_seed(2))


def ordered(logits: torch.Tensor) -> torch.Tensor:
    """All tokens of each row by (logit descending, id ascending), in plain Python."""
    return torch.tensor([sorted(range(len(row)), key=lambda i: (-row[i], i)) for row in logits.tolist()])


def assert_same(a: TopTokens, b: TopTokens) -> None:
    for name in ("values", "tokens", "lse"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@MODES
@VOCABULARIES
def test_against_float64(vocabulary: int, activations: Activations) -> None:
    model, hidden = native_llama(activations=activations, vocab_size=vocabulary), hidden_rows()
    logits = model.logits(hidden)
    order, lse = ordered(logits), torch.logsumexp(logits.double(), -1)
    for k in range(1, 33):
        top = model.top(hidden, k)
        assert torch.equal(top.tokens, order[:, :k]), k
        assert torch.equal(top.values, logits.gather(1, order[:, :k])), k
        torch.testing.assert_close(top.lse, lse, rtol=0, atol=3e-7)
        assert torch.equal(top.lse, model.top(hidden, 1).lse), k
    log_softmax = torch.log_softmax(logits.double(), -1).gather(1, order[:, :32])
    torch.testing.assert_close(top.logprobs(top.values).double(), log_softmax, rtol=1e-6, atol=3e-7)


@MODES
@VOCABULARIES
def test_the_same_bits_for_any_batch_threads_and_level(vocabulary: int, activations: Activations) -> None:
    hidden = hidden_rows()
    expected = native_llama(level="portable", activations=activations, vocab_size=vocabulary).top(hidden, 20)
    for level in LEVELS:
        model = native_llama(level=level, activations=activations, vocab_size=vocabulary)
        logits, rows = model.logits(hidden), torch.tensor([16, 3, 3, 0])
        for count in (1, 2, 5, 8, 9):
            assert_same(model.top(hidden[:count], 20), expected.rows(torch.arange(count)))
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            assert_same(model.top(hidden, 20), expected)
            assert_same(model.top(hidden.flip(0), 20).rows(torch.arange(16, -1, -1)), expected)
            assert_same(top_of_rows(logits, rows, 20, library=load_library(level)), expected.rows(rows))
            assert_same(
                top_of_rows(logits[3:], None, 20, library=load_library(level)), expected.rows(torch.arange(3, 17))
            )


def test_one_logit_makes_another_sum() -> None:
    """Negative control of the equalities above: every column counts."""
    logits = native_llama(vocab_size=1203).logits(hidden_rows(1))
    before = top_of_rows(logits, None, 1).lse
    for column in (0, 255, 256, 1023, 1202):
        changed = logits.clone()
        changed[0, column] += 1.0
        assert not torch.equal(top_of_rows(changed, None, 1).lse, before), column


@pytest.mark.parametrize("level", LEVELS)
def test_equals_come_in_the_order_of_their_ids(level: str) -> None:
    library = load_library(level)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(-2, 3, (9, 1203), generator=generator).float()
    logits[0] = 0.0
    logits[1, ::3] = -0.0  # an equal of 0.0
    order = ordered(logits)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for k in (1, 2, 7, 32, 700, 1203):
            top = top_of_rows(logits, None, k, library=library)
            assert torch.equal(top.tokens, order[:, :k]), k
            assert torch.equal(top.values, logits.gather(1, order[:, :k])), k


@pytest.mark.parametrize("level", LEVELS)
def test_extreme_and_unusable_rows(level: str) -> None:
    """-inf counts nothing, a wide range loses nothing; NaN, +inf and nothing at all fail their own row alone."""
    library = load_library(level)
    logits = torch.randn(7, 600, generator=torch.Generator().manual_seed(6))
    logits[0] = -INF
    logits[0, [300, 17]] = torch.tensor([2.0, -1.0])  # whole segments of nothing
    logits[1] = -5000.0
    logits[1, 599] = 80.0
    logits[2] = 3.0e38
    logits[3, 599] = NAN
    logits[4, 2] = INF
    logits[5] = -INF
    top = top_of_rows(logits, None, 4, library=library)
    good = torch.tensor([0, 1, 2, 6])
    torch.testing.assert_close(top.lse[good], torch.logsumexp(logits[good].double(), -1), rtol=1e-7, atol=0)
    assert top.tokens[:3].tolist() == [[300, 17, 0, 1], [599, 0, 1, 2], [0, 1, 2, 3]]
    assert top.logprobs(top.values)[0].tolist() == pytest.approx([-0.04858735, -3.04858735, -INF, -INF], abs=1e-6)
    assert top.logprobs(top.values)[1, 0] == 0.0
    assert bool(top.values[3].isnan().all())
    assert bool(((top.tokens >= 0) & (top.tokens < 600)).all())
    assert top.values[4, 0] == INF
    assert top.values[5, 0] == -INF
    assert torch.isfinite(top.lse).tolist() == [True, True, True, False, False, False, True]
    assert_same(top.rows(good), top_of_rows(logits[good], None, 4, library=library))
    # torch says the same of which rows are usable.
    reference = torch_top_tokens(logits, 4)
    assert torch.equal(torch.isfinite(reference.lse), torch.isfinite(top.lse))
    assert torch.equal(torch.isfinite(reference.best.values), torch.isfinite(top.best.values))
    assert torch.equal(reference.tokens[good], top.tokens[good])


@pytest.mark.parametrize("level", LEVELS)
def test_bad_hidden_states_fail_alone(level: str) -> None:
    model, hidden = native_llama(level=level), hidden_rows(9)
    expected = model.top(hidden, 3)
    hidden[4, 7] = NAN
    top = model.top(hidden, 3)
    others = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    assert bool(top.values[4].isnan().all())
    assert bool(top.lse[4].isnan())
    assert_same(top.rows(others), expected.rows(others))


@MODES
def test_a_bias_of_the_head_counts(activations: Activations) -> None:
    config = tiny_config()
    bias = 3.0 * torch.randn(97, generator=torch.Generator().manual_seed(8))
    model = NativeLlama(config, TensorSource(tiny_weights(config) | {"lm_head.bias": bias}), activations=activations)
    hidden = hidden_rows()
    logits = model.logits(hidden)
    top, best = model.top(hidden, 5), model.best(hidden)
    assert torch.equal(top.tokens, ordered(logits)[:, :5])
    assert torch.equal(top.values, logits.gather(1, top.tokens))
    assert torch.equal(best.tokens, logits.argmax(-1))
    assert torch.equal(best.values, logits.amax(-1))


def test_no_rows_and_too_many_logits() -> None:
    model = native_llama()
    assert model.top(torch.empty(0, 64), 3).tokens.shape == (0, 3)
    for k in (0, 98):
        with pytest.raises(ModelError, match=f"the {k} largest of 97 logits"):
            model.top(hidden_rows(2), k)
        with pytest.raises(ModelError, match=f"the {k} largest of 97 logits"):
            top_of_rows(torch.zeros(2, 97), None, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_torch_model_and_the_reference(dtype: torch.dtype) -> None:
    """Llama.top is `top_tokens` of its logits; without the kernels torch gives the same order and nearly the sum."""
    model, hidden = tiny_llama(dtype=dtype), hidden_rows().to(dtype)
    logits = model.logits(hidden)
    top, plain = model.top(hidden, 6), torch_top_tokens(logits, 6)
    assert_same(top, top_tokens(logits, 6))
    assert torch.equal(plain.tokens, ordered(logits.float())[:, :6])
    assert torch.equal(top.tokens, plain.tokens)
    assert torch.equal(top.values, plain.values)
    for got in (top, plain):
        torch.testing.assert_close(got.lse, torch.logsumexp(logits.double(), -1), rtol=0, atol=2e-6)
    for row in range(len(logits)):
        assert_same(torch_top_tokens(logits[row : row + 1], 6), plain.rows(torch.tensor([row])))


# ---- engines: greedy log-probabilities with and without whole logits

PROMPT = [5, 9, 14, 5, 9, 14, 5, 9, 14, 5, 9]  # n-grams are found again
LENGTH = 16


class Calls:
    """How many rows of what the target computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = {"top": 0, "logits": 0}
        for name in self.rows:
            monkeypatch.setattr(NativeLlama, name, self._counting(name, getattr(NativeLlama, name)))

    def _counting(self, name: str, method: Any) -> Any:
        def call(model: NativeLlama, hidden: torch.Tensor, *args: int) -> Any:
            self.rows[name] += len(hidden)
            return method(model, hidden, *args)

        return call


def greedy(name: str, num_top: int, **changes: Any) -> Request:
    return ask(name, PROMPT, **({"max_tokens": LENGTH, "temperature": 0.0, "logprobs": num_top} | changes))


def few(found: Bits, num_top: int) -> Bits:
    """What a request for fewer alternatives says."""
    return [(token, logprob, top[:num_top]) for token, logprob, top in found]


async def alone(activations: Activations) -> Bits:
    async with running(make_parts(target=native_model(activations))) as engine:
        (result,) = await collect(engine, greedy("alone", 20))
    return bits(result)


@MODES
async def test_greedy_logprobs_without_logits_are_those_with_them(
    activations: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, among their like, speculative; and beside rows that need whole logits, where theirs come from logits."""
    calls = Calls(monkeypatch)
    want = await alone(activations)
    assert len(want) == LENGTH
    assert [top[0] for _, _, top in want] == [(token, logprob) for token, logprob, _ in want]
    assert calls.rows["logits"] == 0
    for draft in ("none", "ngram"):
        parts = make_parts(target=native_model(activations), draft=draft, draft_len=4)
        async with running(parts) as engine:
            like = await generate(engine, [greedy(str(n), n) for n in (0, 1, 7, 20)])
            accepted = sum(engine.stats().accepted_tokens.values())
            assert calls.rows["logits"] == 0
            mates = [greedy("drawn", 2, temperature=1.0), greedy("biased", 3, logit_bias=((5, 2.0),))]
            mixed = await generate(engine, [greedy("a", 20), *mates, greedy("b", 0)])
        for n in (0, 1, 7, 20):
            assert bits(like[str(n)][0]) == few(want, n), (draft, n)
        assert bits(mixed["a"][0]) == want, draft
        assert bits(mixed["b"][0]) == few(want, 0), draft
        assert (accepted > 0) == (draft != "none")
        assert calls.rows["logits"] > LENGTH
        calls.rows["logits"] = 0
    assert calls.rows["top"] > LENGTH


async def test_the_two_modes_differ() -> None:
    """Negative control: other arithmetic gives other log-probabilities."""
    assert await alone("fast") != await alone("exact")
