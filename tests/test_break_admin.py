"""The control socket against callers who read nothing, who leave, who come together; files that hold up a reader."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import structlog
from aiohttp import web

from specd import cli
from specd.commands.serve import _reread
from specd.config import Config, ServerConfig
from specd.errors import AdminAbortedError, ConfigError, QueueFullError, SpecdError
from specd.request import Request
from specd.sdnotify import Notifier
from specd.server.admin import app as admin_app
from specd.server.admin import views
from specd.server.admin.keyfile import KeyFile
from specd.server.admin.peers import Levels
from specd.server.auth import ApiKeys
from tests.admin import Caller, Desk, serving
from tests.admin_engine import Engine
from tests.http_server import until


@contextlib.asynccontextmanager
async def connected(path: Path, request: str) -> AsyncIterator[asyncio.StreamWriter]:
    """A caller who has asked and reads nothing."""
    head, _, body = request.partition("\n")
    reader, writer = await asyncio.open_unix_connection(str(path), limit=1)
    lines = [f"{head} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", "", body]
    writer.write("\r\n".join(lines).encode())
    transport: asyncio.Transport = reader._transport  # type: ignore[attr-defined]
    transport.pause_reading()
    try:
        yield writer
    finally:
        writer.transport.abort()


async def eventually(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(5):
        while not await is_so():  # noqa: ASYNC110  the other side has no event to wait for
            await asyncio.sleep(0.01)


async def answers(caller: Caller, status: int, path: str = "/v1/events") -> None:
    """Whoever asks anew is answered so, sooner or later."""

    async def is_so() -> bool:
        async with caller.session.get(f"http://admin{path}") as reply:
            return reply.status == status

    await eventually(is_so)


async def test_who_reads_no_events_loses_his_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_app, "_MAX_STREAMS", 1)
    engine, path = Engine(), tmp_path / "a.sock"
    engine.start(*(f"{number}-{'x' * 200}" for number in range(60)))
    desk = Desk(config=Config(server=ServerConfig(slow_client_timeout_s=0.2)))
    async with serving(path, engine, desk) as caller, connected(path, "GET /v1/events?interval=0.1"):
        await answers(caller, 503)
        for _ in range(400):
            caller.console.events.publish("filler", text="x" * 4000)
            await asyncio.sleep(0)
        await answers(caller, 200)


async def test_who_leaves_gives_his_place_back_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_app, "_MAX_STREAMS", 1)
    path = tmp_path / "a.sock"
    async with serving(path, Engine()) as caller:
        async with connected(path, "GET /v1/events?interval=60"):
            await answers(caller, 503)
        await answers(caller, 200)


async def test_nothing_is_made_for_a_caller_who_has_left(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with serving(path, Engine()) as caller:

        async def profiled(status: int) -> bool:
            return (await caller.ask("POST", "/v1/profile", {"kind": "heap", "seconds": 0.05}))[0] == status

        async with connected(path, 'POST /v1/profile\n{"kind": "heap", "seconds": 300}'):
            await eventually(lambda: profiled(409))
        await eventually(lambda: profiled(200))


async def test_a_listener_who_leaves_before_he_is_answered_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(web.StreamResponse):
        async def prepare(self, request: web.BaseRequest) -> None:
            raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web, "StreamResponse", Gone)
    with structlog.testing.capture_logs() as lines:
        async with serving(tmp_path / "a.sock", Engine()) as caller:
            with pytest.raises(aiohttp.ClientError):
                await caller.session.get("http://admin/v1/events")
    assert not [line for line in lines if line["log_level"] == "error"]
    assert not caplog.records


async def test_of_calls_for_one_generation_one_is_done(tmp_path: Path) -> None:
    """Also where the change takes its time: the others are refused meanwhile."""
    async with serving(tmp_path / "a.sock", Engine()) as caller:
        headers = {"If-Match": f'"{caller.console.generation}"'}
        calls = (caller.ask("PUT", "/v1/corpora/x", {"text": "a b c d e f " * n}, headers=headers) for n in (9, 10, 11))
        statuses = sorted([status for status, _ in await asyncio.gather(*calls)])
        assert statuses == [200, 412, 412]
        engine = caller.console.engine
        assert isinstance(engine, Engine)
        engine.start("a")
        headers = {"If-Match": f'"{caller.console.generation}"'}
        draining = asyncio.create_task(caller.result("POST", "/v1/drain", {"timeout": 30}, headers=headers))
        await until(lambda: caller.console.state == "draining")
        assert await caller.refusal("POST", "/v1/resume", headers=headers) == (412, "generation_mismatch")
        engine.finish()
        assert (await draining)["drained"]


async def test_a_change_whose_caller_left_is_made_and_told(tmp_path: Path) -> None:
    engine, path = Engine(), tmp_path / "a.sock"
    engine.start("a")
    async with serving(path, engine) as caller:
        before = caller.console.generation
        async with connected(path, 'POST /v1/drain\n{"timeout": 30}'):
            await until(lambda: caller.console.state == "draining")
        await asyncio.sleep(0.05)  # he is gone
        assert caller.console.generation == before
        engine.finish()
        await until(lambda: caller.console.generation == before + 1)


async def test_changes_that_nobody_waits_for_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_app, "_MAX_CALLS", 3)
    engine, path, gate = Engine(), tmp_path / "a.sock", asyncio.Event()
    begun = 0

    async def put(*_: object, **__: object) -> dict[str, object]:
        nonlocal begun
        begun += 1
        await gate.wait()
        return {}

    monkeypatch.setattr(engine.corpora, "put", put)
    async with serving(path, engine) as caller:
        for number in range(3):
            async with connected(path, f'PUT /v1/corpora/x{number}\n{{"text": "a b c d"}}'):
                await until(lambda number=number: begun == number + 1)  # type: ignore[misc]
        assert await caller.refusal("PUT", "/v1/corpora/x", {"text": "a b c d"}) == (503, "busy")
        assert begun == 3
        gate.set()
        await caller.result("PUT", "/v1/corpora/x", {"text": "a b c d"})


async def test_a_fault_is_logged_where_nobody_waits_for_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, path = Engine(), tmp_path / "a.sock"
    begun, gone = asyncio.Event(), asyncio.Event()

    async def put(*_: object, **__: object) -> dict[str, object]:
        begun.set()
        await gone.wait()
        raise RuntimeError("a fault")

    monkeypatch.setattr(engine.corpora, "put", put)
    with structlog.testing.capture_logs() as lines:
        async with serving(path, engine) as caller:
            async with connected(path, 'PUT /v1/corpora/x\n{"text": "a b c d"}'):
                await begun.wait()
            await until(lambda: any(line.get("result") == "caller_left" for line in lines))
            before = caller.console.generation
            gone.set()
            await until(lambda: any(line["event"] == "admin_failed" for line in lines))
            assert caller.console.generation == before


async def test_snapshots_are_shared_and_look_at_what_they_show(tmp_path: Path) -> None:
    engine = Engine()
    engine.start(*(f"r{number}" for number in range(views._ROWS + 10)))
    asked: list[int | None] = []
    original = engine.requests

    def requests(most: int | None = None) -> list[object]:
        asked.append(most)
        return original(most)

    engine.requests = requests  # type: ignore[assignment,method-assign]
    now = 100.0
    snapshots = views.Snapshots(Desk().console(engine), clock=lambda: now)
    first, stats = snapshots.since(None)
    assert (len(first["requests"]), first["num_requests"]) == (views._ROWS, views._ROWS + 10)
    assert snapshots.since(stats)[0]["rates"] is not None
    assert snapshots.since(None)[0]["rates"] is None
    assert asked == [views._ROWS]
    now += 1.0
    snapshots.since(None)
    assert asked == [views._ROWS] * 2


@pytest.mark.parametrize("error", [AdminAbortedError("ended by an operator"), QueueFullError("full")])
async def test_a_self_test_that_others_ended_is_no_fault(
    tmp_path: Path, error: SpecdError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compare(*_: object) -> list[Request]:
        raise error

    monkeypatch.setattr("specd.server.admin.commands.compare_with_plain", compare)
    with structlog.testing.capture_logs() as lines:
        async with serving(tmp_path / "a.sock", Engine()) as caller:
            assert await caller.refusal("POST", "/v1/selftest") == (503, error.code)
    assert not [line for line in lines if line["log_level"] == "error"]


# ---------------------------------------------------------------- what a reload reads, and whom it tells


def test_a_pipe_is_not_read_again(tmp_path: Path) -> None:
    """Nobody writes to it: to open it would hold up the event loop for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    args = cli.build_parser().parse_args(["serve", "tiny", "--config", str(pipe)])
    with pytest.raises(ConfigError, match="pipe is not a regular file"):
        _reread(args)
    with pytest.raises(ConfigError, match=r"server\.api_keys_file: .*pipe is not a regular file"):
        KeyFile(ApiKeys(), str(pipe)).entries()


def test_ids_that_nobody_can_have_are_refused() -> None:
    admin = Config().admin
    assert Levels.configured(dataclasses.replace(admin, admins=("4294967294",), operator_group="4294967294"))
    for name in ("4294967295", "9" * 5000):
        with pytest.raises(ConfigError, match=r"admin\.admins: .* is beyond the largest id"):
            Levels.configured(dataclasses.replace(admin, admins=(name,)))
        with pytest.raises(ConfigError, match=r"admin\.operator_group: .* is beyond the largest id"):
            Levels.configured(dataclasses.replace(admin, operator_group=name))


def test_a_service_manager_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        notifier = Notifier(str(tmp_path / "notify"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others, contextlib.suppress(BlockingIOError):
            others.setblocking(False)
            while True:
                others.sendto(b"STATUS=x", str(tmp_path / "notify"))
        with pytest.raises(TimeoutError):
            notifier.send("STATUS=x")
        with pytest.raises(BlockingIOError):
            notifier.send("STATUS=x")
        manager.recv(100)
        notifier.send("STATUS=back again")
