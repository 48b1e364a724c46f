"""The control socket's commands around a scripted engine: what each does, who may, what is refused and logged."""

from __future__ import annotations

import asyncio
import io
import os
import re
import socket
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from aiohttp import web

from specd.config import AdminConfig, Config, LogConfig, ServerConfig
from specd.errors import AdminAbortedError, ConfigError
from specd.server.admin import app as admin_app
from specd.server.admin.commands import COMMANDS
from specd.server.admin.console import Shutdown
from specd.server.admin.peers import Level, Levels, Peer, peer_of
from specd.status import EngineState
from tests.admin import Desk, serving
from tests.admin_engine import Engine

STRANGER = os.geteuid() + 4321


async def test_looking(tmp_path: Path) -> None:
    engine = Engine()
    engine.start("r1")
    async with serving(tmp_path / "a.sock", engine) as caller:
        status = await caller.result("GET", "/v1/status")
        assert (status["state"], status["generation"], status["stopping"]) == ("ready", 1, False)
        assert status["info"]["generation_defaults"] == {"temperature": 0.6, "top_k": 40}
        assert status["stats"]["running"] == 1
        assert status["speculation"]["k"] == "adaptive"
        (row,) = await caller.result("GET", "/v1/requests")
        assert (row["request_id"], row["num_accepted_tokens"]) == ("r1", 2)
        assert await caller.result("GET", "/v1/requests?state=waiting") == []
        (detail,) = await caller.result("GET", "/v1/requests/r1")
        assert detail["steps"] == [{"step": 1, "source": "ngram", "drafted": 4, "emitted": 3}]
        assert await caller.refusal("GET", "/v1/requests/nobody") == (404, "not_found")
        assert (await caller.result("GET", "/v1/kv"))["hit_rate"] == 0.25
        assert (await caller.result("GET", "/v1/trace?seconds=2.5"))["seconds"] == 2.5
        dump = await caller.result("GET", "/v1/dump")
    assert dump["invariants"] == {"pages_add_up": True, "lost_requests": 0}
    assert any("test_looking" in frame for frames in dump["tasks"].values() for frame in frames)
    assert any("MainThread" in name for name in dump["threads"])


async def test_abort_by_name_and_by_filter(tmp_path: Path) -> None:
    engine = Engine()
    engine.start("chatcmpl-a#0.0", "chatcmpl-a#0.1", "cmpl-b#1.0", "c")
    async with serving(tmp_path / "a.sock", engine) as caller:
        assert await caller.result("DELETE", "/v1/requests/a") == {"aborted": ["chatcmpl-a#0.0", "chatcmpl-a#0.1"]}
        assert await caller.result("DELETE", "/v1/requests/a") == {"aborted": []}  # idempotent
        assert await caller.refusal("POST", "/v1/requests/abort", {"filter": {}}) == (400, "missing_parameter")
        assert await caller.refusal("POST", "/v1/requests/abort", {}) == (400, "invalid_type")
        unknown = {"filter": {"all": True, "stat": "x"}}
        assert await caller.refusal("POST", "/v1/requests/abort", unknown) == (400, "unknown_parameter")
        assert engine.live.keys() == {"cmpl-b#1.0", "c"}
        for wish in ({"state": "waiting"}, {"older_than": 100}, {"prefix": "x"}):
            assert await caller.result("POST", "/v1/requests/abort", {"filter": wish}) == {"aborted": []}
        assert await caller.result("POST", "/v1/requests/abort", {"filter": {"prefix": "cmpl-"}}) == {
            "aborted": ["cmpl-b#1.0"]
        }
        assert await caller.result("POST", "/v1/requests/abort", {"filter": {"all": True}}) == {"aborted": ["c"]}
    assert all(isinstance(error, AdminAbortedError) for error in engine.errors)


async def test_a_request_is_found_by_its_answer_s_id(tmp_path: Path) -> None:
    engine = Engine()
    engine.start("chatcmpl-a#0.0", "chatcmpl-b#1.0", "chatcmpl-c#2.0", "chatcmpl-msg_c#3.0")
    async with serving(tmp_path / "a.sock", engine) as caller:
        for name, found in (
            ("resp_a", "chatcmpl-a#0.0"),
            ("msg_b", "chatcmpl-b#1.0"),
            ("msg_c", "chatcmpl-msg_c#3.0"),  # a name of the client's own comes first
            ("chatcmpl-c", "chatcmpl-c#2.0"),
        ):
            assert await caller.result("DELETE", f"/v1/requests/{name}") == {"aborted": [found]}


async def test_drain_and_resume(tmp_path: Path) -> None:
    engine = Engine()
    engine.start("a")
    async with serving(tmp_path / "a.sock", engine) as caller:
        cut = await caller.result("POST", "/v1/drain", {"timeout": 0.01})
        assert (cut["drained"], cut["left"], cut["lost"]) == (False, 1, 0)
        assert (await caller.result("GET", "/v1/status"))["state"] == "draining"
        assert await caller.refusal("POST", "/v1/pause") == (409, "conflict")
        waiting = asyncio.create_task(caller.result("POST", "/v1/drain", {"timeout": 30}))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert await caller.result("POST", "/v1/resume") == {"state": "ready"}
        assert not (await waiting)["drained"]  # the one who waited is told at once
        started = await caller.result("POST", "/v1/drain", {"timeout": 30, "wait": False})
        assert not started["drained"]
        assert engine.state is EngineState.DRAINING
        done = await caller.result("POST", "/v1/drain", {"timeout": 0.01, "mode": "deadline"})
        assert (done["drained"], done["aborted"], done["left"], done["lost"]) == (True, 1, 0, 0)


async def test_pause(tmp_path: Path) -> None:
    engine = Engine()
    async with serving(tmp_path / "a.sock", engine) as caller:
        assert (await caller.result("POST", "/v1/pause"))["state"] == "paused"
        assert await caller.refusal("POST", "/v1/selftest") == (409, "conflict")
        assert await caller.result("POST", "/v1/unpause") == {"state": "ready"}
        assert not engine.paused


async def test_speculation_reverts(tmp_path: Path) -> None:
    engine = Engine()
    async with serving(tmp_path / "a.sock", engine) as caller:
        for body, code in (
            ({"k": 9}, "out_of_range"),
            ({"k": True}, "invalid_type"),
            ({"k": "many"}, "invalid_type"),
            ({"mode": "off", "k": 3}, "invalid_value"),
            ({"mode": "auto", "k": 0}, "invalid_value"),
            ({"mode": "on"}, "invalid_type"),
            ({"k": 3, "ttl": 0}, "out_of_range"),
            ({"ttl": 60}, "missing_parameter"),
            ({"mode": "auto", "ttl": 60}, "missing_parameter"),
            ({"drafter": "x"}, "unknown_parameter"),
        ):
            assert await caller.refusal("PATCH", "/v1/speculation", body) == (400, code), body
        assert engine.k is None
        found = await caller.result("PATCH", "/v1/speculation", {"k": 3, "ttl": 0.1})
        assert (found["k"], found["overridden"], found["mode"]) == (3, True, "auto")
        generation = caller.console.generation
        assert 0 < (await caller.result("GET", "/v1/status"))["speculation"]["ttl_left_s"] <= 0.1
        await asyncio.sleep(0.15)
        assert engine.k is None
        assert caller.console.generation == generation + 1
        assert (await caller.result("PATCH", "/v1/speculation", {"mode": "off"}))["mode"] == "off"
        assert not (await caller.result("PATCH", "/v1/speculation", {}))["overridden"]
        assert (await caller.result("PATCH", "/v1/speculation", {"mode": "auto"}))["k"] == "adaptive"
        engine.configured = 0
        status, reply = await caller.ask("PATCH", "/v1/speculation", {"mode": "auto"})
        assert (status, reply["error"]["code"]) == (400, "invalid_value")
        assert "speculation.draft_len" in reply["error"]["message"]
        assert (await caller.result("PATCH", "/v1/speculation", {"mode": "auto", "k": 2}))["k"] == 2


async def test_a_later_override_is_not_reverted_by_an_earlier_one(tmp_path: Path) -> None:
    engine = Engine()
    async with serving(tmp_path / "a.sock", engine) as caller:
        await caller.result("PATCH", "/v1/speculation", {"k": 3, "ttl": 0.05})
        await caller.result("PATCH", "/v1/speculation", {"k": 5})
        await asyncio.sleep(0.1)
        assert engine.k == 5


async def test_log_level_reverts(tmp_path: Path) -> None:
    desk = Desk()
    async with serving(tmp_path / "a.sock", Engine(), desk) as caller:
        found = await caller.result("PUT", "/v1/loglevel", {"level": "debug", "ttl": 0.05})
        assert (found["level"], found["configured"]) == ("debug", "info")
        await asyncio.sleep(0.1)
        assert await caller.refusal("PUT", "/v1/loglevel", {"level": "loud"}) == (400, "invalid_type")
        assert await caller.refusal("PUT", "/v1/loglevel", {"ttl": 60}) == (400, "missing_parameter")
    assert desk.log_levels == ["debug", None]


async def test_kv_flush_and_shutdown(tmp_path: Path) -> None:
    desk = Desk()
    async with serving(tmp_path / "a.sock", Engine(), desk) as caller:
        assert await caller.result("POST", "/v1/kv/flush") == {"flushed_pages": 3}
        assert await caller.result("POST", "/v1/shutdown", {"drain": False, "timeout": 3}) == {"draining": False}
        await caller.result("POST", "/v1/shutdown")
        desk.stopping = True
        for path in ("/v1/drain", "/v1/resume", "/v1/reload"):
            assert await caller.refusal("POST", path) == (409, "conflict")
    assert desk.shutdowns == [Shutdown(drain=False, timeout_s=3.0), Shutdown()]


async def test_a_reload_is_taken_or_refused_whole(tmp_path: Path) -> None:
    desk = Desk(reread=lambda: Config(server=ServerConfig(port=1, max_stop=7), log=LogConfig(level="debug")))
    async with serving(tmp_path / "a.sock", Engine(), desk) as caller:
        dry = await caller.result("POST", "/v1/reload", {"dry_run": True})
        assert dry["applied"] == {
            "server.max_stop": {"from": 4, "to": 7},
            "log.level": {"from": "info", "to": "debug"},
        }
        assert dry["needs_restart"] == {"server.port": {"from": 8000, "to": 1}}
        assert caller.console.generation == 1
        assert caller.console.reloader.config == Config()
        await caller.result("POST", "/v1/reload")
        running = caller.console.reloader.config
        assert (running.server.max_stop, running.server.port, running.log.level) == (7, 8000, "debug")
        assert caller.console.generation == 2
        again = await caller.result("POST", "/v1/reload")
        assert again["applied"] == {}
        assert again["needs_restart"].keys() == {"server.port"}  # until there is one

        def broken() -> Config:
            raise ConfigError("x.toml: server.max_stop = 900: must be ...")

        desk.reread = broken
        assert await caller.refusal("POST", "/v1/reload") == (400, "config_error")
        assert caller.console.reloader.config == running
        assert caller.console.reloader.failures == 1


async def test_generations(tmp_path: Path) -> None:
    engine = Engine()
    async with serving(tmp_path / "a.sock", engine) as caller:
        stale = {"headers": {"If-Match": '"7"'}}
        assert await caller.refusal("POST", "/v1/pause", **stale) == (412, "generation_mismatch")
        assert not engine.paused
        await caller.result("POST", "/v1/pause", headers={"If-Match": '"1"'})
        await caller.result("POST", "/v1/unpause", headers={"If-Match": "*"})
        assert caller.console.generation == 3


async def test_events(tmp_path: Path) -> None:
    engine = Engine()
    async with serving(tmp_path / "a.sock", engine) as caller:
        async with caller.session.get("http://admin/v1/events?interval=0.1") as reply:
            assert reply.content_type == "application/x-ndjson"
            first = orjson.loads(await reply.content.readline())
            assert (first["type"], first["rates"]) == ("snapshot", None)
            await caller.result("POST", "/v1/pause")
            events = [orjson.loads(await reply.content.readline()) for _ in range(3)]
            assert next(e for e in events if e["type"] == "changed")["what"] == "pause"
            assert [e for e in events if e["type"] == "snapshot"][-1]["rates"]["tokens_per_s"] == 0.0
        async with caller.session.get("http://admin/v1/events", headers={"Accept": "text/event-stream"}) as reply:
            assert (await reply.content.readline()).startswith(b'data: {"type":"snapshot"')
        assert await caller.refusal("GET", "/v1/events?interval=0") == (400, "out_of_range")


async def test_listeners_are_sent_home_when_the_daemon_stops(tmp_path: Path) -> None:
    async with serving(tmp_path / "a.sock", Engine()) as caller:
        reply = await caller.session.get("http://admin/v1/events")
        await reply.content.readline()
        await caller.console.close()
        async with asyncio.timeout(1):
            assert orjson.loads(await reply.content.readline())["type"] == "end"
            assert await reply.content.readline() == b""


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/nope", None, 404, "not_found"),
        ("POST", "/v1/status", None, 405, "http_error"),
        ("GET", "/v1/status?x=1", None, 400, "unknown_parameter"),
        ("GET", "/v1/trace?seconds=x", None, 400, "invalid_type"),
        ("GET", "/v1/trace?seconds=0", None, 400, "out_of_range"),
        ("GET", "/v1/trace?seconds=nan", None, 400, "out_of_range"),
        ("POST", "/v1/shutdown", b"{", 400, "invalid_json"),
        ("POST", "/v1/shutdown", b"[]", 400, "invalid_json"),
        ("POST", "/v1/shutdown", b'{"drain": 1}', 400, "invalid_type"),
        ("POST", "/v1/shutdown", b'{"timeout": -1}', 400, "out_of_range"),
        ("POST", "/v1/shutdown", b'{"timeout": true}', 400, "invalid_type"),
        ("POST", "/v1/shutdown?timeout=1", b'{"timeout": 1}', 400, "invalid_value"),
        ("POST", "/v1/drain", b'{"time": 1}', 400, "unknown_parameter"),
        ("POST", "/v1/shutdown", b" " * (2 << 20), 413, "http_error"),
    ],
)
async def test_refusals(tmp_path: Path, method: str, path: str, body: bytes | None, status: int, code: str) -> None:
    desk = Desk()
    async with serving(tmp_path / "a.sock", Engine(), desk) as caller:
        data = None if body is None else io.BytesIO(body)
        assert await caller.refusal(method, path, data=data) == (status, code)
        assert caller.console.generation == 1
    assert not desk.shutdowns


@pytest.mark.parametrize("level", list(Level))
async def test_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: Level) -> None:
    """Everybody may look; a stranger who may not is refused before anything is read or done."""
    peer = {
        Level.USER: Peer(pid=1, uid=STRANGER, gid=1),
        Level.OPERATOR: Peer(pid=1, uid=STRANGER, gid=1, groups=(5, 77)),
        Level.ADMIN: Peer(pid=1, uid=STRANGER + 1, gid=1),
    }[level]
    levels = Levels(frozenset({STRANGER + 1}), operators=77)
    assert levels.of(peer) is level
    monkeypatch.setattr(admin_app, "peer_of", lambda request: peer)
    async with serving(tmp_path / "a.sock", Engine(), Desk(levels=levels)) as caller:
        for command in COMMANDS:
            if command.name != "shutdown":
                body = {"seconds": 0.05} if command.name == "profile" else None
                status, reply = await caller.ask(command.method, re.sub(r"{.*}", "x", command.path), body)
                assert (status == 403) is (level < command.level), (command.name, reply)


def test_who_is_who(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = Levels(operators=7)
    assert levels.of(Peer(1, 0, 0)) is Level.ADMIN
    assert levels.of(Peer(1, os.geteuid(), 5)) is Level.ADMIN
    assert levels.of(Peer(1, STRANGER, 7)) is Level.OPERATOR
    assert levels.of(Peer(1, STRANGER, 8)) is Level.USER
    assert levels.of(None) is Level.USER
    assert Levels().of(Peer(1, STRANGER, 0)) is Level.USER
    assert Levels.configured(AdminConfig(admins=("root", "12"), operator_group="root")).operators == 0
    for wrong in (AdminConfig(admins=("no-such-user",)), AdminConfig(operator_group="no-such-group")):
        with pytest.raises(ConfigError, match="no-such-"):
            Levels.configured(wrong)


async def test_the_kernel_names_the_peer(tmp_path: Path) -> None:
    seen: list[Peer | None] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(peer_of(request))
        return web.Response()

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    path = tmp_path / "a.sock"
    try:
        await web.UnixSite(runner, str(path)).start()
        _, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(5):
            while not seen:  # noqa: ASYNC110  the other side has no event to wait for
                await asyncio.sleep(0.005)
        writer.close()
    finally:
        await runner.cleanup()
    assert seen == [Peer(os.getpid(), os.geteuid(), os.getegid(), tuple(os.getgroups()))]


async def test_changes_are_logged_with_the_peer(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with serving(tmp_path / "a.sock", Engine()) as caller:
            await caller.result("GET", "/v1/status")
            await caller.result("PATCH", "/v1/speculation", {"k": 2})
            await caller.refusal("PATCH", "/v1/speculation", {"k": 99})
    calls = [line for line in lines if line["event"] == "admin_called"]
    assert [(call["command"], call["result"]) for call in calls] == [
        ("speculation", "ok"),
        ("speculation", "out_of_range"),
    ]
    assert calls[0]["arguments"] == '{"k":2}'
    assert calls[0]["peer"] == {"pid": os.getpid(), "uid": os.geteuid(), "gid": os.getegid()}


async def test_a_fault_is_answered_and_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    def fail() -> Any:
        raise RuntimeError("/secret/path exploded")

    monkeypatch.setattr(engine, "kv", fail)
    with structlog.testing.capture_logs() as lines:
        async with serving(tmp_path / "a.sock", engine) as caller:
            status, reply = await caller.ask("GET", "/v1/kv")
    assert (status, reply["error"]["code"]) == (500, "internal_error")
    assert "secret" not in reply["error"]["message"]
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["admin_failed"]


async def test_a_caller_who_leaves_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with structlog.testing.capture_logs() as lines:
        async with serving(path, Engine()) as caller:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(b"GET /v1/events?interval=0.1 HTTP/1.1\r\nHost: x\r\n\r\n")
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)
            await caller.result("GET", "/v1/status")
    assert not [line for line in lines if line["log_level"] == "error"]
