"""The command line of `specd ctl`: its verbs and their options. Parsing only."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TypeAlias

_Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_STATES = ("waiting", "prefilling", "decoding")
_LOOKING = ("status", "requests", "request", "events", "top", "trace", "dump", "selftest", "profile")
_MOST_S = 1e9


def add_verbs(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--socket", help="path of the control socket; default: as configured")
    where.add_argument("--instance", help="the systemd instance NAME: /run/specd/NAME/admin.sock")
    where.add_argument("--config", type=Path, metavar="FILE", help="the daemon's configuration, for admin.socket")
    parser.add_argument("--json", action="store_true", help="print the reply as JSON")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("status", help="what is served, its state, and counts since the start")
    _add_looking(verbs)
    _add_requests(verbs)
    _add_life(verbs)
    _add_settings(verbs)
    for name, verb in verbs.choices.items():
        _add_common(verb, changes=name not in _LOOKING)
        verb.set_defaults(parser=verb)  # of whose usage an error tells


def _add_common(verb: argparse.ArgumentParser, *, changes: bool) -> None:
    """Before the verb or after it; without a default, which would undo the former."""
    verb.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the reply as JSON")
    if changes:
        verb.add_argument(
            "--if-generation",
            type=int,
            default=argparse.SUPPRESS,
            metavar="N",
            help="only while `status` says generation N, else exit 1",
        )


def _add_looking(verbs: _Verbs) -> None:
    top = verbs.add_parser("top", help="the same, live; q or Ctrl-C leaves; one snapshot when piped")
    events = verbs.add_parser("events", help="snapshots and changes as JSON lines, until Ctrl-C")
    events.add_argument("--count", type=int, metavar="N", help="leave after N lines")
    for verb in (top, events):
        verb.add_argument(
            "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between snapshots (default 1)"
        )
    trace = verbs.add_parser("trace", help="the stage timeline as Chrome trace JSON (Perfetto, chrome://tracing)")
    trace.add_argument("--seconds", type=_seconds, default=5.0, help="how far back (default 5)")
    dump = verbs.add_parser("dump", help="configuration, queues and stacks as JSON, for bug reports")
    profile = verbs.add_parser("profile", help="where the daemon spends time (Python, PyTorch), or memory")
    profile.add_argument(
        "kind",
        nargs="?",
        choices=("cpu", "torch", "heap"),
        default="cpu",
        help="cpu (default): Python by stacks; torch: PyTorch by operations; heap: memory by lines",
    )
    profile.add_argument("--seconds", type=_seconds, default=5.0, help="for so long (default 5, at most 300)")
    for verb in (trace, dump, profile):
        verb.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")
    verbs.add_parser(
        "selftest", help="built-in prompts with drafts and without: the text must be the same (else exit 1)"
    )


def _add_requests(verbs: _Verbs) -> None:
    requests = verbs.add_parser("requests", help="live requests and their ids; never their text")
    requests.add_argument("--state", choices=_STATES)
    request = verbs.add_parser("request", help="one live request: its parameters and its latest steps")
    request.add_argument("id", metavar="ID", help="of `requests`, or the client's x-request-id")
    abort = verbs.add_parser("abort", help="end live requests; exit 1 when there was none")
    abort.add_argument("ids", nargs="*", metavar="ID", help="of `requests`, or the client's x-request-id")
    abort.add_argument("--state", choices=_STATES, help="those in this state")
    abort.add_argument("--older-than", type=_seconds, metavar="SECONDS", help="those that are older")
    abort.add_argument("--prefix", metavar="TEXT", help="those whose id begins like this")
    abort.add_argument("--all", action="store_true", help="every one")


def _add_life(verbs: _Verbs) -> None:
    drain = verbs.add_parser("drain", help="accept nothing more, wait for what was accepted; the daemon stays")
    drain.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="wait at most so long; default: as configured"
    )
    drain.add_argument("--deadline", action="store_true", help="when the time is over, end what is left")
    drain.add_argument("--no-wait", action="store_true", help="begin, and do not wait")
    verbs.add_parser("resume", help="accept requests again after a drain")
    verbs.add_parser("pause", help="compute nothing more; requests wait, streams are kept open")
    verbs.add_parser("unpause", help="go on")
    reload = verbs.add_parser(
        "reload", help="read the configuration again: all of it or, on an error, nothing (exit 78)"
    )
    reload.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")
    shutdown = verbs.add_parser("shutdown", help="drain and stop, as SIGTERM does")
    shutdown.add_argument("--now", action="store_true", help="do not drain")
    shutdown.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="drain at most so long; default: as configured"
    )


def _add_settings(verbs: _Verbs) -> None:
    speculation = verbs.add_parser("speculation", help="drafts a step, running requests included")
    wish = speculation.add_mutually_exclusive_group(required=True)
    wish.add_argument("--off", dest="mode", action="store_const", const="off", help="none at all")
    wish.add_argument("--k", type=_length, metavar="N", help='exactly so many, or "adaptive"')
    wish.add_argument("--configured", action="store_true", help="as in the configuration again")
    speculation.add_argument("--ttl", type=_seconds, metavar="SECONDS", help="for so long")
    loglevel = verbs.add_parser("loglevel", help="least level that is logged")
    loglevel.add_argument("level", choices=("debug", "info", "warning", "error", "configured"))
    loglevel.add_argument("--ttl", type=_seconds, metavar="SECONDS", help="for so long")
    kv = verbs.add_parser("kv", help="the page pool and the prefix cache's hit rate")
    kv.add_argument("--flush", action="store_true", help="forget cached prefixes that nobody uses")
    keys = verbs.add_parser("keys", help="API keys: their ids and names")
    change = keys.add_mutually_exclusive_group()
    change.add_argument("--add", metavar="NAME", help="make one; it is shown once")
    change.add_argument("--remove", metavar="ID", help="let it in no more")
    _add_corpora(verbs)


def _add_corpora(verbs: _Verbs) -> None:
    corpora = verbs.add_parser("corpora", help="texts that drafts are taken from where an output quotes them")
    actions = corpora.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="their sizes and how many of their drafts were kept")
    put = actions.add_parser("put", help="add a text, or replace the one of that name")
    put.add_argument("name", metavar="NAME")
    put.add_argument("file", type=Path, metavar="FILE", help="UTF-8 text; - is standard input")
    put.add_argument("--key", metavar="ID", help="for requests with this API key alone (an id of `keys`)")
    put.add_argument("--ttl", type=_seconds, metavar="SECONDS", help="for so long")
    delete = actions.add_parser("delete", help="draft from it no more")
    delete.add_argument("name", metavar="NAME")
    for action in (put, delete):
        _add_common(action, changes=True)
    _add_common(actions.choices["list"], changes=False)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST_S:  # JSON has no other numbers, and a socket waits no longer; the daemon has its limits
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _length(text: str) -> int | str:
    if text == "adaptive":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number and not "adaptive"') from error
