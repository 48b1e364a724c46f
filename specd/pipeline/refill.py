"""Stage 5, on the draft stream: the drafter catches up on what was accepted, and its logits are carried.

    EXACT   await report -> tokens the drafter lacks: [missing known .., accepted it never saw .., newest]
    PADDED  no wait: the target's own batch, tokens shifted left by one, the newest token inserted at the last row;
            rows behind it are junk that later steps overwrite before reading

    carry[slot] = state after the newest token        (rows that did not catch up to it keep their old carry)

The next schedule runs on the host meanwhile. A refill that fails costs drafts, never a request.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from specd.device import Device, Handle
from specd.drafters.base import Drafter
from specd.kernels import step as kernel
from specd.kv import PagedFeatures
from specd.pipeline.draft import DraftRule
from specd.pipeline.verify import VerifyBatch
from specd.step import I32, AcceptanceReport, DraftSource, Refill, RefillMode, StepPlan, indptr
from specd.tensors import Acceptance, DraftState, TargetOutput, batch_info


@dataclasses.dataclass(frozen=True, slots=True)
class Missing:
    """What an EXACT refill computes, on the host: only rows with something to do."""

    rows: list[int]
    tokens: list[list[int]]
    starts: list[int]  # position (= drafter KV slot) of each row's first token
    carried: list[int]  # rows (of `rows`) whose last token is the newest one


def missing_tokens(plan: StepPlan, report: AcceptanceReport, *, shifted: bool) -> Missing:
    """Tokens the drafter has no KV for: known ones first, then what this step accepted.

    An LM draft that drafted d_1..d_K itself holds d_1..d_min(a, K-1); with all K accepted it lacks two, [d_K, newest].
    A head's slot i holds (h_i, t_i+1): its tokens are shifted left by one, and the target's features overwrite its own.
    """
    out = Missing([], [], [], [])
    for row in range(plan.num_rows):
        mode = int(plan.refills[row])
        if mode == Refill.NONE:
            continue
        known = plan.refill_tokens[plan.refill_indptr[row] : plan.refill_indptr[row + 1]].tolist()
        start = int(plan.drafter_lens[row])
        emitted = report.tokens[row, : report.num_accepted[row] + 1].tolist() if mode == Refill.NEWEST else []
        if report.failed[row]:
            continue
        if shifted:
            known = known[1:] + ([int(plan.next_prompt_tokens[row])] if mode == Refill.KNOWN else [])
        elif mode == Refill.NEWEST and not known and plan.sources[row] == DraftSource.DRAFTER:
            drafted = int((report.drafts[row, : plan.num_drafts[row]] >= 0).sum())
            kept = min(int(report.num_accepted[row]), max(drafted - 1, 0))
            start, emitted = start + kept, emitted[kept:]
        tokens = known + emitted
        if tokens:
            if mode == Refill.NEWEST:
                out.carried.append(len(out.rows))
            out.rows.append(row)
            out.tokens.append(tokens)
            out.starts.append(start)
    return out


def refill_exact(
    drafter: Drafter,
    features: PagedFeatures | None,
    plan: StepPlan,
    report: AcceptanceReport,
    carry: DraftState,
    rule: DraftRule,
    device: torch.device,
) -> DraftState:
    """One ragged forward over the missing tokens; writes the drafter's KV and the carry."""
    missing = missing_tokens(plan, report, shifted=drafter.traits.shifted)
    if not missing.rows:
        return carry
    query_lens = np.asarray([len(tokens) for tokens in missing.tokens], np.int32)
    page_indptr, page_indices = _pages(plan, missing.rows)
    info = batch_info(
        query_lens=query_lens,
        kv_lens=np.asarray(missing.starts, np.int32) + query_lens,
        page_indptr=page_indptr,
        page_indices=page_indices,
        slots=plan.slots[missing.rows],
        page_size=plan.page_size,
        device=device,
    )
    tokens = torch.tensor([token for part in missing.tokens for token in part], dtype=torch.int64).to(device)
    read = None if features is None else features.read(info.write_slots)
    carried = torch.tensor(missing.carried, dtype=torch.int64).to(device)
    last_rows = info.qo_indptr[1:].long() - 1
    state = drafter.refill(tokens, read, info, last_rows[carried], logits=rule.reads_logits(plan))
    return write_carry(carry, info.slots[carried], state)


def refill_padded(
    drafter: Drafter,
    batch: VerifyBatch,
    output: TargetOutput,
    accepted: Acceptance,
    plan: StepPlan,
    carry: DraftState,
    rule: DraftRule,
) -> DraftState:
    """The head over the target's own batch, without a host wait."""
    info = batch.info
    assert output.tokens is not None
    tokens, last_rows = shift_left(output.tokens, batch, accepted)
    state = drafter.refill(tokens, output.features, info, last_rows, logits=rule.reads_logits(plan))
    # Rows in the middle of a prompt write their slot's carry too: the row that emits overwrites it before any draft.
    return write_carry(carry, info.slots, state)


def shift_left(tokens: torch.Tensor, batch: VerifyBatch, accepted: Acceptance) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's tokens i64[T], and the packed row i64[B] after which each row's carry stands.

    tokens i64[T], as the target computed them, move one to the left; at the row of the newest token, or of the last
    one of a prompt's chunk, the token that follows is inserted. What is behind it stays junk.
    """
    info, emits = batch.info, batch.sampling.emits
    if kernel.takes(tokens):
        return kernel.shift_left(tokens, info, emits, accepted, batch.next_prompt)
    last_rows = torch.where(emits, accepted.last_row, info.qo_indptr[1:].long() - 1)
    inserted = torch.where(emits, accepted.next_token, batch.next_prompt)
    return torch.cat([tokens[1:], tokens[-1:]]).index_copy(0, last_rows, inserted), last_rows


def write_carry(carry: DraftState, slots: torch.Tensor, state: DraftState) -> DraftState:
    """Copies state rows into the carry at slots i64[B], in place."""
    carry.best.index_copy_(0, slots, state.best)
    for kept, new in ((carry.logits, state.logits), (carry.hidden, state.hidden)):
        if kept is not None and new is not None:
            kept.index_copy_(0, slots, new.to(kept.dtype))
    return carry


def _pages(plan: StepPlan, rows: list[int]) -> tuple[I32, I32]:
    parts = [plan.pages(row) for row in rows]
    return indptr(np.asarray([len(part) for part in parts], np.int32)), np.concatenate(parts)


class RefillStage:
    """Launches the drafter's catch-up on the draft stream."""

    def __init__(self, drafter: Drafter, device: Device, *, features: PagedFeatures | None, rule: DraftRule) -> None:
        self._drafter = drafter
        self._features = features
        self._rule = rule
        self._device = device
        self._stream = device.stream("refill")

    def padded(self, plan: StepPlan) -> bool:
        """Whether this step's refill can reuse the target's batch: no row has a hole to fill first."""
        contiguous = plan.drafter_lens == plan.kv_lens - plan.query_lens
        return self._drafter.traits.refill_mode is RefillMode.PADDED and bool((contiguous & (plan.refills > 0)).all())

    def launch_exact(self, plan: StepPlan, report: AcceptanceReport, carry: Handle[DraftState]) -> Handle[DraftState]:
        return self._stream.launch(
            refill_exact,
            self._drafter,
            self._features,
            plan,
            report,
            carry,
            self._rule,
            self._device.torch_device,
            stage="refill",
            step=plan.step,
        )

    def launch_padded(
        self,
        plan: StepPlan,
        batch: Handle[VerifyBatch],
        output: Handle[TargetOutput],
        accepted: Handle[Acceptance],
        carry: Handle[DraftState],
    ) -> Handle[DraftState]:
        return self._stream.launch(
            refill_padded,
            self._drafter,
            batch,
            output,
            accepted,
            plan,
            carry,
            self._rule,
            stage="refill",
            step=plan.step,
        )
