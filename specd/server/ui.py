"""The page at /ui: its files, and a stream of what the engine does. No torch.

The page is a client of the API like any other: what it shows of a request it has asked for itself. /ui/events tells
figures of the whole engine, never a prompt, a text or a key.

    GET /ui            the page
    GET /ui/{name}     one of its files, from a closed list
    GET /ui/events     server-sent events, one a second; asks for an API key as the API does

A browser would let a foreign page read all of it once its author's name points at this machine (DNS rebinding). So the
Host header must be an address or a name that is known to be this server's.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.resources
import ipaddress
import re
import socket
import time
from typing import Any

from aiohttp import web

from specd.config import Config, ServerConfig
from specd.errors import OverloadedError, RequestError
from specd.server.generation import STREAM_HEADERS, Handler
from specd.server.protocol import EngineProtocol
from specd.server.sending import bound_buffers
from specd.server.sse import event

PATH, FILE_PATH, EVENTS_PATH = "/ui", "/ui/{name}", "/ui/events"
STAGES = ("schedule", "draft", "verify", "accept", "refill")  # lanes of the timeline
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_INDEX = "index.html"
_PERIOD_S = 1.0
_TRACE_S = 1.5  # of stages in an event: more than a period, so that none is missed
_MOST_SPANS = 256  # the latest ones
_MOST_STREAMS = 16  # of events
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]{1,5})?")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def enabled(server: ServerConfig, *, local: bool) -> bool:
    """Whether there is a page. local: only this machine can connect to the listeners."""
    return local if server.ui == "auto" else server.ui == "on"


class Ui:
    """Handlers of /ui. `open_handlers` ask for no key: they are the same for everybody."""

    def __init__(self, engine: EngineProtocol, config: Config) -> None:
        self._engine = engine
        self._config = config
        self._files = _read_files()
        self._hosts = _host_names(config.server)
        self._closing = asyncio.Event()
        self.num_streams = 0  # of events, open now
        self._event = (0.0, b"")  # made when, for every reader of that second
        self.open_handlers: frozenset[Handler] = frozenset({self.page, self.slash, self.file})

    def add_to(self, app: web.Application) -> None:
        app.router.add_get(PATH, self.page)
        app.router.add_get(PATH + "/", self.slash)
        app.router.add_get(EVENTS_PATH, self.events, allow_head=False)
        app.router.add_get(FILE_PATH, self.file)
        app.on_shutdown.append(self._close)

    def reconfigure(self, config: Config) -> None:
        self._config = config

    async def _close(self, _: web.Application) -> None:
        self._closing.set()

    async def page(self, request: web.Request) -> web.Response:
        return self._send(request, _INDEX)

    async def slash(self, request: web.Request) -> web.Response:
        """/ui/ is /ui: the page's links are relative, so that it also works below a proxy's prefix."""
        self._check_host(request)
        return web.Response(status=308, headers={**_HEADERS, "Location": "../ui"})

    async def file(self, request: web.Request) -> web.Response:
        return self._send(request, request.match_info["name"])

    def _send(self, request: web.Request, name: str) -> web.Response:
        self._check_host(request)
        if name not in self._files:
            raise web.HTTPNotFound
        kind, body, tag = self._files[name]
        headers = {**_HEADERS, "ETag": tag}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers={**headers, "Content-Type": f"{kind}; charset=utf-8"})

    def _check_host(self, request: web.Request) -> None:
        """Raises RequestError where the browser was led here by a name that is not this server's."""
        header = request.headers.get("Host", "")
        if not is_known_host(header, self._hosts):
            text = f"the host {header[:128]!r} is not a name of this server; server.ui_hosts may list it"
            raise RequestError(text, code="host_not_allowed")

    # ---------------------------------------------------------------- events

    async def events(self, request: web.Request) -> web.StreamResponse:
        """One event a second until the client leaves or the server stops."""
        self._check_host(request)
        if request.headers.get("Sec-Fetch-Site") == "cross-site":  # it could not read them, and would take a place
            raise RequestError("pages of other sites get no events", code="host_not_allowed")
        if self.num_streams >= _MOST_STREAMS:
            raise OverloadedError(f"{_MOST_STREAMS} pages are being told already")
        self.num_streams += 1
        try:
            return await self._stream(request)
        finally:
            self.num_streams -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={**STREAM_HEADERS, "Cache-Control": "no-store"})
        await response.prepare(request)
        if request.transport is not None:
            bound_buffers(request.transport)
        try:
            while not self._closing.is_set():
                async with asyncio.timeout(self._config.server.slow_client_timeout_s):
                    await response.write(self._latest())
                await _wait(self._closing, _PERIOD_S)
            await response.write_eof()
        except TimeoutError:  # it reads nothing
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the page was closed
        return response

    def _latest(self) -> bytes:
        now = time.monotonic()
        if now - self._event[0] >= _PERIOD_S / 2:
            self._event = (now, event(snapshot(self._engine, self._config.server)))
        return self._event[1]


def snapshot(engine: EngineProtocol, server: ServerConfig) -> dict[str, Any]:
    """One event: gauges of now, counters since the start (the page makes rates of them), stages of the last moments.

    `stages` are [name, step, start, duration] in milliseconds; `now_ms` is on the same clock.
    """
    info, stats, pages = engine.info, engine.stats(), engine.page_map()
    return {
        "model": info.served_names[0],
        "kernels": info.kernels,
        "drafter": info.drafter,
        "acceptance": info.acceptance,
        "max_draft": info.max_draft,
        "max_len": info.max_len,
        "max_logprobs": server.max_logprobs,
        "state": stats.shown_state,
        "uptime_s": stats.uptime_s,
        "running": stats.running,
        "waiting": stats.waiting,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "generation_tokens": stats.generation_tokens,
        "steps": stats.steps,
        "drafts": dict(stats.drafts),
        "draft_tokens": dict(stats.draft_tokens),
        "accepted_tokens": dict(stats.accepted_tokens),
        "drafted_per_position": stats.drafted_per_position,
        "accepted_per_position": stats.accepted_per_position,
        "pages": {
            "size": info.page_size,
            "total": stats.pages_total,
            "free": stats.pages_free - stats.pages_cached,
            "cached": stats.pages_cached,
            "cell_pages": pages.cell_pages,
            "cells": pages.cells,
        },
        "now_ms": time.perf_counter_ns() / 1e6,
        "stages": _stages(engine.trace(_TRACE_S)),
    }


def _stages(trace: dict[str, Any]) -> list[tuple[str, int, float, float]]:
    found = [
        (span["name"], span["args"]["step"], round(span["ts"] / 1000, 3), round(span["dur"] / 1000, 3))
        for span in trace["traceEvents"]
        if span["ph"] == "X" and span["name"] in STAGES
    ]
    return found[-_MOST_SPANS:]


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event or for so long, whichever is first."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


def is_known_host(header: str, names: frozenset[str]) -> bool:
    """Whether a Host header is an address (nobody can point that elsewhere), localhost or one of `names`."""
    found = _HOST.fullmatch(header)
    if found is None:
        return False
    host = found[1].lower().removesuffix(".")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost" or host.endswith(".localhost") or host in names
    return True


def _host_names(server: ServerConfig) -> frozenset[str]:
    return frozenset(name.lower() for name in (server.host, socket.gethostname(), *server.ui_hosts))


def _read_files() -> dict[str, tuple[str, bytes, str]]:
    """(content type, content, entity tag) of every file, by name. Nothing else can be asked for."""
    files: dict[str, tuple[str, bytes, str]] = {}
    for entry in importlib.resources.files("specd.server").joinpath("ui").iterdir():
        kind = _TYPES.get("." + entry.name.rpartition(".")[2])
        if kind is not None:
            body = entry.read_bytes()
            files[entry.name] = (kind, body, f'"{hashlib.sha256(body).hexdigest()[:24]}"')
    return files
