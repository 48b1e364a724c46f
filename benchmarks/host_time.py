"""What the host costs in a step of many streams, while all of them decode.

    python -m benchmarks.host_time                     # 64 streams, about fifteen minutes on two cores
    python -m benchmarks.host_time --sides 'specd torch none' --streams 8
    python -m benchmarks.host_time --quick             # to see that it works

From the timeline and the clocks of the event loop's thread, between the last stream's first token and the first
stream's end: `schedule_ms`, commit and schedule; `loop_ms`, the processor time of all that the event loop does (commit,
schedule, launch, publish, and reading the deltas here); `idle_ms`, when no stream of the device computes: host time
that nothing hides. All are of one step. Writes benchmarks/results/host_time.json.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import gc
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import Question, SpecdSide, arguments, run, union, write_result
from benchmarks.peers import SPECD, chosen, make_load, side_pattern
from specd.bench.report import machine, percentile
from specd.engine import Engine
from specd.models.fetch import resolve
from specd.models.gguf import read_metadata
from specd.request import Request, SamplingParams
from specd.text import Tokenizer

_DEFAULT = ("specd native fast none", "specd native fast ngram adaptive", "specd native fast mtp+ngram")
_SPARE = 16


class Window:
    """The time in which all streams decode: from the last first token to the first end."""

    def __init__(self, num_streams: int) -> None:
        self._missing = num_streams
        self.start_s, self.end_s = math.inf, -math.inf
        self.loop_s = 0.0  # processor time of the event loop's thread within it

    def first_token(self) -> None:
        self._missing -= 1
        if self._missing == 0 and self.end_s < 0:
            self.start_s = time.perf_counter()
            self.loop_s = -self.thread_time_s()

    def ended(self) -> None:
        if self.end_s < 0:
            self.end_s = time.perf_counter()
            self.loop_s += self.thread_time_s()

    def thread_time_s(self) -> float:
        """Of the event loop's thread: here it is this one."""
        return time.thread_time()


async def read(engine: Engine, question: Question, name: str, window: Window) -> None:
    params = SamplingParams(max_tokens=question.num_tokens, seed=0, temperature=0.0, ignore_eos=True)
    first = True
    async for delta in engine.submit(Request(name, question.prompt_ids, params, arrival_s=time.monotonic())):
        if delta.error is not None:
            raise delta.error
        if first and delta.token_ids:
            window.first_token()
            first = False
    window.ended()


async def round_of(engine: Engine, questions: Sequence[Question]) -> dict[str, float]:
    """One batch of all questions. RuntimeError when they never all decoded at once."""
    window = Window(len(questions))
    async with asyncio.TaskGroup() as group:
        for i, question in enumerate(questions):
            group.create_task(read(engine, question, f"host-{i}-{time.monotonic_ns()}", window))
    return per_step(engine.trace(time.perf_counter() - window.start_s), window)


def per_step(trace: dict[str, Any], window: Window) -> dict[str, float]:
    """Milliseconds of one step, and shares of it. Raises RuntimeError when the window holds less than two steps."""
    events = trace["traceEvents"]
    host = next(event["tid"] for event in events if event["ph"] == "M" and event["args"]["name"] == "host")
    start_us, end_us = 1e6 * window.start_s, 1e6 * window.end_s
    spans = [event for event in events if event["ph"] == "X" and start_us <= event["ts"] < end_us]
    starts = sorted(span["ts"] for span in spans if span["name"] == "verify")
    if len(starts) < 2:
        raise RuntimeError("the streams hardly ever decoded all at once: ask for more tokens")
    begin, end, steps = starts[0], starts[-1], len(starts) - 1
    inside = [span for span in spans if begin <= span["ts"] < end]
    busy = union([(span["ts"], min(span["ts"] + span["dur"], end)) for span in inside if span["tid"] != host])
    step_ms = (end - begin) / steps / 1e3
    schedule_ms = sum(span["dur"] for span in inside if span["tid"] == host) / steps / 1e3
    loop_ms = window.loop_s / (window.end_s - window.start_s) * step_ms
    idle_ms = step_ms - busy / steps / 1e3
    return {
        "steps": steps,
        "step_ms": step_ms,
        "schedule_ms": schedule_ms,
        "loop_ms": loop_ms,
        "idle_ms": idle_ms,
        "schedule_share": schedule_ms / step_ms,
        "loop_share": loop_ms / step_ms,
        "idle_share": idle_ms / step_ms,
    }


async def measure(args: argparse.Namespace) -> None:
    before = machine()
    tokenizer = Tokenizer.load(resolve(args.model), read_metadata=read_metadata)
    load = make_load(tokenizer, f"chat-{args.streams}", args)
    longest = max(len(question.prompt_ids) for question in load.questions) + args.tokens + _SPARE
    common = [f"model.path={args.model}", f"model.threads={args.threads or os.cpu_count() or 1}"]
    common += [f"model.max_len={longest}", f"scheduler.max_running={args.streams}"]
    entries = []
    for name in chosen(args.sides, [load]):
        if name not in SPECD:
            continue
        side = await SpecdSide.create(name, [*common, *SPECD[name]])
        gc.collect()
        gc.freeze()  # as the daemon does: full collections go through what has come since
        try:
            rounds = [await round_of(side.engine, load.questions) for _ in range(args.rounds + 1)][1:]
        finally:
            await side.close()
            gc.unfreeze()
        median = {key: percentile([figures[key] for figures in rounds], 50) for key in rounds[0]}
        entries.append({"side": name, "streams": args.streams, "median": median, "rounds": rounds})
        print(name, ", ".join(f"{key} {value:.3g}" for key, value in median.items() if value is not None))
    print(write_result("host_time", args, before, entries).name)


def specd_pattern(text: str) -> str:
    if not fnmatch.filter(SPECD, side_pattern(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no side of specd's own")
    return text


def main() -> None:
    parser = arguments("benchmarks.host_time", "What the host costs in a step of many streams.", cells=False)
    parser.add_argument("--sides", nargs="+", type=specd_pattern, default=list(_DEFAULT), metavar="PATTERN")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=202)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tokens, args.streams = 1, 24, 4
    args.prompts = args.streams
    run(measure(args))


if __name__ == "__main__":
    main()
