"""The control socket: who may use it, what it answers, and whose socket file it replaces."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from specd.errors import AddressInUseError, ConfigError
from specd.request import Request, SamplingParams
from specd.server import admin
from specd.server.admin import Shutdown, bind_admin_socket, create_admin_app
from tests.fake_engine import FakeEngine


@contextlib.asynccontextmanager
async def serving(path: Path, engine: FakeEngine, asked: list[Shutdown]) -> AsyncIterator[aiohttp.ClientSession]:
    runner = web.AppRunner(create_admin_app(engine, asked.append), access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, bind_admin_socket(path)).start()
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
            yield session
    finally:
        await runner.cleanup()


async def ask(session: aiohttp.ClientSession, method: str, path: str, **kwargs: Any) -> tuple[int, Any]:
    async with session.request(method, f"http://admin{path}", **kwargs) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


async def test_verbs(tmp_path: Path) -> None:
    engine = FakeEngine()
    asked: list[Shutdown] = []
    engine.submit(Request("r1", (1, 2, 3), SamplingParams(max_tokens=4, seed=1)))
    async with serving(tmp_path / "admin.sock", engine, asked) as session:
        status, reply = await ask(session, "GET", "/v1/status")
        assert (status, reply["ok"]) == (200, True)
        assert reply["result"]["state"] == "ready"
        assert reply["result"]["info"]["drafter"] == "ngram"
        assert reply["result"]["info"]["generation_defaults"] == {"temperature": 0.6, "top_k": 40}
        assert reply["result"]["stats"]["running"] == 1
        _, reply = await ask(session, "GET", "/v1/requests")
        assert reply["result"][0]["request_id"] == "r1"
        assert reply["result"][0]["num_accepted_tokens"] == 2
        _, reply = await ask(session, "GET", "/v1/trace?seconds=2.5")
        assert reply["result"] == {"traceEvents": [], "seconds": 2.5}
        _, reply = await ask(session, "POST", "/v1/shutdown", json={"drain": False, "timeout": 3})
        assert reply == {"ok": True, "result": {"draining": False}}
        await ask(session, "POST", "/v1/shutdown")
    assert asked == [Shutdown(drain=False, timeout_s=3.0), Shutdown()]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/nope", None, 404, "not_found"),
        ("POST", "/v1/status", None, 405, "http_error"),
        ("GET", "/v1/trace?seconds=x", None, 400, "invalid_type"),
        ("GET", "/v1/trace?seconds=0", None, 400, "out_of_range"),
        ("GET", "/v1/trace?seconds=nan", None, 400, "out_of_range"),
        ("POST", "/v1/shutdown", b"{", 400, "invalid_json"),
        ("POST", "/v1/shutdown", b'{"drain": 1}', 400, "invalid_type"),
        ("POST", "/v1/shutdown", b'{"timeout": -1}', 400, "out_of_range"),
        ("POST", "/v1/shutdown", io.BytesIO(b" " * (2 << 20)), 413, "http_error"),
    ],
)
async def test_refusals(
    tmp_path: Path, method: str, path: str, body: bytes | io.BytesIO | None, status: int, code: str
) -> None:
    asked: list[Shutdown] = []
    async with serving(tmp_path / "admin.sock", FakeEngine(), asked) as session:
        found, reply = await ask(session, method, path, data=body)
    assert (found, reply["ok"], reply["error"]["code"]) == (status, False, code)
    assert not asked


async def test_other_users_may_look_but_not_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Shutdown] = []
    monkeypatch.setattr(admin, "peer_of", lambda request: admin.Peer(pid=1, uid=os.geteuid() + 4321, gid=1))
    async with serving(tmp_path / "admin.sock", FakeEngine(), asked) as session:
        assert (await ask(session, "GET", "/v1/status"))[0] == 200
        status, reply = await ask(session, "POST", "/v1/shutdown")
        assert (status, reply["error"]["code"]) == (403, "forbidden")
    assert not asked


async def test_mutations_are_logged_with_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []

    class Recorder:
        def warning(self, name: str, **fields: Any) -> None:
            lines.append({"event": name, **fields})

    monkeypatch.setattr(admin, "log", Recorder())
    async with serving(tmp_path / "admin.sock", FakeEngine(), []) as session:
        await ask(session, "GET", "/v1/status")
        await ask(session, "POST", "/v1/shutdown")
    assert len(lines) == 1
    assert lines[0]["peer"] == {"pid": os.getpid(), "uid": os.geteuid(), "gid": os.getegid()}


def test_modes(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "admin.sock"
    with bind_admin_socket(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_stale_sockets_are_replaced_and_living_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    bind_admin_socket(path).close()
    assert path.exists()
    with bind_admin_socket(path), pytest.raises(AddressInUseError, match=r"--set admin\.socket="):
        bind_admin_socket(path)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        bind_admin_socket(path)
    assert path.read_text() == "precious"
    link = tmp_path / "link.sock"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a socket"):
        bind_admin_socket(link)


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(ConfigError, match="everybody can write"):
        bind_admin_socket(shared / "admin.sock")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use the folder"):
        bind_admin_socket(tmp_path / "file" / "admin.sock")
    with pytest.raises(ConfigError, match="cannot listen"):
        bind_admin_socket(tmp_path / ("x" * 150))


def test_listens_with_a_backlog(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with bind_admin_socket(path), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        client.connect(str(path))
