"""The control socket's HTTP: routes, rights, generations, errors and the line in the log of every change.

Every reply is {"ok": true, "result": ...} or {"ok": false, "error": {"code", "message"}}; its ETag is the generation.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import orjson
from aiohttp import web

from specd.errors import AbortedError, ConfigError, DrainingError, OverloadedError, RequestError, SpecdError
from specd.log import get_logger
from specd.server.admin import views
from specd.server.admin.arguments import Arguments
from specd.server.admin.commands import COMMANDS, Command
from specd.server.admin.console import Console
from specd.server.admin.peers import Level, Peer, peer_of
from specd.server.json_body import parse_json

_MAX_BODY_BYTES = 1 << 20  # of JSON, which is parsed on the loop
_MAX_TEXT_BYTES = 4 << 20
_MAX_CALLS = 32  # at a time, of the callers of one level
_MAX_STREAMS = 16  # the same for /v1/events, beside the calls
_BODY_DEADLINE_S = 10.0
_MAX_LOGGED = 512  # characters of arguments in the log
_LOGGED_DEPTH = 4  # no command takes deeper ones
_STATUS = {
    "forbidden": 403, "not_found": 404, "request_timeout": 408, "conflict": 409, "generation_mismatch": 412,
    "busy": 503, "quota_exceeded": 409,
}  # fmt: skip
_PEER_KEY: web.RequestKey[Peer | None] = web.RequestKey("peer", Peer)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = get_logger("admin")


def create_admin_app(console: Console) -> web.Application:
    """See `commands.COMMANDS`; and GET /v1/events. Listen with `bind_admin_socket` and `web.SockSite`.

    Run it with `server.app.create_runner`: a caller who leaves cancels what nobody waits for any more.
    """
    desk = _Desk(console)
    app = web.Application(middlewares=[desk.middleware])
    for command in COMMANDS:
        app.router.add_route(command.method, command.path, desk.handler(command))
    app.router.add_get("/v1/events", desk.events)

    async def close(_: web.Application) -> None:
        await console.close()

    app.on_shutdown.append(close)  # before connections are waited for: listeners are sent home
    return app


class _Desk:
    """Lets a caller in, has the command run, answers and keeps the book."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._snapshots = views.Snapshots(console)
        self._changes: dict[asyncio.Task[Any], Level] = {}  # that are not done yet, and who asked for them
        self._taken: collections.Counter[tuple[Level, bool]] = collections.Counter()  # (level, whether for events)

    def handler(self, command: Command) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            peer = request[_PEER_KEY]
            arguments: dict[str, Any] = {}
            outcome = "failed"
            try:
                self._check_level(peer, command.level)
                arguments = await _arguments(request, command)
                self._check_generation(request)
                if command.changes and not arguments.get("dry_run"):
                    result = await self._changed(command, arguments, peer)
                else:
                    result = await command.run(self._console, Arguments(arguments))
                outcome = "ok"
                return _reply(result)
            except SpecdError as error:
                outcome = error.code
                raise
            except asyncio.CancelledError:
                outcome = "caller_left"
                raise
            finally:
                if command.changes:
                    _log(command, peer, arguments, outcome)

        return handle

    @property
    def middleware(self) -> Any:
        @web.middleware
        async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                with self._place(request):
                    response = await handler(request)
            except web.HTTPException as error:
                response = _refusal("not_found" if error.status == 404 else "http_error", error.reason, error.status)
            except (RequestError, ConfigError) as error:
                response = _refusal(error.code, str(error), _STATUS.get(error.code, 400))
            except (OverloadedError, DrainingError, AbortedError) as error:  # of the requests of a self-test
                response = _refusal(error.code, str(error), 503)
            except SpecdError as error:
                log.error("admin_failed", path=request.path, exc_info=error)
                response = _refusal(error.code, str(error), 500)
            except (ConnectionError, TimeoutError):
                raise
            except Exception as error:  # whatever it is: the caller gets an answer, the log the traceback
                log.error("admin_failed", path=request.path, exc_info=error)
                response = _refusal("internal_error", "the daemon failed; its log says how", 500)
            if not response.prepared:
                response.headers["ETag"] = f'"{self._console.generation}"'
            return response

        return errors

    @contextlib.contextmanager
    def _place(self, request: web.Request) -> Iterator[None]:
        """One of the caller's level, so that nobody keeps out those who may do more. Raises RequestError."""
        peer = request[_PEER_KEY] = peer_of(request)
        streams = request.match_info.handler == self.events
        kind = (self._console.levels.of(peer), streams)
        most = _MAX_STREAMS if streams else _MAX_CALLS
        if self._taken[kind] >= most:
            what = "event streams are open" if streams else "calls are being answered"
            raise RequestError(f"{most} {what}; try again", code="busy")
        self._taken[kind] += 1
        try:
            yield
        finally:
            self._taken[kind] -= 1

    async def _changed(self, command: Command, arguments: dict[str, Any], peer: Peer | None) -> Any:
        """What is changed is changed whole, and told: also when its caller does not wait for it."""

        async def change() -> Any:
            result = await command.run(self._console, Arguments(arguments))
            self._console.changed(command.name, uid=peer.uid if peer else None)
            return result

        level = self._console.levels.of(peer)
        if sum(other is level for other in self._changes.values()) >= _MAX_CALLS:  # of callers who did not wait
            raise RequestError(f"{_MAX_CALLS} changes are being made; try again", code="busy")
        task = asyncio.create_task(change(), name=f"specd-admin-{command.name}")
        self._changes[task] = level
        task.add_done_callback(self._changes.pop)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_fault)  # he has left, and is not told
            raise

    def _check_level(self, peer: Peer | None, needed: Level) -> None:
        if self._console.levels.of(peer) < needed:
            who = "nobody" if peer is None else f"uid {peer.uid}"
            raise RequestError(f"{who} is not {needed.name.lower()} here", code="forbidden")

    def _check_generation(self, request: web.Request) -> None:
        wanted = request.headers.get("If-Match", "*").strip().strip('"')
        if wanted not in ("*", str(self._console.generation)):
            text = f"the generation is {self._console.generation}, not {wanted[:32]!r}: somebody changed something"
            raise RequestError(text, code="generation_mismatch")
        if wanted != "*" and self._changes:
            raise RequestError("something is being changed right now; look again", code="generation_mismatch")

    # ---------------------------------------------------------------- events

    async def events(self, request: web.Request) -> web.StreamResponse:
        """A snapshot every `interval` seconds (1) and what happens in between; SSE when that is accepted."""
        query = Arguments(request.query)
        interval_s = query.seconds("interval", low=0.1, high=60.0) or 1.0
        query.end()
        sse = "text/event-stream" in request.headers.get("Accept", "")
        kind = "text/event-stream" if sse else "application/x-ndjson"
        self._snapshots.since(None)  # what fails here still has a status of its own
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})

        async def send(event: Mapping[str, Any]) -> None:
            line = orjson.dumps(event)
            async with asyncio.timeout(self._console.reloader.config.server.slow_client_timeout_s):
                await response.write(b"data: " + line + b"\n\n" if sse else line + b"\n")

        try:
            await response.prepare(request)
            await self._follow(interval_s, send)
        except ConnectionError:
            pass  # the caller has left
        except TimeoutError:  # it reads nothing
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _follow(self, interval_s: float, send: Callable[[Mapping[str, Any]], Awaitable[None]]) -> None:
        """Until the daemon stops; ConnectionError when the caller has left."""
        before = None
        with self._console.events.listening() as listener:
            while True:
                snapshot, before = self._snapshots.since(before)
                await send(snapshot)
                until_s = time.monotonic() + interval_s
                while (left_s := until_s - time.monotonic()) > 0:
                    try:
                        event = await listener.get(left_s)
                    except TimeoutError:
                        break
                    if event is None:
                        await send({"type": "end", "ts": time.time()})
                        return
                    await send({**event, "dropped": listener.num_dropped})


async def _arguments(request: web.Request, command: Command) -> dict[str, Any]:
    """Of the query, the body and the path, in one; each name once. Raises RequestError."""
    try:
        async with asyncio.timeout(_BODY_DEADLINE_S):
            body = await _body(request, command)
    except TimeoutError as error:
        raise RequestError(f"the body took longer than {_BODY_DEADLINE_S:g} s", code="request_timeout") from error
    found: dict[str, Any] = {}
    for source in (request.query, body, request.match_info):
        for name, value in source.items():
            if name in found:
                raise RequestError(f"{name[:64]} is given twice", code="invalid_value", param=name[:64])
            found[name] = value
    return found


async def _body(request: web.Request, command: Command) -> Mapping[str, Any]:
    """The arguments that the body gives. Raises RequestError; aiohttp answers 413 by itself."""
    plain = command.text and request.content_type == "text/plain"
    raw = await request.clone(client_max_size=_MAX_TEXT_BYTES if plain else _MAX_BODY_BYTES).read()
    if not plain:
        return parse_json(raw) if raw else {}
    try:
        return {command.text: raw.decode()}
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error}", code="invalid_text", param=command.text) from error


def _log(command: Command, peer: Peer | None, arguments: Mapping[str, Any], outcome: str) -> None:
    who = None if peer is None else {k: v for k, v in dataclasses.asdict(peer).items() if k != "groups"}
    plain = {name: _size(value) if name in command.content else value for name, value in arguments.items()}
    shown = json.dumps(_cut(plain, _LOGGED_DEPTH), separators=(",", ":"))[:_MAX_LOGGED]
    log.warning("admin_called", command=command.name, peer=who, arguments=shown, result=outcome)


def _log_fault(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, SpecdError):
        log.error("admin_failed", path=task.get_name(), exc_info=error)


def _size(value: object) -> str:
    return f"<{len(value)}>" if isinstance(value, str | list) else "<>"


def _cut(value: object, depth: int) -> object:
    """A value without what is nested deeper: callers choose the nesting, and encoders have a limit."""
    if isinstance(value, Mapping):
        return {name: _cut(item, depth - 1) for name, item in value.items()} if depth else "..."
    if isinstance(value, list):
        return [_cut(item, depth - 1) for item in value] if depth else "..."
    return value


def _reply(result: object) -> web.Response:
    return web.Response(body=orjson.dumps({"ok": True, "result": result}), content_type="application/json")


def _refusal(code: str, message: str, status: int) -> web.Response:
    body = {"ok": False, "error": {"code": code, "message": message}}
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
