"""Grammar masks through the accept stage: one mask per draft position, obeyed by every emitted token.

The grammar is a toy that a host could compile: token t may be followed by u when (t + u) % 3 == 0, so the mask of a
position depends on the draft before it. The target is a table of logits by newest token.

Legend: B rows, K drafts, R logits rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from specd.frames import fresh_upload
from specd.pipeline.accept import accept_rows
from specd.pipeline.verify import upload
from specd.sampling.chain import DEFAULT_SETTINGS
from specd.step import RowSampling
from specd.tensors import Acceptance, DraftTokens, LogitMasks, TargetOutput
from tests.sampling_plans import CPU, advance, params, plan_of, row

VOCAB_SIZES = [31, 33, 50, 64, 97]
NUM_ROWS, LENGTH = 6, 24

Allow = Callable[[int], torch.Tensor]  # newest token -> bool[V]


def pack(allowed: torch.Tensor, *, padding: int = 0) -> LogitMasks:
    """bool[R, V] -> words; `padding` is the bit that stands past the vocabulary's end."""
    rows, vocab = allowed.shape
    bits = np.full((rows, -(-vocab // 32) * 32), padding, np.uint8)
    bits[:, :vocab] = allowed.numpy()
    words = np.packbits(bits, axis=1, bitorder="little").view("<u4")
    return LogitMasks(words=torch.from_numpy(words.view(np.int32).copy()))


def grammar(vocab: int) -> Allow:
    tokens = torch.arange(vocab)
    return lambda last: (tokens + last) % 3 == 0


def table_of(vocab: int) -> torch.Tensor:
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(vocab)) * 2


def step(
    states: list[RowSampling],
    table: torch.Tensor,
    lasts: list[int],
    drafts: torch.Tensor,
    masks: LogitMasks | None,
    *,
    rule: str = "exact",
) -> Acceptance:
    """One accept stage: lasts are the rows' newest tokens, drafts i64[B, K]."""
    plan = plan_of(states, [drafts.shape[1]] * len(states))
    before = torch.cat([torch.tensor(lasts)[:, None], drafts], dim=1).flatten()
    output = TargetOutput(logits=table[before])
    return accept_rows(
        rule,
        DEFAULT_SETTINGS,
        plan,
        upload(plan, fresh_upload(CPU), table.shape[1]),
        DraftTokens(tokens=drafts),
        output,
        masks,
    )


def masks_of(allow: Allow, lasts: list[int], drafts: torch.Tensor) -> torch.Tensor:
    """bool[R, V]: what may follow the newest token, then what may follow each draft."""
    before = torch.cat([torch.tensor(lasts)[:, None], drafts], dim=1).flatten()
    return torch.stack([allow(token) for token in before.tolist()])


def states_of(temperature: float) -> list[RowSampling]:
    return [row(params(temperature=temperature, top_p=0.95, seed=i), prompt=[i + 1]) for i in range(NUM_ROWS)]


def decode(
    table: torch.Tensor, allow: Allow, *, temperature: float, num_drafts: int, rule: str = "exact"
) -> tuple[list[list[int]], set[int]]:
    """(at least LENGTH tokens of every row, the counts of kept drafts that occurred).

    Drafts guess the target's favourite of all tokens, legal or not, or of the legal ones, or a random token.
    """
    vocab, states = len(table), states_of(temperature)
    random = np.random.default_rng(0)
    outputs: list[list[int]] = [[] for _ in states]
    kept: set[int] = set()
    while min(map(len, outputs)) < LENGTH:
        lasts = [out[-1] if out else i + 1 for i, out in enumerate(outputs)]
        drafts = torch.zeros(NUM_ROWS, num_drafts, dtype=torch.int64)
        for i, token in enumerate(lasts):
            for k in range(num_drafts):
                kind = int(random.integers(4))
                scores = table[token] if kind == 0 else table[token].masked_fill(~allow(token), -torch.inf)
                token = int(random.integers(vocab)) if kind == 1 else int(scores.argmax())
                drafts[i, k] = token
        current = [advance(s, [i + 1], out) for i, (s, out) in enumerate(zip(states, outputs, strict=True))]
        out = step(current, table, lasts, drafts, pack(masks_of(allow, lasts, drafts)), rule=rule)
        assert not out.failed.any()
        kept |= set(out.num_accepted.tolist())
        for own, emitted in zip(outputs, out.tokens.tolist(), strict=True):
            own += [token for token in emitted if token >= 0]
    return outputs, kept


def violations(outputs: list[list[int]], allow: Allow) -> int:
    pairs = [(last, token) for i, out in enumerate(outputs) for last, token in zip([i + 1, *out], out, strict=False)]
    return sum(not bool(allow(last)[token]) for last, token in pairs)


@pytest.mark.parametrize("rule", ["exact", "ratio"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", VOCAB_SIZES)
def test_every_emitted_token_obeys_its_mask(vocab: int, temperature: float, rule: str) -> None:
    allow = grammar(vocab)
    outputs, kept = decode(table_of(vocab), allow, temperature=temperature, num_drafts=3, rule=rule)
    assert violations(outputs, allow) == 0
    assert kept >= {0, 1, 2, 3}, "drafts were rejected and kept at every position"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", VOCAB_SIZES)
def test_masked_speculation_equals_masked_plain_decoding(vocab: int, temperature: float) -> None:
    table, allow = table_of(vocab), grammar(vocab)
    expected, _ = decode(table, allow, temperature=temperature, num_drafts=0)
    for num_drafts in (1, 4):
        outputs, _ = decode(table, allow, temperature=temperature, num_drafts=num_drafts)
        assert [out[:LENGTH] for out in outputs] == [out[:LENGTH] for out in expected]


@pytest.mark.parametrize("kept_positions", [0, 1])
def test_a_mask_of_the_first_position_alone_is_not_enough(kept_positions: int) -> None:
    """Negative control: with positions unmasked, the drafts behind them and the bonus token break the grammar."""
    vocab = 50
    table, allow = table_of(vocab), grammar(vocab)
    lasts = list(range(1, NUM_ROWS + 1))
    favourite = table.argmax(-1)
    chain = [torch.tensor([int(table[t].masked_fill(~allow(t), -torch.inf).argmax()) for t in lasts])]
    chain.append(favourite[chain[0]])
    drafts = torch.stack(chain, dim=1)
    whole = masks_of(allow, lasts, drafts).view(NUM_ROWS, 3, vocab)
    partial = whole.clone()
    partial[:, kept_positions:] = True
    states = states_of(0.0)
    broken = step(states, table, lasts, drafts, pack(partial.flatten(0, 1))).tokens.tolist()
    assert violations([[t for t in tokens if t >= 0] for tokens in broken], allow) > 0
    obeyed = step(states, table, lasts, drafts, pack(whole.flatten(0, 1))).tokens.tolist()
    assert violations([[t for t in tokens if t >= 0] for tokens in obeyed], allow) == 0


@pytest.mark.parametrize("rule", ["exact", "ratio"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_may_emit_nothing_fails_alone(temperature: float, rule: str) -> None:
    vocab = 33
    table, allow = table_of(vocab), grammar(vocab)
    states, lasts = states_of(temperature), list(range(1, NUM_ROWS + 1))
    drafts = torch.zeros(NUM_ROWS, 0, dtype=torch.int64)
    allowed = masks_of(allow, lasts, drafts)
    expected = step(states, table, lasts, drafts, pack(allowed), rule=rule)
    allowed[2] = False
    out = step(states, table, lasts, drafts, pack(allowed, padding=1), rule=rule)
    others = [i for i in range(NUM_ROWS) if i != 2]
    assert out.failed.tolist() == [i == 2 for i in range(NUM_ROWS)]
    assert out.tokens[2].tolist() == [-1]
    assert out.tokens[others].equal(expected.tokens[others])


def test_a_dead_end_behind_a_rejected_draft_does_no_harm() -> None:
    """The host may give an empty mask behind a draft that the grammar refuses: no emitted token comes from there."""
    vocab = 50
    table, allow = table_of(vocab), grammar(vocab)
    lasts = [1, 2]
    legal = [int(table[t].masked_fill(~allow(t), -torch.inf).argmax()) for t in lasts]
    illegal = [(t + 1) % vocab for t in legal]
    drafts = torch.tensor([[illegal[0], 0], [legal[1], (legal[1] + 1) % vocab]])
    allowed = masks_of(allow, lasts, drafts).view(2, 3, vocab)
    allowed[0, 1:] = False
    out = step(states_of(0.0)[:2], table, lasts, drafts, pack(allowed.flatten(0, 1)))
    assert out.failed.tolist() == [False, False]
    assert out.tokens[0].tolist() == [legal[0], -1, -1]
    allowed[1, 1] = False  # now the dead end is behind a draft that was kept
    out = step(states_of(0.0)[:2], table, lasts, drafts, pack(allowed.flatten(0, 1)))
    assert out.failed.tolist() == [False, True]


@pytest.mark.parametrize("vocab", VOCAB_SIZES)
def test_each_bit_is_its_own_token(vocab: int) -> None:
    """Bit 31 (the sign), the first of a word, the last of the vocabulary: a mask of one token leaves that token."""
    allowed = torch.eye(vocab, dtype=torch.bool)
    state = row(params(temperature=1.0))
    table, none = torch.zeros(vocab, vocab), torch.zeros(vocab, 0, dtype=torch.int64)
    for padding in (0, 1):
        out = step([state] * vocab, table, [0] * vocab, none, pack(allowed, padding=padding))
        assert out.next_token.tolist() == list(range(vocab))


def test_masks_join_the_other_parameters_and_leave_logprobs_raw() -> None:
    vocab = 50
    table, allow = table_of(vocab), grammar(vocab)
    only = (5, 8, 9)  # after token 1 the grammar allows 5 and 8 of these
    state = row(params(temperature=0.0, allowed_token_ids=only, logprobs=2), prompt=[1])
    none = torch.zeros(1, 0, dtype=torch.int64)
    raw = table[1].log_softmax(-1)
    out = step([state], table, [1], none, pack(masks_of(allow, [1], none)))
    best = max((5, 8), key=lambda token: float(raw[token]))
    assert out.next_token.tolist() == [best]
    assert out.logprobs is not None
    assert out.top_ids is not None
    torch.testing.assert_close(out.logprobs[0, 0], raw[best])
    assert out.top_ids[0, 0].tolist() == raw.topk(2).indices.tolist()
    contradiction = dataclasses.replace(state, params=params(temperature=0.0, allowed_token_ids=(9,)))
    assert step([contradiction], table, [1], none, pack(masks_of(allow, [1], none))).failed.tolist() == [True]
