"""The options of `specd bench`, named as in vLLM's `bench serve` and in aiperf where they mean the same."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: http://127.0.0.1:8000")
    parser.add_argument("--allow-remote", action="store_true", help="allow a URL that is not this machine's")
    parser.add_argument("--api-key", help="Bearer token; better: the environment variable SPECD_API_KEY")
    parser.add_argument("--model", help="default: the server's first model")
    parser.add_argument("--concurrency", type=int, help="requests in flight (default 1)")
    parser.add_argument(
        "--requests",
        type=int,
        help="requests (default 16); with --compare: in each mode, rounded up to 5 or more rounds of --concurrency; "
        "with --rate: at most so many, after the warm-up",
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of each request (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0")
    parser.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens tokens")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line, or JSON lines with `prompt`")
    prompts.add_argument(
        "--prompt-set", choices=("chat", "copy", "all"), default="all", help="built-in prompts (default all)"
    )
    parser.add_argument("--compare", choices=("off",), help="alternate speculation on and off, report the ratios")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the report as JSON; - is standard output"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request (default 600)")
    _add_open_loop(parser.add_argument_group("open loop", "requests arrive by the clock, answered or not"))


def _add_open_loop(group: argparse._ArgumentGroup) -> None:
    """Defaults are None: whether an option was given counts, because without --rate they mean nothing."""
    group.add_argument(
        "--rate", "--request-rate", type=float, metavar="R", help="requests a second; latency counts from the arrival"
    )
    group.add_argument("--arrival-pattern", choices=("poisson", "constant"), help="default poisson")
    group.add_argument("--duration", type=float, metavar="S", help="seconds in which requests arrive (default 30)")
    group.add_argument(
        "--warmup", "--warmup-duration", type=float, metavar="S", help="seconds before that do not count (default 0)"
    )
    group.add_argument(
        "--grace-period", type=float, metavar="S", help="seconds to wait for what is left at the end (default 30)"
    )
    group.add_argument("--seed", type=int, help="of the arrivals (default 0)")
    group.add_argument(
        "--slo",
        "--goodput",
        metavar="NAME=TIME,...",
        help="objective, such as ttft=200ms,itl=50ms,e2e=3s (and tpot): counts requests that met it all",
    )
    group.add_argument(
        "--find-rate", action="store_true", help="search from --rate (default 1) for the largest that meets --slo"
    )
    group.add_argument("--goodput-target", type=float, metavar="SHARE", help="what --find-rate asks (default 0.99)")
    group.add_argument("--search-time", type=float, metavar="S", help="most seconds of --find-rate (default 600)")
