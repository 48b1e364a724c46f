"""The packed plan: every plan survives the trip, nothing else is taken for one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.request import TokenOrigin
from specd.step import _ARRAYS, DraftSource, DraftTraits, StepPlan, indptr

PER_ROW = (
    "slots", "query_lens", "kv_lens", "num_drafts", "sources", "next_prompt_tokens", "emits", "drafter_lens", "refills",
)  # fmt: skip


def i32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.asarray(values, np.int32)


@st.composite
def plans(draw: st.DrawFn, min_rows: int = 0) -> StepPlan:
    """Any plan whose parts agree, as `build_plan` makes them; values within a part are arbitrary."""
    num_rows = draw(st.integers(min_rows, 5))
    row_lists = st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows)
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    drafts = i32(draw(row_lists))
    known = i32(draw(row_lists)) + 1
    pages, refills = i32(draw(row_lists)), i32(draw(row_lists))

    def some(*shape: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return rng.integers(-(2**31), 2**31 - 1, size=shape, dtype=np.int32)

    return StepPlan(
        step=draw(st.integers(0, 2**61)),
        page_size=draw(st.integers(1, 64)),
        slots=some(num_rows),
        query_lens=known + drafts,
        kv_lens=known + drafts + some(num_rows) % 100,
        num_drafts=drafts,
        sources=np.where(drafts > 0, 1 + some(num_rows) % 3, 0).astype(np.int32),
        host_drafts=some(num_rows, int(drafts.max(initial=0))),
        page_indptr=indptr(pages),
        page_indices=some(int(pages.sum())),
        tokens=some(int(known.sum())),
        next_prompt_tokens=some(num_rows),
        emits=some(num_rows),
        drafter_lens=some(num_rows),
        refills=some(num_rows),
        refill_indptr=indptr(refills),
        refill_tokens=some(int(refills.sum())),
        sampling=(None,) * num_rows,
        split=draw(st.integers(0, num_rows)),
    )


def assert_same(one: StepPlan, two: StepPlan) -> None:
    for name in _ARRAYS:
        a, b = getattr(one, name), getattr(two, name)
        assert a.shape == b.shape, name
        assert a.dtype == b.dtype == np.int32, name
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert (one.step, one.page_size, one.split) == (two.step, two.page_size, two.split)


# Pack and unpack


@given(plans())
def test_a_plan_survives_the_trip(plan: StepPlan) -> None:
    buffer = plan.pack()
    assert buffer.dtype == np.int32
    assert buffer.flags.c_contiguous
    found = StepPlan.unpack(buffer)
    assert_same(found, plan)
    assert found.num_rows == plan.num_rows
    assert found.num_tokens == plan.num_tokens
    assert found.max_drafts == plan.max_drafts
    assert found.sampling == ()


@given(plans())
def test_a_plan_is_found_at_the_start_of_a_larger_buffer(plan: StepPlan) -> None:
    """A slot of a ring is as long as the longest plan."""
    buffer = plan.pack()
    assert_same(StepPlan.unpack(np.concatenate([buffer, i32([7] * 9)])), plan)


def test_every_array_of_the_record_is_packed() -> None:
    arrays = {f.name for f in dataclasses.fields(StepPlan) if str(f.type) == "I32"}
    assert arrays == set(_ARRAYS)


@given(plans(), st.data())
def test_a_cut_buffer_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    buffer = plan.pack()
    with pytest.raises(ValueError, match="packed StepPlan"):
        StepPlan.unpack(buffer[: data.draw(st.integers(0, len(buffer) - 1))])


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(0, np.int32),
        np.zeros(1000, np.int32),
        np.zeros((10, 100), np.int32),
        np.full(1000, 0x53504344, np.int64),
        np.full(1000, 0x53504344, np.float32),
    ],
)
def test_other_buffers_are_refused(buffer: Any) -> None:
    with pytest.raises(ValueError, match="packed StepPlan"):
        StepPlan.unpack(buffer)


def consistent(plan: StepPlan) -> bool:
    """What the stages rely on when they index with it."""
    size = plan.num_rows
    return (
        all(getattr(plan, name).shape == (size,) for name in PER_ROW)
        and plan.host_drafts.shape == (size, plan.max_drafts)
        and bool((plan.num_drafts >= 0).all())
        and bool((plan.num_known >= 0).all())
        and plan.tokens.shape == (int(plan.num_known.sum()),)
        and all(
            offsets.shape == (size + 1,)
            and offsets[0] == 0
            and bool((np.diff(offsets) >= 0).all())
            and values.shape == (offsets[-1],)
            for offsets, values in (
                (plan.page_indptr, plan.page_indices),
                (plan.refill_indptr, plan.refill_tokens),
            )
        )
        and plan.page_size > 0
        and 0 <= plan.split <= size
    )


@given(plans(min_rows=1), st.data())
def test_a_hostile_buffer_is_refused_or_a_plan(plan: StepPlan, data: st.DataObject) -> None:
    """Header words and lengths are overwritten: what comes out never makes a stage index past an array."""
    assert consistent(plan)
    buffer = plan.pack()
    edges = [-(2**31), -1, 0, 1, 2, 3, 2**16, 2**31 - 1]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(1, len(buffer) - 1))
        buffer[at] = data.draw(st.sampled_from([*edges, int(buffer[at]) + 1]).filter(lambda v: abs(v) <= 2**31 - 1))
    try:
        found = StepPlan.unpack(buffer)
    except ValueError:
        return
    assert consistent(found)


# Rows


@given(plans(min_rows=1), st.data(), st.booleans())
def test_selected_rows_are_the_same_rows(plan: StepPlan, data: st.DataObject, drafts: bool) -> None:
    rows = data.draw(st.lists(st.integers(0, plan.num_rows - 1), unique=True))
    found = plan.select(rows, drafts=drafts)
    assert consistent(dataclasses.replace(found, split=0))
    assert found.split == 0
    assert len(found.sampling) == len(rows)
    known, known_indptr = plan.num_known, indptr(plan.num_known)
    for i, row in enumerate(rows):
        assert found.pages(i).tolist() == plan.pages(row).tolist()
        assert found.num_known[i] == known[row]
        assert found.kv_lens[i] - found.query_lens[i] == plan.kv_lens[row] - plan.query_lens[row]
        for name in ("slots", "next_prompt_tokens", "emits", "drafter_lens", "refills"):
            assert getattr(found, name)[i] == getattr(plan, name)[row]
        start = int(indptr(found.num_known)[i])
        tokens = plan.tokens[known_indptr[row] : known_indptr[row + 1]]
        assert found.tokens[start : start + known[row]].tolist() == tokens.tolist()
        refill = slice(*plan.refill_indptr[row : row + 2])
        found_refill = slice(*found.refill_indptr[i : i + 2])
        assert found.refill_tokens[found_refill].tolist() == plan.refill_tokens[refill].tolist()
        assert found.num_drafts[i] == (plan.num_drafts[row] if drafts else 0)
        assert found.sources[i] == (plan.sources[row] if found.num_drafts[i] else DraftSource.NONE)
        shown = plan.host_drafts[row, : found.num_drafts[i]]
        assert found.host_drafts[i, : found.num_drafts[i]].tolist() == shown.tolist()
    assert_same(StepPlan.unpack(found.pack()), found)


@given(plans(min_rows=1))
def test_all_rows_selected_change_nothing(plan: StepPlan) -> None:
    rows = list(range(plan.num_rows))
    assert_same(plan.select(rows, drafts=True), dataclasses.replace(plan, split=0))


def test_sources_have_origins() -> None:
    assert [source.origin for source in DraftSource] == [
        TokenOrigin.TARGET,
        TokenOrigin.DRAFT,
        TokenOrigin.NGRAM,
        TokenOrigin.PREDICTION,
        TokenOrigin.CORPUS,
        TokenOrigin.GRAMMAR,
    ]


def test_only_a_draft_model_runs_ahead_of_the_target() -> None:
    assert DraftTraits(name="lm", max_depth=4).extra_slots == 1
    assert DraftTraits(name="head", max_depth=4, shifted=True).extra_slots == 0
