"""A predicted output as drafts: what is proposed, that the tokens do not change, and that the counts are exact."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.proposers.base import Proposer
from specd.proposers.choose import proposers_of
from specd.proposers.prediction import PredictionProposer
from specd.request import Request, SequenceStats, SpeculationParams, TokenOrigin
from specd.step import DraftSource, RefillMode
from tests.engines import (
    Result,
    ask,
    collect,
    generate,
    greedy_answer,
    make_parts,
    running,
    target_model,
)
from tests.test_identity import ALONE, LONG, REPETITIVE
from tests.test_mtp_engine import drafter_of, parts_of, target_of

# The proposer alone. Letters are tokens.

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on"


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def proposer(prediction: str, *, prompt: str = "") -> PredictionProposer:
    made = PredictionProposer(ids(prediction), num_prompt=len(prompt))
    made.extend(ids(prompt))
    return made


def proposed(guesser: Proposer, count: int) -> str:
    return "".join(map(chr, guesser.propose(count)))


def steps(prediction: str, output: str, *, most: int = 8) -> tuple[int, int]:
    """How many steps the output takes after its first token, and how many drafts were wrong."""
    guesser = proposer(prediction)
    done, taken, wrong = 1, 0, 0
    guesser.extend(ids(output[:1]))
    while done < len(output):
        guess = proposed(guesser, min(most, len(output) - done - 1))
        kept = next((i for i, (a, b) in enumerate(zip(guess, output[done:], strict=False)) if a != b), len(guess))
        guesser.extend(ids(output[done : done + kept + 1]))
        done, taken, wrong = done + kept + 1, taken + 1, wrong + len(guess) - kept
    return taken, wrong


def test_what_comes_next_is_proposed() -> None:
    guesser = proposer("abcdefgh")
    guesser.extend(ids("abcd"))
    assert proposed(guesser, 3) == "efg"
    assert proposed(guesser, 0) == ""
    guesser.extend(ids("efgh"))
    assert proposed(guesser, 8) == "", "the prediction's end is the end"


def test_the_prompt_is_not_predicted() -> None:
    guesser = proposer("abcdef", prompt="xxabc")
    assert proposed(guesser, 2) == "ab"
    guesser.extend(ids("a"))
    assert proposed(guesser, 2) == "bc"


def test_a_place_is_believed_as_far_as_it_was_right() -> None:
    guesser = proposer("abcdefghijklmnop")
    assert [len(guesser.propose(8)), len(guesser.propose(1))] == [2, 1]
    guesser.extend(ids("a"))
    assert len(guesser.propose(8)) == 4
    guesser.extend(ids("b"))
    guesser.extend(ids("c"))
    assert len(guesser.propose(8)) == 8
    guesser.extend(ids("?"))
    assert guesser.propose(8) == []
    guesser.extend(ids("g"))
    assert proposed(guesser, 8) == "hi"


@pytest.mark.parametrize(
    ("output", "most_steps", "most_wrong"),
    [
        (TEXT, 10, 0),
        (TEXT.replace("brown", "red"), 14, 16),
        (TEXT.replace("quick brown ", ""), 12, 12),
        (TEXT.replace("jumps", "0123456789 jumps"), 10 + 14, 16),
        ("Sure: " + TEXT, 17, 16),
        (TEXT[20:] + TEXT[:20], 18, 24),
        ("?" * 40, 39, 2),
    ],
    ids=["same", "replaced", "left out", "inserted", "preceded", "moved", "unrelated"],
)
def test_what_differs_costs_a_few_tokens(output: str, most_steps: int, most_wrong: int) -> None:
    taken, wrong = steps(TEXT, output)
    assert taken <= most_steps
    assert wrong <= most_wrong


def test_of_equal_places_the_nearest_one_counts() -> None:
    text = "add x to y; sub x to y; mul x to y; div x to y;"
    guesser = proposer(text)
    guesser.extend(ids("add x to y; sub x to "))
    guesser.extend(ids("z; "))  # "; " is there three times
    assert proposed(guesser, 3) == "mul"


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(0, 9))
def test_a_proposal_follows_the_longest_match(prediction: list[int], output: list[int], count: int) -> None:
    """Compared with a scan: a place that was lost is found again by as many of the last 8 tokens as stand anywhere."""
    guesser = PredictionProposer(prediction, num_prompt=0)
    follows = True  # from the start
    for i, token in enumerate(output):
        expected = guesser.propose(1)
        guesser.extend([token])
        follows = bool(expected) and expected[0] == token
        guess = guesser.propose(count)
        if not follows:
            longest = _longest(prediction, output[: i + 1])
            ends = [end for end in range(len(prediction) + 1) if _ends(prediction[:end], output[: i + 1], longest)]
            allowed = [prediction[end : end + min(count, 2 * longest)] for end in ends] if longest else [[]]
            assert guess in allowed
        assert len(guess) <= count


def _ends(text: Sequence[int], output: Sequence[int], length: int) -> bool:
    return len(text) >= length <= len(output) and list(text[len(text) - length :]) == list(
        output[len(output) - length :]
    )


def _longest(prediction: Sequence[int], output: Sequence[int]) -> int:
    lengths = range(min(8, len(output)), 0, -1)
    return next((n for n in lengths for end in range(len(prediction) + 1) if _ends(prediction[:end], output, n)), 0)


def test_a_proposal_is_the_callers_own() -> None:
    guesser = proposer("abcdef")
    first = guesser.propose(2)
    first += [1, 2, 3]
    assert proposed(guesser, 2) == "ab"


def test_who_proposes_for_a_request() -> None:
    parts = make_parts(draft="ngram")
    speculation = parts.config.speculation
    request = ask("r", [1, 2])
    predicted = dataclasses.replace(request, prediction=(3, 4))
    empty = dataclasses.replace(request, prediction=())

    def sources(request: Request, *, uses_ngram: bool) -> list[DraftSource]:
        return [p.source for p in proposers_of(request, speculation, uses_ngram=uses_ngram)]

    assert sources(predicted, uses_ngram=True) == [DraftSource.PREDICTION, DraftSource.NGRAM]
    assert sources(predicted, uses_ngram=False) == [DraftSource.PREDICTION]
    assert sources(empty, uses_ngram=True) == sources(request, uses_ngram=True) == [DraftSource.NGRAM]


# The whole engine

OUTPUT = 40
PROMPTS = {"alone": ALONE, "long": LONG, "repetitive": REPETITIVE}
KINDS = ("right", "wrong", "half", "shifted", "empty", "huge")


def prediction_of(kind: str, right: list[int]) -> tuple[int, ...]:
    rng = random.Random(kind)
    half = len(right) // 2
    noise = [rng.randrange(2, 97) for _ in range(3 * len(right))]
    return {
        "right": tuple(right),
        "wrong": tuple(noise),
        "half": tuple(right[:half] + noise[:half]),
        "shifted": tuple(right[7:half] + noise[:3] + right[half + 5 :]),
        "empty": (),
        "huge": tuple((noise + right) * 20),
    }[kind]


def predicted(name: str, kind: str, answer: list[int], **sampling: Any) -> Request:
    request = ask(f"{name} {kind}", PROMPTS[name], max_tokens=OUTPUT, **sampling)
    return dataclasses.replace(request, prediction=prediction_of(kind, answer))


def stats_of(result: Result) -> SequenceStats:
    assert result.last is not None
    assert result.last.stats is not None
    return result.last.stats


@pytest.mark.parametrize("draft_len", [4, "adaptive"])
@pytest.mark.parametrize("draft", ["none", "ngram", "layers", "lm"])
async def test_greedy_tokens_are_the_targets_own(draft: str, draft_len: int | str) -> None:
    """All kinds at once, with chunked prompts and more tokens than there are pages."""
    answers = {name: greedy_answer(target_model(), prompt, OUTPUT) for name, prompt in PROMPTS.items()}
    requests = [predicted(name, kind, answers[name]) for name in PROMPTS for kind in KINDS]
    parts = make_parts(draft=draft, draft_len=draft_len, num_slots=240, max_running=5, max_tokens=32)
    async with running(parts) as engine:
        results = await generate(engine, requests)
        counts = engine.stats()
    for name, (result,) in results.items():
        assert result.tokens == answers[name.split()[0]], name
    verified = {name: stats_of(result) for name, (result,) in results.items()}
    accepted = sum(stats.accepted_prediction_tokens for stats in verified.values())
    rejected = sum(stats.rejected_prediction_tokens for stats in verified.values())
    if draft == "none":
        assert (accepted, rejected, counts.draft_tokens) == (0, 0, {}), "none means none"
        return
    assert counts.preemptions > 0
    assert accepted > 0
    assert rejected > 0
    for name in PROMPTS:
        assert verified[f"{name} empty"].accepted_prediction_tokens == 0
        assert verified[f"{name} empty"].rejected_prediction_tokens == 0
        assert verified[f"{name} right"].rejected_prediction_tokens == 0
    if draft_len == "adaptive":  # nothing fills up to a length: every draft of this source is one of a prediction
        assert counts.accepted_tokens["prediction"] == accepted
        assert counts.draft_tokens["prediction"] == accepted + rejected


@pytest.mark.parametrize("draft", ["none", "ngram", "layers", "lm"])
async def test_seeded_tokens_do_not_depend_on_the_prediction(draft: str) -> None:
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 11}
    async with running(make_parts(draft="none")) as engine:
        (plain,) = await collect(engine, ask("plain", ALONE, max_tokens=OUTPUT, **sampled))
    async with running(make_parts(draft=draft, draft_len=3)) as engine:
        results = await generate(engine, [predicted("alone", kind, plain.tokens, **sampled) for kind in KINDS])
    assert all(result.tokens == plain.tokens for (result,) in results.values())
    assert (stats_of(results["alone right"][0]).accepted_prediction_tokens > 0) is (draft != "none")


@pytest.mark.parametrize("kind", [*KINDS, "short"])
async def test_counts_are_exact(kind: str) -> None:
    """Compared with a replay. A fixed length fills proposals up: that is no part of the prediction."""
    answer = greedy_answer(target_model(), ALONE, OUTPUT)
    request = predicted("alone", "right" if kind == "short" else kind, answer)
    request = dataclasses.replace(request, prediction=tuple(answer[:3]) if kind == "short" else request.prediction)
    async with running(make_parts(draft="ngram", draft_len=4)) as engine:
        deltas = [delta async for delta in engine.submit(request)]
    guesser = PredictionProposer(request.prediction or (), num_prompt=0)
    guesser.extend(deltas[0].token_ids)
    accepted, drafted, done = 0, 0, len(deltas[0].token_ids)
    for delta in deltas[1:]:
        guess = guesser.propose(min(4, OUTPUT - done - 1))
        pairs = zip(guess, delta.token_ids, strict=False)
        accepted += next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(guess), len(delta.token_ids)))
        drafted += len(guess)
        done += len(delta.token_ids)
        guesser.extend(delta.token_ids)
    stats = deltas[-1].stats
    assert stats is not None
    assert stats.accepted_prediction_tokens == accepted
    assert stats.accepted_prediction_tokens + stats.rejected_prediction_tokens == drafted
    assert (drafted > 0) is (kind != "empty")


async def test_the_origin_of_a_token_is_told() -> None:
    answer = greedy_answer(target_model(), ALONE, OUTPUT)
    async with running(make_parts(draft="lm", draft_len="adaptive")) as engine:
        deltas = [delta async for delta in engine.submit(predicted("alone", "right", answer))]
    origins = [origin for delta in deltas for origin, _, _ in delta.origins]
    assert deltas[-1].stats is not None
    assert origins.count(TokenOrigin.PREDICTION) == deltas[-1].stats.accepted_prediction_tokens > OUTPUT // 2


async def test_every_choice_follows_its_own_text() -> None:
    """n choices share a prediction and nothing else."""
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    request = ask("three", ALONE, n=3, max_tokens=OUTPUT, **sampled)
    async with running(make_parts(draft="ngram", draft_len=4)) as engine:
        plain = await collect(engine, request)
        second = dataclasses.replace(request, request_id="again", prediction=tuple(plain[1].tokens))
        results = await collect(engine, second)
    assert [result.tokens for result in results] == [result.tokens for result in plain]
    accepted = [stats_of(result).accepted_prediction_tokens for result in results]
    assert accepted[1] > max(accepted[0], accepted[2])


async def test_speculation_off_is_off() -> None:
    answer = greedy_answer(target_model(), ALONE, OUTPUT)
    request = dataclasses.replace(predicted("alone", "right", answer), speculation=SpeculationParams(mode="off"))
    async with running(make_parts(draft="ngram", draft_len=4)) as engine:
        (result,) = await collect(engine, request)
    assert result.tokens == answer
    assert stats_of(result).num_draft_tokens == stats_of(result).accepted_prediction_tokens == 0


@pytest.mark.parametrize(
    ("mode", "proposes", "draft_len"),
    [(RefillMode.EXACT, False, "adaptive"), (RefillMode.PADDED, False, 3), (RefillMode.PADDED, True, "adaptive")],
)
async def test_tokens_beside_a_head(mode: RefillMode, proposes: bool, draft_len: int | str) -> None:
    """Rows whose drafts are predicted, between rows whose drafts a head makes; greedy and seeded."""
    seeded: dict[str, Any] = {"temperature": 0.8, "seed": 11}
    names = ("alone", "long")
    plain = [ask(name, PROMPTS[name], max_tokens=OUTPUT) for name in names]
    plain.append(ask("seeded", ALONE, max_tokens=OUTPUT, **seeded))
    async with running(make_parts(target=target_of("torch"))) as engine:
        answers = {name: result.tokens for name, (result,) in (await generate(engine, plain)).items()}
    requests = [predicted(name, kind, answers[name]) for name in names for kind in ("right", "shifted")]
    wanted = dataclasses.replace(predicted("alone", "half", answers["seeded"], **seeded), request_id="seeded half")
    changes = {"num_slots": 240, "max_len": 128}
    parts = parts_of("torch", drafter_of("torch", mode), draft_len=draft_len, proposes=proposes, **changes)
    async with running(parts) as engine:
        results = await generate(engine, [*requests, wanted, *plain])
        counts = engine.stats()
    for name, (result,) in results.items():
        assert result.tokens == answers[name.split()[0]], name
    assert 0 < counts.accepted_tokens["prediction"] < counts.draft_tokens["prediction"]
