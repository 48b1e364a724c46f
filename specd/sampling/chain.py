"""Acceptance of draft chains: which drafts are kept, and the token after them.

    logits [R, V] -> process -> rule(drafts) -> tokens [B, K + 1], num_accepted [B] -> failed rows, log-probabilities

The rules (spec: methods 1.0-1.6) are one table of functions with one signature:

    exact      the match rule: the target draws with its own noise, a draft is kept while it equals that draw
    ratio      rejection sampling by Leviathan 2211.17192, with the drafts' true distribution or a point mass
    literal    ratio with an argmax draft and the draft model's soft distribution. Lossy: the trap of methods 1.2
    threshold  keeps the longest prefix that the target finds probable enough. Lossy
    typical    Medusa's entropy-dependent threshold. Lossy

Invariants: 0 <= num_accepted <= num_drafts; a row emits num_accepted + 1 tokens, or none (not emitting, failed);
what happens in one row depends on that row alone.

Legend: B rows of the plan, K drafts, R logits rows, V vocabulary; p the target's distribution, q the draft's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from specd.config import SpeculationConfig
from specd.kernels import step as kernel
from specd.sampling.batch import SamplingBatch
from specd.sampling.logprobs import emitted_logprobs
from specd.sampling.noise import Purpose, position_keys, uniform
from specd.sampling.process import Distribution, process, race
from specd.step import StepPlan
from specd.tensors import (
    Acceptance,
    BatchInfo,
    BestTokens,
    DraftState,
    DraftTokens,
    LogitMasks,
    TargetOutput,
    TopTokens,
)

_CONFIGURED = SpeculationConfig()  # its defaults are the only ones


@dataclasses.dataclass(frozen=True, slots=True)
class AcceptanceSettings:
    """Constants of the lossy rules (`config.LOSSY_ACCEPTANCE`); exact and ratio have none."""

    threshold: float = _CONFIGURED.threshold  # least score of a kept prefix
    threshold_score: Literal["min", "prod"] = _CONFIGURED.threshold_score  # over p(x) of the prefix
    typical_threshold: float = _CONFIGURED.typical_threshold  # Medusa's posterior_threshold
    typical_alpha: float = _CONFIGURED.typical_alpha  # Medusa's posterior_alpha


DEFAULT_SETTINGS = AcceptanceSettings()

# (the target's [R, V], drafts, batch, settings) -> (tokens i64[B, K + 1] padded -1, num_accepted i64[B])
Rule = Callable[[Distribution, DraftTokens, SamplingBatch, AcceptanceSettings], tuple[torch.Tensor, torch.Tensor]]


def accept(
    output: TargetOutput,
    drafts: DraftTokens,
    plan: StepPlan,
    info: BatchInfo,
    sampling: SamplingBatch,
    *,
    rule: str = "exact",
    masks: LogitMasks | None = None,
    settings: AcceptanceSettings = DEFAULT_SETTINGS,
) -> Acceptance:
    """The accept stage of a chain batch: plain sampling when K = 0.

    drafts.tokens i64[B, K] with K = plan.max_drafts. A row fails when a logits row that it uses has NaN, +inf, or
    nothing that may be drawn, before the filters or after them; it then emits nothing, and its next_token is a valid
    but meaningless id.
    """
    assert drafts.tokens.shape == (plan.num_rows, plan.max_drafts), (drafts.tokens.shape, plan.max_drafts)
    if sampling.num_rows == 0:
        return nothing_emitted(plan, info, sampling)
    if output.best is not None and masks is None and not sampling.needs_logits:
        return keep_best(output.best, output.top, drafts, info, sampling)
    logits = output.all_logits()
    processed = processed_logits(logits, drafts.tokens, sampling, masks)
    if sampling.all_greedy:
        # p is one-hot in every row: all rules coincide, and one pass gives both the argmax and what is finite.
        peaks, drawn = processed.max(-1)
        tokens, num_accepted = keep_matching(drawn, drafts.tokens, sampling)
        finite = torch.isfinite(peaks)  # a maximum is NaN, +inf or -inf exactly when its row must not be used
    else:
        target = Distribution(processed, sampling)
        tokens, num_accepted = ACCEPTANCE_RULES[rule](target, drafts, sampling, settings)
        finite = target.finite()
    finite = usable_rows(finite, processed, logits)
    return finish(logits, finite, info, sampling, tokens, num_accepted, sampling.row_index, num_accepted)


def keep_best(
    best: BestTokens, top: TopTokens | None, drafts: DraftTokens, info: BatchInfo, sampling: SamplingBatch
) -> Acceptance:
    """`accept` of plain greedy rows. p is one-hot in every row, so all rules coincide. top: for log-probabilities."""
    if sampling.logprobs is None and kernel.takes(best.values):
        return kernel.accept(
            best,
            drafts.tokens,
            info,
            row_index=sampling.row_index,
            num_drafts=sampling.num_drafts,
            emits=sampling.emits,
            root_offset=sampling.root_offset,
        )
    tokens, num_accepted = keep_matching(best.tokens, drafts.tokens, sampling)
    finite = torch.isfinite(best.values)  # a maximum is NaN, +inf or -inf exactly when its row must not be used
    return finish(top, finite, info, sampling, tokens, num_accepted, sampling.row_index, num_accepted)


def processed_logits(
    logits: torch.Tensor, drafts: torch.Tensor, sampling: SamplingBatch, masks: LogitMasks | None
) -> torch.Tensor:
    """`process`, but for a plain greedy batch the logits as they are: not even a cast."""
    if sampling.all_greedy and not sampling.processes and masks is None:
        return logits
    return process(logits, drafts, sampling, masks)


def usable_rows(finite: torch.Tensor, processed: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """finite bool[R] of the processed logits -> bool[R]: and the raw ones, whose NaN a mask may have hidden."""
    return finite if processed is logits else finite & torch.isfinite(logits.amax(-1))


def nothing_emitted(plan: StepPlan, info: BatchInfo, sampling: SamplingBatch) -> Acceptance:
    """The result of a step in which no row emits."""
    zeros = torch.zeros_like(sampling.num_drafts)
    return Acceptance(
        tokens=zeros.new_full((plan.num_rows, plan.max_drafts + 1), -1),
        num_accepted=zeros,
        next_token=zeros,
        last_row=info.qo_indptr[:-1].long() + sampling.root_offset,
        failed=zeros.bool(),
    )


def finish(
    scores: torch.Tensor | TopTokens | None,
    finite: torch.Tensor,
    info: BatchInfo,
    sampling: SamplingBatch,
    tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    rows: torch.Tensor,
    last_node: torch.Tensor,
) -> Acceptance:
    """What follows from the tokens, for chains and trees: failed rows, the newest token, log-probabilities.

    scores as `emitted_logprobs` takes them; None where no row asks.
    finite bool[R]; tokens i64[B, W]; rows i64[B, W] the logits row of each token; last_node i64[B] the block row that
    gave the newest token.
    """
    used = torch.arange(tokens.shape[1], device=tokens.device) <= num_accepted[:, None]
    failed = (used & ~finite[rows]).any(-1) & sampling.emits
    silent = failed | ~sampling.emits
    tokens = tokens.masked_fill(silent[:, None], -1)
    num_accepted = num_accepted.masked_fill(silent, 0)
    logprobs = top_ids = top_logprobs = None
    if sampling.logprobs is not None:
        assert scores is not None
        logprobs, top_ids, top_logprobs = emitted_logprobs(scores, rows, tokens, sampling.logprobs)
    return Acceptance(
        tokens=tokens,
        num_accepted=num_accepted,
        next_token=tokens.gather(1, num_accepted[:, None])[:, 0].clamp(min=0),
        last_row=info.qo_indptr[:-1].long() + sampling.root_offset + last_node.masked_fill(silent, 0),
        failed=failed,
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def keep_matching(drawn: torch.Tensor, drafts: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The match rule given the target's draws i64[R]."""
    own = drawn[batch.row_index]
    num_accepted = _leading(drafts == own[:, :-1], batch)
    columns = torch.arange(own.shape[1], device=own.device)
    return own.masked_fill(columns > num_accepted[:, None], -1), num_accepted


def accept_match(
    target: Distribution, drafts: DraftTokens, batch: SamplingBatch, settings: AcceptanceSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact (methods 1.0): the tokens are those of plain decoding with the same seed, whatever was proposed."""
    return keep_matching(target.draw(purpose=Purpose.TARGET), drafts.tokens, batch)


def accept_ratio(
    target: Distribution, drafts: DraftTokens, batch: SamplingBatch, settings: AcceptanceSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling (methods 1.1): keep x while u q(x) < p(x), then draw from relu(p - q), or from p at the end.

    Without `drafts.probs`, and for proposers' tokens, q is a point mass: keep x with probability p(x), then draw from
    p without x (methods 1.2).
    """
    p = target.probabilities()
    tokens = drafts.tokens.clamp(min=0)
    rows = batch.row_index[:, :-1]
    q_x = _proposal(drafts, tokens, batch)
    coins = uniform(_keys(rows, batch, Purpose.ACCEPT))
    num_accepted = _leading((coins * q_x < p[rows, tokens]) & (drafts.tokens >= 0), batch)
    last = batch.row_index.gather(1, num_accepted[:, None])[:, 0]
    rejected = num_accepted < batch.num_drafts
    weights = _residual(p[last], drafts, batch, num_accepted, rejected)
    keys = torch.where(rejected, _keys(last, batch, Purpose.RECOVER), _keys(last, batch, Purpose.BONUS))
    return _append(drafts.tokens, num_accepted, race(weights, keys)), num_accepted


def accept_threshold(
    target: Distribution, drafts: DraftTokens, batch: SamplingBatch, settings: AcceptanceSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lossy (methods 1.6): keep the longest prefix whose score reaches the threshold, then draw from p."""
    p_x = _target_of_drafts(target.probabilities(), drafts, batch)
    score = p_x.cumprod(-1) if settings.threshold_score == "prod" else p_x.cummin(-1).values if p_x.shape[1] else p_x
    # p(x) = 0: a draft that is forbidden, or not there, which a threshold of 0 must not keep either.
    return _keep_then_draw((score >= settings.threshold) & (p_x > 0), target, drafts, batch)


def accept_typical(
    target: Distribution, drafts: DraftTokens, batch: SamplingBatch, settings: AcceptanceSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lossy (methods 4.4, Medusa 2401.10774): keep x while p(x) > min(threshold, alpha exp(-entropy of p))."""
    p = target.probabilities()
    entropy = -(p * torch.log(p + 1e-5)).sum(-1)
    least = (settings.typical_alpha * torch.exp(-entropy)).clamp(max=settings.typical_threshold)
    kept = _target_of_drafts(p, drafts, batch) > least[batch.row_index[:, :-1]]
    return _keep_then_draw(kept, target, drafts, batch)


ACCEPTANCE_RULES: dict[str, Rule] = {
    "exact": accept_match,
    "ratio": accept_ratio,
    "literal": accept_ratio,  # the same comparison; what is wrong with it is how its drafts are drawn
    "threshold": accept_threshold,
    "typical": accept_typical,
}


def draw_draft(
    state: DraftState, batch: SamplingBatch, offset: int, *, rule: str = "exact"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft token `offset` (0 = the first) of every row, and the distribution it was drawn from if the rule needs it.

    state of the drafter, with logits (`draws` said so); batch from `draft_batch` -> tokens i64[B], probs f32[B, V] or
    None. Under the exact rule a drawn draft shares the target's noise, which is what makes it likely to equal the
    target's draw.
    """
    assert state.logits is not None
    # A greedy row's logits may be those of an earlier step, when nobody drew: its best token is always of this one.
    given = Distribution(state.logits.float(), batch, state.best)
    if rule == "literal":
        return state.best, given.probabilities()
    if rule != "ratio":
        return given.draw(purpose=Purpose.TARGET, offset=offset), None
    probs = given.probabilities()
    keys = position_keys(batch.keys, batch.emit_position + offset, Purpose.DRAFT)
    return race(probs, keys), probs


def _keys(rows: torch.Tensor, batch: SamplingBatch, purpose: Purpose) -> torch.Tensor:
    """Noise keys of the given logits rows, any shape."""
    return position_keys(batch.keys[rows], batch.emit_position[rows], purpose)


def _leading(kept: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """bool[B, K] -> how many leading drafts of each row are kept: i64[B]."""
    columns = torch.arange(kept.shape[1], device=kept.device)
    return (kept & (columns < batch.num_drafts[:, None])).long().cumprod(-1).sum(-1)


def _append(drafts: torch.Tensor, num_accepted: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """Kept drafts, then the newest token, then -1: i64[B, K + 1]."""
    columns = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    tokens = F.pad(drafts, (0, 1), value=-1).masked_fill(columns >= num_accepted[:, None], -1)
    return tokens.scatter_(1, num_accepted[:, None], newest[:, None])


def _proposal(drafts: DraftTokens, tokens: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """q(x) of every draft: f32[B, K]."""
    if drafts.probs is None:
        return torch.ones(tokens.shape, device=tokens.device)
    q_x = drafts.probs.gather(-1, tokens.clamp(max=drafts.probs.shape[-1] - 1)[..., None])[..., 0]
    if batch.point_mass is not None:
        q_x = q_x.masked_fill(batch.point_mass, 1.0)
    return q_x.masked_fill(q_x <= 0, float("inf"))  # a token its own distribution excludes is never kept


def _residual(
    p: torch.Tensor, drafts: DraftTokens, batch: SamplingBatch, num_accepted: torch.Tensor, rejected: torch.Tensor
) -> torch.Tensor:
    """Unnormalised weights f32[B, V] of the newest token, p f32[B, V] being the target's distribution there."""
    num_drafts = drafts.tokens.shape[1]
    if num_drafts == 0:
        return p
    index = num_accepted.clamp(max=num_drafts - 1)[:, None]
    token = drafts.tokens.gather(1, index)
    weights = p.scatter(1, token.clamp(min=0), 0.0)
    if drafts.probs is not None:
        q = drafts.probs[torch.arange(len(p), device=p.device), index[:, 0]]
        soft = torch.relu(p - F.pad(q, (0, p.shape[1] - q.shape[1])))
        point = batch.point_mass.gather(1, index) if batch.point_mass is not None else torch.zeros_like(token).bool()
        weights = torch.where(point, weights, soft)
    # p equal to q up to rounding leaves nothing, and a broken q leaves NaN: p itself is then the right thing to draw.
    some = rejected[:, None] & (token >= 0) & (weights.sum(-1, keepdim=True) > 0)
    return torch.where(some, weights, p)


def _target_of_drafts(p: torch.Tensor, drafts: DraftTokens, batch: SamplingBatch) -> torch.Tensor:
    """p(x) of every draft f32[B, K], 0 where there is none."""
    return p[batch.row_index[:, :-1], drafts.tokens.clamp(min=0)].masked_fill(drafts.tokens < 0, 0.0)


def _keep_then_draw(
    kept: torch.Tensor, target: Distribution, drafts: DraftTokens, batch: SamplingBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    num_accepted = _leading(kept, batch)
    own = target.draw(purpose=Purpose.TARGET)[batch.row_index]
    newest = own.gather(1, num_accepted[:, None])[:, 0]
    return _append(drafts.tokens, num_accepted, newest), num_accepted
