"""From shards to batches: which sequences, in which order, and which of their tokens are learned.

The order is a function of (seed, epoch) alone and a step's batches of (seed, step), so a run that is taken up again
needs no more than the number of its step.

Legend: B sequences, L positions of the longest, P passes, R predicted tokens, F features.
"""

from __future__ import annotations

import dataclasses

import torch

from specd.train.shards import Collected

_BUCKET = 64  # sequences that are sorted by length together: little padding, and still a random order


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Padded sequences, and the places of the tokens that are learned.

    Row r is about position `at[r]` of sequence `row[r]`: the target's state there says what follows. Pass j predicts it
    from position at - 1 - j, which exists where valid[j, r].
    """

    tokens: torch.Tensor  # i64[B, L + P] zero padded
    features: torch.Tensor  # f32[B, L, F]
    row: torch.Tensor  # i64[R]
    at: torch.Tensor  # i64[R]
    valid: torch.Tensor  # bool[P, R]
    teacher: torch.Tensor  # f32[R, H] the target's state
    best: torch.Tensor  # i64[R] the target's argmax after it
    following: torch.Tensor  # i64[R] the token that really follows


def sequences(data: Collected, *, held_out: bool) -> list[int]:
    """Those of three tokens or more: shorter ones predict nothing."""
    chosen = (data.held_out == held_out) & (data.lens >= 3)
    return [int(i) for i in chosen.nonzero().flatten()]


def epoch_batches(data: Collected, chosen: list[int], num_tokens: int, *, seed: int, epoch: int) -> list[list[int]]:
    """The sequences of every batch of an epoch: at most num_tokens padded tokens each, or one sequence."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = [chosen[int(i)] for i in torch.randperm(len(chosen), generator=generator)]
    batches: list[list[int]] = []
    for begin in range(0, len(order), _BUCKET):
        bucket = sorted(order[begin : begin + _BUCKET], key=lambda s: int(data.lens[s]))
        batches += _cut(data, bucket, num_tokens)
    return [batches[int(i)] for i in torch.randperm(len(batches), generator=generator)]


def _cut(data: Collected, ascending: list[int], num_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    for sequence in ascending:
        if batches[-1] and int(data.lens[sequence]) * (len(batches[-1]) + 1) > num_tokens:
            batches.append([])
        batches[-1].append(sequence)
    return batches


def make_batch(data: Collected, chosen: list[int], *, passes: int, learned: torch.Tensor) -> Batch:
    """learned bool[N]: whether what follows the token of that row of the shards is to be predicted."""
    lens, starts = data.lens[chosen], data.starts[chosen]
    length = int(lens.max())
    places = torch.arange(length)
    there = places < lens[:, None]
    rows = (starts[:, None] + places).where(there, starts[:, None])
    tokens = torch.zeros(len(chosen), length + passes, dtype=torch.int64)
    tokens[:, :length] = data.ids[rows].where(there, torch.tensor(0))
    row, at = (learned[rows] & there & (places >= 1) & (places < lens[:, None] - 1)).nonzero(as_tuple=True)
    flat = starts[row] + at
    return Batch(
        tokens=tokens,
        features=data.features[rows].float(),
        row=row,
        at=at,
        valid=at >= torch.arange(1, passes + 1)[:, None],
        teacher=data.hidden[flat].float(),
        best=data.best[flat],
        following=data.ids[flat + 1],
    )


def evenly(chosen: list[int], lens: torch.Tensor, num_tokens: int) -> list[int]:
    """Of the chosen sequences as many as num_tokens allow, at least one, evenly spread. lens i64[S] of all."""
    share = min(1.0, num_tokens / float(lens[chosen].sum()))
    count = max(1, round(share * len(chosen)))
    return [chosen[i * len(chosen) // count] for i in range(count)]


def follows(data: Collected) -> torch.Tensor:
    """bool[N]: the model wrote the token after this one. False at the end of a sequence: nothing is known there."""
    after = torch.zeros_like(data.written)
    after[:-1] = data.written[1:]
    after[data.starts + data.lens - 1] = False
    return after


def draft_vocabulary(data: Collected, size: int, vocab_size: int) -> tuple[torch.Tensor, float]:
    """The `size` tokens that the target says most often in what is trained on, ascending, and their share of it."""
    train = follows(data) & ~data.held_out.repeat_interleave(data.lens)
    said = torch.cat([data.best[train], data.ids[1:][train[:-1]]])
    counts = said.bincount(minlength=vocab_size)
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    return ids, float(counts[ids].sum() / counts.sum().clamp(min=1))
