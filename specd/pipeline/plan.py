"""From the scheduler's rows to a StepPlan: host arrays only, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows

import numpy as np

from specd.corpora import Tally
from specd.pipeline.prompt_scores import scores_of
from specd.proposers.base import Proposal
from specd.sequence import Sequence
from specd.step import I32, DraftSource, Refill, RowSampling, StepPlan, indptr


@dataclasses.dataclass(slots=True)
class Row:
    """One sequence in one step."""

    sequence: Sequence
    num_known: int
    emits: bool
    source: DraftSource = DraftSource.NONE
    num_drafts: int = 0
    num_wanted: int = 0  # what the length policy gave; less is planned where tokens or pages ran out
    host_drafts: list[int] = dataclasses.field(default_factory=list)
    num_guessed: int = 0  # of host_drafts; what follows fills up to a pinned length
    tally: Tally | None = None  # is told what became of the guessed ones
    passed_over: Proposal | None = None  # what the drafter was preferred to
    refill: Refill = Refill.NONE
    num_refill: int = 0  # known tokens the drafter gets, from sequence.drafter_len on

    @property
    def num_predicted(self) -> int:
        """Drafts out of the request's prediction."""
        return min(self.num_drafts, self.num_guessed) if self.source is DraftSource.PREDICTION else 0


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan and the sequences behind its rows."""

    plan: StepPlan
    rows: tuple[Row, ...]

    @property
    def num_prefill_tokens(self) -> int:
        return sum(row.num_known for row in self.rows if row.num_known > 1 or not row.emits)


def build_plan(step: int, rows: Rows[Row], page_size: int) -> StepPlan:
    """Reads the sequences as they are now: computed lengths, pages, tokens, sampling state."""
    sequences = [row.sequence for row in rows]
    num_known = _i32(row.num_known for row in rows)
    num_drafts = _i32(row.num_drafts for row in rows)
    computed = _i32(sequence.num_computed for sequence in sequences)
    width = max((row.num_drafts for row in rows), default=0)
    host_drafts = np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        if row.host_drafts:
            host_drafts[i, : row.num_drafts] = row.host_drafts[: row.num_drafts]
    tokens = [s.tokens[s.num_computed : s.num_computed + row.num_known] for s, row in zip(sequences, rows, strict=True)]
    scores = [scores_of(row.sequence, row.num_known) for row in rows]
    refills = [s.tokens[s.drafter_len : s.drafter_len + row.num_refill] for s, row in zip(sequences, rows, strict=True)]
    return StepPlan(
        step=step,
        page_size=page_size,
        slots=_i32(sequence.slot for sequence in sequences),
        query_lens=num_known + num_drafts,
        kv_lens=computed + num_known + num_drafts,
        num_drafts=num_drafts,
        sources=_i32(row.source if row.num_drafts else DraftSource.NONE for row in rows),
        host_drafts=host_drafts,
        page_indptr=indptr(_i32(len(sequence.pages) for sequence in sequences)),
        page_indices=np.frombuffer(bytearray().join([sequence.pages for sequence in sequences]), np.int32),
        tokens=_i32(token for part in tokens for token in part),
        next_prompt_tokens=_i32(_next_prompt_token(row) for row in rows),
        emits=_i32(row.emits for row in rows),
        drafter_lens=_i32(sequence.drafter_len for sequence in sequences),
        refills=_i32(row.refill for row in rows),
        refill_indptr=indptr(_i32(len(part) for part in refills)),
        refill_tokens=_i32(token for part in refills for token in part),
        sampling=tuple(row_sampling(row.sequence) if row.emits else None for row in rows),
        prompt_scores=tuple(scores) if any(scores) else (),
    )


def _next_prompt_token(row: Row) -> int:
    """What a head pairs with the last known token it gets; -1 where that is a token this step emits."""
    sequence = row.sequence
    if row.refill == Refill.KNOWN:
        return sequence.tokens[sequence.drafter_len + row.num_refill]
    return -1 if row.emits else sequence.tokens[sequence.num_computed + row.num_known]


def row_sampling(sequence: Sequence) -> RowSampling:
    """A snapshot of what the next token of a sequence depends on, besides the logits."""
    params = sequence.sampling
    output_ids = output_counts = prompt_ids = None
    if params.penalised:
        output_ids = _i32(sequence.output_counts.keys())
        output_counts = _i32(sequence.output_counts.values())
    if params.repetition_penalty != 1.0:
        prompt_ids = sequence.prompt_ids()
    longest = max(map(len, params.bad_words_ids), default=0)
    return RowSampling(
        params=params,
        eos_ids=sequence.eos_ids,
        noise_key=(params.seed, sequence.request.prompt_index, sequence.index),
        position=len(sequence.tokens),
        num_output=sequence.num_output,
        output_ids=output_ids,
        output_counts=output_counts,
        prompt_ids=prompt_ids,
        tail=tuple(sequence.tokens[-(longest - 1) :]) if longest > 1 else (),
        grammar=sequence.grammar,
        tells_drafts=sequence.request.speculation.detail == "tokens",
    )


def _i32(values: object) -> I32:
    return np.fromiter(values, np.int32)  # type: ignore[call-overload, no-any-return]
