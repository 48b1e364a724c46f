"""Acceptance through the real stage function: the distribution of what is emitted, with negative controls."""

from __future__ import annotations

import pytest
import torch

from specd.config import LOSSY_ACCEPTANCE
from specd.sampling.chain import AcceptanceSettings, accept
from specd.tensors import DraftTokens, TargetOutput
from tests.toy_world import ALPHA, KINDS, NUM_ROWS, V, draw, first_two_tokens, p_values, reseeded, step, tables, world


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rule", "sampled"), [("exact", True), ("exact", False), ("ratio", True), ("ratio", False)])
def test_lossless_rules_have_the_targets_distribution(kind: str, rule: str, sampled: bool) -> None:
    first, joint = p_values(first_two_tokens(kind, num_drafts=2, rule=rule, sampled=sampled), kind)
    assert first > ALPHA
    assert joint > ALPHA


@pytest.mark.parametrize("rule", ["exact", "ratio"])
@pytest.mark.parametrize("num_drafts", [0, 1])
def test_plain_decoding_and_the_bonus_token(rule: str, num_drafts: int) -> None:
    first, joint = p_values(first_two_tokens("random", num_drafts=num_drafts, rule=rule, sampled=True), "random")
    assert first > ALPHA
    assert joint > ALPHA


NEGATIVE: list[tuple[str, bool, AcceptanceSettings]] = [
    ("literal", False, AcceptanceSettings()),
    ("threshold", True, AcceptanceSettings(threshold=0.1)),
    ("threshold", False, AcceptanceSettings(threshold_score="prod", threshold=0.05)),
    ("typical", True, AcceptanceSettings()),
    ("typical", False, AcceptanceSettings()),
]


@pytest.mark.parametrize(("rule", "sampled", "settings"), NEGATIVE)
def test_lossy_rules_fail_the_same_test(rule: str, sampled: bool, settings: AcceptanceSettings) -> None:
    counts = first_two_tokens("random", num_drafts=2, rule=rule, sampled=sampled, settings=settings)
    assert min(p_values(counts, "random")) < ALPHA
    assert rule in LOSSY_ACCEPTANCE


def test_the_trap_in_numbers() -> None:
    """methods 1.2: p = (.5, .5), q = (.8, .2): read literally, token 0 comes with probability .625."""
    plan, info, base, drafting = world(1)
    p, q = (torch.tensor(x).log().expand(NUM_ROWS, 2) for x in ((0.5, 0.5), (0.8, 0.2)))
    shares = {}
    for rule in ("literal", "ratio", "exact"):
        tokens, probs = draw(q, drafting, 0, rule=rule, sampled=False)
        batch = reseeded(base, 5, torch.zeros(NUM_ROWS, dtype=torch.int64))
        drafts = DraftTokens(tokens=tokens[:, None], probs=None if probs is None else probs[:, None])
        out = accept(TargetOutput(logits=p.repeat_interleave(2, 0)), drafts, plan, info, batch, rule=rule)
        shares[rule] = float((out.tokens[:, 0] == 0).float().mean())
    assert shares["literal"] == pytest.approx(0.625, abs=0.012)
    assert shares["ratio"] == pytest.approx(0.5, abs=0.012)
    assert shares["exact"] == pytest.approx(0.5, abs=0.012)


def test_sampled_drafts_are_accepted_as_often_as_the_theory_says() -> None:
    """ratio: 1 - TV(p, q), the optimum; exact: less, but far more than with argmax drafts on average."""
    p, q = tables("random")
    last, zeros = torch.full((NUM_ROWS,), V), torch.zeros(NUM_ROWS, dtype=torch.int64)
    kept = {}
    for rule in ("ratio", "exact"):
        out = step(p, q, last, zeros, num_drafts=1, round_=0, rule=rule, sampled=True, settings=AcceptanceSettings())
        kept[rule] = float(out.num_accepted.float().mean())
    best = float(torch.minimum(p[V], q[V]).sum())
    assert kept["ratio"] == pytest.approx(best, abs=0.015)
    assert best / (2 - best) - 0.015 < kept["exact"] <= best + 0.015


def test_a_drawn_draft_of_the_same_distribution_is_always_kept() -> None:
    """Under the match rule draft and target share their noise."""
    p, _ = tables("random")
    last, zeros = torch.full((NUM_ROWS,), V), torch.zeros(NUM_ROWS, dtype=torch.int64)
    out = step(p, p, last, zeros, num_drafts=3, round_=2, rule="exact", sampled=True, settings=AcceptanceSettings())
    assert bool((out.num_accepted == 3).all())
