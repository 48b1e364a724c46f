"""`specd bench`."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shlex
import sys
import time
import urllib.parse
from collections.abc import Iterable
from typing import Any

import orjson
import tqdm

from specd.bench.goodput import Slo
from specd.bench.load import Load, describe, num_requests, run_load
from specd.bench.open_loop import MOST_ARRIVALS, Arrivals
from specd.bench.prompts import built_in, read_prompts
from specd.bench.report import machine, render
from specd.bench.search import Search
from specd.errors import UsageError
from specd.listeners import is_loopback


def run(args: argparse.Namespace) -> int:
    load = _load(args)
    print(describe(load), file=sys.stderr, flush=True)
    bar = tqdm.tqdm(total=num_requests(load), unit="request", disable=None, file=sys.stderr, leave=False)
    with bar:
        result = asyncio.run(run_load(load, progress=bar.update))
    report = {
        "command": shlex.join(_without_key(sys.argv)),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "load": {
            "url": load.url,
            "prompts": len(load.prompts),
            "requests": num_requests(load),
            "concurrency": None if load.arrivals else load.concurrency,
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "ignore_eos": load.ignore_eos,
        },
        **result,
    }
    text = orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if args.output is not None and str(args.output) != "-":
        args.output.write_bytes(text)
    if args.output is not None and str(args.output) == "-":
        print(text.decode(), end="")
    else:
        print(render(report))
    if "search" in report:
        return 0 if report["search"]["rate"] is not None else 1
    return 1 if any(summary["failed"] for summary in report["summary"].values()) else 0


# Options that mean nothing without the one that they belong to, and what they are when they are left out.
_OPEN_LOOP = {"arrival_pattern": "poisson", "duration": 30.0, "warmup": 0.0, "grace_period": 30.0, "seed": 0}
_SEARCH = {"goodput_target": 0.99, "search_time": 600.0}
_CLOSED_LOOP = {"concurrency": 1, "requests": 16}


def _load(args: argparse.Namespace) -> Load:
    """The checked arguments. Raises UsageError."""
    host = urllib.parse.urlsplit(args.url).hostname
    if host is None:
        raise UsageError(f"--url {args.url!r}: write it as http://127.0.0.1:8000")
    if not is_loopback(host) and not args.allow_remote:
        raise UsageError(f"--url {args.url!r} is not this machine; --allow-remote puts load on other people's servers")
    for name in ("concurrency", "requests", "max_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"{_option(name)} {getattr(args, name)}: must be at least 1")
    if not 0 < args.timeout < math.inf:
        raise UsageError(f"--timeout {args.timeout:g}: must be above 0, and finite")
    if not 0 <= args.temperature <= 2:
        raise UsageError(f"--temperature {args.temperature:g}: must be from 0 to 2")
    arrivals = _arrivals(args)
    slo = Slo.parse(args.slo) if args.slo else None
    if args.find_rate and slo is None:
        raise UsageError("--find-rate: needs an objective, such as --slo ttft=200ms,itl=50ms")
    _refuse(args, _SEARCH, unless=args.find_rate, needs="--find-rate")
    closed = {name: getattr(args, name) or value for name, value in _CLOSED_LOOP.items()}
    return Load(
        url=args.url,
        prompts=read_prompts(args.prompts) if args.prompts else built_in(args.prompt_set),
        model=args.model,
        **closed,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        compare_off=args.compare == "off",
        arrivals=arrivals,
        slo=slo,
        search=_search(args, arrivals) if args.find_rate and arrivals else None,
        api_key=args.api_key or os.environ.get("SPECD_API_KEY"),
        timeout_s=args.timeout,
    )


def _arrivals(args: argparse.Namespace) -> Arrivals | None:
    """None without --rate and --find-rate. Raises UsageError."""
    is_open = args.rate is not None or args.find_rate
    _refuse(args, _OPEN_LOOP, unless=is_open, needs="--rate or --find-rate")
    if not is_open:
        return None
    for name in ("concurrency", "compare"):
        if getattr(args, name) is not None:
            raise UsageError(f"{_option(name)}: is of the closed loop; with --rate requests come by the clock")
    rate = 1.0 if args.rate is None else args.rate
    given = {name: _given(args, name, value) for name, value in _OPEN_LOOP.items()}
    for name, number in (("rate", rate), ("duration", given["duration"])):
        if not 0 < number < math.inf:
            raise UsageError(f"{_option(name)} {number:g}: must be above 0, and finite")
    for name in ("warmup", "grace_period"):
        if not 0 <= given[name] < math.inf:
            raise UsageError(f"{_option(name)} {given[name]:g}: must be at least 0, and finite")
    arrivals = Arrivals(
        rate,
        pattern=given["arrival_pattern"],
        duration_s=given["duration"],
        warmup_s=given["warmup"],
        grace_s=given["grace_period"],
        seed=given["seed"],
        most=args.requests,
    )
    arrivals.schedule()
    return arrivals


def _search(args: argparse.Namespace, arrivals: Arrivals) -> Search:
    target, most_s = (_given(args, name, value) for name, value in _SEARCH.items())
    trial_s = arrivals.warmup_s + arrivals.duration_s + arrivals.grace_s
    if not 0 < target <= 1:
        raise UsageError(f"--goodput-target {target:g}: must be above 0 and at most 1")
    if not trial_s <= most_s < math.inf:
        raise UsageError(f"--search-time {most_s:g}: one trial takes {trial_s:g} s (warm-up, duration, grace period)")
    highest = MOST_ARRIVALS / (arrivals.warmup_s + arrivals.duration_s)
    return Search(arrivals.rate, 1 / arrivals.duration_s, highest, trial_s, target=target, most_s=most_s)


def _given(args: argparse.Namespace, name: str, default: Any) -> Any:
    return default if getattr(args, name) is None else getattr(args, name)


def _refuse(args: argparse.Namespace, names: Iterable[str], *, unless: bool, needs: str) -> None:
    for name in names:
        if getattr(args, name) is not None and not unless:
            raise UsageError(f"{_option(name)} {getattr(args, name)}: only with {needs}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _without_key(argv: list[str]) -> list[str]:
    """The command line as it goes into the report, with the key blotted out."""
    words = list(argv)
    for i, word in enumerate(words):
        if word.startswith("--api-key="):
            words[i] = "--api-key=..."
        elif word == "--api-key" and i + 1 < len(words):
            words[i + 1] = "..."
    return words
