"""Counter-based randomness: every number is a hash of what it is for, so no state is carried and none can be shared.

    row_key(seed, prompt index, choice)  [host, once a request]
        -> position_keys(row keys, absolute positions, purpose)  [device, once a step]
            -> exponential(keys, V): one Exp(1) number per token id, or uniform(keys): one coin

The mixer is SplitMix64's (Steele, Lea, Flood 2014; Stafford's variant 13). What a seed means is fixed by this file: a
kernel that replaces it must give the same integers, and the same exponentials up to rounding.

Legend: R logits rows, V vocabulary.
"""

from __future__ import annotations

import enum

import torch

from specd.sampling.blocks import in_blocks

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


class Purpose(enum.IntEnum):
    """What a number is used for. The same position never uses one purpose twice (spec: methods 1.5).

    Under the match rule the draft shares TARGET: that is what makes it guess the target's draw.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3
    BONUS = 4


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def row_key(seed: int, prompt_index: int, choice: int) -> int:
    """The key of one choice of one prompt, as a signed 64-bit integer. seed may be any integer (taken modulo 2^64)."""
    key = _mix_int(seed + _GOLDEN)
    for part in (prompt_index, choice):
        key = _mix_int(key + (part + 1) * _GOLDEN)
    return _signed(key)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on i64, in place. torch shifts arithmetically: the copied sign bits are masked off."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        value ^= (value >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            value *= _signed(factor)
    return value


def position_keys(keys: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Row keys i64[R] and absolute positions i64[R] -> keys i64[R] of one purpose at these positions."""
    counter = _mix(positions * 8 + int(purpose) + 1)
    return _mix((keys ^ counter) + _signed(_GOLDEN))


def exponential(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exp(1) noise e per row and token id, from `position_keys`: i64[R] -> f32[R, V], all entries in (0, 17].

    argmax(p / e) is then a draw from p: an exponential race, the Gumbel trick without a logarithm of p.
    Small e are fine-grained (2^-53 before rounding to fp32): they are the ones that win.
    """
    tokens = torch.arange(1, vocab_size + 1, device=keys.device) * _signed(_GOLDEN)
    return in_blocks(lambda part: _exponential(part, tokens), keys, width=vocab_size)


def _exponential(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    bits = _mix(keys[:, None] + tokens).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    # u in (0, 1): fp32 rounds the top of the range up to 1, where the race would lose by an infinite e.
    u = bits.float().add_(0.5).mul_(2.0**-53).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_()


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """One coin per row in [0, 1): i64[R] -> f64[R], 53 random bits. No token's number: it stands before all of them."""
    return _mix(keys - _signed(_GOLDEN)).bitwise_right_shift(11).bitwise_and((1 << 53) - 1).double() * 2.0**-53
