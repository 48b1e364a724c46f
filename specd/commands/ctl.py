"""`specd ctl`: HTTP and JSON over the control socket, printed as tables. Standard library only: it starts at once."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specd.config import admin_socket_path
from specd.config_loader import load_config
from specd.errors import SpecdError

_TIMEOUT_S = 30.0


def run(args: argparse.Namespace) -> int:
    path = _socket_path(args)
    if args.verb == "trace":
        return _trace(args, path)
    if args.verb == "shutdown":
        result = call(path, "POST", "/v1/shutdown", {"drain": not args.now, "timeout": args.timeout})
    else:
        result = call(path, "GET", f"/v1/{args.verb}")
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def _socket_path(args: argparse.Namespace) -> Path:
    """--socket, --instance, or admin.socket of the same file and environment that the daemon was given."""
    if args.socket:
        return Path(args.socket)
    if args.instance:
        return Path("/run/specd", args.instance, "admin.sock")
    return admin_socket_path(load_config(args.config, env=os.environ).admin.socket, os.environ)


def _trace(args: argparse.Namespace, path: Path) -> int:
    trace = call(path, "GET", f"/v1/trace?seconds={args.seconds}")
    text = json.dumps(trace)
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text, encoding="utf-8")
        print(f"{args.output}: {len(trace.get('traceEvents', ()))} events; open it in https://ui.perfetto.dev")
    return 0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def call(path: Path, method: str, target: str, body: object = None) -> Any:
    """One call: the `result` of the reply. Raises SpecdError when nobody answers or the answer is an error."""
    connection = _UnixConnection(path)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, target, content, {"Content-Type": "application/json"})
        reply = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException) as error:
        raise SpecdError(f"{path}: {error}; is `specd serve` running, with this admin.socket?") from error
    except ValueError as error:
        raise SpecdError(f"{path}: the reply is not JSON; is it specd's control socket?") from error
    finally:
        connection.close()
    if not isinstance(reply, dict) or not reply.get("ok"):
        raise SpecdError(f"{target}: {_error_text(reply)}")
    return reply.get("result")


def _error_text(reply: Any) -> str:
    error = reply.get("error") if isinstance(reply, dict) else reply
    return f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else str(error)


def table(value: Any) -> str:
    """A list of records as columns, a record as `name  value` lines (nested names joined with dots)."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _columns(value) if value else "none"
    if isinstance(value, Mapping):
        lines = _flatten(value)
        width = max((len(name) for name, _ in lines), default=0)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)
    return _cell(value)


def _columns(records: Sequence[Any]) -> str:
    if not all(isinstance(record, Mapping) for record in records):
        return "\n".join(_cell(record) for record in records)
    names = list(dict.fromkeys(name for record in records for name in record))
    rows = [names, *([_cell(record.get(name)) for name in names] for record in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _flatten(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for name, value in record.items():
        lines += _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, _cell(value))]
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_cell(item) for item in value)
    return str(value)
