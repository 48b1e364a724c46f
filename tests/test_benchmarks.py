"""The arithmetic of the side-by-side measurements, on answers that were never measured."""

from __future__ import annotations

import argparse
import dataclasses
import math

import pytest

from benchmarks.host_time import Window, per_step
from benchmarks.llama_cpp import PLAIN
from benchmarks.measure import Cell, Load, Question, Sample, figures, show, table
from benchmarks.peers import OWN_PLAIN, SIDES, load_name, sentences
from benchmarks.targets import TARGETS, markdown, targets

NONE, ADAPTIVE, FIXED = (f"specd native fast {name}" for name in ("none", "ngram adaptive", "ngram K=3"))


def sample(first_s: float, gap_s: float, num_tokens: int = 11, *, per_step: int = 1) -> Sample:
    """Asked at 0, the first token at first_s, then per_step tokens every gap_s."""
    times = [first_s + gap_s * i for i in range((num_tokens - 1) // per_step + 1)]
    return Sample(
        start_s=0.0,
        first_s=first_s,
        end_s=times[-1],
        token_ids=tuple(range(num_tokens)),
        gaps_s=(gap_s,) * (len(times) - 1),
        arrivals=((first_s, 1), *((at, per_step) for at in times[1:])),
    )


def cell(kind: str, concurrency: int, side: str, *rounds: list[Sample]) -> Cell:
    return Cell(Load(kind, concurrency, (Question((1, 2, 3), 11),)), side, list(rounds))


def test_full_rate_counts_decoding_alone() -> None:
    # One decodes from 1 to 6, the other from 3 to 13: both from 3 to 6, at 2 and 1 tokens a second.
    both = figures([sample(1.0, 0.5), sample(3.0, 1.0)])
    assert both["full_tokens_per_s"] == pytest.approx(3.0)
    assert both["decode_tokens_per_s"] == pytest.approx(20 / 12)
    assert both["tokens_per_s"] == pytest.approx(22 / 13)
    # The first ends while the second waits for its first token: what it did meanwhile is not decoding alone.
    apart = figures([sample(1.0, 0.5), sample(7.0, 0.25)])
    assert apart["full_tokens_per_s"] == pytest.approx(4.0)
    # One after the other, each asked when the one before has ended.
    one_by_one = figures([sample(1.0, 0.5), dataclasses.replace(sample(7.0, 0.5), start_s=6.0)])
    assert one_by_one["full_tokens_per_s"] == pytest.approx(2.0)


def test_unknown_arrivals_are_taken_as_even() -> None:
    told = sample(1.0, 0.5)
    untold = Sample(told.start_s, told.first_s, told.end_s, (), num_untold=11)
    assert untold.num_tokens == 11
    assert figures([untold])["full_tokens_per_s"] == pytest.approx(figures([told])["full_tokens_per_s"])


def test_an_answer_of_one_token_has_no_decode_rate() -> None:
    found = figures([Sample(0.0, 1.0, 1.5, (7,)), sample(2.0, 1.0, 1)])
    assert found["decode_tokens_per_s"] is None
    assert found["full_tokens_per_s"] is None
    assert found["ttft_ms"] == pytest.approx(1500)


def test_answers_are_compared_by_ids_then_by_text() -> None:
    ids = Sample(0, 1, 2, (1, 2), text="a")
    assert ids.equals(Sample(0, 1, 2, (1, 2), text="b"))
    assert not ids.equals(Sample(0, 1, 2, (1, 3), text="a"))
    assert ids.equals(Sample(0, 1, 2, (), text="a", num_untold=2))
    assert not ids.equals(Sample(0, 1, 2, (), text="b", num_untold=2))
    assert not Sample(0, 1, 2, (1,)).equals(Sample(0, 1, 2, (), num_untold=1))


def test_ratios_are_taken_within_a_round() -> None:
    # The machine is twice as slow in the second round, for everybody.
    cells = [
        cell("chat", 1, PLAIN, [sample(1.0, 1.0)], [sample(2.0, 2.0)], [sample(1.0, 1.0)]),
        cell("chat", 1, NONE, [sample(1.0, 0.5)], [sample(2.0, 1.0)], [sample(1.0, 0.25)]),
        cell("chat", 1, ADAPTIVE, [sample(1.0, 0.5, per_step=2)], [sample(2.0, 1.0)], [sample(1.0, 0.25)]),
        cell("chat", 32, NONE, [sample(1.0, 0.5)]),
    ]
    entries = table(cells, against=PLAIN, own=OWN_PLAIN)
    assert entries[1][f"ratio to {PLAIN}"]["full_tokens_per_s"]["median"] == pytest.approx(2.0)
    assert entries[2]["ratio to own plain"]["full_tokens_per_s"]["median"] == pytest.approx(1.0)
    assert entries[2]["ratio to own plain"]["full_tokens_per_s"]["p75"] == pytest.approx(1.5)
    assert f"ratio to {PLAIN}" not in entries[3]
    assert entries[0][f"answers equal to {PLAIN}"] == 1
    assert len(show(entries, against=PLAIN).splitlines()) == 5


def test_targets_name_the_sides_and_say_whether_they_are_met() -> None:
    cells = [
        cell("chat", 1, PLAIN, [sample(1.0, 1.0)]),
        cell("chat", 1, f"{PLAIN} ngram-mod", [sample(1.0, 0.8)]),
        cell("chat", 1, f"{PLAIN} ngram-cache", [sample(1.0, 1.2)]),
        cell("chat", 1, NONE, [sample(1.0, 0.5)]),
        cell("chat", 1, ADAPTIVE, [sample(1.0, 0.45)]),
        cell("chat", 1, FIXED, [sample(1.0, 0.7, per_step=2)]),
        cell("chat", 1, "specd torch none", [sample(1.0, 0.1)]),  # faster, but not what the targets are about
    ]
    rows = {row["row"]: row for row in targets(cells)}
    assert len(rows) == 3
    plain = rows["plain decode, batch 1, against llama.cpp"]
    assert (plain["ours"], plain["theirs"], plain["met"]) == (NONE, PLAIN, True)
    assert plain["ratio"]["median"] == pytest.approx(2.0)
    step = rows["a step of m = 4 against m = 1"]
    assert step["ratio"]["median"] == pytest.approx(1.4)
    assert step["met"] is False
    best = rows["best speculative mode against llama.cpp's best mode, chat, batch 1"]
    assert (best["ours"], best["theirs"]) == (FIXED, f"{PLAIN} ngram-mod")
    assert best["ratio"]["median"] == pytest.approx((2 / 0.7) / (1 / 0.8))
    entries = table(cells, against=PLAIN, own=OWN_PLAIN)
    text = markdown(
        "command", {"cpu": "cpu", "cores": 2, "load_1min": 0.0}, {}, entries, [*rows.values()], against=PLAIN
    )
    assert text.count(NONE) == 3  # ours, theirs, and its line
    assert "| at most 1.35 | no |" in text


def test_targets_speak_of_sides_and_loads_that_exist() -> None:
    for target in TARGETS:
        for name in (*target.ours, *target.theirs):
            assert name in SIDES or f"specd native fast {name}" in SIDES
        name = target.kind if target.kind.startswith("ttft") else f"{target.kind}-{target.concurrency}"
        assert load_name(name) == name
    with pytest.raises(argparse.ArgumentTypeError, match="chat-0"):
        load_name("chat-0")


def test_sentences_differ_from_their_first_words_on() -> None:
    starts = {sentences(f"seed {i}", 3)[:40] for i in range(50)}
    assert len(starts) == 50
    assert sentences("a", 3) == sentences("a", 3)


def test_host_time_looks_at_the_window_alone() -> None:
    window = Window(2)
    window.first_token()
    assert window.start_s == math.inf
    window.start_s, window.end_s, window.loop_s = 1.0, 1.05, 0.005
    names = [{"ph": "M", "tid": tid, "args": {"name": name}} for tid, name in enumerate(("host", "all"))]

    def span(tid: int, name: str, start_ms: float, length_ms: float) -> dict[str, object]:
        return {"ph": "X", "tid": tid, "name": name, "ts": 1e6 + 1e3 * start_ms, "dur": 1e3 * length_ms}

    steps = [
        event
        for at in (-10, 0, 10, 20)  # a step every 10 ms: 9 of computing, 0.5 of scheduling; the first is not inside
        for event in (span(1, "verify", at, 6), span(1, "accept", at + 6, 3), span(0, "schedule", at + 9, 0.5))
    ]
    found = per_step({"traceEvents": [*names, *steps]}, window)
    assert found["steps"] == 2
    assert found["step_ms"] == pytest.approx(10)
    assert found["schedule_ms"] == pytest.approx(0.5)
    assert found["idle_share"] == pytest.approx(0.1)
    assert found["loop_share"] == pytest.approx(0.1)
    with pytest.raises(RuntimeError, match="more tokens"):
        per_step({"traceEvents": [*names, *steps[:6]]}, window)
