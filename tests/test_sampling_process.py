"""Logit processing: every parameter, at every draft position, and the filters against plain references."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specd.request import SamplingParams
from specd.sampling.batch import SamplingBatch, draft_batch, sampling_batch
from specd.sampling.filters import mass_threshold
from specd.sampling.logprobs import emitted_logprobs
from specd.sampling.noise import Purpose
from specd.sampling.process import Distribution, process
from specd.step import RowSampling
from specd.tensors import LogitMasks
from tests.sampling_plans import CPU, advance, params, plan_of, row

V = 23
EOS = (2,)
PROMPT = (5, 6, 7, 5, 9)
OUTPUT = (8, 3, 8, 8)
DRAFTS = (3, 11, 3, 5)

CASES: dict[str, SamplingParams] = {
    "logit_bias": params(logit_bias=((4, 3.5), (11, -100.0), (0, 1.25))),
    "presence": params(presence_penalty=0.7),
    "frequency": params(frequency_penalty=0.4),
    "negative frequency": params(frequency_penalty=-1.1),
    "repetition": params(repetition_penalty=1.3),
    "all penalties": params(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.2),
    "allowed": params(allowed_token_ids=(5, 6, 11)),
    "banned": params(bad_words_ids=((7,), (3, 11), (8, 3, 11), (11, 3, 5), (8, 8, 3), (9, 1), (4, 11))),
    "min_tokens": params(min_tokens=6, stop_token_ids=(3, 14)),
    "everything": params(
        logit_bias=((4, 3.5),),
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.2,
        allowed_token_ids=tuple(range(18)),
        bad_words_ids=((7,), (3, 11)),
        min_tokens=6,
        stop_token_ids=(3,),
    ),
}


def random_logits(rows: int, *, seed: int = 0, vocab_size: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    return Distribution(logits, batch).draw(purpose=Purpose.TARGET)


def probabilities(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    return Distribution(logits, batch).probabilities()


def tokens(*rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def processed(states: list[RowSampling | None], drafts: list[list[int]], logits: torch.Tensor) -> torch.Tensor:
    """Rows of drafts of any length; logits in row order."""
    width = max(len(d) for d in drafts)
    padded = torch.tensor([[*d, *[-1] * (width - len(d))] for d in drafts], dtype=torch.int64).view(len(drafts), width)
    batch = sampling_batch(plan_of(states, [len(d) for d in drafts]), logits.shape[1], CPU)
    return process(logits, padded, batch)


@pytest.mark.parametrize("name", list(CASES))
def test_every_draft_position_is_what_plain_decoding_would_compute(name: str) -> None:
    state = row(CASES[name], prompt=PROMPT, output=OUTPUT, eos=EOS)
    logits = random_logits(len(DRAFTS) + 1)
    together = processed([state], [list(DRAFTS)], logits)
    for i in range(len(DRAFTS) + 1):
        later = advance(state, PROMPT, [*OUTPUT, *DRAFTS[:i]])
        alone = processed([later], [[]], logits[i : i + 1])
        assert torch.equal(together[i], alone[0]), i
    assert not torch.equal(together, logits)
    # The position matters: the root's history applied to a later row would be a fault this test sees.
    if name not in ("logit_bias", "allowed"):
        stale = processed([state], [[]], logits[-1:])
        assert not torch.equal(together[-1], stale[0])


def test_a_mixed_batch_is_its_rows_one_by_one() -> None:
    """All cases, a greedy row and a prompt chunk in one batch, with different numbers of drafts."""
    states: list[RowSampling | None] = [row(p, prompt=PROMPT, output=OUTPUT, eos=EOS) for p in CASES.values()]
    states += [None, row(params(temperature=0.0)), row(CASES["presence"])]
    drafts = [[3, 11, 3, 5][: i % 5] for i in range(len(states))]
    drafts[-3] = []
    sizes = [0 if state is None else len(d) + 1 for state, d in zip(states, drafts, strict=True)]
    logits = random_logits(sum(sizes))
    together = processed(states, drafts, logits)
    start = 0
    for state, chain, size in zip(states, drafts, sizes, strict=True):
        if state is not None:
            mine = slice(start, start + size)
            assert torch.equal(together[mine], processed([state], [chain], logits[mine]))
        start += size


def penalised_by_hand(
    logits: torch.Tensor, p: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    out = logits.clone()
    for token in range(len(out)):
        count = list(output).count(token)
        if count or token in prompt:
            out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
        out[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return out


def test_penalties_are_what_their_definition_says() -> None:
    p = params(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.2)
    logits = random_logits(5, seed=4)
    state = row(p, prompt=PROMPT, output=OUTPUT)
    together = processed([state], [list(DRAFTS)], logits)
    for i in range(5):
        expected = penalised_by_hand(logits[i], p, PROMPT, [*OUTPUT, *DRAFTS[:i]])
        torch.testing.assert_close(together[i], expected, atol=1e-5, rtol=0)


def test_presence_and_frequency_ignore_the_prompt() -> None:
    state = row(params(presence_penalty=1.0, frequency_penalty=1.0), prompt=PROMPT)
    logits = random_logits(1)
    assert torch.equal(processed([state], [[]], logits), logits)


def test_banned_sequences_at_the_start_of_a_sequence() -> None:
    """The -1 before the first token completes nothing, and a single banned token needs no history."""
    state = row(params(bad_words_ids=((1, 1, 4), (9,), (1, 6))), prompt=(1,))
    out = processed([state], [[-1]], torch.zeros(2, V))
    banned = [{t for t in range(V) if out[i, t] == -math.inf} for i in range(2)]
    assert banned == [{9, 6}, {9}]


def test_min_tokens_counts_tokens_not_steps() -> None:
    state = row(params(min_tokens=3, stop_token_ids=(4,), ignore_eos=False), output=(7,), eos=(2, 3))
    out = processed([state], [[5, 5, 5]], torch.zeros(4, V))
    held = [[t for t in range(V) if out[i, t] == -math.inf] for i in range(4)]
    assert held == [[2, 3, 4], [2, 3, 4], [], []]


def test_grammar_masks_hold_per_row() -> None:
    batch = sampling_batch(plan_of([row(params())], [1]), 40, CPU)
    words = np.zeros((2, 2), np.uint32)
    words[0, 0], words[0, 1] = 1 << 31 | 1, 1 << 7
    words[1] = 0xFFFFFFFF
    logits = random_logits(2, vocab_size=40)
    out = process(logits, tokens([3]), batch, LogitMasks(words=torch.from_numpy(words.view(np.int32))))
    assert [t for t in range(40) if out[0, t] > -math.inf] == [0, 31, 39]
    assert torch.equal(out[1], logits[1])


def test_the_input_is_never_modified() -> None:
    state = row(CASES["everything"], prompt=PROMPT, output=OUTPUT, eos=EOS)
    logits = random_logits(5)
    before = logits.clone()
    processed([state], [list(DRAFTS)], logits)
    assert torch.equal(logits, before)


def test_a_plain_batch_costs_nothing() -> None:
    batch = sampling_batch(plan_of([row(params(temperature=0.0)), None], [2, 0]), V, CPU)
    logits = random_logits(3)
    assert batch.all_greedy
    assert not batch.processes
    assert process(logits, tokens([1, 2], [-1, -1]), batch) is logits


def test_nan_stays_in_its_row() -> None:
    states: list[RowSampling | None] = [row(p, prompt=PROMPT, output=OUTPUT, eos=EOS) for p in CASES.values()]
    batch = sampling_batch(plan_of(states, [0] * len(states)), V, CPU)
    logits = random_logits(len(states))
    drafts = torch.empty(len(states), 0, dtype=torch.int64)
    clean = process(logits, drafts, batch)
    dirty_logits = logits.clone()
    dirty_logits[3] = math.nan
    dirty = process(dirty_logits, drafts, batch)
    others = [i for i in range(len(states)) if i != 3]
    assert torch.equal(dirty[others], clean[others])
    first, second = draw(dirty, batch), draw(clean, batch)
    assert torch.equal(first[others], second[others])
    assert 0 <= int(first[3]) < V


# ---- filters


def filtered_by_sorting(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """One row in fp64, by sorting; ties at a boundary are kept."""
    scaled = logits.double() / p.temperature
    if 0 < p.top_k < len(logits):
        scaled[scaled < scaled.sort(descending=True).values[p.top_k - 1]] = -math.inf
    probs = scaled.softmax(-1)
    if p.top_p < 1:
        mass_above = torch.stack([probs[probs > value].sum() for value in probs])
        probs = probs * (mass_above < p.top_p)
    probs = probs * (probs >= p.min_p * probs.max())
    return probs / probs.sum()


FILTERS = [
    params(temperature=0.7),
    params(temperature=1.6, top_k=5),
    params(top_p=0.8),
    params(top_p=0.2),
    params(top_p=0.999),
    params(min_p=0.2),
    params(temperature=0.9, top_k=9, top_p=0.7),
    params(temperature=1.3, top_k=12, top_p=0.9, min_p=0.1),
    params(top_k=400),
    params(top_k=1),
    params(top_p=0.0),
    params(temperature=0.0),
]


def test_filters_equal_their_definition_in_one_mixed_batch() -> None:
    logits = random_logits(len(FILTERS), seed=8)
    batch = sampling_batch(plan_of([row(p) for p in FILTERS], [0] * len(FILTERS)), V, CPU)
    probs = probabilities(logits, batch)
    for i, p in enumerate(FILTERS):
        if p.temperature == 0.0 or p.top_k == 1 or p.top_p == 0.0:
            expected = torch.zeros(V).double().index_fill_(0, logits[i].argmax(), 1.0)
        else:
            expected = filtered_by_sorting(logits[i], p)
        torch.testing.assert_close(probs[i].double(), expected, atol=1e-6, rtol=0)
        assert bool(((probs[i] > 0) == (expected > 0)).all()), p


def test_ties_at_a_boundary_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])

    def kept(p: SamplingParams) -> list[int]:
        probs = probabilities(logits, sampling_batch(plan_of([row(p)], [0]), 6, CPU))
        return [i for i in range(6) if probs[0, i] > 0]

    assert kept(params(top_k=2)) == [0, 2, 3, 4]
    assert kept(params(top_k=4)) == [0, 2, 3, 4]
    assert kept(params(top_k=5)) == [0, 1, 2, 3, 4]
    assert kept(params(top_p=0.5)) == [0, 2, 3, 4]
    assert kept(params(top_p=0.3)) == [0]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    batch = sampling_batch(plan_of([row(params(temperature=0.0)), row(params(top_k=1))], [0, 0]), 5, CPU)
    drawn = draw(torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]] * 2), batch)
    assert drawn.equal(torch.tensor([1, 1]))


@pytest.mark.parametrize("vocab_size", [1, 7, 5000])
def test_mass_threshold_by_brute_force(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    probs = torch.softmax(torch.randn(12, vocab_size, generator=generator) * 3, -1)
    probs[::3, ::2] = probs[::3, :1]  # ties
    probs[1::4, 1:] = 0.0
    probs /= probs.sum(-1, keepdim=True)
    for mass in (1e-6, 0.1, 0.5, 0.9, 0.99):
        threshold = mass_threshold(probs, torch.full((12, 1), mass))
        for i in range(12):
            ordered = probs[i].double().sort(descending=True).values
            values = ordered[(ordered.cumsum(-1) - ordered) < mass]
            # fp32 sums may disagree about a token whose bound is hit within rounding; the mass kept must still do.
            kept = probs[i][probs[i] >= threshold[i]].double()
            assert kept.sum() >= mass - 1e-5
            assert kept[kept > kept.min()].sum() < mass + 1e-5
            assert abs(len(kept) - len(ordered[ordered >= values.min()])) <= 1
    assert torch.equal(mass_threshold(probs, torch.full((12, 1), math.inf)), torch.zeros(12, 1))


def test_probabilities_do_not_depend_on_the_other_rows() -> None:
    logits = random_logits(len(FILTERS), vocab_size=900)
    together = probabilities(logits, sampling_batch(plan_of([row(p) for p in FILTERS], [0] * len(FILTERS)), 900, CPU))
    for i, p in enumerate(FILTERS):
        alone = probabilities(logits[i : i + 1], sampling_batch(plan_of([row(p)], [0]), 900, CPU))
        torch.testing.assert_close(together[i], alone[0], atol=1e-7, rtol=1e-5)


# ---- noise positions


def test_a_draft_row_draws_what_plain_decoding_draws_later() -> None:
    """Row i's noise is that of position + i: of the K = 0 step after i more tokens."""
    state = row(params(seed=77), prompt=PROMPT, output=OUTPUT)
    logits = random_logits(5, seed=3) * 0.1
    batch = sampling_batch(plan_of([state], [4]), V, CPU)
    drawn = draw(logits, batch)
    for i in range(5):
        later = sampling_batch(plan_of([advance(state, PROMPT, [*OUTPUT, *DRAFTS[:i]])], [0]), V, CPU)
        assert int(draw(logits[i : i + 1], later)) == int(drawn[i])
    shifted = draw(logits, draft_batch(plan_of([state], [4]), V, CPU, rows=[0] * 5))
    assert not torch.equal(shifted, drawn)  # the same position five times


# ---- log-probabilities


def test_logprobs_are_of_the_raw_logits_and_only_where_asked() -> None:
    states = [row(params(logprobs=2, temperature=0.3)), row(params()), row(params(logprobs=0))]
    batch = sampling_batch(plan_of(states, [1, 1, 0]), V, CPU)
    logits = random_logits(5)
    assert batch.logprobs is not None
    emitted = tokens([4, 9], [1, 2], [6, -1])
    logprobs, ids, values = emitted_logprobs(logits, batch.row_index, emitted, batch.logprobs)
    raw = logits.log_softmax(-1)
    expected = torch.tensor([[raw[0, 4], raw[1, 9]], [0.0, 0.0], [raw[4, 6], 0.0]])
    torch.testing.assert_close(logprobs, expected)
    assert ids is not None
    assert values is not None
    assert torch.equal(ids[0], logits[:2].topk(2).indices)
    torch.testing.assert_close(values[0], raw[:2].topk(2).values)
    assert bool((ids[1] == -1).all())
    assert bool((ids[2, 1] == -1).all())


def test_top_logprobs_order_equals_by_id_in_any_dtype() -> None:
    batch = sampling_batch(plan_of([row(params(logprobs=4))], [0]), 6, CPU)
    assert batch.logprobs is not None
    logits = torch.tensor([[-1.0, 2.0, 0.5, 2.0, -3.0, 2.0]], dtype=torch.bfloat16)
    _, ids, _ = emitted_logprobs(logits, batch.row_index, tokens([1]), batch.logprobs)
    assert ids is not None
    assert ids.flatten().equal(torch.tensor([1, 3, 5, 2]))
