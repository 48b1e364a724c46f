"""The command line. Parsing only: what a command needs is imported when it runs, so that --help is instant.

Exit codes: 0 done, 1 fault, 2 usage, 75 a drain was cut off, 78 configuration or model that cannot be used, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TypeAlias

from specd.commands import bench_options, ctl_options, train
from specd.commands.settings import add_settings
from specd.errors import ConfigError, DraftError, FetchError, ModelError, SpecdError, UsageError

_EXIT_FAULT, _EXIT_USAGE, _EXIT_CONFIG, _EXIT_INTERRUPTED = 1, 2, 78, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives the exit code. argparse itself raises SystemExit(2) on wrong usage."""
    args = build_parser().parse_args(argv)
    try:
        code: int = importlib.import_module(f"specd.commands.{args.module}").run(args)
    except UsageError as error:
        args.parser.print_usage(sys.stderr)
        print(f"{args.parser.prog}: error: {error}", file=sys.stderr)  # as argparse says it
        code = _EXIT_USAGE
    except SpecdError as error:
        print(f"specd: {error}", file=sys.stderr)
        # A download may succeed next time: the service manager should try again. A wrong value will not.
        permanent = isinstance(error, ConfigError | ModelError | DraftError) and not isinstance(error, FetchError)
        code = _EXIT_CONFIG if permanent else _EXIT_FAULT
    except KeyboardInterrupt:
        code = _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader left (`specd ctl requests | head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _EXIT_FAULT
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specd", description="Serves language models with speculative decoding.")
    parser.add_argument("--version", action="version", version=f"specd {version('specd')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_check(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_fetch(commands)
    _add_ctl(commands)
    _add_bench(commands)
    _add_train(commands)
    return parser


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_serve(commands: _Commands) -> None:
    parser = commands.add_parser("serve", help="run the daemon in the foreground")
    add_settings(parser)
    parser.set_defaults(module="serve", parser=parser)


def _add_check(commands: _Commands) -> None:
    parser = commands.add_parser("check", help="validate configuration, model and drafter; exit 78 on error")
    add_settings(parser)
    parser.set_defaults(module="check", parser=parser)


def _add_generate(commands: _Commands) -> None:
    parser = commands.add_parser(
        "generate", help="answer one prompt in the terminal, each token coloured by its origin"
    )
    parser.add_argument("words", nargs="+", metavar="[MODEL] PROMPT", help="the prompt; - reads standard input")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    _add_generation(parser)
    add_settings(parser, model=False, server=False)
    parser.set_defaults(module="generate", parser=parser, interactive=False)


def _add_chat(commands: _Commands) -> None:
    parser = commands.add_parser("chat", help="talk to the model in the terminal")
    _add_generation(parser)
    add_settings(parser, server=False)
    parser.set_defaults(module="generate", parser=parser, interactive=True, raw=False)


def _add_generation(parser: argparse.ArgumentParser) -> None:
    # The limits of a request's own fields.
    temperature, whole = _number(float, "a number", 0, 2), _number(int, "a whole number", 1, 2**63 - 1)
    seed = _number(int, "a whole number", -(2**63), 2**63 - 1)
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0 (the default) is greedy; at most 2")
    parser.add_argument("--seed", type=seed, default=0, help="with a temperature: same seed, same text (default 0)")
    parser.add_argument("--max-tokens", type=whole, help="default: what the context leaves")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal")


def _number(read: Callable[[str], float], kind: str, low: int, high: int) -> Callable[[str], float]:
    """An argparse type: a number in low..high. Wrong usage (exit 2) otherwise."""

    def parse(text: str) -> float:
        try:
            value = read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from error
        if not low <= value <= high:  # nan is not either
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value

    return parse


def _add_fetch(commands: _Commands) -> None:
    parser = commands.add_parser("fetch", help="download a model into the cache and check its SHA-256")
    parser.add_argument("alias", metavar="ALIAS", help="such as smollm2-135m, or a hub id (org/name)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.set_defaults(module="fetch", parser=parser)


def _add_ctl(commands: _Commands) -> None:
    parser = commands.add_parser("ctl", help="ask a running daemon over its control socket")
    ctl_options.add_verbs(parser)
    parser.set_defaults(module="ctl", parser=parser)


def _add_bench(commands: _Commands) -> None:
    parser = commands.add_parser("bench", help="measure a running server over HTTP: TTFT, ITL, tokens/s, acceptance")
    bench_options.add_options(parser)
    parser.set_defaults(module="bench", parser=parser)


def _add_train(commands: _Commands) -> None:
    parser = commands.add_parser("train", help="train a head that drafts for a target")
    train.add_verbs(parser)
    parser.set_defaults(module="train", parser=parser)
