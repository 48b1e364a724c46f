"""From raw logits to what a token is drawn from: every parameter, exact at every draft position.

The logits row of block row i is processed with the history as it would be if the drafts above it had been emitted, so
a step of K drafts treats a sequence as K + 1 steps of one token would (plain decoding is the same code with K = 0).

Legend: B rows of the plan, R logits rows, K drafts, V vocabulary, H history, E entries, M tokens before a last one.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from specd.kernels import draw as kernel
from specd.sampling.batch import (
    WILDCARD,
    AllowedTokens,
    BannedSequences,
    MinTokens,
    Penalties,
    SampledRows,
    SamplingBatch,
)
from specd.sampling.filters import filtered_probabilities
from specd.sampling.noise import Purpose, exponential, position_keys
from specd.tensors import LogitMasks

NEVER = float("-inf")


def process(
    logits: torch.Tensor, drafts: torch.Tensor, batch: SamplingBatch, masks: LogitMasks | None = None
) -> torch.Tensor:
    """Bias, penalties, allowed and banned tokens, min_tokens, then the grammar's masks.

    logits [R, V] of any float type (not modified), drafts i64[B, K] (-1 = none) -> f32[R, V]; when nothing is asked
    for this is the logits themselves in fp32. A row of which nothing is left is all -inf.
    """
    if not batch.processes and masks is None:
        return logits.float()
    out = logits.to(torch.float32, copy=True)
    if batch.bias is not None:
        ids, values = batch.bias
        out.scatter_add_(1, ids[batch.sequence], values[batch.sequence])
    if batch.penalties is not None:
        _penalise(out, drafts, batch, batch.penalties)
    if batch.allowed is not None:
        _allow(out, batch.allowed)
    if batch.banned is not None:
        _ban(out, drafts, batch, batch.banned)
    if batch.min_tokens is not None:
        _hold_back_ends(out, batch, batch.min_tokens)
    if masks is not None:
        out += _unpack(masks.words, out.shape[1])
    return out


class Distribution:
    """What the token of each logits row is drawn from: filtered once, whoever asks.

    Rows are drawn by the CPU kernels where they can (`specd.kernels.draw.takes`), all of them by the same arithmetic: a
    row's token must not depend on who shares its batch. Only rules that read probabilities have them computed.
    """

    def __init__(self, processed: torch.Tensor, batch: SamplingBatch, best: torch.Tensor | None = None) -> None:
        """processed f32[R, V] of `process`, not modified; best i64[R]: greedy rows' tokens where they are known."""
        self.processed = processed
        self.batch = batch
        self._best = best
        self._usable: torch.Tensor | None = None  # bool[Rs] sampled rows that the kernels could draw from

    @functools.cached_property
    def filtered(self) -> torch.Tensor | None:
        """f32[Rs, V]: what temperature, top-k, top-p and min-p leave of the sampled rows; None when all are greedy."""
        sampled = self.batch.sampled
        if sampled is None:
            return None
        rows = self.processed if sampled.rows is None else self.processed.index_select(0, sampled.rows)
        return filtered_probabilities(rows, sampled.filters)

    @property
    def best(self) -> torch.Tensor:
        """i64[R]: what greedy rows take, the lowest id among equals."""
        return self.processed.argmax(-1) if self._best is None else self._best

    def finite(self) -> torch.Tensor:
        """bool[R]: there is something to draw, both in the logits and in what the filters left of them."""
        finite = torch.isfinite(self.processed.amax(-1))
        if self.batch.sampled is None:
            return finite
        left = self._usable
        if left is None:
            assert self.filtered is not None
            peaks = self.filtered.amax(-1)  # NaN where a row holds any
            left = (peaks > 0) & torch.isfinite(peaks)
        rows = self.batch.sampled.rows
        return finite & left if rows is None else finite.index_copy(0, rows, finite.index_select(0, rows) & left)

    def probabilities(self) -> torch.Tensor:
        """f32[R, V]; greedy rows are one-hot."""
        rows = None if self.batch.sampled is None else self.batch.sampled.rows
        if self.filtered is not None and rows is None:
            return self.filtered
        out = torch.zeros_like(self.processed).scatter_(1, self.best[:, None], 1.0)
        return out if self.filtered is None or rows is None else out.index_copy_(0, rows, self.filtered)

    def draw(self, *, purpose: Purpose, offset: int = 0) -> torch.Tensor:
        """One token per logits row, with the noise of (seed, choice, position + offset, token): i64[R].

        Greedy rows take the largest logit, the lowest id among equals. A row that is not finite gives some valid id.
        """
        batch = self.batch
        if batch.sampled is None:
            return self.best
        keys = position_keys(batch.keys, batch.emit_position + offset, purpose)
        rows = batch.sampled.rows
        drawn = self._draw(batch.sampled, keys if rows is None else keys.index_select(0, rows))
        return drawn if rows is None else self.best.index_copy(0, rows, drawn)

    def _draw(self, sampled: SampledRows, keys: torch.Tensor) -> torch.Tensor:
        """i64[Rs] of the sampled rows."""
        if not kernel.takes(self.processed):
            assert self.filtered is not None
            return race(self.filtered, keys)
        filters = sampled.filters
        tokens, self._usable = kernel.draw(
            self.processed,
            sampled.rows,
            keys,
            temperature=filters.temperature,
            top_k=filters.top_k,
            top_p=filters.top_p,
            min_p=filters.min_p,
        )
        return tokens


def race(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A draw per row in proportion to weights f32[R, V] >= 0 (any scale), keys i64[R] -> i64[R]."""
    return kernel.race(weights, keys) if kernel.takes(weights) else torch_race(weights, keys)


def torch_race(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    noise = exponential(keys, weights.shape[1])
    return torch.div(weights, noise, out=noise).argmax(-1)


def _visible(drafts: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """f32[R, K]: 1 where draft k comes before the token that row r emits."""
    above = batch.ancestors
    if above is None:
        above = torch.arange(drafts.shape[1], device=drafts.device) < batch.depth[:, None]
    return (above & (drafts >= 0)[batch.sequence]).float()


def _penalise(logits: torch.Tensor, drafts: torch.Tensor, batch: SamplingBatch, penalties: Penalties) -> None:
    """Repetition (prompt and output), then frequency and presence (output alone), only where a token occurs.

    Works on the few tokens of history and drafts: an entry's count is what it was at the root plus the visible drafts
    equal to it. A token with several entries gets the same value from each, so the order of writing is irrelevant.
    """
    sequence = batch.sequence
    tokens = drafts.clamp(min=0)
    visible = _visible(drafts, batch)[:, None, :]
    ids = torch.cat([penalties.ids, tokens], dim=1)  # [B, H + K]
    in_history = (penalties.ids[:, :, None] == tokens[:, None, :]) * penalties.counted[:, :, None]  # [B, H, K]
    counts = torch.cat([penalties.counts, (in_history * penalties.counts[:, :, None]).sum(1)], dim=1)
    present = torch.cat([penalties.present, (in_history * penalties.present[:, :, None]).sum(1)], dim=1)
    equal = (ids[:, :, None] == tokens[:, None, :]).float()  # [B, H + K, K]
    drafted = (equal[sequence] * visible).sum(-1)  # [R, H + K]
    counts = counts[sequence] + drafted
    seen = present[sequence] + drafted > 0
    ids = ids[sequence]
    values = logits.gather(1, ids)
    repetition = penalties.repetition[sequence][:, None]
    values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
    values -= penalties.frequency[sequence][:, None] * counts
    values -= penalties.presence[sequence][:, None] * (counts > 0)
    logits.scatter_(1, ids, values)


def _allow(logits: torch.Tensor, allowed: AllowedTokens) -> None:
    rows = logits.index_select(0, allowed.rows)
    kept = torch.full_like(rows, NEVER).scatter_(1, allowed.ids, rows.gather(1, allowed.ids))
    logits.index_copy_(0, allowed.rows, kept)


def _ban(logits: torch.Tensor, drafts: torch.Tensor, batch: SamplingBatch, banned: BannedSequences) -> None:
    context = _context(drafts, batch, banned)[banned.rows]  # [E, M]
    matches = ((context == banned.before) | (banned.before == WILDCARD)).all(-1)
    _forbid(logits, banned.rows, banned.ids, matches)


def _context(drafts: torch.Tensor, batch: SamplingBatch, banned: BannedSequences) -> torch.Tensor:
    """i64[R, M] the tokens before the one that each row emits, newest first: drafts above it, then the tail."""
    own = F.pad(drafts, (1, 0), value=-1)[batch.sequence, batch.node]  # each row's own token; the root's is in the tail
    row = torch.arange(batch.num_rows, device=drafts.device)
    columns = []
    for back in range(banned.width):
        drafts_left = batch.depth - back
        older = banned.tail[batch.sequence, (-drafts_left).clamp(min=0)]
        columns.append(torch.where(drafts_left > 0, own[row], older))
        row = batch.parent[row]
    return torch.stack(columns, dim=1)


def _hold_back_ends(logits: torch.Tensor, batch: SamplingBatch, min_tokens: MinTokens) -> None:
    _forbid(logits, min_tokens.rows, min_tokens.ids, batch.depth[min_tokens.rows] < min_tokens.remaining)


def _forbid(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, when: torch.Tensor) -> None:
    """Adds -inf at (rows, ids)[E] where `when`. Adding, so that entries of one token cannot undo each other."""
    zero = logits.new_zeros(())
    logits.index_put_((rows, ids), torch.where(when, zero + NEVER, zero), accumulate=True)


def _unpack(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """i32[R, ceil(V / 32)] bits -> f32[R, V]: 0 where a token is allowed, else -inf.

    To add them is faster than to fill by a mask (on one core, five rows of 49,152: 0.14 ms instead of 1.0). A logit of
    +inf becomes NaN: no row with either is used.
    """
    addends = _byte_addends(words.device)
    rows = addends.index_select(0, words.view(torch.uint8).flatten().int())
    return rows.view(len(words), -1)[:, :vocab_size]


@functools.cache
def _byte_addends(device: torch.device) -> torch.Tensor:
    """f32[256, 8]: what each bit of a byte adds, the lowest first (words are little-endian)."""
    bits = torch.arange(256)[:, None] >> torch.arange(8)
    return torch.zeros(256, 8).masked_fill(bits % 2 == 0, NEVER).to(device)
