"""What sampling needs of one step, uploaded once: parameters per logits row, index tensors, and what the host knows.

A row of the plan that emits has a block of logits rows: the root's, then one per draft (or tree node). Block row i
stands `depth` tokens below the root and emits at absolute position `position + depth`.
Whatever no row of the batch asks for is None here and costs nothing: a batch of plain greedy rows is one argmax.

Legend: B rows of the plan, R logits rows, K widest draft, V vocabulary, Rs logits rows that are drawn (not greedy).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specd.frames import fresh_upload
from specd.request import SamplingParams
from specd.sampling.filters import Filters
from specd.sampling.noise import row_key
from specd.step import RowSampling, StepPlan

I64 = npt.NDArray[np.int64]

_TINY = float(np.finfo(np.float32).tiny)  # a smaller top_p would be 0 in fp32, and a mass of 0 keeps no token
WILDCARD = -2  # matches every token, also the -1 that stands before a sequence's first token


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Histories and strengths, per plan row. H = most distinct tokens in one history.

    An unused entry of `ids` repeats a used one with `counted` 0, so that it computes and writes the same value.
    """

    ids: torch.Tensor  # i64[B, H] distinct tokens of prompt and output
    counts: torch.Tensor  # f32[B, H] how often each was emitted
    counted: torch.Tensor  # f32[B, H] 1 where the entry is used
    present: torch.Tensor  # f32[B, H] 1 where the token is in the prompt or was emitted
    presence: torch.Tensor  # f32[B]
    frequency: torch.Tensor  # f32[B]
    repetition: torch.Tensor  # f32[B]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    rows: torch.Tensor  # i64[Ra] logits rows that are limited
    ids: torch.Tensor  # i64[Ra, A], padded by repetition


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BannedSequences:
    """One entry per logits row and banned sequence: its last token must not follow the others."""

    rows: torch.Tensor  # i64[E] logits row
    ids: torch.Tensor  # i64[E] the last token
    before: torch.Tensor  # i64[E, M] the tokens before it, newest first, WILDCARD-padded
    tail: torch.Tensor  # i64[B, M] newest tokens of each sequence, newest first, padded -1
    width: int  # M


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MinTokens:
    """One entry per logits row and end token of a sequence that has not reached its min_tokens."""

    rows: torch.Tensor  # i64[E]
    ids: torch.Tensor  # i64[E] eos and stop token ids
    remaining: torch.Tensor  # i64[E] tokens that must come first, from the root on


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """The logits rows that are drawn: all others are greedy."""

    rows: torch.Tensor | None  # i64[Rs], None = all R
    filters: Filters  # [Rs, 1] each


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    sequences: torch.Tensor  # i64[L] plan rows that ask
    num_top: int  # most alternatives asked for

    def width(self, vocab_size: int) -> int:
        """How many of a row's largest logits are looked for: one at least, and no more than there are."""
        return min(max(self.num_top, 1), vocab_size)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """See the module. Device tensors unless said otherwise."""

    num_rows: int  # R
    vocab_size: int
    max_drafts: int  # K
    num_drafts: torch.Tensor  # i64[B]
    emits: torch.Tensor  # bool[B]
    row_index: torch.Tensor  # i64[B, K + 1] logits row of each block row; past the block's end its first (or 0)
    root_offset: torch.Tensor  # i64[B] root among the row's query tokens: num_known - 1
    sequence: torch.Tensor  # i64[R] plan row
    node: torch.Tensor  # i64[R] index in the block: 0 = the root's row, i = that of draft i - 1
    depth: torch.Tensor  # i64[R] tokens below the root; equals `node` in a chain
    parent: torch.Tensor  # i64[R] logits row of the token before; the root's is itself
    ancestors: torch.Tensor | None  # bool[R, K]: draft k is among the tokens before row r; None = chain, k < depth
    point_mass: torch.Tensor | None  # bool[B, K] a proposer's token: a point mass whatever `DraftTokens.probs` says
    keys: torch.Tensor  # i64[R] noise key of the choice
    position: torch.Tensor  # i64[R] absolute position of the first token the sequence emits
    sampled: SampledRows | None = None  # None = all greedy
    bias: tuple[torch.Tensor, torch.Tensor] | None = None  # i64[B, Hb], f32[B, Hb], padded with 0 and 0.0
    penalties: Penalties | None = None
    allowed: AllowedTokens | None = None
    banned: BannedSequences | None = None
    min_tokens: MinTokens | None = None
    logprobs: Logprobs | None = None
    constrained: bool = False  # masks come with this batch: some row has a grammar

    @property
    def all_greedy(self) -> bool:
        return self.sampled is None

    @property
    def processes(self) -> bool:
        """Whether any parameter changes the logits before temperature."""
        steps = (self.bias, self.penalties, self.allowed, self.banned, self.min_tokens)
        return any(step is not None for step in steps)

    @property
    def needs_logits(self) -> bool:
        """False for a batch of greedy rows whose logits nothing changes: the largest of each row say everything.

        Also what is most likely, when their log-sum-exp comes with them (`TargetOutput.top`).
        """
        return not self.all_greedy or self.processes or self.constrained

    @property
    def emit_position(self) -> torch.Tensor:
        """i64[R] absolute position of the token that each logits row emits."""
        return self.position + self.depth


def sampling_batch(plan: StepPlan, vocab_size: int, device: torch.device) -> SamplingBatch:
    """The batch of a verify step: one block of num_drafts + 1 logits rows for each plan row that emits."""
    blocks = np.where(plan.emits != 0, plan.num_drafts + 1, 0).astype(np.int64)
    return _build(plan.sampling, blocks, plan, vocab_size, device)


def draft_batch(
    plan: StepPlan, vocab_size: int, device: torch.device, rows: Sequence[int] | None = None
) -> SamplingBatch:
    """One logits row per plan row in `rows` (all of them by default): what `draw_draft` reads.

    vocab_size is the drafter's. Only the parameters of the drawing itself are kept: a proposal may have any
    distribution, and a draft that penalties would forbid is merely rejected.
    """
    chosen = range(plan.num_rows) if rows is None else rows
    sampling = tuple(plan.sampling[row] if plan.sampling else None for row in chosen)
    return _build(sampling, np.ones(len(sampling), np.int64), None, vocab_size, device)


class _Uploader:
    """Numpy to device, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._upload = fresh_upload(device)

    def ints(self, values: Any) -> torch.Tensor:
        return self._upload("", np.asarray(values, np.int64))

    def floats(self, values: Any) -> torch.Tensor:
        return self._upload("", np.asarray(values, np.float32))

    def bools(self, values: Any) -> torch.Tensor:
        return self._upload("", np.asarray(values, np.bool_))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Host layout of the logits rows."""

    sizes: I64  # [B] logits rows of each plan row
    starts: I64  # [B]
    sequence: I64  # [R]
    node: I64  # [R] index in the block

    @classmethod
    def of(cls, sizes: I64) -> _Blocks:
        starts = np.cumsum(sizes) - sizes
        sequence = np.repeat(np.arange(len(sizes)), sizes)
        return cls(sizes=sizes, starts=starts, sequence=sequence, node=np.arange(len(sequence)) - starts[sequence])

    def rows(self, sequence: int) -> range:
        return range(int(self.starts[sequence]), int(self.starts[sequence] + self.sizes[sequence]))


def _build(
    sampling: tuple[RowSampling | None, ...], sizes: I64, plan: StepPlan | None, vocab_size: int, device: torch.device
) -> SamplingBatch:
    blocks = _Blocks.of(sizes)
    up = _Uploader(device)
    width = plan.max_drafts if plan is not None else 0
    columns = np.arange(width + 1)
    inside = columns < sizes[:, None]
    first = np.where(sizes > 0, blocks.starts, 0)
    emitting = [(row, state) for row, state in enumerate(sampling) if state is not None and sizes[row] > 0]
    keys, position = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    for row, state in emitting:
        keys[row], position[row] = row_key(*state.noise_key), state.position
    node = up.ints(blocks.node)
    features = _processing(emitting, blocks, up) if plan is not None else {}
    return SamplingBatch(
        num_rows=len(blocks.sequence),
        vocab_size=vocab_size,
        max_drafts=width,
        num_drafts=up.ints(np.maximum(sizes - 1, 0)),
        emits=up.bools(sizes > 0),
        row_index=up.ints(first[:, None] + np.where(inside, columns, 0)),
        root_offset=up.ints(plan.num_known - 1 if plan is not None else np.zeros(len(sizes))),
        sequence=up.ints(blocks.sequence),
        node=node,
        depth=node,
        parent=up.ints(np.arange(len(blocks.sequence)) - (blocks.node > 0)),
        ancestors=None,
        point_mass=_point_mass(plan, width, up) if plan is not None else None,
        keys=up.ints(keys[blocks.sequence]),
        position=up.ints(position[blocks.sequence]),
        sampled=_sampled(emitting, blocks, up, vocab_size),
        constrained=plan is not None and any(state.grammar is not None for _, state in emitting),
        **features,
    )


def _point_mass(plan: StepPlan, width: int, up: _Uploader) -> torch.Tensor | None:
    proposed = plan.host_drafts[:, :width] >= 0
    if not proposed.any():
        return None
    return up.bools(np.pad(proposed, ((0, 0), (0, width - proposed.shape[1]))))


Emitting = list[tuple[int, RowSampling]]


def _sampled(emitting: Emitting, blocks: _Blocks, up: _Uploader, vocab_size: int) -> SampledRows | None:
    drawn = [(row, state.params) for row, state in emitting if not state.params.greedy]
    if not drawn:
        return None
    params = [p for _, p in drawn]
    repeats = blocks.sizes[[row for row, _ in drawn]]
    rows = np.concatenate([np.asarray(blocks.rows(row), np.int64) for row, _ in drawn])
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    filters = Filters(
        temperature=up.floats(np.repeat([p.temperature for p in params], repeats)[:, None]),
        top_k=up.ints(np.repeat(top_k, repeats)[:, None]),
        top_p=up.floats(
            np.repeat([max(p.top_p, _TINY) if p.top_p < 1.0 else np.inf for p in params], repeats)[:, None]
        ),
        min_p=up.floats(np.repeat([p.min_p for p in params], repeats)[:, None]),
        max_top_k=max((k for k in top_k if k < vocab_size), default=0),
        any_top_p=any(p.top_p < 1.0 for p in params),
        any_min_p=any(p.min_p > 0.0 for p in params),
    )
    return SampledRows(rows=None if len(rows) == len(blocks.sequence) else up.ints(rows), filters=filters)


def _processing(emitting: Emitting, blocks: _Blocks, up: _Uploader) -> dict[str, Any]:
    """The optional parts that at least one row asks for, by field name."""
    num_sequences = len(blocks.sizes)
    out: dict[str, Any] = {}
    if asking := _asking(emitting, lambda p: bool(p.logit_bias)):
        out["bias"] = _bias(asking, num_sequences, up)
    if asking := _asking(emitting, lambda p: p.penalised):
        out["penalties"] = _penalties(asking, num_sequences, up)
    if asking := _asking(emitting, lambda p: p.allowed_token_ids is not None):
        out["allowed"] = _allowed(asking, blocks, up)
    if asking := _asking(emitting, lambda p: bool(p.bad_words_ids)):
        out["banned"] = _banned(asking, blocks, up)
    if asking := _asking(emitting, lambda p: p.logprobs is not None):
        out["logprobs"] = _logprobs(asking, up)
    waiting = [(row, state) for row, state in emitting if state.num_output < state.params.min_tokens]
    min_tokens = _min_tokens(waiting, blocks, up)
    return out if min_tokens is None else {**out, "min_tokens": min_tokens}


def _asking(emitting: Emitting, wanted: Callable[[SamplingParams], bool]) -> Emitting:
    return [(row, state) for row, state in emitting if wanted(state.params)]


def _bias(asking: Emitting, num_sequences: int, up: _Uploader) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(state.params.logit_bias) for _, state in asking)
    ids, values = np.zeros((num_sequences, width), np.int64), np.zeros((num_sequences, width), np.float32)
    for row, state in asking:
        for i, (token, value) in enumerate(state.params.logit_bias):
            ids[row, i], values[row, i] = token, value
    return up.ints(ids), up.floats(values)


def _penalties(asking: Emitting, num_sequences: int, up: _Uploader) -> Penalties:
    histories = {row: _history(state) for row, state in asking}
    width = max(1, max(len(ids) for ids, _ in histories.values()))
    ids, counts = np.zeros((num_sequences, width), np.int64), np.zeros((num_sequences, width), np.float32)
    counted, present = np.zeros_like(counts), np.zeros_like(counts)
    strengths = np.tile(np.asarray([[0.0], [0.0], [1.0]], np.float32), (1, num_sequences))
    for row, state in asking:
        history, emitted = histories[row]
        size = len(history)
        if size:
            ids[row], counts[row], present[row] = history[0], emitted[0], 1.0
            ids[row, :size], counts[row, :size], counted[row, :size] = history, emitted, 1.0
        p = state.params
        strengths[:, row] = p.presence_penalty, p.frequency_penalty, p.repetition_penalty
    return Penalties(
        ids=up.ints(ids),
        counts=up.floats(counts),
        counted=up.floats(counted),
        present=up.floats(present),
        presence=up.floats(strengths[0]),
        frequency=up.floats(strengths[1]),
        repetition=up.floats(strengths[2]),
    )


def _history(state: RowSampling) -> tuple[I64, npt.NDArray[np.float32]]:
    """Distinct tokens of output and prompt, and how often each was emitted (0 for those of the prompt alone)."""
    output = np.asarray(state.output_ids if state.output_ids is not None else (), np.int64)
    counts = np.asarray(state.output_counts if state.output_counts is not None else (), np.float32)
    prompt = np.asarray(state.prompt_ids if state.prompt_ids is not None else (), np.int64)
    if state.params.repetition_penalty == 1.0:
        prompt = prompt[:0]  # only repetition counts the prompt
    prompt = np.setdiff1d(prompt, output)
    return np.concatenate([output, prompt]), np.concatenate([counts, np.zeros(len(prompt), np.float32)])


def _allowed(asking: Emitting, blocks: _Blocks, up: _Uploader) -> AllowedTokens:
    lists = [state.params.allowed_token_ids or () for _, state in asking]
    width = max(len(ids) for ids in lists)
    padded = [[*ids, *[ids[0]] * (width - len(ids))] for ids in lists]
    repeats = blocks.sizes[[row for row, _ in asking]]
    rows = [r for row, _ in asking for r in blocks.rows(row)]
    return AllowedTokens(rows=up.ints(rows), ids=up.ints(np.repeat(padded, repeats, axis=0)))


def _banned(asking: Emitting, blocks: _Blocks, up: _Uploader) -> BannedSequences:
    width = max(1, max(len(word) for _, state in asking for word in state.params.bad_words_ids) - 1)
    entries: list[tuple[int, int, list[int]]] = []
    tail = np.full((len(blocks.sizes), width), -1, np.int64)
    for row, state in asking:
        newest = state.tail[::-1][:width]
        tail[row, : len(newest)] = newest
        for word in state.params.bad_words_ids:
            before = [*word[-2::-1], *[WILDCARD] * (width - len(word) + 1)]
            entries += [(r, word[-1], before) for r in blocks.rows(row)]
    return BannedSequences(
        rows=up.ints([e[0] for e in entries]),
        ids=up.ints([e[1] for e in entries]),
        before=up.ints([e[2] for e in entries]),
        tail=up.ints(tail),
        width=width,
    )


def _min_tokens(waiting: Emitting, blocks: _Blocks, up: _Uploader) -> MinTokens | None:
    rows: list[I64] = []
    ids: list[I64] = []
    remaining: list[I64] = []
    for row, state in waiting:
        ends = np.asarray(sorted({*state.eos_ids, *state.params.stop_token_ids}), np.int64)
        own = np.asarray(blocks.rows(row), np.int64)
        rows.append(np.repeat(own, len(ends)))
        ids.append(np.tile(ends, len(own)))
        remaining.append(np.full(len(own) * len(ends), state.params.min_tokens - state.num_output, np.int64))
    if not sum(map(len, ids)):
        return None
    return MinTokens(*(up.ints(np.concatenate(parts)) for parts in (rows, ids, remaining)))


def _logprobs(asking: Emitting, up: _Uploader) -> Logprobs:
    return Logprobs(
        sequences=up.ints([row for row, _ in asking]), num_top=max(state.params.logprobs or 0 for _, state in asking)
    )
