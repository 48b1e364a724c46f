"""What one caller of the control socket can do to another: bodies that never come, streams, nested arguments."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from aiohttp import web

from specd.server.admin import app as admin_app
from specd.server.admin.peers import Peer
from tests.admin import Caller, Desk, serving
from tests.admin_engine import Engine

STRANGER = {"X-Uid": str(os.geteuid() + 4321)}  # may look, no more
NESTING = 900


@pytest.fixture(autouse=True)
def uids_are_told_in_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    def peer_of(request: web.Request) -> Peer:
        return Peer(1, int(request.headers.get("X-Uid", os.geteuid())), 1)

    monkeypatch.setattr(admin_app, "peer_of", peer_of)


@contextlib.asynccontextmanager
async def promising(path: Path) -> AsyncIterator[asyncio.StreamReader]:
    """A stranger's connection that announces a body and sends none."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    head = ["GET /v1/status HTTP/1.1", "Host: x", f"X-Uid: {STRANGER['X-Uid']}", "Content-Length: 9", "", ""]
    writer.write("\r\n".join(head).encode())
    try:
        yield reader
    finally:
        writer.close()


async def status_of(caller: Caller, path: str) -> int:
    """Of the answer to a stranger, who does not read it."""
    async with caller.session.get(f"http://admin{path}", headers=STRANGER) as reply:
        return reply.status


async def until_status(caller: Caller, status: int, *, path: str = "/v1/status") -> None:
    async with asyncio.timeout(5):
        while await status_of(caller, path) != status:  # noqa: ASYNC110  the other side has no event to wait for
            await asyncio.sleep(0.005)


async def test_who_may_only_look_keeps_nobody_else_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_app, "_MAX_CALLS", 2)
    path, desk = tmp_path / "a.sock", Desk()
    async with serving(path, Engine(), desk) as caller, promising(path), promising(path):
        await until_status(caller, 503)
        assert await caller.refusal("GET", "/v1/status", headers=STRANGER) == (503, "busy")
        await caller.result("POST", "/v1/shutdown")
    assert len(desk.shutdowns) == 1


async def test_a_body_that_never_comes_is_waited_for_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_app, "_MAX_CALLS", 1)
    monkeypatch.setattr(admin_app, "_BODY_DEADLINE_S", 0.2)
    path = tmp_path / "a.sock"
    async with serving(path, Engine()) as caller, promising(path) as reader:
        await until_status(caller, 503)
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"request_timeout"' in await reader.readuntil(b"}}")
        await until_status(caller, 200)


async def test_event_streams_have_places_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_app, "_MAX_CALLS", 1)
    monkeypatch.setattr(admin_app, "_MAX_STREAMS", 1)
    events = "/v1/events?interval=0.1"
    async with serving(tmp_path / "a.sock", Engine()) as caller:
        async with caller.session.get(f"http://admin{events}", headers=STRANGER) as theirs:
            await theirs.content.readline()
            assert await caller.refusal("GET", events, headers=STRANGER) == (503, "busy")
            await caller.result("GET", "/v1/status", headers=STRANGER)
            async with caller.session.get(f"http://admin{events}") as ours:
                assert orjson.loads(await ours.content.readline())["type"] == "snapshot"
        await until_status(caller, 200, path=events)  # those who leave give their places back


def nested(name: str) -> bytes:
    return f'{{"{name}":'.encode() + b'{"a":' * NESTING + b"1" + b"}" * NESTING + b"}"


@pytest.mark.parametrize(
    ("method", "path", "name", "code"),
    [
        ("POST", "/v1/shutdown", "drain", "invalid_type"),
        ("POST", "/v1/drain", "mode", "invalid_type"),
        ("POST", "/v1/requests/abort", "filter", "unknown_parameter"),
        ("PATCH", "/v1/speculation", "k", "invalid_type"),
        ("POST", "/v1/pause", "x", "unknown_parameter"),
    ],
)
async def test_nested_arguments_are_refused_and_logged(
    tmp_path: Path, method: str, path: str, name: str, code: str
) -> None:
    lines: Any
    with structlog.testing.capture_logs() as lines:
        async with serving(tmp_path / "a.sock", Engine()) as caller:
            assert await caller.refusal(method, path, data=nested(name)) == (400, code)
    (line,) = [line for line in lines if line["event"] == "admin_called"]
    assert line["result"] == code
    assert line["arguments"] == json.dumps({name: {"a": {"a": {"a": "..."}}}}, separators=(",", ":"))
    assert not [line for line in lines if line["log_level"] == "error"]
