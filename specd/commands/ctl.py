"""`specd ctl`: HTTP and JSON over the control socket, printed as tables. Standard library only: it starts at once.

Exit codes: 0 done, 1 refused or failed, 2 usage, 69 nobody answers, 75 a drain was not finished, 77 not allowed,
78 a reload was refused because of the configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specd.commands import ctl_status, ctl_top
from specd.commands.ctl_client import Client, Refusal, Unreachable
from specd.commands.tables import columns, table
from specd.config import admin_socket_path
from specd.config_loader import load_config
from specd.errors import UsageError

_FAILED, _UNREACHABLE, _UNFINISHED, _FORBIDDEN, _CONFIG = 1, 69, 75, 77, 78
_CODES = {"forbidden": _FORBIDDEN, "config_error": _CONFIG}
_LONG_S = 86400.0 + 60.0  # a drain may take a day
_SELFTEST_S = 600.0
_PROFILE_S = 60.0  # to gather what was seen
_ROWS = {"torch": "operations", "heap": "lines"}  # of a profile
_PUT_S = 300.0  # others are indexed first


def run(args: argparse.Namespace) -> int:
    client = Client(_socket_path(args), if_generation=getattr(args, "if_generation", None))
    try:
        return _VERBS[args.verb](args, client)
    except Unreachable as error:
        print(f"specd: {error}", file=sys.stderr)
        return _UNREACHABLE
    except Refusal as error:
        print(f"specd: {error}", file=sys.stderr)
        return _CODES.get(error.code, _FAILED)


def _socket_path(args: argparse.Namespace) -> Path:
    """--socket, --instance, or admin.socket of the same file and environment that the daemon was given."""
    if args.socket:
        return Path(args.socket)
    if args.instance:
        return Path("/run/specd", args.instance, "admin.sock")
    return admin_socket_path(load_config(args.config, env=os.environ).admin.socket, os.environ)


def _show(args: argparse.Namespace, result: Any) -> int:
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def _post(target: str) -> Callable[[argparse.Namespace, Client], int]:
    return lambda args, client: _show(args, client.call("POST", target, {}))


def _status(args: argparse.Namespace, client: Client) -> int:
    found = client.call("GET", "/v1/status")
    if args.json:
        return _show(args, found)
    print(ctl_status.render(found))
    return 0


def _requests(args: argparse.Namespace, client: Client) -> int:
    query = f"?state={args.state}" if args.state else ""
    return _show(args, client.call("GET", f"/v1/requests{query}"))


def _request(args: argparse.Namespace, client: Client) -> int:
    found = client.call("GET", f"/v1/requests/{_quoted(args.id)}")
    if args.json:
        return _show(args, found)
    for choice in found:
        steps = choice.pop("steps")
        print(table(choice))
        print(columns(steps[-20:]) if steps else "no steps yet")
    return 0


def _abort(args: argparse.Namespace, client: Client) -> int:
    wish = {"all": args.all or None, "state": args.state, "older_than": args.older_than, "prefix": args.prefix}
    found: list[str] = []
    if not args.ids and all(value is None for value in wish.values()):
        raise UsageError("give ids, --state, --older-than or --prefix, or --all")
    for request_id in args.ids:
        aborted = client.call("DELETE", f"/v1/requests/{_quoted(request_id)}")["aborted"]
        if not aborted:
            print(f"specd: there is no live request {request_id!r}", file=sys.stderr)
        found += aborted
    if any(value is not None for value in wish.values()):
        aborted = client.call("POST", "/v1/requests/abort", {"filter": wish})["aborted"]
        if not aborted:
            print("specd: no live request is of that kind", file=sys.stderr)
        found += aborted
    _show(args, {"aborted": found})
    return 0 if found else _FAILED


def _drain(args: argparse.Namespace, client: Client) -> int:
    mode = "deadline" if args.deadline else "finish"
    body = {"timeout": args.timeout, "mode": mode, "wait": not args.no_wait}
    result = client.call("POST", "/v1/drain", body, timeout_s=_LONG_S)
    _show(args, result)
    return 0 if result["drained"] or args.no_wait else _UNFINISHED


def _reload(args: argparse.Namespace, client: Client) -> int:
    found = client.call("POST", "/v1/reload", {"dry_run": args.dry_run})
    if args.json or found["applied"] or found["needs_restart"]:
        return _show(args, found)
    print(f"nothing {'would change' if args.dry_run else 'changed'}: the configuration is the one that is in force")
    return 0


def _speculation(args: argparse.Namespace, client: Client) -> int:
    body = {"mode": args.mode, "k": args.k, "ttl": args.ttl}
    return _show(args, client.call("PATCH", "/v1/speculation", body))


def _loglevel(args: argparse.Namespace, client: Client) -> int:
    level = None if args.level == "configured" else args.level
    return _show(args, client.call("PUT", "/v1/loglevel", {"level": level, "ttl": args.ttl}))


def _kv(args: argparse.Namespace, client: Client) -> int:
    if args.flush:
        return _show(args, client.call("POST", "/v1/kv/flush", {}))
    return _show(args, client.call("GET", "/v1/kv"))


def _keys(args: argparse.Namespace, client: Client) -> int:
    if args.add is not None:
        return _show(args, client.call("POST", "/v1/keys", {"name": args.add}))
    if args.remove is not None:
        return _show(args, client.call("DELETE", f"/v1/keys/{_quoted(args.remove)}"))
    return _show(args, client.call("GET", "/v1/keys"))


def _corpora(args: argparse.Namespace, client: Client) -> int:
    if args.action in (None, "list"):
        return _show(args, client.call("GET", "/v1/corpora"))
    target = f"/v1/corpora/{_quoted(args.name)}"
    if args.action == "delete":
        return _show(args, client.call("DELETE", target))
    try:
        text = sys.stdin.buffer.read() if str(args.file) == "-" else args.file.read_bytes()
    except OSError as error:
        print(f"specd: {args.file} cannot be read: {error.strerror}", file=sys.stderr)
        return _FAILED
    query = {name: value for name, value in (("key", args.key), ("ttl", args.ttl)) if value is not None}
    suffix = "?" + urllib.parse.urlencode(query) if query else ""
    return _show(args, client.call("PUT", target + suffix, text=text, timeout_s=_PUT_S))


def _selftest(args: argparse.Namespace, client: Client) -> int:
    found = client.call("POST", "/v1/selftest", {}, timeout_s=_SELFTEST_S)
    _show(args, found)
    same = sum(row["identical"] for row in found)
    drafted, accepted = (sum(row[name] for row in found) for name in ("drafted", "accepted"))
    if not args.json:
        print(f"{same} of {len(found)} texts are the same; {drafted} drafts were made, {accepted} kept")
    if same < len(found):
        print("specd: speculation changed a text (a near tie, or a fault)", file=sys.stderr)
        return _FAILED
    return 0


def _events(args: argparse.Namespace, client: Client) -> int:
    for number, event in enumerate(client.events(args.interval), 1):
        print(json.dumps(event), flush=True)
        if number == args.count:
            break
    return 0


def _top(args: argparse.Namespace, client: Client) -> int:
    return ctl_top.run(client.events(args.interval), as_json=args.json)


def _to_file(args: argparse.Namespace, result: Any, what: str) -> int:
    text = json.dumps(result)
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text, encoding="utf-8")
        print(f"{args.output}: {what}")
    return 0


def _trace(args: argparse.Namespace, client: Client) -> int:
    trace = client.call("GET", f"/v1/trace?seconds={args.seconds}")
    num_events = len(trace.get("traceEvents", ()))
    return _to_file(
        args, trace, f"{num_events} event{'' if num_events == 1 else 's'}; open it in https://ui.perfetto.dev"
    )


def _dump(args: argparse.Namespace, client: Client) -> int:
    return _to_file(args, client.call("GET", "/v1/dump"), "configuration, queues and stacks; no text, no keys")


def _profile(args: argparse.Namespace, client: Client) -> int:
    """Python's time as collapsed stacks, which flame graph tools read; PyTorch's time, and memory, as a table."""
    body = {"kind": args.kind, "seconds": args.seconds}
    found = client.call("POST", "/v1/profile", body, timeout_s=args.seconds + _PROFILE_S)
    if args.json:
        text = json.dumps(found)
    else:
        text = "\n".join(found["stacks"]) if args.kind == "cpu" else table(found[_ROWS[args.kind]])
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text + "\n", encoding="utf-8")
        print(f"{args.output}: {args.seconds:g} s of {args.kind}")
    if args.kind == "torch":
        print(f"seen in {found['looked_s']:.1f} s; specd's own kernels are no operations of PyTorch", file=sys.stderr)
    return 0


def _shutdown(args: argparse.Namespace, client: Client) -> int:
    return _show(args, client.call("POST", "/v1/shutdown", {"drain": not args.now, "timeout": args.timeout}))


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")


_VERBS: dict[str, Callable[[argparse.Namespace, Client], int]] = {
    "status": _status,
    "requests": _requests,
    "request": _request,
    "abort": _abort,
    "drain": _drain,
    "resume": _post("/v1/resume"),
    "pause": _post("/v1/pause"),
    "unpause": _post("/v1/unpause"),
    "reload": _reload,
    "speculation": _speculation,
    "loglevel": _loglevel,
    "kv": _kv,
    "keys": _keys,
    "corpora": _corpora,
    "selftest": _selftest,
    "events": _events,
    "top": _top,
    "trace": _trace,
    "profile": _profile,
    "dump": _dump,
    "shutdown": _shutdown,
}
