"""Open-loop load, objectives and the search for a rate: on a scripted server, a fake engine and a clock of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from specd import cli
from specd.bench.client import Sample
from specd.bench.goodput import Slo, goodput
from specd.bench.load import Load, describe, num_requests, run_load
from specd.bench.open_loop import Arrivals, Run, run_schedule
from specd.bench.prompts import built_in
from specd.bench.report import render
from specd.bench.search import Search, Trial, find_rate
from specd.commands.bench import _load
from specd.errors import OverloadedError, QueueFullError, UsageError
from tests.fake_engine import FakeEngine, Script
from tests.http_server import serve
from tests.test_bench import parse


def sample(
    *, ok: bool = True, total_s: float = 1.0, arrivals: tuple[float, ...] = (0.5, 1.0), tokens: int = 2
) -> Sample:
    return Sample(ok=ok, speculation="auto", total_s=total_s, arrivals=arrivals, completion_tokens=tokens)


def load(url: str, **changes: Any) -> Load:
    fields = {"arrivals": Arrivals(50, pattern="constant", duration_s=0.2, grace_s=5), "max_tokens": 16}
    return Load(**{"url": url, "prompts": built_in("chat")[:1], **fields, **changes})


# ---------------------------------------------------------------- arrivals


def test_poisson_arrivals_have_the_rate_and_no_memory() -> None:
    times = Arrivals(20, duration_s=500, seed=3).schedule()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(times) == pytest.approx(10_000, rel=0.05)
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.05)  # an exponential's own; evenly spaced has 0
    assert times == Arrivals(20, duration_s=500, seed=3).schedule()
    assert times != Arrivals(20, duration_s=500, seed=4).schedule()


def test_constant_arrivals_and_their_end() -> None:
    arrivals = Arrivals(4, pattern="constant", duration_s=1, warmup_s=0.5)
    assert arrivals.schedule() == [0, 0.25, 0.5, 0.75, 1.0, 1.25]
    assert arrivals.num_warm(arrivals.schedule()) == 2
    few = Arrivals(4, pattern="constant", duration_s=1, warmup_s=0.5, most=3).schedule()
    assert few == [0, 0.25, 0.5, 0.75, 1.0], "the warm-up is beside them"
    assert Arrivals(0.1, pattern="constant", duration_s=1, warmup_s=1).schedule() == [0, 1], "one that counts"
    with pytest.raises(UsageError, match="more than"):
        Arrivals(1e6, duration_s=60).schedule()


async def run(arrivals: Arrivals, service_s: Any, **more: Any) -> Run:
    """service_s(i): how long request i is served; one is served at a time, as by a server that is busy."""
    turn = asyncio.Lock()

    async def send(index: int, due: float) -> Sample:
        sent = time.perf_counter()
        async with turn:
            await asyncio.sleep(service_s(index))
        end = time.perf_counter() - due
        return Sample(ok=True, speculation="auto", total_s=end, arrivals=(end,), late_s=sent - due)

    return await run_schedule(arrivals, send, **more)


async def test_a_stall_is_seen_by_all_who_would_have_come() -> None:
    """The first request takes 0.4 s: a closed loop of one would see one slow request and nine fast ones."""
    found = await run(Arrivals(25, pattern="constant", duration_s=0.4), lambda i: 0.4 if i == 0 else 0.0)
    waits = [sample.total_s for sample in found.samples]
    assert len(waits) == 10
    for index, wait in enumerate(waits):
        assert wait > 0.39 - 0.04 * index


async def test_a_client_that_is_late_hides_nothing() -> None:
    """The event loop hangs while requests fall due: they are sent late, and the lateness is in their latency."""
    arrivals = Arrivals(100, pattern="constant", duration_s=0.1)

    def hang(index: int) -> float:
        if index == 0:
            time.sleep(0.3)
        return 0.0

    found = await run(arrivals, hang)
    second = found.samples[1]
    assert second.late_s > 0.2
    assert second.total_s >= second.late_s


async def test_what_does_not_end_is_unfinished_and_counted() -> None:
    arrivals = Arrivals(50, pattern="constant", duration_s=0.1, warmup_s=0.04, grace_s=0.1)
    found = await run(arrivals, lambda i: 60 if i == 4 else 0.0)
    assert (found.num_warm, len(found.samples), found.num_unsent) == (2, 5, 0)
    assert [sample.kind for sample in found.samples] == ["", "", *["unfinished"] * 3]
    assert found.samples[-1].total_s > 0.09
    assert found.seconds == pytest.approx(0.1)


async def test_a_run_can_be_given_up() -> None:
    arrivals = Arrivals(20, pattern="constant", duration_s=10)
    start = time.perf_counter()
    found = await run(arrivals, lambda i: 0.0, given_up=lambda sample: True)
    assert time.perf_counter() - start < 2
    assert found.num_unsent > 190
    assert len(found.samples) + found.num_unsent == 200


# ---------------------------------------------------------------- objectives


def test_an_objective_is_read_or_refused_with_its_words() -> None:
    assert dict(Slo.parse("ttft=200ms, itl=.5s,e2e=3s").limits) == {"ttft": 0.2, "itl": 0.5, "e2e": 3.0}
    for text, words in (
        ("ttft=200", "ttft=200.*unit"),
        ("ttft", "NAME=TIME"),
        ("late=2s", "late.*not one of ttft, tpot, itl, e2e"),
        ("ttft=1s,ttft=2s", "twice"),
        ("ttft=-1s", "write"),
    ):
        with pytest.raises(UsageError, match=words):
            Slo.parse(text)


def test_each_limit_is_of_the_time_that_it_names() -> None:
    request = sample(total_s=2.5, arrivals=(1.0, 1.2, 2.2), tokens=13)  # 12 tokens in 1.2 s after the first
    for text, missed in (
        ("ttft=1s,tpot=101ms,itl=1s,e2e=2.5s", ()),
        ("ttft=999ms", ("ttft",)),
        ("tpot=99ms", ("tpot",)),
        ("itl=900ms", ("itl",)),
        ("e2e=2.4s,ttft=5s", ("e2e",)),
    ):
        assert Slo.parse(text).missed(request) == missed, text
    silent = sample(total_s=2.0, arrivals=(), tokens=1)
    assert Slo.parse("ttft=1s,tpot=1ms,itl=1ms").missed(silent) == ("ttft",), "no text: the end is its first token"


def test_goodput_counts_failures_as_bad() -> None:
    samples = [sample(), sample(total_s=9), sample(ok=False), sample(arrivals=(3.0, 3.5), total_s=9)]
    found = goodput(samples, Slo.parse("ttft=1s,e2e=2s"), 2.0)
    assert (found["good"], found["requests"], found["share"], found["requests_per_s"]) == (1, 4, 0.25, 0.5)
    assert (found["missed"], found["failed"]) == ({"ttft": 1, "e2e": 2}, 1)


# ---------------------------------------------------------------- the search


async def search_for(capacity: float, **changes: Any) -> tuple[Any, list[float]]:
    """A server that holds any rate up to `capacity`; each trial takes ten seconds of the clock."""
    tried: list[float] = []

    async def trial(rate: float) -> Trial:
        tried.append(rate)
        return Trial(rate, rate <= capacity, {})

    search = Search(**{"start": 1.0, "lowest": 0.1, "highest": 1e4, "trial_s": 10.0, **changes})
    return await find_rate(search, trial, clock=lambda: 10.0 * len(tried)), tried


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.7, 400.0])
async def test_the_search_closes_in(capacity: float) -> None:
    found, tried = await search_for(capacity)
    assert found.complete
    assert found.rate <= capacity < found.limit <= 1.05 * found.rate
    assert len(tried) < 20


async def test_the_search_keeps_its_time() -> None:
    found, tried = await search_for(1000.0, most_s=45.0)
    assert tried == [1, 2, 4, 8]
    assert (found.rate, found.limit, found.complete) == (8, None, False)
    nothing, _ = await search_for(0.0)
    assert (nothing.rate, nothing.complete) == (None, True)
    everything, tried = await search_for(1e9, highest=6.0)
    assert tried == [1, 2, 4, 6]
    assert (everything.rate, everything.limit, everything.complete) == (6, None, True)


# ---------------------------------------------------------------- over HTTP


async def test_a_server_is_measured_from_the_arrivals() -> None:
    slo = Slo.parse("ttft=30s,e2e=60s")
    async with serve(FakeEngine(Script(delay_s=0.002))) as client:
        asked = load(client.url, slo=slo)
        report = await run_load(asked)
    summary = report["summary"]["auto"]
    assert num_requests(asked) == summary["requests"] == 10
    assert summary["errors_by_kind"] == {}
    assert summary["goodput"]["share"] == 1
    assert summary["requests_per_s"] == pytest.approx(50)
    assert summary["acceptance_length"] == pytest.approx(1 + 6 / 4), "from metrics.speculative_decoding"
    assert report["arrivals"]["rate"] == 50
    assert all(record["late_s"] >= 0 and record["total_s"] > record["late_s"] for record in report["samples"])
    assert "10 of 10 within ttft 30000 ms, e2e 60000 ms" in render(report)
    assert describe(asked) == "50 requests/s, constant arrivals, 0.2 s"


async def test_failures_are_counted_by_kind() -> None:
    refusals: list[OverloadedError | None] = [QueueFullError("full", retry_after_s=7), None]

    class Half(FakeEngine):
        def submit(self, request: Any) -> Any:
            self.script.refuse = refusals[len(self.requests_seen) % 2]
            if self.script.refuse:
                self.requests_seen.append(request)
            return super().submit(request)

    async with serve(Half(Script(fail_after=2))) as client:
        report = await run_load(load(client.url, slo=Slo.parse("e2e=60s")))
    summary = report["summary"]["auto"]
    assert summary["failed"] == summary["requests"] == 10
    assert summary["errors_by_kind"] == {"http.429.queue_full": 5, "stream.non_finite_logits": 5}
    assert summary["retry_after_s"] == {"least": 7.0, "most": 7.0}
    assert summary["goodput"]["good"] == 0
    assert "5 failed: http.429.queue_full" in render(report)


async def test_a_rate_is_found_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each answer takes at least 30 ms, so an objective below it never holds, and one far above it does."""
    file, prompts = tmp_path / "report.json", tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    words = ["bench", "--max-tokens", "4", "--prompts", str(prompts), "-o", str(file), "--find-rate", "--rate", "5000"]
    words += ["--duration", "0.2", "--grace-period", "9", "--search-time", "10"]
    async with serve(FakeEngine(Script(delay_s=0.03))) as client:

        async def main(slo: str) -> int:
            return await asyncio.to_thread(cli.main, [*words, "--url", client.url, "--slo", slo])

        assert await main("ttft=1ms") == 1
        report = json.loads(file.read_text())
        assert report["search"]["rate"] is None
        assert report["summary"] == {}
        assert all(not trial["holds"] for trial in report["search"]["trials"])
        words[words.index("5000")] = "10"
        assert await main("ttft=20s") == 0
        rate = json.loads(file.read_text())["search"]["rate"]
        said = capsys.readouterr().out.rpartition("found: ")[2]
        assert said.startswith(f"{rate:.2f} (")
        assert "--grace-period" not in said
        words[words.index("9")] = "0"
        kept = file.read_text()
        assert await main("ttft=20s") == 1
        found = capsys.readouterr().out.rpartition("found: none")[2]
        assert "--grace-period is too short: at " in found
        file.write_text(kept)
    report = json.loads(file.read_text())
    assert report["search"]["rate"] == report["arrivals"]["rate"]
    assert report["summary"]["auto"]["goodput"]["share"] == 1
    assert report["summary"]["auto"]["errors_by_kind"] == {}


def test_options_that_contradict_are_refused() -> None:
    for words, message in (
        ("--rate 0", "--rate 0: must be above 0"),
        ("--rate nan", "--rate nan"),
        ("--duration 5", "--duration 5.0: only with --rate"),
        ("--rate 1 --concurrency 4", "--concurrency: is of the closed loop"),
        ("--rate 1 --compare off", "--compare: is of the closed loop"),
        ("--rate 1 --warmup -1", "--warmup -1: must be at least 0, and finite"),
        ("--find-rate", "--find-rate: needs an objective"),
        ("--rate 1 --search-time 9", "--search-time 9.0: only with --find-rate"),
        ("--find-rate --slo e2e=1s --goodput-target 2", "--goodput-target 2"),
        ("--find-rate --slo e2e=1s --search-time 9", "one trial takes 60 s"),
        ("--rate 1e9", "more than 1,000,000 requests"),
        ("--slo e2e=1", "--slo 'e2e=1'"),
    ):
        with pytest.raises(UsageError, match=message):
            _load(parse(*words.split()))


def test_other_tools_names_are_understood() -> None:
    words = ["--request-rate", "3", "--arrival-pattern", "constant", "--warmup-duration", "2", "--goodput", "e2e=1s"]
    found = _load(parse(*words))
    assert found.arrivals == Arrivals(3, pattern="constant", warmup_s=2)
    assert found.slo is not None
    assert (found.concurrency, found.requests, found.search) == (1, 16, None)
    closed = _load(parse("--slo", "e2e=1s", "--compare", "off"))
    assert closed.compare_off
    assert closed.arrivals is None
