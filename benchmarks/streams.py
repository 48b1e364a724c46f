"""What the host costs a daemon that serves 200 streams over HTTP, and how late its event loop runs meanwhile.

    python -m benchmarks.streams                    # 200 streams, about a quarter of an hour on two cores
    python -m benchmarks.streams --quick            # 8 streams, to see that it works

A real `specd serve`, asked by a client in this process: both want the processor, and `client_share` says how much of a
core the client took. Looked at while all streams decode, between the last stream's first token and the first one's end:

    schedule_ms  commit and schedule, of one step
    loop_ms      processor time of the event loop's thread in one step: commit, schedule, launch, JSON, HTTP
    idle_ms      the part of a step in which no stream of the device computes: host time that nothing hides

Of the whole round, prompts included: `lag_*_ms`, how late a timer of the event loop fired (`specd_loop_lag_seconds`;
linear between its buckets), the time to the first text, the gaps between chunks, and tokens/s.

Writes benchmarks/results/streams.json, and the same as a table in streams.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.host_time import Window, per_step
from benchmarks.measure import arguments, run, write_result
from benchmarks.peers import SPECD
from benchmarks.served import Served, serving
from specd.bench.prompts import CHAT
from specd.bench.report import machine, percentile

_DEFAULT = ("specd native fast none", "specd native fast ngram adaptive")
_LONGEST_PROMPT = 96  # tokens of the built-in questions with their number and the template; spare ones for drafts
_LAG = "specd_loop_lag_seconds"

Buckets = Mapping[float, float]  # upper bound -> observations up to it


class Stream:
    """One answer: when each of its chunks came."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.usage: dict[str, Any] = {}

    async def read(self, session: aiohttp.ClientSession, url: str, body: bytes, window: Window) -> None:
        """RuntimeError when it is refused or cut off. Only the last event is parsed: the client is to be cheap."""
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as reply:
            if reply.status != 200:
                raise RuntimeError(f"HTTP {reply.status}: {(await reply.text())[:300]}")
            last, end = b"", b""
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    last = line
                    self.arrivals.append(time.perf_counter())
                    if len(self.arrivals) == 2:  # the first one holds the role
                        window.first_token()
                elif line.startswith(b"data: [DONE]"):
                    window.ended()
                    end = line
        if not end:
            raise RuntimeError(f"a stream was cut off after {last[:300]!r}")
        self.usage = orjson.loads(last[6:])["usage"]

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks that hold text: not the role's, the finish's and the usage's."""
        return [b - a for a, b in itertools.pairwise(self.arrivals[1:-2])]


async def round_of(served: Served, model: str, args: argparse.Namespace) -> dict[str, float]:
    """All streams once. RuntimeError when they never all decoded at once."""
    window = _Watched(args.streams, served.process.pid)
    before = lag_buckets(await served.metrics())
    streams = [Stream() for _ in range(args.streams)]
    start = time.perf_counter()
    own = time.process_time()
    async with _session() as session, asyncio.TaskGroup() as group:
        for number, stream in enumerate(streams):
            body = orjson.dumps(_body(model, number, args.tokens))
            group.create_task(stream.read(session, f"{served.url}/v1/chat/completions", body, window))
    wall_s = time.perf_counter() - start
    client_s = time.process_time() - own
    lags = {bound: count - before[bound] for bound, count in lag_buckets(await served.metrics()).items()}
    if math.isinf(window.start_s):
        raise RuntimeError("the streams never decoded all at once: ask for more tokens")
    trace = await served.call("GET", f"/v1/trace?seconds={time.perf_counter() - window.start_s + 1:.3f}")
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    return {
        **per_step(trace, window),
        "lag_p50_ms": 1e3 * quantile(lags, 0.5),
        "lag_p99_ms": 1e3 * quantile(lags, 0.99),
        "lag_samples": max(lags.values()),
        "ttft_p99_ms": 1e3 * _percentile([stream.arrivals[1] - start for stream in streams], 99),
        "gap_p50_ms": 1e3 * _percentile(gaps, 50),
        "gap_p99_ms": 1e3 * _percentile(gaps, 99),
        "tokens_per_s": sum(stream.usage["completion_tokens"] for stream in streams) / wall_s,
        "client_share": client_s / wall_s,
    }


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=3600))


class _Watched(Window):
    """The window's processor time is that of the daemon's main thread, where its event loop runs."""

    def __init__(self, num_streams: int, pid: int) -> None:
        super().__init__(num_streams)
        self._file = Path(f"/proc/{pid}/task/{pid}/schedstat")

    def thread_time_s(self) -> float:
        return int(self._file.read_text(encoding="ascii").split()[0]) / 1e9


def _body(model: str, number: int, num_tokens: int) -> dict[str, Any]:
    """Prompts differ from their first words on, so that no stream's work is another's."""
    text = f"Question {number}: {CHAT[number % len(CHAT)]}"
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def lag_buckets(text: str) -> dict[float, float]:
    """The cumulative buckets of the loop's lag in a page of metrics."""
    for family in text_string_to_metric_families(text):
        if family.name == _LAG:
            return {float(s.labels["le"]): s.value for s in family.samples if s.name == f"{_LAG}_bucket"}
    raise RuntimeError(f"/metrics has no {_LAG}")


def quantile(buckets: Buckets, q: float) -> float:
    """As Prometheus' histogram_quantile: linear within a bucket, the last finite bound at most; NaN for nothing."""
    bounds = sorted(buckets)
    rank = q * buckets[bounds[-1]]
    below, low = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank and buckets[bound] > below:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (buckets[bound] - below)
        below, low = buckets[bound], bound
    return float("nan")


def _percentile(values: Sequence[float], q: float) -> float:
    found = percentile(values, q)
    assert found is not None
    return found


async def side_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A daemon of its own for each side; its first round does not count."""
    settings = [f"scheduler.max_running={args.streams}", f"model.max_len={_LONGEST_PROMPT + args.tokens}"]
    settings += [f"model.threads={args.threads}", "kv.prefix_cache=false", "log.level=warning", *SPECD[name]]
    words = [word for setting in settings for word in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="specd-streams-") as folder:
        async with serving(Path(folder), args.model, words=words) as served:
            model = (await served.call("GET", "/v1/status"))["info"]["served_names"][0]
            rounds = [await round_of(served, model, args) for _ in range(args.rounds + 1)][1:]
            end = await served.stop()
    if end.code != 0 or end.errors:
        raise RuntimeError(f"{name}: the daemon ended with {end.code}: {end.errors[:3]}")
    median = {key: percentile([figures[key] for figures in rounds], 50) for key in rounds[0]}
    return {"side": name, "streams": args.streams, "median": median, "rounds": rounds}


_COLUMNS = (
    ("step ms", "step_ms", 1.0, 1), ("schedule ms", "schedule_ms", 1.0, 2), ("loop ms", "loop_ms", 1.0, 2),
    ("loop % of a step", "loop_share", 100.0, 1), ("idle % of a step", "idle_share", 100.0, 1),
    ("lag p50 ms", "lag_p50_ms", 1.0, 2), ("lag p99 ms", "lag_p99_ms", 1.0, 2), ("gap p50 ms", "gap_p50_ms", 1.0, 1),
    ("gap p99 ms", "gap_p99_ms", 1.0, 1), ("tokens/s", "tokens_per_s", 1.0, 0),
    ("client % of a core", "client_share", 100.0, 0),
)  # fmt: skip


def markdown(command: str, before: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """The medians as a table."""
    head = ["side", "streams", *(title for title, *_ in _COLUMNS)]
    rows = [
        [entry["side"], str(entry["streams"])]
        + [f"{factor * entry['median'][key]:.{digits}f}" for _, key, factor, digits in _COLUMNS]
        for entry in entries
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))
    return f"`{command}`; {before['cpu']}, {before['cores']} cores, load {before['load_1min']:.1f} before\n\n{table}\n"


async def measure(args: argparse.Namespace) -> None:
    before = machine()
    entries = []
    for name in args.sides:
        entries.append(await side_of(name, args))
        print(name, ", ".join(f"{key} {value:.3g}" for key, value in entries[-1]["median"].items()), flush=True)
    path = write_result("streams", args, before, entries)
    command = f"python -m benchmarks.streams {shlex.join(sys.argv[1:])}".strip()
    path.with_suffix(".md").write_text(markdown(command, before, entries), encoding="utf-8")
    print(path.name)


def main() -> None:
    parser = arguments("benchmarks.streams", "What the host costs a daemon with many streams over HTTP.", cells=False)
    parser.add_argument("--sides", nargs="+", choices=list(SPECD), default=list(_DEFAULT), metavar="SIDE")
    parser.add_argument("--streams", type=int, default=200)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tokens, args.streams = 1, 24, 8
    args.threads = args.threads or os.cpu_count() or 1
    run(measure(args))


if __name__ == "__main__":
    main()
