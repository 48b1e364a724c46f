"""What the comparisons share: sides that answer the same prompts, alternating rounds, medians, and the result's file.

A side is an engine, or another library's `generate`, that takes prompts and gives samples. In each round every side
gets the same prompts; who goes first changes from round to round. A ratio is taken within one round, so that drift of
the machine cancels, and the median over rounds is reported with the quartiles.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.metadata
import itertools
import shlex
import statistics
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import orjson
import uvloop

from specd.bench.prompts import CHAT, COPY
from specd.bench.report import MIN_ROUNDS, percentile
from specd.config_loader import load_config
from specd.engine import Engine
from specd.request import Request, SamplingParams, SequenceDelta

RESULTS = Path(__file__).parent / "results"
KINDS = {"chat": CHAT, "copy": COPY}
PACKAGES = ("specd", "torch", "transformers", "numpy")


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    prompt_ids: tuple[int, ...]
    num_tokens: int  # exactly so many are generated, greedily, whatever the end-of-sequence token says


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One answer. Times are of time.perf_counter; gaps are the seconds between what arrived together.

    An engine that tells no token ids leaves them empty and gives their number (`num_untold`).
    """

    start_s: float
    first_s: float
    end_s: float
    token_ids: tuple[int, ...]
    gaps_s: tuple[float, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    num_spec_steps: int = 0
    text: str | None = None  # without special tokens
    num_untold: int = 0
    arrivals: tuple[tuple[float, int], ...] = ()  # (time, tokens), the first one included; empty: not known

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) or self.num_untold

    def equals(self, other: Sample) -> bool:
        """The same answer, by token ids where both have them, else by text."""
        if self.token_ids and other.token_ids:
            return self.token_ids == other.token_ids
        return self.text is not None and self.text == other.text


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What one cell of the table asks: `questions`, at most `concurrency` of them at a time."""

    kind: str
    concurrency: int
    questions: tuple[Question, ...]


class Side(Protocol):
    """One of the things compared."""

    name: str

    def takes(self, load: Load) -> bool:
        """Whether it can do this at all."""
        ...

    async def answer(self, load: Load) -> list[Sample]:
        """Samples in the order of the questions."""
        ...

    async def close(self) -> None: ...


def run(measurement: Coroutine[Any, Any, None]) -> None:
    """Runs a benchmark on the event loop that the daemon uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measurement)


class SpecdSide:
    """An engine of this project, in this process."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self._count = 0

    @classmethod
    async def create(cls, name: str, settings: Sequence[str]) -> SpecdSide:
        """settings: `section.key=value`, as on the command line. The prefix cache is off: prompts repeat here."""
        config = load_config(None, env={}, sets=["kv.prefix_cache=false", "speculation.self_check=false", *settings])
        return cls(name, await Engine.create(config))

    def takes(self, load: Load) -> bool:
        return load.concurrency <= self.engine.info.max_running

    async def answer(self, load: Load) -> list[Sample]:
        samples: dict[int, Sample] = {}
        waiting = iter(enumerate(load.questions))

        async def work() -> None:
            for index, question in waiting:  # shared: each worker takes the next one
                samples[index] = await self._ask(question)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, len(load.questions))):
                group.create_task(work())
        return [samples[i] for i in range(len(load.questions))]

    async def _ask(self, question: Question) -> Sample:
        self._count += 1
        params = SamplingParams(max_tokens=question.num_tokens, seed=0, temperature=0.0, ignore_eos=True)
        request = Request(f"bench-{self._count}", question.prompt_ids, params, arrival_s=time.monotonic())
        start = time.perf_counter()
        return await _sample(self.engine.submit(request), start)

    async def close(self) -> None:
        await self.engine.close()


async def _sample(stream: AsyncIterator[SequenceDelta], start: float) -> Sample:
    arrivals: list[tuple[float, int]] = []
    tokens: list[int] = []
    text = ""
    async for delta in stream:
        if delta.error is not None:
            raise delta.error
        if delta.token_ids:
            arrivals.append((time.perf_counter(), len(delta.token_ids)))
            tokens += delta.token_ids
        text += delta.text
        stats = delta.stats
    assert stats is not None
    return Sample(
        start_s=start,
        first_s=arrivals[0][0],
        end_s=arrivals[-1][0],
        token_ids=tuple(tokens),
        gaps_s=tuple(b - a for (a, _), (b, _) in itertools.pairwise(arrivals)),
        num_drafted=stats.num_draft_tokens,
        num_accepted=stats.num_accepted_tokens,
        num_spec_steps=stats.num_spec_steps,
        text=text,
        arrivals=tuple(arrivals),
    )


# ---------------------------------------------------------------- rounds


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """All rounds of one load on one side."""

    load: Load
    side: str
    rounds: list[list[Sample]]


async def alternate(sides: Sequence[Side], loads: Sequence[Load], num_rounds: int) -> list[Cell]:
    """Every load on every side, num_rounds times after one round that does not count."""
    cells = [Cell(load, side.name, []) for load in loads for side in sides if side.takes(load)]
    by_name = {side.name: side for side in sides}
    for number in range(-1, num_rounds):
        for load in loads:
            row = [cell for cell in cells if cell.load is load]
            first = number % len(row)
            for cell in row[first:] + row[:first]:
                samples = await by_name[cell.side].answer(load)
                if number >= 0:
                    cell.rounds.append(samples)
        print(f"round {number + 1} of {num_rounds} done", file=sys.stderr, flush=True)
    return cells


def figures(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Of one round. tokens_per_s: all tokens over the whole time, prompts included. decode_tokens_per_s: tokens after
    each answer's first over the time in which any answer was past its first. full_tokens_per_s: of decoding alone, see
    `_full_rate`."""
    tokens = sum(sample.num_tokens for sample in samples)
    wall = max(sample.end_s for sample in samples) - min(sample.start_s for sample in samples)
    decoding = union([(sample.first_s, sample.end_s) for sample in samples])
    steps = sum(sample.num_spec_steps for sample in samples)
    drafted = sum(sample.num_drafted for sample in samples)
    accepted = sum(sample.num_accepted for sample in samples)
    gaps = [gap for sample in samples for gap in sample.gaps_s]
    return {
        "tokens_per_s": tokens / wall,
        "decode_tokens_per_s": (tokens - len(samples)) / decoding if decoding and tokens > len(samples) else None,
        "full_tokens_per_s": _full_rate(samples),
        "ttft_ms": 1e3 * statistics.median(sample.first_s - sample.start_s for sample in samples),
        "gap_p50_ms": _milliseconds(percentile(gaps, 50)),
        "gap_p99_ms": _milliseconds(percentile(gaps, 99)),
        "drafts_kept": accepted / drafted if drafted else None,
        "tokens_per_draft_step": 1 + accepted / steps if steps else None,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def union(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds covered by at least one span."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _full_rate(samples: Sequence[Sample]) -> float | None:
    """Tokens a second of decoding alone: while no answer waited for its first token, and of that time the part in which
    the most answers were under way. Where arrivals are not known they are taken as even."""
    edges = sorted({edge for sample in samples for edge in (sample.start_s, sample.first_s, sample.end_s)})
    active = {
        (a, b): sum(sample.first_s <= a and b <= sample.end_s for sample in samples)
        for a, b in itertools.pairwise(edges)
        if not any(sample.start_s <= a and b <= sample.first_s for sample in samples)
    }
    full = [window for window, count in active.items() if count == max(active.values())]
    seconds = sum(b - a for a, b in full)
    tokens = sum(_tokens_within(sample, a, b) for a, b in full for sample in samples)
    return tokens / seconds if tokens else None


def _tokens_within(sample: Sample, start_s: float, end_s: float) -> float:
    if sample.arrivals:
        return sum(count for at, count in sample.arrivals if start_s < at <= end_s and at > sample.first_s)
    if not sample.first_s <= start_s < end_s <= sample.end_s:
        return 0.0
    return (sample.num_tokens - 1) * (end_s - start_s) / (sample.end_s - sample.first_s)


_RATIOS = ("tokens_per_s", "decode_tokens_per_s", "full_tokens_per_s", "ttft_ms", "gap_p50_ms", "gap_p99_ms")


def table(
    cells: Sequence[Cell], *, against: str, own: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """One entry a cell: medians over rounds, and the ratio to the side `against` within each round.

    own: side -> the side that does the same without drafts; gives the ratio to that too. A base that did not take a
    cell's load is left out of its entry.
    """
    bases = {(cell.load, cell.side): cell for cell in cells}
    entries = []
    for cell in cells:
        rounds = [figures(samples) for samples in cell.rounds]
        entry: dict[str, Any] = {
            "kind": cell.load.kind,
            "concurrency": cell.load.concurrency,
            "side": cell.side,
            "prompt_tokens": statistics.median(len(question.prompt_ids) for question in cell.load.questions),
            "answers": len(cell.load.questions),
            "median": {name: _median([round_[name] for round_ in rounds]) for name in rounds[0]},
        }
        for name, side in ((against, against), ("own plain", own.get(cell.side))):
            base = bases.get((cell.load, side)) if side else None
            if base is not None:
                entry[f"ratio to {name}"] = {figure: ratio(cell, base, figure) for figure in _RATIOS}
                entry[f"answers equal to {name}"] = _equal(cell, base)
        entries.append({**entry, "rounds": rounds})
    return entries


def ratio(cell: Cell, base: Cell, figure: str) -> dict[str, float | None]:
    """Median and quartiles of the ratios within each round."""
    pairs = [(figures(a)[figure], figures(b)[figure]) for a, b in zip(cell.rounds, base.rounds, strict=True)]
    return _quartiles([a / b if a is not None and b else None for a, b in pairs])


def _equal(cell: Cell, base: Cell) -> int:
    """Answers of the first round that are the same."""
    return sum(a.equals(b) for a, b in zip(cell.rounds[0], base.rounds[0], strict=True))


def _median(values: Sequence[float | None]) -> float | None:
    return percentile([value for value in values if value is not None], 50)


def _quartiles(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {name: percentile(known, q) for name, q in (("median", 50), ("p25", 25), ("p75", 75))}


# ---------------------------------------------------------------- the command


def arguments(module: str, description: str, *, cells: bool = True) -> argparse.ArgumentParser:
    """The options that all comparisons have. cells: also the ones that say which loads there are."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--model", default="smollm2-135m", help="alias or .gguf file")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of an answer")
    if cells:
        parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
        parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--quick", action="store_true", help="one tiny round, to see that it works; not a measurement")
    parser.add_argument("--output", type=Path, help="default: a file named after the benchmark in benchmarks/results/")
    return parser


def write_result(
    name: str,
    args: argparse.Namespace,
    before: dict[str, Any],
    entries: list[dict[str, Any]],
    *,
    variant: str = "",
    packages: Sequence[str] = PACKAGES,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """The result as JSON, with command, machine and versions. before: `machine()` from before the first round.

    name: the module in benchmarks/; with a variant both are in the file's name. more: further fields of the file.
    """
    path: Path = args.output or RESULTS / f"{name}{variant and '-' + variant}{'-quick' if args.quick else ''}.json"
    content = {
        "benchmark": name,
        "command": f"python -m benchmarks.{name} {shlex.join(sys.argv[1:])}".strip(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": before,
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "model": Path(args.model).name,
        "rounds": args.rounds,
        **more,
        "results": entries,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")
    return path


def show(entries: Sequence[dict[str, Any]], *, against: str) -> str:
    """The table for people."""
    lines = [
        f"{'kind':<10}{'at once':>8}  {'side':<32}{'tok/s':>8}{'x':>7}{'decode':>9}{'x':>7}{'TTFT ms':>9}{'x':>7}"
        f"{'kept':>7}"
    ]
    for entry in entries:
        median, ratios = entry["median"], entry.get(f"ratio to {against}", {})
        times = {name: ratios.get(name, {}).get("median") for name in _RATIOS}
        equal = entry.get(f"answers equal to {against}", "-")
        lines.append(
            f"{entry['kind']:<10}{entry['concurrency']:>8}  {entry['side']:<32}"
            f"{_cell(median['tokens_per_s'], 8, 1)}{_cell(times['tokens_per_s'], 7)}"
            f"{_cell(median['decode_tokens_per_s'], 9, 1)}{_cell(times['decode_tokens_per_s'], 7)}"
            f"{_cell(median['ttft_ms'], 9, 0)}{_cell(times['ttft_ms'], 7)}"
            f"{_cell(median['drafts_kept'], 7)}  {equal}/{entry['answers']} equal"
        )
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"
