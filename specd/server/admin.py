"""The control socket of `specd ctl`: HTTP and JSON over a Unix socket. Never on TCP; no torch.

Every reply is {"ok": true, "result": ...} or {"ok": false, "error": {"code", "message"}}.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from specd.errors import AddressInUseError, ConfigError, RequestError, SpecdError
from specd.log import get_logger
from specd.server.metrics import version
from specd.server.openai import parse_json
from specd.server.protocol import EngineProtocol

_MAX_BODY_BYTES = 1 << 20
_MAX_TRACE_S = 3600.0
_SOCKET_MODE = 0o660
_BACKLOG = 32
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = get_logger("admin")


@dataclasses.dataclass(frozen=True, slots=True)
class Shutdown:
    """What `POST /v1/shutdown` asks. drain: finish what was accepted, at most timeout_s (None: the configured time)."""

    drain: bool = True
    timeout_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel says. The pid may already be somebody else's."""

    pid: int
    uid: int
    gid: int


def create_admin_app(engine: EngineProtocol, on_shutdown: Callable[[Shutdown], None]) -> web.Application:
    """GET /v1/status, /v1/requests, /v1/trace?seconds=N; POST /v1/shutdown {"drain": bool, "timeout": seconds}.

    `on_shutdown` is called on the event loop and returns at once. Listen with `bind_admin_socket` and `web.SockSite`.
    """
    handlers = _Verbs(engine, on_shutdown)
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
    app.router.add_get("/v1/status", handlers.status)
    app.router.add_get("/v1/requests", handlers.requests)
    app.router.add_get("/v1/trace", handlers.trace)
    app.router.add_post("/v1/shutdown", handlers.shutdown)
    return app


def bind_admin_socket(path: str | Path) -> socket.socket:
    """A listening socket file of mode 0660. A missing parent is made with mode 0700; a stale file is replaced.

    Raises AddressInUseError when somebody listens there, ConfigError when the file is something else, or when others
    could swap the file because they can write to its folder or own it.
    """
    path = Path(path)
    _check_parent(path.parent)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, _SOCKET_MODE)  # before listen: nobody can have connected
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"admin.socket: cannot listen on {path}: {error}") from error
    listener.setblocking(False)
    return listener


def _check_parent(parent: Path) -> None:
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = parent.stat()
    except OSError as error:
        raise ConfigError(f"admin.socket: cannot use the folder {parent}: {error}") from error
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(f"admin.socket: everybody can write to {parent}; choose a folder of your own")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"admin.socket: {parent} belongs to uid {found.st_uid}; choose a folder of your own")


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"admin.socket: {path} is there and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            raise ConfigError(f"admin.socket: cannot tell whether {path} is in use: {error}") from error
    raise AddressInUseError(
        f"admin.socket: another daemon listens on {path}; stop it, or give this one a socket of its own: "
        "--set admin.socket=PATH"
    )


class _Verbs:
    def __init__(self, engine: EngineProtocol, on_shutdown: Callable[[Shutdown], None]) -> None:
        self._engine = engine
        self._on_shutdown = on_shutdown

    async def status(self, request: web.Request) -> web.Response:
        """`info` and `stats` are EngineInfo and EngineStats field by field."""
        stats = self._engine.stats()
        result = {
            "version": version(),
            "pid": os.getpid(),
            "state": stats.state,
            "info": _plain(self._engine.info),
            "stats": _plain(stats),
        }
        return _reply(result)

    async def requests(self, request: web.Request) -> web.Response:
        return _reply([_plain(item) for item in self._engine.requests()])

    async def trace(self, request: web.Request) -> web.Response:
        text = request.query.get("seconds", "10")
        try:
            seconds = float(text)
        except ValueError as error:
            raise RequestError(f"seconds must be a number; got {text[:32]}", code="invalid_type") from error
        if not 0 < seconds <= _MAX_TRACE_S:
            raise RequestError(f"seconds must be in 0..{_MAX_TRACE_S:g}; got {text[:32]}", code="out_of_range")
        return _reply(self._engine.trace(seconds))

    async def shutdown(self, request: web.Request) -> web.Response:
        raw = await request.read()
        wish = _shutdown(parse_json(raw) if raw else {})
        peer = peer_of(request)
        allowed = peer is not None and peer.uid in (0, os.geteuid())
        who = dataclasses.asdict(peer) if peer is not None else None
        log.warning("admin_called", command="shutdown", peer=who, drain=wish.drain, allowed=allowed)
        if not allowed:
            raise RequestError("only root and the daemon's own user may do that", code="forbidden")
        self._on_shutdown(wish)
        return _reply({"draining": wish.drain})


def peer_of(request: web.Request) -> Peer | None:
    """The connection's SO_PEERCRED; None when it has already gone."""
    if request.transport is None:
        return None
    connection = request.transport.get_extra_info("socket")
    return Peer(*_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)))


def _shutdown(body: Mapping[str, Any]) -> Shutdown:
    drain, timeout = body.get("drain", True), body.get("timeout")
    if not isinstance(drain, bool):
        raise RequestError("drain must be true or false", code="invalid_type", param="drain")
    if timeout is not None and (type(timeout) not in (int, float) or not 0 <= timeout <= 86400):
        raise RequestError("timeout must be seconds in 0..86400", code="out_of_range", param="timeout")
    return Shutdown(drain, None if timeout is None else float(timeout))


def _plain(record: Any) -> dict[str, Any]:
    """A record's fields; mappings of any kind become objects."""
    values = ((field.name, getattr(record, field.name)) for field in dataclasses.fields(record))
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values}


def _reply(result: object) -> web.Response:
    return web.Response(body=orjson.dumps({"ok": True, "result": result}), content_type="application/json")


def _refusal(code: str, message: str, status: int) -> web.Response:
    body = {"ok": False, "error": {"code": code, "message": message}}
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refusal("not_found" if error.status == 404 else "http_error", error.reason, error.status)
    except RequestError as error:
        return _refusal(error.code, str(error), 403 if error.code == "forbidden" else 400)
    except SpecdError as error:
        log.error("admin_failed", path=request.path, exc_info=error)
        return _refusal(error.code, str(error), 500)
