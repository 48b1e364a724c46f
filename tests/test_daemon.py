"""The daemon's life with a scripted engine: loading, ready, drain, stop, exit codes, systemd's side."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import structlog
import uvloop

from specd import cli
from specd.commands.ctl import call
from specd.config import AdminConfig, Config, ServerConfig
from specd.daemon import plan_text, serve, status_line
from specd.errors import ConfigError, DrainingError, ModelError, SpecdError
from specd.listeners import address_of, bind, is_loopback
from specd.request import Request, SequenceDelta
from specd.sdnotify import Notifier, listen_sockets
from specd.status import EngineInfo, EngineState, EngineStats, RequestStatus

INFO = EngineInfo(
    model="fake",
    served_names=("fake", "other"),
    weight_bytes=98_400_000,
    dtype="float32",
    max_len=64,
    vocab_size=100,
    eos_ids=(2,),
    drafter="ngram",
    max_draft=4,
    acceptance="exact",
    kv_tokens=1024,
    page_size=16,
    max_running=8,
    fingerprint="fp_1",
    generation_defaults={},
    created=0,
)
STATS = EngineStats(
    state=EngineState.READY,
    uptime_s=10.0,
    last_progress_s=0.0,
    running=0,
    waiting=0,
    pages_total=64,
    pages_free=64,
    pages_cached=0,
    accepted_requests=0,
    finished_requests={},
    prompt_tokens=0,
    cached_tokens=0,
    generation_tokens=0,
    preemptions=0,
    steps=0,
    drafts={"ngram": 0},
    draft_tokens={"ngram": 0},
    accepted_tokens={"ngram": 0},
    accepted_per_position=(0, 0, 0, 0),
    drafted_per_position=(0, 0, 0, 0),
)


class FakeEngine:
    """Holds `pending` requests that never end by themselves; `finish` ends one."""

    def __init__(self, pending: int = 0) -> None:
        self.info = INFO
        self.tokenizer: Any = SimpleNamespace(chat_template=None)
        self.changes: dict[str, Any] = {"accepted_requests": pending, "running": pending}
        self.state = EngineState.READY
        self.closed = 0
        self._idle = asyncio.Event()
        if not pending:
            self._idle.set()

    def finish(self) -> None:
        self.changes["running"] -= 1
        self._idle.set()
        self.changes["requests_finished"] = self.changes.get("requests_finished", 0) + 1

    def submit(self, request: Request) -> AsyncIterator[SequenceDelta]:
        raise DrainingError("draining")

    def abort(self, request_id: str) -> bool:
        return False

    def stats(self) -> EngineStats:
        return dataclasses.replace(STATS, state=self.state, **self.changes)

    def requests(self) -> list[RequestStatus]:
        return []

    def trace(self, seconds: float) -> dict[str, Any]:
        return {"traceEvents": [{"name": "draft"}]}

    async def drain(self, timeout_s: float) -> bool:
        self.state = EngineState.DRAINING
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self.closed += 1
        self.state = EngineState.STOPPED
        self.changes["requests_aborted"] = self.changes["running"]
        self.changes["running"] = 0


@dataclasses.dataclass
class Daemon:
    """One served daemon in this process, on uvloop, in the test's own thread's loop."""

    engine: FakeEngine
    config: Config
    ready: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def load(self, config: Config) -> FakeEngine:
        await self.ready.wait()
        return self.engine


def run(main: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def config(tmp_path: Path) -> Config:
    socket_path = tmp_path / "control" / "admin.sock"
    return Config(server=ServerConfig(port=free_port()), admin=AdminConfig(socket=str(socket_path)))


@contextlib.asynccontextmanager
async def serving(daemon: Daemon, *, loaded: bool = True) -> AsyncIterator[asyncio.Task[int]]:
    if loaded:
        daemon.ready.set()
    task = asyncio.ensure_future(serve(daemon.config, create_engine=daemon.load))
    async with asyncio.timeout(10):
        yield task
        await task


async def health(config: Config) -> int:
    """Status of GET /health on a new connection, as soon as somebody listens."""
    url = f"http://127.0.0.1:{config.server.port}/health"
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as reply:
                    await reply.read()
                    return reply.status
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.01)


async def until_health(config: Config, status: int) -> None:
    async with asyncio.timeout(5):
        while await health(config) != status:  # noqa: ASYNC110  it is another process's state, as a probe sees it
            await asyncio.sleep(0.01)


def test_health_follows_the_engine_and_sigterm_drains(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> int:
        daemon = Daemon(FakeEngine(pending=1), config)
        async with serving(daemon, loaded=False) as task:
            assert await health(config) == 503  # loading
            daemon.ready.set()
            await until_health(config, 200)
            os.kill(os.getpid(), signal.SIGTERM)
            await until_health(config, 503)  # draining, still listening
            assert not task.done()
            daemon.engine.finish()
        assert daemon.engine.closed == 1
        return task.result()

    assert run(main) == 0
    out = capsys.readouterr().out
    assert f"http://127.0.0.1:{config.server.port}" in out
    assert "accepted 1 == finished 1 + failed 0 + aborted 0\n" in out
    assert not Path(config.admin.socket).exists()


def test_the_drain_limit_gives_75(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    config = dataclasses.replace(config, server=dataclasses.replace(config.server, drain_timeout_s=0.05))

    async def main() -> int:
        async with serving(Daemon(FakeEngine(pending=1), config)) as task:
            await until_health(config, 200)
            os.kill(os.getpid(), signal.SIGTERM)
        return task.result()

    assert run(main) == 75
    assert "accepted 1 == finished 0 + failed 0 + aborted 1\n" in capsys.readouterr().out


def test_a_second_signal_stops_at_once(config: Config) -> None:
    async def main() -> int:
        async with serving(Daemon(FakeEngine(pending=1), config)) as task:
            await until_health(config, 200)
            os.kill(os.getpid(), signal.SIGTERM)
            await until_health(config, 503)
            os.kill(os.getpid(), signal.SIGINT)
        return task.result()

    assert run(main) == 75


def test_a_lost_request_is_a_fault(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> int:
        engine = FakeEngine()
        engine.changes["accepted_requests"] = 2
        async with serving(Daemon(engine, config)) as task:
            await until_health(config, 200)
            os.kill(os.getpid(), signal.SIGTERM)
        return task.result()

    assert run(main) == 1
    assert "LOST 2" in capsys.readouterr().out


def test_a_signal_while_loading_stops(config: Config) -> None:
    async def main() -> int:
        async with serving(Daemon(FakeEngine(), config), loaded=False) as task:
            assert await health(config) == 503
            os.kill(os.getpid(), signal.SIGTERM)
        return task.result()

    assert run(main) == 0


def test_a_failed_engine_stops_the_daemon(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specd.daemon._PERIOD_S", 0.01)

    async def main() -> int:
        daemon = Daemon(FakeEngine(), config)
        async with serving(daemon) as task:
            await until_health(config, 200)
            daemon.engine.state = EngineState.FAILED
        return task.result()

    assert run(main) == 1


def test_an_engine_that_does_not_load_raises_and_frees_the_port(config: Config) -> None:
    async def fail(config: Config) -> FakeEngine:
        raise ModelError("no such file")

    async def main() -> None:
        await serve(config, create_engine=fail)

    with pytest.raises(ModelError, match="no such file"):
        run(main)
    bind("127.0.0.1", config.server.port).close()


def test_ctl_over_the_control_socket(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> int:
        async with serving(Daemon(FakeEngine(), config)) as task:
            await until_health(config, 200)
            await asyncio.to_thread(ask)
        return task.result()

    def ask() -> None:
        base = ["ctl", "--socket", config.admin.socket]
        assert cli.main([*base, "status"]) == 0
        assert cli.main([*base, "requests"]) == 0
        assert cli.main([*base, "trace", "--seconds", "1", "-o", str(tmp_path / "trace.json")]) == 0
        with pytest.raises(SpecdError, match="seconds must be"):
            call(Path(config.admin.socket), "GET", "/v1/trace?seconds=-1")
        assert cli.main([*base, "shutdown"]) == 0

    assert run(main) == 0
    out = capsys.readouterr().out
    assert "info.drafter" in out
    assert "none" in out  # no live requests
    assert (tmp_path / "trace.json").read_text() == '{"traceEvents": [{"name": "draft"}]}'


def test_a_warning_when_everybody_can_reach_it(config: Config) -> None:
    async def main(host: str) -> None:
        changed = dataclasses.replace(config, server=dataclasses.replace(config.server, host=host))
        async with serving(Daemon(FakeEngine(), changed), loaded=False):
            await health(config)
            os.kill(os.getpid(), signal.SIGTERM)

    with structlog.testing.capture_logs() as logs:
        run(lambda: main("0.0.0.0"))
    assert [line for line in logs if line["event"] == "listening_without_keys"]
    with structlog.testing.capture_logs() as logs:
        run(lambda: main("127.0.0.1"))
    assert not [line for line in logs if line["event"] == "listening_without_keys"]


def test_the_service_manager_is_told(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "20000")

        async def main() -> int:
            async with serving(Daemon(FakeEngine(), config)) as task:
                await until_health(config, 200)
                await asyncio.sleep(0.05)
                os.kill(os.getpid(), signal.SIGTERM)
            return task.result()

        told: list[str] = []

        def listen() -> None:
            while not any("STOPPING=1" in line for line in told):
                told.extend(manager.recv(4096).decode().split("\n"))

        listener = threading.Thread(target=listen)
        listener.start()
        assert run(main) == 0
        listener.join(5)
    assert told.index("READY=1") < told.index("WATCHDOG=1") < told.index("STOPPING=1")
    assert "STATUS=0 running, 0 waiting, 0.0 tokens/s" in told
    assert "NOTIFY_SOCKET" not in os.environ  # children must not speak for the daemon


def test_activated_sockets_are_served(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    given = bind("127.0.0.1", 0)
    port = given.getsockname()[1]
    monkeypatch.setattr("specd.daemon.listen_sockets", lambda env: {"http": [given]})

    async def main() -> int:
        async with serving(Daemon(FakeEngine(), config)) as task:
            await until_health(dataclasses.replace(config, server=ServerConfig(port=port)), 200)
            os.kill(os.getpid(), signal.SIGTERM)
        return task.result()

    assert run(main) == 0


def test_listen_fds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tcp, unix = bind("127.0.0.1", 0), socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "a.sock"))
    unix.listen()
    first = min(tcp.fileno(), unix.fileno())
    if max(tcp.fileno(), unix.fileno()) != first + 1:
        pytest.skip("the two descriptors are not neighbours here")
    monkeypatch.setattr("specd.sdnotify._FIRST_FD", first)
    for sock in (tcp, unix):
        sock.detach()
    env = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "specd@a.socket:other", "X": "1"}
    sockets = listen_sockets(env)
    assert env == {"X": "1"}
    assert {name: len(found) for name, found in sockets.items()} == {"http": 1, "admin": 1}
    for found in sockets.values():
        assert not os.get_inheritable(found[0].fileno())
        found[0].close()


def test_listen_fds_of_another_process_are_left_alone() -> None:
    assert listen_sockets({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == {}
    with pytest.raises(ConfigError, match="LISTEN_FDS"):
        listen_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"})


def test_notifier_reaches_abstract_sockets_and_needs_none() -> None:
    Notifier(None).send("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0specd-test-{os.getpid()}")
        Notifier(f"@specd-test-{os.getpid()}").send("READY=1", "STATUS=x")
        assert manager.recv(100) == b"READY=1\nSTATUS=x"
    assert Notifier.from_env({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}).watchdog_s is None
    assert Notifier.from_env({"WATCHDOG_USEC": "1500000"}).watchdog_s == 1.5


def test_a_port_in_use_is_a_configuration_error() -> None:
    with bind("127.0.0.1", 0) as first:
        with pytest.raises(ConfigError, match=str(first.getsockname()[1])):
            bind("127.0.0.1", first.getsockname()[1])
        assert address_of(first) == f"http://127.0.0.1:{first.getsockname()[1]}"
    with pytest.raises(ConfigError, match=r"server\.host"):
        bind("not-a-host.invalid", 1)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.com", False),
    ],
)
def test_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_status_line_counts_between_snapshots() -> None:
    later = dataclasses.replace(
        STATS, uptime_s=12.0, running=3, generation_tokens=82, drafts={"ngram": 10}, accepted_tokens={"ngram": 19}
    )
    expected = "STATUS=3 running, 0 waiting, 41.0 tokens/s, 2.90 tokens a draft step"
    assert status_line(STATS, later) == expected


def test_plan_names_what_is_served() -> None:
    text = plan_text(INFO, ["http://127.0.0.1:8000"], control=[])
    for word in ("fake, other", "98.4 MB", "1,024 tokens", "ngram, at most 4 drafts", "http://127.0.0.1:8000"):
        assert word in text
