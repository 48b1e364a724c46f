"""Mixed load on a real daemon for as long as you like: nothing may be lost, nothing may grow, no answer may change.

    nice -n 10 python -m benchmarks.soak                       # half an hour on the default model
    python -m benchmarks.soak --minutes 1 --window 10          # a first look
    python -m benchmarks.soak tiny-folder --workers 4

Windows of load: streams, whole answers, structured output, slow readers, clients that leave at every phase, aborts,
deadlines, reloads, an operator at work (`soak_visits.py`). After each the clients wait until the daemon is idle; then
its memory, descriptors, threads and tasks are counted. It fails (exit code 1)

- when one of them rises by more than its limit after the warm-up, by the median slope between windows (Theil and Sen);
- when a page of the KV pool is not free while nobody is served;
- when a request ends without a finish or an error, or with an error that it has no reason for;
- when the daemon dies, or does not answer or end;
- when accepted is not finished + failed + aborted, when one failed, or when the daemon logs an error;
- when the answer to one of a few greedy prompts is not what it was at first, alone or among others.

Memory needs the default half hour, or a fast model: until buffers, thread pools and the ring of spans have been filled
it rises by right. Prints a line a window and writes benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import itertools
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.measure import RESULTS, run
from benchmarks.served import End, Served, serving
from benchmarks.soak_site import Outcome, Site, Violation
from benchmarks.soak_visits import GREEDY, KINDS, Kind, greedy_body, make, tool
from specd.bench.report import machine
from specd.errors import SpecdError

_IDLE_S = 60.0  # to become idle once nobody asks
_GREEDY_S = 300.0  # for a few short answers
_TIMELINE_SPANS, _SPANS_A_STEP = 65536, 4  # see specd/timeline.py: at least schedule, verify, accept, refill
_MOST_VIOLATIONS = 20  # of which the words are kept
_SETTINGS = ("scheduler.max_running=8", "server.slow_client_timeout_s=5", "log.level=info")


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What an idle daemon holds."""

    at_s: float  # since the start
    rss_mib: float
    anon_mib: float  # of it, what is not a file's
    descriptors: int
    threads: int
    tasks: int
    pages_free: int
    pages_total: int
    accepted: int
    ended: int
    failed: int
    steps: int


# Per minute. A steady loss shows over any time; what a cache still takes at the end of the warm-up does not last.
LIMITS = {"anon_mib": 0.5, "descriptors": 0.2, "threads": 0.2, "tasks": 0.2}


def slope_per_minute(samples: Sequence[Sample], name: str) -> float:
    """Median of the slopes between all pairs (Theil 1950, Sen 1968): a single step or spike does not move it much."""
    pairs = itertools.combinations(samples, 2)
    slopes = [60 * (getattr(b, name) - getattr(a, name)) / (b.at_s - a.at_s) for a, b in pairs if b.at_s > a.at_s]
    return statistics.median(slopes) if slopes else 0.0


def steady(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Those after the warm-up: a quarter, or until the daemon's ring of spans is full (12 MiB) if it comes to that."""
    full = [sample for sample in samples if sample.steps * _SPANS_A_STEP >= _TIMELINE_SPANS]
    quarter = samples[len(samples) // 4 :]
    return full if 4 <= len(full) < len(quarter) else quarter


def verdict(
    samples: Sequence[Sample], violations: Sequence[str], end: End, limits: dict[str, float]
) -> tuple[dict[str, float], list[str]]:
    """Slopes after the warm-up, and everything that is wrong."""
    slopes = {name: slope_per_minute(steady(samples), name) for name in limits}
    wrong = list(violations)
    wrong += [f"{n} rose by {slopes[n]:.2f} a minute, more than {limits[n]:g}" for n in limits if slopes[n] > limits[n]]
    for sample in samples:
        if sample.pages_free != sample.pages_total:
            wrong.append(f"{sample.pages_total - sample.pages_free} pages were not free at {sample.at_s:.0f} s")
        if sample.accepted != sample.ended or sample.failed:
            wrong.append(
                f"{sample.accepted} accepted, {sample.ended} ended, {sample.failed} failed at {sample.at_s:.0f} s"
            )
    if end.code != 0 or end.account is None:
        wrong.append(f"the daemon ended with {end.code} and the account {end.account}")
    return slopes, wrong + [f"the log: {line[:300]}" for line in end.errors]


class Soak:
    def __init__(self, site: Site, kinds: Sequence[Kind], *, workers: int) -> None:
        self.site = site
        self.kinds = list(kinds)
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.violations: list[str] = []
        self.num_violations = 0
        self._workers = workers
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    async def window(self, seconds: float) -> Sample:
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._work(until))
        # What was left short by a reload or a command is as it was, so that all windows begin alike.
        self.site.config.write_text("[scheduler]\nmax_waiting = 256\n", encoding="utf-8")
        await self.site.served.call("POST", "/v1/reload", {})
        async with asyncio.timeout(_GREEDY_S):
            await self._ask_greedy()
        return await self._idle()

    async def _work(self, until: float) -> None:
        weights = [kind.weight for kind in self.kinds]
        while time.monotonic() < until and self.site.served.process.returncode is None:
            (kind,) = self.site.draw.choices(self.kinds, weights)
            await self._visit(kind)

    async def _visit(self, kind: Kind) -> None:
        try:
            outcome: Outcome | str = await make(kind, self.site)
        except Violation as error:
            outcome = "VIOLATION"
            self.violate(str(error))
        self.outcomes[kind.visit.__name__][str(outcome)] += 1

    def violate(self, text: str) -> None:
        self.num_violations += 1
        if len(self.violations) < _MOST_VIOLATIONS:
            self.violations.append(f"{text} (at {self.seconds:.0f} s)")

    async def _ask_greedy(self) -> None:
        for prompt in GREEDY:
            outcome, text = await self.site.follow("/v1/chat/completions", greedy_body(self.site.model, prompt))
            if outcome.how != "finished" or text != self.site.answers.setdefault(prompt, text):
                self.violate(f"alone, {prompt!r} was {outcome} and answered {text!r}")

    async def _idle(self) -> Sample:
        """Waits until nobody is served and connections are closed, and counts. What does not end in time shows."""
        seen: list[Sample] = []
        async with asyncio.timeout(2 * _IDLE_S):
            while len(seen) < 2 or not is_settled(*seen[-2:]):
                seen.append(await sample_of(self.site.served, self.seconds))
                if seen[-1].at_s - seen[0].at_s > _IDLE_S:
                    break
                await asyncio.sleep(0.5)
        return seen[-1]


def is_settled(a: Sample, b: Sample) -> bool:
    return (
        (a.tasks, a.descriptors) == (b.tasks, b.descriptors) and b.accepted == b.ended and b.pages_free == b.pages_total
    )


async def sample_of(served: Served, at_s: float) -> Sample:
    dump = await served.call("GET", "/v1/dump")
    stats = dump["status"]["stats"]
    proc = Path("/proc", str(served.process.pid))
    lines = dict(line.split(":", 1) for line in (proc / "status").read_text(encoding="utf-8").splitlines())
    return Sample(
        at_s=at_s,
        rss_mib=int(lines["VmRSS"].split()[0]) / 1024,
        anon_mib=int(lines["RssAnon"].split()[0]) / 1024,
        descriptors=len(os.listdir(proc / "fd")),
        threads=int(lines["Threads"]),
        tasks=len(dump["tasks"]),
        pages_free=stats["pages_free"],
        pages_total=stats["pages_total"],
        accepted=stats["accepted_requests"],
        ended=stats["requests_finished"] + stats["requests_failed"] + stats["requests_aborted"],
        failed=stats["requests_failed"],
        steps=stats["steps"],
    )


HEAD = (
    f"{'s':>6}{'accepted':>10}{'lost':>6}{'RSS MiB':>9}{'anon':>8}{'fds':>5}{'threads':>9}{'tasks':>7}"
    f"{'pages':>12}{'wrong':>7}"
)


def row(sample: Sample, wrong: int) -> str:
    return (
        f"{sample.at_s:>6.0f}{sample.accepted:>10}{sample.accepted - sample.ended:>6}{sample.rss_mib:>9.1f}"
        f"{sample.anon_mib:>8.1f}{sample.descriptors:>5}{sample.threads:>9}{sample.tasks:>7}"
        f"{f'{sample.pages_free}/{sample.pages_total}':>12}{wrong:>7}"
    )


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    """The whole of it. The result's `wrong` is empty when all is well."""
    before = machine()
    with tempfile.TemporaryDirectory(prefix="specd-soak-") as name:
        folder = Path(name)
        config = folder / "specd.toml"
        config.write_text("[scheduler]\nmax_waiting = 256\n", encoding="utf-8")
        settings = [
            *_SETTINGS,
            f"model.max_len={args.max_len}",
            f"kv.memory={args.kv_memory}",
            f"model.threads={args.threads}",
            *args.set,
        ]
        words = [word for setting in settings for word in ("--set", setting)]
        async with serving(folder, args.model, words=words, config=config) as served:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a kept connection is a kept descriptor
            async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:
                info = (await served.call("GET", "/v1/status"))["info"]
                site = Site(served, session, random.Random(args.seed), info["served_names"][0], info["max_len"], config)
                work = Soak(site, await _kinds(site), workers=args.workers)
                samples = await _windows(work, args)
            end = await _end(served)
    slopes, wrong = verdict(samples, work.violations, end, args.limits)
    return {
        "machine": before,
        "command": shlex.join(["python", "-m", "benchmarks.soak", *sys.argv[1:]]),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": work.seconds,
        "account": dict(zip(("accepted", "finished", "failed", "aborted"), end.account or (), strict=False)),
        "slopes_per_minute": slopes,
        "limits_per_minute": args.limits,
        "violations": work.num_violations,
        "wrong": wrong,
        "outcomes": {name: dict(count) for name, count in sorted(work.outcomes.items())},
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }


async def _end(served: Served) -> End:
    try:
        return await served.stop()
    except RuntimeError as error:  # it did not end
        return End(None, None, [str(error)])


async def _kinds(site: Site) -> list[Kind]:
    """All kinds of visits; without tools where this model or this daemon has none, which is said."""
    outcome = await tool(site)
    if outcome.how != "refused":
        return list(KINDS)
    print(f"left out: {tool.__name__} ({outcome})")
    return [kind for kind in KINDS if kind.visit is not tool]


async def _windows(work: Soak, args: argparse.Namespace) -> list[Sample]:
    """As many as begin in time; two at least, since what rises is seen between them."""
    print(HEAD, flush=True)
    samples: list[Sample] = []
    while (len(samples) < 2 or work.seconds < 60 * args.minutes) and work.num_violations < 10 * _MOST_VIOLATIONS:
        try:
            samples.append(await work.window(args.window))
        except (SpecdError, aiohttp.ClientError, OSError) as error:
            work.violate(f"the daemon answers no more: {error}")
            break
        print(row(samples[-1], work.num_violations), flush=True)
    return samples


def limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in LIMITS:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=NUMBER with one of {', '.join(LIMITS)}")
    return name, float(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Mixed load on a real daemon.")
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--window", type=float, default=20.0, help="seconds of load between two counts (default 20)")
    parser.add_argument("--workers", type=int, default=16, help="clients at a time (default 16)")
    parser.add_argument("--threads", type=int, default=1, help="of the daemon's forwards (default 1)")
    parser.add_argument("--max-len", type=int, default=2048, help="tokens of context (default 2048)")
    parser.add_argument("--kv-memory", default="96MiB", help="small: pages run short, and the pool is soon touched")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any setting")
    parser.add_argument(
        "--limit", action="append", type=limit, default=[], metavar="NAME=NUMBER", help=f"a minute; default {LIMITS}"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "soak.json")
    args = parser.parse_args(argv)
    args.limits = {**LIMITS, **dict(args.limit)}
    found: dict[str, Any] = {}

    async def measure() -> None:
        found.update(await soak(args))

    run(measure())
    args.output.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    rises = ", ".join(f"{name} {value:+.3f}" for name, value in found["slopes_per_minute"].items())
    print(f"{found['account']}; a minute, after the warm-up: {rises}")
    for text in found["wrong"]:
        print(f"WRONG: {text}")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
