"""Stage 2, on the draft stream: a chain of guesses per row.

    carry[slot] -> d_1          no forward: the logits were carried over from the last refill
    extend(d_1) -> d_2 ... extend(d_K-1) -> d_K

Rows may want different lengths: row b takes part until it has its num_drafts[b]. Proposals of the host are copied in.
A drafter that fails costs this step's drafts and nothing else: they stay -1, which matches no token.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from specd.device import Device, Handle
from specd.drafters.base import Drafter
from specd.log import get_logger
from specd.sampling.batch import draft_batch
from specd.sampling.chain import draw_draft
from specd.step import DraftSource, StepPlan, indptr
from specd.tensors import BatchInfo, DraftState, DraftTokens, batch_info

log = get_logger(__name__)


def host_drafts(plan: StepPlan, device: torch.device) -> torch.Tensor:
    """The plan's proposals on the device, i64[B, K], -1 where the drafter or nobody proposes."""
    return torch.from_numpy(plan.host_drafts.astype(np.int64)).to(device, non_blocking=True)


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRule:
    """How drafts are drawn."""

    acceptance: str = "exact"
    argmax: bool = False  # also where the request samples; then there are no proposal distributions

    def draws(self, plan: StepPlan) -> bool:
        """Whether any row's drafts are drawn from a distribution.

        A row's own answer never changes, so a carry has the logits of every row that draws; the same of what it tells.
        """
        if self.acceptance == "literal":
            return True
        return not self.argmax and any(row is not None and not row.params.greedy for row in plan.sampling)

    def reads_logits(self, plan: StepPlan) -> bool:
        """Whether more is asked of the drafter than its best tokens: to draw, or to tell how sure it was."""
        return self.draws(plan) or any(row is not None and row.tells_drafts for row in plan.sampling)


def grow_chain(
    drafter: Drafter, plan: StepPlan, rows: list[int], rule: DraftRule, carry: DraftState, device: torch.device
) -> DraftTokens:
    """Drafts for `rows` (those whose source is the drafter), next to the host's proposals for the others."""
    tokens = host_drafts(plan, device)
    probs: torch.Tensor | None = None
    logits = rule.reads_logits(plan)
    lengths = plan.num_drafts[rows]
    sampling = draft_batch(plan, drafter.vocab_size, device, rows) if rule.draws(plan) else None
    confidence = torch.ones(tokens.shape, device=device) if _tells(plan, rows) else None
    state = DraftState(  # only what will be read of it
        carry.best, carry.logits if logits else None, carry.hidden if lengths.max() > 1 else None
    ).rows(torch.from_numpy(plan.slots[rows].astype(np.int64)).to(device))
    for depth in range(int(lengths.max())):
        drawn, drawn_probs = state.best, None
        if sampling is not None:
            drawn, drawn_probs = draw_draft(state, sampling, depth, rule=rule.acceptance)
        index = torch.tensor(rows, dtype=torch.int64).to(device)
        tokens[index, depth] = drawn
        if drawn_probs is not None:
            if probs is None:
                probs = torch.zeros((*tokens.shape, drawn_probs.shape[-1]), device=device)
            probs[index, depth] = drawn_probs
        if confidence is not None:
            confidence[index, depth] = _probabilities(state, drawn)
        going = [i for i, length in enumerate(lengths) if length > depth + 1]
        if going:
            state = _keep(state, going, device)
            if sampling is not None and len(going) < len(rows):
                sampling = draft_batch(plan, drafter.vocab_size, device, [rows[i] for i in going])
            rows, lengths = [rows[i] for i in going], lengths[going]
            drawn = drawn[torch.tensor(going, dtype=torch.int64).to(device)]
            state = drafter.extend(drawn, state, _one_token(plan, rows, depth, drafter, device), logits=logits)
    return DraftTokens(tokens=tokens, probs=probs, confidence=confidence)


def _tells(plan: StepPlan, rows: list[int]) -> bool:
    sampling = [plan.sampling[row] for row in rows] if plan.sampling else []
    return any(row is not None and row.tells_drafts for row in sampling)


def _probabilities(state: DraftState, tokens: torch.Tensor) -> torch.Tensor:
    """What the drafter gave tokens i64[B], before temperature and filters: f32[B]. Only rows that tell have a value."""
    assert state.logits is not None
    logits = state.logits.float()
    return torch.exp(logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1))


def _keep(state: DraftState, rows: list[int], device: torch.device) -> DraftState:
    if len(rows) == len(state.best):
        return state
    return state.rows(torch.tensor(rows, dtype=torch.int64).to(device))


def _one_token(plan: StepPlan, rows: list[int], depth: int, drafter: Drafter, device: torch.device) -> BatchInfo:
    """Batch information of the forward that processes draft `depth` (0-based) of each row.

    With the root at position n an LM draft has processed it already and writes slot n + 1 + depth; a head pairs the
    root's feature with the first draft and writes slot n + depth.
    """
    root = plan.kv_lens[rows] - plan.num_drafts[rows]  # tokens up to and including the root
    pages = [plan.pages(row) for row in rows]
    return batch_info(
        query_lens=np.ones(len(rows), np.int32),
        kv_lens=(root + depth + drafter.traits.extra_slots).astype(np.int32),
        page_indptr=indptr(np.asarray([len(part) for part in pages], np.int32)),
        page_indices=np.concatenate(pages),
        slots=plan.slots[rows],
        page_size=plan.page_size,
        device=device,
    )


class DraftStage:
    """Launches drafting on the draft stream."""

    def __init__(self, drafter: Drafter | None, device: Device, *, rule: DraftRule) -> None:
        self._drafter = drafter
        self._device = device
        self._rule = rule
        self._stream = device.stream("draft")

    def launch(self, plan: StepPlan, carry: Handle[DraftState] | None) -> tuple[Handle[DraftTokens], int]:
        """Drafts of a step, and how many drafter forwards they take."""
        device = self._device.torch_device
        rows = np.flatnonzero((plan.sources == DraftSource.DRAFTER) & (plan.num_drafts > 0)).tolist()
        if self._drafter is None or carry is None or not rows:
            # The handle of the last refill is waited for all the same: verify may reuse pages it still writes.
            fallback = _Fallback(plan, device, drafted=False)
            return self._stream.launch(_proposals, plan, device, carry, on_error=fallback), 0
        handle = self._stream.launch(
            grow_chain,
            self._drafter,
            plan,
            rows,
            self._rule,
            carry,
            device,
            stage="draft",
            step=plan.step,
            on_error=_Fallback(plan, device, drafted=True),
        )
        return handle, int(plan.num_drafts[rows].max()) - 1


def _proposals(plan: StepPlan, device: torch.device, after: object) -> DraftTokens:
    return DraftTokens(tokens=host_drafts(plan, device))


class _Fallback:
    """A failed draft means K = 0: the proposals of the host alone, -1 for the drafter's."""

    def __init__(self, plan: StepPlan, device: torch.device, *, drafted: bool) -> None:
        self._plan = plan
        self._device = device
        self._drafted = drafted  # else only the last refill, waited for, failed: the loop tells

    def __call__(self, error: Exception) -> DraftTokens:
        if self._drafted:
            log.warning("draft_failed", step=self._plan.step, error=repr(error))
        return DraftTokens(tokens=host_drafts(self._plan, self._device))
