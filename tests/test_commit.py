"""The one loop over accepted tokens: a block of five is five blocks of one, and both are what the words promise."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.commit import RowReport, abortion, commit, failure, row_report
from specd.errors import EngineError, NonFiniteLogitsError
from specd.pipeline.counters import Counters, num_kept
from specd.request import FinishReason, SamplingParams, SequenceDelta, TokenLogprob, TokenOrigin
from specd.step import AcceptanceReport, DraftSource
from tests.commit_blocks import (
    EOS,
    PIECES,
    PROMPT,
    SPECIAL,
    Pieces,
    Recorder,
    Whole,
    block,
    params_of,
    run,
    sequence_of,
    whole,
)

SAMPLING = st.builds(
    params_of,
    max_tokens=st.integers(1, 14),
    min_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
    stop=st.lists(st.sampled_from(["a", "ab", "bca", "abc", "한", "é ", "\ufffd", "😀b", "<s>"]), max_size=3).map(
        tuple
    ),
    stop_token_ids=st.lists(st.sampled_from([1, 4, 8, EOS, SPECIAL]), max_size=2).map(tuple),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
)
TOKENS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, len(PIECES) - 1)), min_size=1, max_size=20)


@st.composite
def blocks_of(draw: st.DrawFn, tokens: list[int]) -> list[list[int]]:
    out, rest = [], tokens
    while rest:
        size = draw(st.integers(1, min(9, len(rest))))
        out.append(rest[:size])
        rest = rest[size:]
    return out


# Splits


@given(SAMPLING, TOKENS, st.data(), st.integers(4, 20))
def test_blocks_are_indistinguishable_from_single_tokens(
    params: SamplingParams, tokens: list[int], data: st.DataObject, max_len: int
) -> None:
    alone, together = (sequence_of(params, max_len=max_len) for _ in range(2))
    singles = run(alone, [[token] for token in tokens])
    deltas = run(together, data.draw(blocks_of(tokens)), spare=1)
    assert whole(deltas) == whole(singles)
    assert together.tokens == alone.tokens
    assert together.output_counts == alone.output_counts
    (recorder,) = together.proposers
    assert isinstance(recorder, Recorder)
    assert recorder.tokens == together.tokens
    for delta in deltas:
        assert len(delta.origins) == len(delta.token_ids)
        assert delta.logprobs is None or [one.token_id for one in delta.logprobs] == list(delta.token_ids)
        assert (delta.stats is not None) == (delta.finish_reason is not None) == (delta is deltas[-1] and over(deltas))
    if over(deltas):
        check_stats(deltas)


def over(deltas: list[SequenceDelta]) -> bool:
    return deltas[-1].finish_reason is not None


def check_stats(deltas: list[SequenceDelta]) -> None:
    """Usage and acceptance agree with what was really sent, token by token."""
    stats = deltas[-1].stats
    assert stats is not None
    kept = [sum(origin is TokenOrigin.DRAFT for origin, _, _ in delta.origins) for delta in deltas]
    assert stats.prompt_tokens == len(PROMPT)
    assert stats.completion_tokens == sum(len(delta.token_ids) for delta in deltas)
    assert stats.num_spec_steps == len(deltas)
    assert list(stats.per_step_accepted) == kept
    assert stats.num_accepted_tokens == sum(kept)
    assert stats.num_draft_tokens == sum(stats.per_step_drafted)
    assert list(stats.acceptance_histogram) == [kept.count(i) for i in range(9)]


@given(SAMPLING, TOKENS, TOKENS, TOKENS)
def test_what_stands_behind_the_end_leaves_no_trace(
    params: SamplingParams, tokens: list[int], rest: list[int], other: list[int]
) -> None:
    """The same end in blocks that go on differently: equal deltas and equal state."""
    ids = whole(run(sequence_of(params), [[token] for token in [*tokens[:6], EOS]])).ids
    one, two = sequence_of(params), sequence_of(params)
    first, second = (
        commit(s, block([*ids, *tail][:9], num_drafts=8), source=DraftSource.DRAFTER, step=1)
        for s, tail in ((one, rest), (two, other))
    )
    if first.finish_reason is None or second.finish_reason is None or len(first.token_ids) > len(ids):
        return  # the cap of a block came before the end
    assert first.stats is not None
    assert second.stats is not None
    # Whether the last token was a draft or the target's own depends on the block; what is behind it never counts.
    assert dataclasses.replace(first, stats=None, origins=()) == dataclasses.replace(second, stats=None, origins=())
    assert one.tokens == two.tokens
    assert one.output_counts == two.output_counts
    assert max(first.stats.num_accepted_tokens, second.stats.num_accepted_tokens) <= len(ids)


# What the words mean: the same decided by looking at everything at once


def decoded(tokens: Items[int], params: SamplingParams, *, final: bool) -> str:
    skipped = Pieces.special_ids if params.skip_special_tokens else ()
    data = b"".join(PIECES[token] for token in tokens if token not in skipped)
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data, final)


def first_stop(text: str, start: int, stops: Items[str]) -> tuple[int, str] | None:
    """(where it ends, which) of the stop string in text[start:] that is completed first, the longest of those."""
    for end in range(start + 1, len(text) + 1):
        found = [stop for stop in stops if end - len(stop) >= start and text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def expected(tokens: list[int], params: SamplingParams, limit: int) -> Whole:
    ids: list[int] = []
    start = 0  # stop strings are looked for in what is said after min_tokens
    for token in tokens:
        ids.append(token)
        if len(ids) <= params.min_tokens:
            start = len(decoded(ids, params, final=False))
        elif (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            is_eos = token == EOS and not params.ignore_eos
            text = decoded(ids[:-1], params, final=True)
            if params.include_stop_str_in_output and token in params.stop_token_ids:
                text += decoded([token], params, final=True)
            found = first_stop(text, start, params.stop)
            if found is not None:
                text = cut(text, found, params)
            return Whole(ids, text, None, FinishReason.STOP, None if is_eos else token)
        final = len(ids) == limit
        text = decoded(ids, params, final=final)
        found = first_stop(text, start, params.stop) if len(ids) > params.min_tokens else None
        if found is not None:
            return Whole(ids, cut(text, found, params), None, FinishReason.STOP, found[1])
        if final:
            return Whole(ids, text, None, FinishReason.LENGTH, None)
    return Whole(ids, "", None, None, None)


def cut(text: str, found: tuple[int, str], params: SamplingParams) -> str:
    end, stop = found
    return text[:end] if params.include_stop_str_in_output else text[: end - len(stop)]


@given(SAMPLING, TOKENS, st.data(), st.integers(4, 20))
def test_the_end_is_where_the_whole_text_says(
    params: SamplingParams, tokens: list[int], data: st.DataObject, max_len: int
) -> None:
    deltas = run(sequence_of(params, max_len=max_len), data.draw(blocks_of(tokens)))
    found = whole(deltas)
    wanted = expected(tokens, params, min(params.max_tokens, max_len - len(PROMPT)))
    assert (found.ids, found.finish_reason, found.stop_reason) == (
        wanted.ids,
        wanted.finish_reason,
        wanted.stop_reason,
    )
    if wanted.finish_reason is not None:
        assert found.text == wanted.text
    else:
        assert decoded(found.ids, params, final=False).startswith(found.text), "text that may still be cut is held"


# Single cases that users of other servers have reported


def test_a_stop_inside_a_block_comes_before_the_cap() -> None:
    delta = commit(
        sequence_of(params_of(max_tokens=5, stop_token_ids=(4,))),
        block([0, 1, 4, 2, 2, 2]),
        source=DraftSource.DRAFTER,
        step=1,
    )
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == ((0, 1, 4), FinishReason.STOP, 4)
    assert delta.text == "ab"


def test_a_stop_at_the_cap_is_a_stop() -> None:
    for token, changes in ((EOS, {}), (4, {"stop_token_ids": (4,)}), (3, {"stop": ("b",)})):
        delta = commit(
            sequence_of(params_of(max_tokens=2, **changes)), block([2, token, 2]), source=DraftSource.DRAFTER, step=1
        )
        assert (delta.token_ids, delta.finish_reason) == ((2, token), FinishReason.STOP)


def test_exactly_max_tokens_are_delivered_and_counted() -> None:
    deltas = run(sequence_of(params_of(max_tokens=8)), [[0] * 5, [0] * 5])
    assert [len(delta.token_ids) for delta in deltas] == [5, 3]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[-1].stats is not None
    assert deltas[-1].stats.completion_tokens == 8


def test_the_context_ends_a_sequence_too() -> None:
    deltas = run(sequence_of(params_of(max_tokens=50), max_len=6), [[0] * 9])
    assert (len(deltas[0].token_ids), deltas[0].finish_reason) == (3, FinishReason.LENGTH)


def test_drafts_behind_an_end_are_not_counted_as_accepted() -> None:
    sequence, counters = sequence_of(params_of()), Counters(8)
    delta = commit(sequence, block([0, 1, EOS, 0, 1, 2]), source=DraftSource.DRAFTER, step=4)
    counters.committed(delta, DraftSource.DRAFTER, 5, num_planned=5)
    assert delta.stats is not None
    assert (delta.stats.num_accepted_tokens, delta.stats.num_draft_tokens) == (3, 5)
    assert delta.origins == ((TokenOrigin.DRAFT, 4, 0), (TokenOrigin.DRAFT, 4, 1), (TokenOrigin.DRAFT, 4, 2))
    assert num_kept(delta) == 3
    assert counters.accepted_per_position == [1, 1, 1, 0, 0, 0, 0, 0]
    assert counters.drafted_per_position == [1, 1, 1, 1, 1, 0, 0, 0]
    assert (counters.accepted_tokens["drafter"], counters.draft_tokens["drafter"]) == (3, 5)
    assert counters.generation_tokens == 3


@pytest.mark.parametrize(
    ("num_drafts", "tokens", "source", "origins"),
    [
        (0, [0], DraftSource.NONE, "t"),
        (3, [0], DraftSource.DRAFTER, "t"),
        (3, [0, 1], DraftSource.DRAFTER, "dt"),
        (3, [0, 1, 2, 0], DraftSource.DRAFTER, "dddb"),
        (2, [0, 1, 2], DraftSource.NGRAM, "nnb"),
        (2, [0, 1], DraftSource.PREDICTION, "pt"),
    ],
)
def test_each_token_has_an_origin(num_drafts: int, tokens: list[int], source: DraftSource, origins: str) -> None:
    delta = commit(sequence_of(params_of()), block(tokens, num_drafts=num_drafts), source=source, step=9)
    assert "".join(origin for origin, _, _ in delta.origins) == origins
    assert [(step, position) for _, step, position in delta.origins] == [(9, i) for i in range(len(tokens))]


def test_text_waits_for_whole_characters_and_stop_strings() -> None:
    smile = [PIECES.index(bytes([byte])) for byte in "😀".encode()]
    deltas = run(sequence_of(params_of(stop=("abc",))), [[0], smile[:2], smile[2:], [3], [2, 0]])
    assert [delta.text for delta in deltas] == ["", "", "a😀", "", ""]
    assert deltas[-1].stop_reason == "abc"


def test_the_text_of_a_stop_token_is_kept_only_on_request() -> None:
    for include, text in ((False, "c"), (True, "cca b")):
        params = params_of(stop_token_ids=(4,), include_stop_str_in_output=include)
        delta = commit(sequence_of(params), block([2, 4]), source=DraftSource.NONE, step=1)
        assert (delta.text, delta.token_ids) == (text, (2, 4))


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    half = PIECES.index("한".encode()[:1])
    for end, changes in (([EOS], {}), ([], {"max_tokens": 2})):
        delta = commit(sequence_of(params_of(**changes)), block([0, half, *end]), source=DraftSource.NONE, step=1)
        assert delta.text == "a\ufffd"


def test_before_min_tokens_no_stop_is_looked_for() -> None:
    """Not even in the character that the cap replaces."""
    half = PIECES.index("한".encode()[:1])
    params = params_of(max_tokens=2, min_tokens=2, stop=("\ufffd", "a"))
    delta = commit(sequence_of(params), block([0, half]), source=DraftSource.NONE, step=1)
    assert (delta.text, delta.finish_reason) == ("a\ufffd", FinishReason.LENGTH)


@pytest.mark.parametrize("detail", ["none", "summary", "detailed", "tokens"])
def test_steps_are_listed_only_on_request(detail: str) -> None:
    deltas = run(sequence_of(params_of(max_tokens=4), detail=detail), [[0, 1], [0, 1]], spare=2)
    stats = deltas[-1].stats
    assert stats is not None
    steps = (stats.per_step_drafted, stats.per_step_accepted)
    assert steps == (((3, 3), (1, 1)) if detail == "detailed" else ((), ()))
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (6, 2)


def test_a_step_without_drafts_is_no_speculation() -> None:
    deltas = run(sequence_of(params_of(max_tokens=2)), [[0], [0]])
    stats = deltas[-1].stats
    assert stats is not None
    assert (stats.num_spec_steps, sum(stats.acceptance_histogram)) == (0, 0)


# Other ends


def test_a_row_that_is_not_finite_ends_with_an_error() -> None:
    sequence = sequence_of(params_of())
    run(sequence, [[0, 1]])
    delta = commit(sequence, RowReport((), 0, 2, True, None), source=DraftSource.DRAFTER, step=1)
    assert delta.finish_reason is FinishReason.ERROR
    assert isinstance(delta.error, NonFiniteLogitsError)
    assert (delta.token_ids, delta.text) == ((), "")
    assert delta.stats is not None
    assert delta.stats.completion_tokens == 2


def test_failures_and_aborts_are_last_deltas() -> None:
    sequence = sequence_of(params_of())
    error = EngineError("x")
    for delta, reason in ((failure(sequence, error), FinishReason.ERROR), (abortion(sequence), FinishReason.ABORT)):
        assert (delta.request_id, delta.index, delta.finish_reason) == ("r", 3, reason)
        assert delta.stats is not None
    assert failure(sequence, error).error is error
    assert abortion(sequence).error is None


# From the batch's report to a row


def report_of(tokens: list[list[int]], num_accepted: list[int], **fields: Any) -> AcceptanceReport:
    return AcceptanceReport(
        tokens=np.asarray(tokens, np.int32),
        num_accepted=np.asarray(num_accepted, np.int32),
        failed=np.zeros(len(tokens), np.int32),
        drafts=np.full((len(tokens), len(tokens[0]) - 1), -1, np.int32),
        **fields,
    )


def test_rows_are_read_from_the_report() -> None:
    report = report_of([[5, 6, -1], [-1, -1, -1], [7, -1, -1]], [1, 0, 0])
    rows = [row_report(report, i, num_drafts=2, num_logprobs=None) for i in range(3)]
    assert [row.tokens for row in rows] == [(5, 6), (), (7,)]
    assert [row.num_accepted for row in rows] == [1, 0, 0]
    assert rows[0].num_drafts == 2
    assert not rows[0].failed


def test_each_row_gets_the_logprobs_it_asked_for() -> None:
    logprobs = np.asarray([[-0.5, -0.25], [-1.0, 0.0]], np.float32)
    top_ids = np.asarray([[[5, 4, 3], [6, 2, 1]], [[7, 8, 9], [0, 0, 0]]], np.int32)
    top = np.asarray([[[-0.5, -1, -2], [-0.25, -3, -4]], [[-1, -2, -3], [0, 0, 0]]], np.float32)
    report = report_of([[5, 6], [7, -1]], [1, 0], logprobs=logprobs, top_ids=top_ids, top_logprobs=top)
    assert row_report(report, 0, num_drafts=1, num_logprobs=2).logprobs == (
        TokenLogprob(5, -0.5, ((5, -0.5), (4, -1.0))),
        TokenLogprob(6, -0.25, ((6, -0.25), (2, -3.0))),
    )
    assert row_report(report, 1, num_drafts=1, num_logprobs=0).logprobs == (TokenLogprob(7, -1.0),)
    assert row_report(report, 1, num_drafts=1, num_logprobs=None).logprobs is None
