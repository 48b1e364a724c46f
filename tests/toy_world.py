"""The toy world of the distribution tests: tables of a target p(. | prefix) and a draft q(. | prefix) over V tokens."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from scipy import stats

from specd.sampling.batch import SamplingBatch, draft_batch, sampling_batch
from specd.sampling.chain import AcceptanceSettings, accept, draw_draft
from specd.step import StepPlan
from specd.tensors import Acceptance, BatchInfo, DraftState, DraftTokens, TargetOutput
from tests.sampling_plans import CPU, info_of, params, plan_of, row

V = 6
ALPHA = 1e-4
NUM_ROWS = 20_000
ROUNDS = 5  # 100,000 sequences per test, two steps each

Tables = tuple[torch.Tensor, torch.Tensor]  # p [V + 1, V], q [V + 1, V]: by the last token, the last row for none


def tables(kind: str, *, seed: int = 0) -> Tables:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(V) * 0.8, V + 1), rng.dirichlet(np.ones(V) * 0.8, V + 1)
    if kind == "zeros in p":
        p[:, 1::3] = 0.0
    elif kind == "zeros in q":
        q[:, ::3] = 0.0
    elif kind == "equal":
        q = p.copy()
    elif kind == "disjoint":
        p[:, : V // 2], q[:, V // 2 :] = 0.0, 0.0
    elif kind == "one-hot p":
        p = np.eye(V)[rng.integers(0, V, V + 1)]
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return torch.from_numpy(p).float(), torch.from_numpy(q).float()


KINDS = ["random", "zeros in p", "zeros in q", "equal", "disjoint", "one-hot p"]


@functools.cache
def world(num_drafts: int, rows: int = NUM_ROWS) -> tuple[StepPlan, BatchInfo, SamplingBatch, SamplingBatch]:
    """Plan, info, target and draft batch of `rows` sampled rows; `reseeded` gives them new noise each round."""
    plan = plan_of([row(params())] * rows, [num_drafts] * rows)
    return plan, info_of(plan), sampling_batch(plan, V, CPU), draft_batch(plan, V, CPU)


def reseeded(batch: SamplingBatch, round_: int, position: torch.Tensor) -> SamplingBatch:
    seeds = torch.from_numpy(np.random.default_rng(round_).integers(-(2**63), 2**63, len(batch.num_drafts)))
    return dataclasses.replace(batch, keys=seeds[batch.sequence], position=position[batch.sequence])


def draw(
    logits: torch.Tensor, drafting: SamplingBatch, offset: int, *, rule: str, sampled: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `grow_chain` does: without `sampled` the best token is drafted."""
    state = DraftState.of(logits)
    if rule != "literal" and not sampled:
        return state.best, None
    return draw_draft(state, drafting, offset, rule=rule)


def step(
    p: torch.Tensor, q: torch.Tensor, last: torch.Tensor, position: torch.Tensor, *, num_drafts: int, round_: int,
    rule: str, sampled: bool, settings: AcceptanceSettings,
) -> Acceptance:  # fmt: skip
    """One whole step of NUM_ROWS sequences whose newest tokens are `last` (V = none yet)."""
    plan, info, base, draft_base = world(num_drafts)
    target, drafting = (reseeded(batch, round_, position) for batch in (base, draft_base))
    drafts, probs, logits, here = [], [], [p[last].log()], last
    for j in range(num_drafts):
        here, q_here = draw(q[here].log(), drafting, j, rule=rule, sampled=sampled)
        drafts.append(here)
        if q_here is not None:
            probs.append(q_here)
        logits.append(p[here].log())
    return accept(
        TargetOutput(logits=torch.stack(logits, 1).flatten(0, 1)),
        DraftTokens(
            tokens=torch.stack(drafts, 1) if drafts else torch.empty((len(last), 0), dtype=torch.int64),
            probs=torch.stack(probs, 1) if probs else None,
        ),
        plan, info, target, rule=rule, settings=settings,
    )  # fmt: skip


def first_two_tokens(
    kind: str, *, num_drafts: int, rule: str, sampled: bool, settings: AcceptanceSettings | None = None
) -> np.ndarray:
    """Counts [V, V] of the first two emitted tokens over many sequences; a second step where one token came."""
    p, q = tables(kind)
    counts = np.zeros((V, V))
    for round_ in range(ROUNDS):
        run = functools.partial(
            step, p, q, num_drafts=num_drafts, round_=round_, rule=rule, sampled=sampled,
            settings=settings or AcceptanceSettings(),
        )  # fmt: skip
        start = torch.zeros(NUM_ROWS, dtype=torch.int64)
        emitted = run(torch.full((NUM_ROWS,), V), start).tokens
        first = emitted[:, 0]
        second = emitted[:, 1] if num_drafts else torch.full_like(first, -1)
        again = run(first, start + 1).tokens[:, 0]
        np.add.at(counts, (first.numpy(), torch.where(second >= 0, second, again).numpy()), 1)
    return counts


def p_values(counts: np.ndarray, kind: str) -> tuple[float, float]:
    """Of the first token against p_1, and of the first two against p_1 x p_2; 0 when something impossible came."""
    p, _ = (table.double().numpy() for table in tables(kind))
    joint = p[V][:, None] * p[:V]
    return goodness(counts.sum(1), p[V]), goodness(counts.ravel(), joint.ravel())


def goodness(counts: np.ndarray, probs: np.ndarray) -> float:
    probs = probs / probs.sum()
    if counts[probs <= 0].sum():
        return 0.0
    expected = probs * counts.sum()
    large = expected >= 5
    observed = [*counts[large], counts[~large].sum()]
    wanted = [*expected[large], expected[~large].sum()]
    cells = [(o, e) for o, e in zip(observed, wanted, strict=True) if e > 0]
    if len(cells) < 2:
        return 1.0
    return float(stats.chisquare([o for o, _ in cells], [e for _, e in cells]).pvalue)
