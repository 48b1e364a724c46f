"""Tokens drawn in the CPU kernels: the torch reference's, whatever the level, the threads and the neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specd.errors import ModelError
from specd.kernels import draw as kernel
from specd.kernels.library import Library, load_library
from specd.sampling.filters import Filters, filtered_probabilities
from specd.sampling.noise import exponential
from specd.sampling.process import torch_race
from tests.native import LEVELS, needs_kernels

pytestmark = needs_kernels
INF = float("inf")
NEAR = 1e-5  # races closer than this may end either way: exp and log are rounded differently


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(request.param)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def keys_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator(seed))


def columns(count: int, vocab: int, **filters: Any) -> dict[str, torch.Tensor]:
    values = {"temperature": 1.0, "top_k": vocab, "top_p": INF, "min_p": 0.0} | filters
    kinds = {"top_k": torch.int64}
    return {k: torch.full((count, 1), v, dtype=kinds.get(k, torch.float32)) for k, v in values.items()}


def reference(logits: torch.Tensor, keys: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    """f32[R, V]: weight / noise of every token."""
    top_k = parameters["top_k"]
    filters = Filters(
        **parameters,
        max_top_k=int(top_k[top_k < logits.shape[1]].amax()) if bool((top_k < logits.shape[1]).any()) else 0,
        any_top_p=bool(torch.isfinite(parameters["top_p"]).any()),
        any_min_p=bool((parameters["min_p"] > 0).any()),
    )
    return filtered_probabilities(logits, filters) / exponential(keys, logits.shape[1])


def assert_same_draws(tokens: torch.Tensor, scores: torch.Tensor) -> int:
    """Equal to the reference's where its race is clear; how many rows are not."""
    best = scores.topk(2, dim=-1)
    clear = best.values[:, 1] < best.values[:, 0] * (1 - NEAR)
    assert torch.equal(tokens[clear], best.indices[clear, 0])
    return int((~clear).sum())


FILTERS = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product((0.3, 1.0, 2.5), (1, 7, 400, 100_000), (0.05, 0.9, 1 - 1e-6, INF), (0.0, 0.02))
]


@pytest.mark.parametrize("vocab", [1, 15, 64, 333, 5000])
def test_all_filters_against_torch(library: Library, vocab: int) -> None:
    rows, unclear = (12 if vocab < 5000 else 2), 0
    for i, filters in enumerate(FILTERS):
        logits = 3 * torch.randn(rows, vocab, generator=generator(i))
        parameters = columns(rows, vocab, **(filters | {"top_k": min(filters["top_k"], vocab)}))
        keys = keys_of(rows, i)
        tokens, usable = kernel.draw(logits, None, keys, **parameters, library=library)
        assert usable.all()
        if vocab == 1:
            assert not tokens.any()
            continue
        unclear += assert_same_draws(tokens, reference(logits, keys, parameters))
    assert unclear < 0.01 * rows * len(FILTERS)


def test_every_level_thread_count_and_place_gives_the_same_token() -> None:
    rows, vocab = 40, 3001
    logits = 2 * torch.randn(rows, vocab, generator=generator(1))
    logits[:, ::7] = logits[:, ::7].round()  # ties
    parameters = columns(rows, vocab)
    for i, filters in enumerate(FILTERS[:rows]):
        for name, value in filters.items():
            parameters[name][i] = min(value, vocab) if name == "top_k" else value
    keys = keys_of(rows)
    expected, _ = kernel.draw(logits, None, keys, **parameters)
    assert len(set(expected.tolist())) > rows // 3
    order = torch.randperm(rows, generator=generator(2))
    for level, threads in itertools.product(LEVELS, (1, 2, 3)):
        torch.set_num_threads(threads)
        chosen = {name: values[order] for name, values in parameters.items()}
        tokens, _ = kernel.draw(logits, order, keys[order], **chosen, library=load_library(level))
        assert torch.equal(tokens, expected[order]), (level, threads)
    alone = [
        kernel.draw(logits[i : i + 1], None, keys[i : i + 1], **{k: v[i : i + 1] for k, v in parameters.items()})[0]
        for i in range(rows)
    ]
    assert torch.equal(torch.cat(alone), expected)


def test_tokens_come_as_often_as_they_are_likely(library: Library) -> None:
    """Chi-square of 20,000 draws from what top-k and top-p leave; 99.99 % below the bound."""
    vocab, draws = 70, 20_000
    logits = 1.5 * torch.randn(1, vocab, generator=generator(5))
    parameters = columns(draws, vocab, top_k=30, top_p=0.9, temperature=0.8)
    filters = Filters(**{k: v[:1] for k, v in parameters.items()}, max_top_k=30, any_top_p=True, any_min_p=False)
    p = filtered_probabilities(logits, filters)[0]
    rows = torch.zeros(draws, dtype=torch.int64)
    tokens, _ = kernel.draw(logits, rows, keys_of(draws), **parameters, library=library)
    counts = torch.bincount(tokens, minlength=vocab).float()
    assert not counts[p == 0].any()
    kept = p > 0
    statistic = float(((counts - draws * p)[kept].square() / (draws * p[kept])).sum())
    degrees = int(kept.sum()) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5 + 8


@pytest.mark.parametrize("value", [float("nan"), INF])
def test_a_bad_row_fails_alone(library: Library, value: float) -> None:
    logits = torch.randn(4, 200, generator=generator(0))
    expected, _ = kernel.draw(logits, None, keys_of(4), **columns(4, 200, top_k=20, top_p=0.9), library=library)
    broken = logits.clone()
    broken[1, 133] = value
    broken[2] = -INF
    parameters = columns(4, 200, top_k=20, top_p=0.9)
    tokens, usable = kernel.draw(broken, None, keys_of(4), **parameters, library=library)
    assert usable.tolist() == [True, False, False, True]
    assert tokens.tolist() == [int(expected[0]), 0, 0, int(expected[3])]


def test_forbidden_tokens_are_never_drawn(library: Library) -> None:
    logits = torch.full((300, 150), -INF)
    logits[:, 149], logits[:, 64] = 0.0, -1.0
    tokens, usable = kernel.draw(logits, None, keys_of(300), **columns(300, 150, temperature=5.0), library=library)
    assert usable.all()
    assert set(tokens.tolist()) == {64, 149}


def test_tokens_tied_at_a_boundary_are_all_kept(library: Library) -> None:
    logits = torch.zeros(400, 90)
    logits[:, [3, 50]] = 2.0
    logits[:, [70, 71, 72]] = 1.0
    for filters in ({"top_k": 3}, {"top_p": 0.2}):
        parameters = columns(400, 90, **({"temperature": 0.5} | filters))
        tokens, _ = kernel.draw(logits, None, keys_of(400), **parameters, library=library)
        scores = reference(logits, keys_of(400), parameters)
        assert_same_draws(tokens, scores)
        assert set(tokens.tolist()) == set((scores > 0).any(0).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_races_of_weights(library: Library, scale: float) -> None:
    weights = torch.rand(60, 1000, generator=generator(3)).pow(8) * scale
    weights[weights < 1e-4 * scale] = 0.0
    weights[5] = 0.0
    weights[5, 999] = scale
    tokens = kernel.race(weights, keys_of(60), library=library)
    scores = weights / exponential(keys_of(60), 1000)
    assert assert_same_draws(tokens, scores) <= 1
    assert tokens[5] == 999
    assert torch.equal(tokens, torch_race(weights, keys_of(60)))


def test_what_is_taken() -> None:
    assert kernel.takes(torch.zeros(1, 2))
    assert not kernel.takes(torch.zeros(1, 2, dtype=torch.bfloat16))
    assert not kernel.takes(torch.zeros(1, 2, device="meta"))


@pytest.mark.parametrize(
    "bad", [{"temperature": 0.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": 0}, {"min_p": 1.5}]
)
def test_parameters_that_mean_nothing_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ModelError, match="out of its range"):
        kernel.draw(torch.zeros(1, 4), None, keys_of(1), **columns(1, 4, **bad))
