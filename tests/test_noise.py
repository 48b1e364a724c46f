"""The hash behind every draw: fixed values, the distributions it gives, and that different uses are independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from specd.sampling import noise
from specd.sampling.noise import Purpose, exponential, position_keys, row_key, uniform

ALPHA = 1e-4


def keys_for(count: int, *, seed: int = 1, choice: int = 0, purpose: Purpose = Purpose.TARGET) -> torch.Tensor:
    """The keys of `count` consecutive positions of one choice."""
    return position_keys(torch.full((count,), row_key(seed, 0, choice)), torch.arange(count), purpose)


def as_uniform(e: torch.Tensor) -> np.ndarray:
    return -np.expm1(-e.double().numpy())


def splitmix(value: int) -> int:
    """SplitMix64's finaliser with Python's integers: the reference of the torch one."""
    mask = (1 << 64) - 1
    value &= mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def test_mixer_is_splitmix64() -> None:
    # The first outputs of the published generator seeded with 1234567.
    golden = 0x9E3779B97F4A7C15
    assert [splitmix(1234567 + i * golden) for i in (1, 2)] == [6457827717110365317, 3203168211198807973]
    values = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
    expected = [splitmix(int(v)) for v in values]
    assert [int(v) % 2**64 for v in noise._mix(values.clone())] == expected


def test_exponential_is_what_a_scalar_loop_gives() -> None:
    keys = keys_for(3)
    e = exponential(keys, 5)
    for row in range(3):
        for token in range(5):
            bits = splitmix(int(keys[row]) + (token + 1) * 0x9E3779B97F4A7C15) >> 11
            assert e[row, token].item() == pytest.approx(-np.log1p(-(bits + 0.5) * 2.0**-53), rel=1e-5)


def test_any_seed_is_taken_and_distinguished() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**31, 123456789]
    assert len({row_key(s, i, j) for s in seeds for i in range(5) for j in range(5)}) == 25 * len(seeds)
    assert all(-(2**63) <= row_key(s, 0, 0) < 2**63 for s in seeds)
    assert row_key(7, 1, 2) != row_key(7, 2, 1)


def test_exponential_has_its_distribution_and_no_zero_or_infinity() -> None:
    e = exponential(keys_for(64), 4096)
    assert bool(((e > 0) & torch.isfinite(e)).all())
    counts, _ = np.histogram(as_uniform(e), bins=256, range=(0, 1))
    assert stats.chisquare(counts).pvalue > ALPHA
    # The small ones decide a race over a large vocabulary: their own distribution, at a thousandth of the scale.
    small = as_uniform(e)[as_uniform(e) < 1e-3]
    assert stats.kstest(small * 1e3, "uniform").pvalue > ALPHA


def test_coins_are_uniform() -> None:
    coins = uniform(keys_for(200_000, purpose=Purpose.ACCEPT)).numpy()
    assert coins.min() >= 0.0
    assert coins.max() < 1.0
    assert stats.chisquare(np.histogram(coins, bins=128, range=(0, 1))[0]).pvalue > ALPHA


def pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Two fields of noise that must have nothing to do with each other, per thing that separates them."""
    count = 256
    base = keys_for(count)
    e = exponential(base, 512)
    return {
        "positions": (e[:-1], e[1:]),
        "tokens": (e[:, :-1], e[:, 1:]),
        "seeds": (e, exponential(keys_for(count, seed=2), 512)),
        "choices": (e, exponential(keys_for(count, choice=1), 512)),
        "purposes": (e, exponential(keys_for(count, purpose=Purpose.DRAFT), 512)),
        "seed and position": (e[1:], exponential(keys_for(count, seed=2), 512)[:-1]),
        "race and coin": (e[:, 0], -torch.log1p(-uniform(base))),
    }


@pytest.mark.parametrize("name", list(pairs()))
def test_different_uses_are_independent(name: str) -> None:
    first, second = pairs()[name]
    u, v = as_uniform(first).ravel(), as_uniform(second).ravel()
    table, _, _ = np.histogram2d(u, v, bins=5, range=((0, 1), (0, 1)))
    assert stats.chi2_contingency(table).pvalue > ALPHA


def test_the_independence_test_can_fail() -> None:
    first, _ = pairs()["seeds"]
    u = as_uniform(first).ravel()
    table, _, _ = np.histogram2d(u, u * 0.99, bins=5, range=((0, 1), (0, 1)))
    assert stats.chi2_contingency(table).pvalue < ALPHA


def test_a_row_does_not_depend_on_the_others() -> None:
    keys = keys_for(70)
    together = exponential(keys, 3000)
    for row in (0, 43, 44, 69):  # around the border of a block
        assert torch.equal(exponential(keys[row : row + 1], 3000)[0], together[row])


def test_bits_are_balanced_and_avalanche() -> None:
    """Changing one bit of the key changes each bit of the output half the time."""
    keys = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 4000))
    for bit in (0, 1, 31, 62):
        flipped = noise._mix(keys.clone()) ^ noise._mix(keys ^ (1 << bit))
        shares = [float(((flipped >> i) & 1).float().mean()) for i in range(64)]
        assert min(shares) > 0.45
        assert max(shares) < 0.55
