"""`speculation.detail: "tokens"`: what was proposed where a token stands, and how sure the drafter was of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specd.commit import row_report
from specd.request import DraftedToken, Request, SamplingParams, SequenceDelta, SpeculationParams, TokenOrigin
from specd.step import AcceptanceReport
from tests.engines import drafter_of, make_parts, running, target_model

PROMPT = tuple(range(3, 15))


def asked(name: str, *, temperature: float, detail: str = "tokens") -> Request:
    params = SamplingParams(max_tokens=24, seed=11, temperature=temperature, ignore_eos=True, logprobs=0)
    return Request(name, PROMPT, params, SpeculationParams(detail=detail))  # type: ignore[arg-type]


async def answer(draft: str, *requests: Request) -> list[list[SequenceDelta]]:
    async with running(make_parts(draft=draft, draft_len=3)) as engine:
        streams = [engine.submit(request) for request in requests]
        return [[delta async for delta in stream] for stream in streams]


def flat(deltas: list[SequenceDelta]) -> list[tuple[int, TokenOrigin, DraftedToken | None, float]]:
    found = []
    for delta in deltas:
        assert delta.logprobs is not None
        rows = zip(delta.token_ids, delta.origins, delta.drafts, delta.logprobs, strict=True)
        found += [(token, origin[0], draft, math.exp(told.logprob)) for token, origin, draft, told in rows]
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_drafter_that_is_the_target_is_as_sure_as_the_target(temperature: float) -> None:
    rows = flat((await answer("lm-self", asked("a", temperature=temperature)))[0])
    kept = [row for row in rows if row[1] is TokenOrigin.DRAFT]
    assert len(kept) > 12
    for token, _, draft, target in kept:
        assert draft is not None
        assert draft.token_id == token
        assert draft.prob == pytest.approx(target, abs=1e-5)
    assert len({round(target, 6) for *_, target in kept}) > 6, "they differ, or the comparison says nothing"
    assert all(draft is None for _, origin, draft, _ in rows if origin is TokenOrigin.BONUS)


async def test_what_was_rejected_is_told_with_the_token_in_its_place() -> None:
    assert drafter_of("layers", target_model()) is not None
    rows = flat((await answer("layers", asked("a", temperature=0.0)))[0])
    replaced = [(token, draft) for token, origin, draft, _ in rows if origin is TokenOrigin.TARGET and draft]
    assert replaced, "one layer is often wrong"
    assert all(draft.token_id != token and 0 < draft.prob <= 1 for token, draft in replaced)


async def test_a_request_that_does_not_ask_is_told_nothing_and_gets_the_same_text() -> None:
    told, plain = await answer("layers", asked("a", temperature=0.8), asked("b", temperature=0.8, detail="detailed"))
    assert all(delta.drafts == () for delta in plain)
    assert [t for d in told for t in d.token_ids] == [t for d in plain for t in d.token_ids]


async def test_proposers_are_certain() -> None:
    request = asked("a", temperature=0.0)
    (deltas,) = await answer("ngram", request)
    drafted = [draft for _, _, draft, _ in flat(deltas) if draft is not None]
    assert drafted
    assert {draft.prob for draft in drafted} == {1.0}


def test_a_report_without_a_drafter_is_of_certain_drafts() -> None:
    report = AcceptanceReport(
        tokens=np.asarray([[5, 9, -1]], np.int32),
        num_accepted=np.asarray([1], np.int32),
        failed=np.asarray([0], np.int32),
        drafts=np.asarray([[5, 7]], np.int32),
    )
    row = row_report(report, 0, num_drafts=2, num_logprobs=None, tells_drafts=True)
    assert row.drafts == (DraftedToken(5, 1.0), DraftedToken(7, 1.0))
    assert row_report(report, 0, num_drafts=2, num_logprobs=None).drafts == ()
