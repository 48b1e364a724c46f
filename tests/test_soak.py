"""The soak and the benchmark of many streams: what they make of figures, and a short soak of a real daemon."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from benchmarks import soak, streams
from benchmarks.served import End, log_errors
from benchmarks.soak import LIMITS, Sample, slope_per_minute, steady, verdict
from benchmarks.soak_site import Outcome, Site, Violation
from benchmarks.soak_visits import KINDS, make, stream

GOOD = End(0, (10, 8, 0, 2), [])


def samples(*anon_mib: float, period_s: float = 60.0, **changes: int) -> list[Sample]:
    base = Sample(0.0, 300.0, 0.0, 20, 6, 6, 64, 64, 10, 10, 0, 100_000)
    return [dataclasses.replace(base, at_s=period_s * i, anon_mib=value, **changes) for i, value in enumerate(anon_mib)]


def test_a_slope_is_a_minutes_and_one_spike_is_none() -> None:
    assert slope_per_minute(samples(1, 3, 5, 7, period_s=30), "anon_mib") == pytest.approx(4)
    assert slope_per_minute(samples(*[5.0] * 4, 90, *[5.0] * 5), "anon_mib") == 0
    assert slope_per_minute(samples(5.0), "anon_mib") == 0


def test_what_is_wrong_is_said() -> None:
    assert verdict(samples(*[100.0] * 8), [], GOOD, LIMITS) == (dict.fromkeys(LIMITS, 0.0), [])
    rising = samples(*[100.0 + i for i in range(8)])
    for found, violations, end, words in (
        (rising, [], GOOD, "anon_mib rose by 1.00 a minute, more than 0.5"),
        (samples(1, 1, pages_free=60), [], GOOD, "4 pages were not free"),
        (samples(1, 1, accepted=11), [], GOOD, "11 accepted, 10 ended"),
        (samples(1, 1, failed=1), [], GOOD, "1 failed"),
        (samples(1, 1), ["greedy: other text"], GOOD, "greedy: other text"),
        (samples(1, 1), [], End(1, (1, 1, 0, 0), []), "ended with 1"),
        (samples(1, 1), [], End(0, None, []), "the account None"),
        (samples(1, 1), [], End(0, (1, 1, 0, 0), ["Traceback"]), "the log: Traceback"),
    ):
        assert any(words in text for text in verdict(found, violations, end, LIMITS)[1]), words


def test_the_warm_up_lasts_until_the_rings_are_full() -> None:
    filling = [dataclasses.replace(s, steps=1000 * i) for i, s in enumerate(samples(*[1.0] * 40))]
    assert steady(filling)[0].steps * 4 >= 65536
    assert steady(filling[:8]) == filling[2:8], "too short for that: a quarter"


def test_errors_of_a_log() -> None:
    lines = ['{"level":"info"}', '{"ts":"x","level":"error","event":"stream_failed"}', "Traceback (most recent", ""]
    assert log_errors("\n".join(lines)) == lines[1:3]


async def test_an_outcome_that_nobody_expects_is_a_violation() -> None:
    site: Site = None  # type: ignore[assignment]

    async def visit(outcome: Outcome) -> Outcome:
        kind = dataclasses.replace(KINDS[0], visit=lambda site: answer(outcome), codes=frozenset({"late"}))
        return await make(kind, site)

    async def answer(outcome: Outcome) -> Outcome:
        return outcome

    for fine in (Outcome("finished"), Outcome("left"), Outcome("ended", "late"), Outcome("refused", "queue_full")):
        assert await visit(fine) == fine
    with pytest.raises(Violation, match="ended engine_error"):
        await visit(Outcome("ended", "engine_error"))


def test_the_lag_is_read_from_its_buckets() -> None:
    text = "# TYPE specd_loop_lag_seconds histogram\n" + "".join(
        f'specd_loop_lag_seconds_bucket{{le="{bound}"}} {count}\n'
        for bound, count in (("0.001", 50), ("0.01", 90), ("0.1", 99), ("+Inf", 100))
    )
    buckets = streams.lag_buckets(text)
    assert buckets[math.inf] == 100
    assert streams.quantile(buckets, 0.5) == pytest.approx(0.001)
    assert streams.quantile(buckets, 0.7) == pytest.approx(0.001 + 0.009 * 20 / 40)
    assert streams.quantile(buckets, 0.999) == pytest.approx(0.1), "beyond the last bound: at least that"
    assert math.isnan(streams.quantile({0.1: 0, math.inf: 0}, 0.5))
    with pytest.raises(RuntimeError, match="specd_loop_lag"):
        streams.lag_buckets("")


def test_streams_writes_a_table() -> None:
    median = {key: 0.25 for _, key, _, _ in streams._COLUMNS}
    entry = {"side": "specd native fast none", "streams": 200, "median": median}
    text = streams.markdown("command", {"cpu": "cpu", "cores": 2, "load_1min": 0.5}, [entry])
    rows = text.splitlines()[2:]
    assert len(rows) == 3
    assert len({row.count("|") for row in rows}) == 1
    assert "| 25.0 |" in rows[2]


def test_a_short_soak(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two windows: nothing is lost and no answer changes. Too short for slopes, so their limits are wide."""
    file = tmp_path / "soak.json"
    words = [str(tiny_folder), "--minutes", "0.2", "--window", "6", "--workers", "6", "--max-len", "512"]
    words += ["--kv-memory", "1MiB", "--limit", "anon_mib=500", "--output", str(file)]
    for name in ("descriptors", "threads", "tasks"):
        words += ["--limit", f"{name}=100"]
    code = soak.main(words)
    shown = capsys.readouterr().out
    assert code == 0, shown
    report = json.loads(file.read_text())
    assert len(report["samples"]) >= 2
    account = report["account"]
    assert account["accepted"] == account["finished"] + account["aborted"] > 0
    assert stream.__name__ in report["outcomes"]
    assert f"{report['samples'][-1]['accepted']:>10}" in shown


def test_a_daemon_that_dies_is_a_finding(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found before is written, and the end is told without a traceback."""
    original = soak.Soak.window

    async def window(work: soak.Soak, seconds: float) -> Sample:
        work.violate("something before it")
        work.site.served.process.kill()
        return await original(work, seconds)

    monkeypatch.setattr(soak.Soak, "window", window)
    file = tmp_path / "soak.json"
    words = [str(tiny_folder), "--minutes", "0.1", "--window", "0.5", "--workers", "2", "--max-len", "512"]
    assert soak.main([*words, "--output", str(file)]) == 1
    wrong = json.loads(file.read_text())["wrong"]
    for text in ("something before it", "the daemon answers no more", "the daemon ended with -9 and the account None"):
        assert any(text in line for line in wrong), wrong
