"""Load on a server: closed-loop (so many in flight, the next one sent when one ends), open-loop, or a search.

Open-loop requests arrive by the clock (`open_loop.py`); a search looks for the rate at which they still meet an
objective (`search.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from specd.bench.client import Client, Sample, request_body
from specd.bench.goodput import Slo, goodput
from specd.bench.open_loop import Arrivals, Run, run_schedule
from specd.bench.prompts import Messages
from specd.bench.report import MIN_ROUNDS, compare, summarise
from specd.bench.search import Search, Trial, find_rate

_MODES = ("auto", "off")
_OF_TRIALS = (
    "goodput",
    "requests_per_s",
    "errors_by_kind",
    "ttft_ms",
    "itl_ms",
    "total_ms",
    "late_ms",
    "acceptance_length",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What to send."""

    url: str
    prompts: Sequence[Messages]
    model: str | None = None  # None = the server's first
    concurrency: int = 1
    requests: int = 16  # with `compare_off`: rounded up to whole rounds of `concurrency`, at least MIN_ROUNDS
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    compare_off: bool = False
    arrivals: Arrivals | None = None  # None: closed-loop
    slo: Slo | None = None
    search: Search | None = None  # needs arrivals and an slo
    api_key: str | None = dataclasses.field(default=None, repr=False)
    timeout_s: float = 600.0


async def run_load(load: Load, *, progress: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Runs the load and gives the report without its heading. progress(n): n more requests have ended."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, load.url, api_key=load.api_key, timeout_s=load.timeout_s)
        runner = _Runner(load, client, load.model or await client.first_model(), progress)
        if load.search is not None:
            return await runner.find(load.search)
        if load.arrivals is not None:
            return await runner.scheduled(load.arrivals)
        return await (runner.alternate() if load.compare_off else runner.plain())


def num_requests(load: Load) -> int | None:
    """How often `progress` will be told of a request; None: nobody knows yet."""
    if load.search is not None:
        return None
    if load.arrivals is not None:
        return len(load.arrivals.schedule())
    return 2 * _num_rounds(load) * load.concurrency if load.compare_off else load.requests


def describe(load: Load) -> str:
    """What is really sent, for people: with `compare_off` it can be more than `requests`."""
    if load.arrivals is not None:
        at = load.arrivals
        tried = f"from {at.rate:g} requests/s up or down, at most {load.search.most_s:g} s: " if load.search else ""
        rate = "" if load.search else f"{at.rate:g} requests/s, "
        warm = f" after {at.warmup_s:g} s that do not count" if at.warmup_s else ""
        return f"{tried}{rate}{at.pattern} arrivals, {at.duration_s:g} s{warm}"
    if not load.compare_off:
        return f"{load.requests} requests, {min(load.requests, load.concurrency)} in flight"
    rounds = _num_rounds(load)
    return (
        f"{num_requests(load)} requests: {rounds} rounds (at least {MIN_ROUNDS}) of {load.concurrency} in flight, each "
        "with speculation on and off, after one of a single token for each prompt"
    )


def _num_rounds(load: Load) -> int:
    return max(MIN_ROUNDS, -(-load.requests // load.concurrency))


class _Runner:
    def __init__(self, load: Load, client: Client, model: str, progress: Callable[[int], None]) -> None:
        self._load = load
        self._client = client
        self._model = model
        self._progress = progress

    async def plain(self) -> dict[str, Any]:
        prompts = itertools.islice(itertools.cycle(self._load.prompts), self._load.requests)
        samples, wall_s = await self._closed_loop(list(prompts), "auto")
        return {"model": self._model, "summary": {"auto": self._figures(samples, wall_s)}, "samples": _records(samples)}

    def _figures(self, samples: Sequence[Sample], wall_s: float, *, arrival_s: float | None = None) -> dict[str, Any]:
        """arrival_s: in which the samples' requests arrived, when that is not all the time."""
        slo, seconds = self._load.slo, wall_s if arrival_s is None else arrival_s
        return {
            **summarise(samples, wall_s),
            "requests_per_s": len(samples) / seconds if seconds else None,
            **({} if slo is None else {"goodput": goodput(samples, slo, seconds)}),
        }

    async def scheduled(self, arrivals: Arrivals) -> dict[str, Any]:
        return self._report(arrivals, await self._run(arrivals))

    def _report(self, arrivals: Arrivals, run: Run) -> dict[str, Any]:
        return {
            "model": self._model,
            "arrivals": {**dataclasses.asdict(arrivals), "warmup_requests": run.num_warm},
            "summary": {"auto": self._figures(run.samples, run.wall_s, arrival_s=run.seconds)},
            "samples": _records(run.samples),
        }

    async def _run(self, arrivals: Arrivals, given_up: Callable[[Sample], bool] = lambda sample: False) -> Run:
        async def send(index: int, due: float) -> Sample:
            prompt = self._load.prompts[index % len(self._load.prompts)]
            sample = await self._send(prompt, "auto", max_tokens=self._load.max_tokens, due=due)
            self._progress(1)
            return sample

        return await run_schedule(arrivals, send, given_up=given_up)

    async def find(self, search: Search) -> dict[str, Any]:
        """The report of the best run, with all trials beside it; no summary when none held."""
        base, slo = self._load.arrivals, self._load.slo
        assert base is not None
        assert slo is not None
        best: dict[str, Any] = {"model": self._model, "summary": {}, "samples": []}

        async def trial(rate: float) -> Trial:
            nonlocal best
            arrivals = dataclasses.replace(base, rate=rate)
            schedule = arrivals.schedule()
            spare = math.floor((1 - search.target) * (len(schedule) - arrivals.num_warm(schedule)) + 1e-9)

            def given_up(sample: Sample) -> bool:
                nonlocal spare
                spare -= not slo.is_met(sample)
                return spare < 0

            run = await self._run(arrivals, given_up)
            found = goodput(run.samples, slo, run.seconds)
            holds = not run.num_unsent and found["share"] >= search.target
            report = self._report(arrivals, run)
            if holds:
                best = report  # each rate that holds is higher than the ones before
            summary = report["summary"]["auto"]
            return Trial(rate, holds, {"unsent": run.num_unsent, **{name: summary[name] for name in _OF_TRIALS}})

        result = await find_rate(search, trial)
        return {
            **best,
            "search": {"target": search.target, "precision": search.precision, **dataclasses.asdict(result)},
        }

    async def alternate(self) -> dict[str, Any]:
        """Each round sends the same prompts in both modes; which mode goes first changes from round to round.

        Before the timing, each prompt is sent once for one token: both modes then find it in the prefix cache.
        """
        prompts = itertools.cycle(self._load.prompts)
        rounds: list[dict[str, dict[str, Any]]] = []
        samples: dict[str, list[Sample]] = {mode: [] for mode in _MODES}
        walls = dict.fromkeys(_MODES, 0.0)
        for number in range(_num_rounds(self._load)):
            batch = list(itertools.islice(prompts, self._load.concurrency))
            await asyncio.gather(*(self._send(messages, "auto", max_tokens=1) for messages in batch))
            summaries = {}
            for mode in _MODES if number % 2 == 0 else _MODES[::-1]:
                done, wall_s = await self._closed_loop(batch, mode)
                samples[mode] += done
                walls[mode] += wall_s
                summaries[mode] = summarise(done, wall_s)
            rounds.append(summaries)
        pairs = list(zip(samples["auto"], samples["off"], strict=True))
        return {
            "model": self._model,
            "summary": {mode: self._figures(samples[mode], walls[mode]) for mode in _MODES},
            "compare": compare(rounds, pairs),
            "rounds": rounds,
            "samples": _records([sample for mode in _MODES for sample in samples[mode]]),
        }

    async def _closed_loop(self, prompts: Sequence[Messages], mode: str) -> tuple[list[Sample], float]:
        """Samples in the order of the prompts, and the seconds from the first send to the last end."""
        samples: dict[int, Sample] = {}
        waiting = iter(enumerate(prompts))

        async def work() -> None:
            for index, messages in waiting:  # shared: each worker takes the next one
                samples[index] = await self._send(messages, mode, max_tokens=self._load.max_tokens)
                self._progress(1)

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._load.concurrency, len(prompts))):
                group.create_task(work())
        return [samples[i] for i in range(len(prompts))], time.perf_counter() - start

    async def _send(self, messages: Messages, mode: str, *, max_tokens: int, due: float | None = None) -> Sample:
        load = self._load
        body = request_body(
            self._model, messages, max_tokens=max_tokens, temperature=load.temperature, ignore_eos=load.ignore_eos
        )
        return await self._client.complete(body, speculation=mode, due=due)


def _records(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Figures only: texts stay out of reports."""
    records = []
    for sample in samples:
        record = dataclasses.asdict(sample)
        del record["text"]
        records.append(record)
    return records
