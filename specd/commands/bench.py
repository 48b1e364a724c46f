"""`specd bench`."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
import urllib.parse

import orjson
import tqdm

from specd.bench.load import Load, describe, num_requests, run_load
from specd.bench.prompts import built_in, read_prompts
from specd.bench.report import machine, render
from specd.errors import ConfigError
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
            "concurrency": load.concurrency,
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
    return 1 if any(summary["failed"] for summary in report["summary"].values()) else 0


def _load(args: argparse.Namespace) -> Load:
    """The checked arguments. Raises ConfigError."""
    host = urllib.parse.urlsplit(args.url).hostname
    if host is None:
        raise ConfigError(f"--url {args.url!r}: write it as http://127.0.0.1:8000")
    if not is_loopback(host) and not args.allow_remote:
        raise ConfigError(f"--url {args.url!r} is not this machine; --allow-remote puts load on other people's servers")
    for name in ("concurrency", "requests", "max_tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    return Load(
        url=args.url,
        prompts=read_prompts(args.prompts) if args.prompts else built_in(args.prompt_set),
        model=args.model,
        concurrency=args.concurrency,
        requests=args.requests,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        compare_off=args.compare == "off",
        api_key=args.api_key or os.environ.get("SPECD_API_KEY"),
        timeout_s=args.timeout,
    )


def _without_key(argv: list[str]) -> list[str]:
    """The command line as it goes into the report, with the key blotted out."""
    words = list(argv)
    for i, word in enumerate(words):
        if word.startswith("--api-key="):
            words[i] = "--api-key=..."
        elif word == "--api-key" and i + 1 < len(words):
            words[i + 1] = "..."
    return words
