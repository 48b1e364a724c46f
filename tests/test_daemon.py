"""The daemon's life with a scripted engine: ready, drain, stop, exit codes, systemd's side."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import threading
import time
from pathlib import Path

import aiohttp
import pytest
import structlog

from specd import cli
from specd.commands.ctl_client import Client, Refusal
from specd.config import Config, ServerConfig
from specd.daemon import plan_text, serve
from specd.errors import ModelError, SpecdError
from specd.listeners import bind
from specd.status import EngineState
from specd.supervision import status_line
from tests.daemons import INFO, STATS, Daemon, FakeEngine, config_in, health, run, serving, until_health


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path)


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


def test_a_failed_engine_stops_the_daemon(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specd.supervision.PERIOD_S", 0.01)

    async def main() -> int:
        daemon = Daemon(FakeEngine(), config)
        async with serving(daemon) as task:
            await until_health(config, 200)
            daemon.engine.state = EngineState.FAILED
        return task.result()

    assert run(main) == 1


def test_an_engine_that_fails_while_it_drains_is_a_fault(config: Config) -> None:
    async def main() -> int:
        daemon = Daemon(FakeEngine(pending=1), config)
        async with serving(daemon) as task:
            await until_health(config, 200)
            os.kill(os.getpid(), signal.SIGTERM)
            await until_health(config, 503)
            daemon.engine.state = EngineState.FAILED
            daemon.engine.finish()  # a failed engine ends all its streams: the drain is complete
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
        with pytest.raises(SpecdError, match="seconds = -1"):
            Client(Path(config.admin.socket)).call("GET", "/v1/trace?seconds=-1")
        assert cli.main([*base, "shutdown"]) == 0

    assert run(main) == 0
    out = capsys.readouterr().out
    assert "info.drafter" in out
    assert "none" in out  # no live requests
    assert (tmp_path / "trace.json").read_text() == '{"traceEvents": [{"name": "draft"}]}'


def test_a_warning_when_everybody_can_reach_it(config: Config) -> None:
    async def main(host: str) -> None:
        changed = dataclasses.replace(config, server=dataclasses.replace(config.server, host=host))
        async with serving(Daemon(FakeEngine(), changed)):
            await until_health(config, 200)
            os.kill(os.getpid(), signal.SIGTERM)

    with structlog.testing.capture_logs() as logs:
        run(lambda: main("0.0.0.0"))
    assert [line for line in logs if line["event"] == "listening_without_keys"]
    with structlog.testing.capture_logs() as logs:
        run(lambda: main("127.0.0.1"))
    assert not [line for line in logs if line["event"] == "listening_without_keys"]


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_what_is_bound_decides_about_the_warning(
    host: str, warned: bool, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An activated socket has an address of its own, whatever server.host says."""
    given = bind(host, 0)
    monkeypatch.setattr("specd.daemon.listen_sockets", lambda env: {"http": [given]})
    configured = "127.0.0.1" if warned else "0.0.0.0"
    server = ServerConfig(host=configured, port=given.getsockname()[1])

    async def main() -> None:
        async with serving(Daemon(FakeEngine(), dataclasses.replace(config, server=server))):
            await until_health(dataclasses.replace(config, server=server), 200)
            os.kill(os.getpid(), signal.SIGTERM)

    with structlog.testing.capture_logs() as logs:
        run(main)
    assert bool([line for line in logs if line["event"] == "listening_without_keys"]) is warned


def test_a_reload_does_not_take_the_keys_away(config: Config, tmp_path: Path) -> None:
    """A file that is being written is empty for a moment; so is what a pipe gives the second time."""
    (tmp_path / "keys").write_text("secret\n")
    locked = dataclasses.replace(
        config, server=ServerConfig(port=config.server.port, api_keys_file=str(tmp_path / "keys"))
    )
    daemon = Daemon(FakeEngine(), locked, reread=lambda: config)

    async def main() -> None:
        async with serving(daemon):
            await until_health(config, 200)
            call = Client(Path(config.admin.socket)).call
            with pytest.raises(Refusal, match=r"config_error: server\.api_keys_file: is not set any more"):
                await asyncio.to_thread(call, "POST", "/v1/reload", {})
            url = f"http://127.0.0.1:{config.server.port}/v1/models"
            async with aiohttp.ClientSession() as session, session.get(url) as reply:
                assert reply.status == 401
            os.kill(os.getpid(), signal.SIGTERM)

    run(main)


def test_a_reload_without_keys_warns_as_a_start_does(config: Config) -> None:
    opened = dataclasses.replace(config, server=ServerConfig(host="0.0.0.0", port=config.server.port))

    async def main() -> list[int]:
        async with serving(Daemon(FakeEngine(), opened)):
            await until_health(config, 200)
            before = warned()
            await asyncio.to_thread(Client(Path(config.admin.socket)).call, "POST", "/v1/reload", {})
            os.kill(os.getpid(), signal.SIGTERM)
        return [before, warned()]

    with structlog.testing.capture_logs() as logs:

        def warned() -> int:
            return sum(line["event"] == "listening_without_keys" for line in logs)

        assert run(main) == [1, 2]


def test_a_blocked_loop_is_seen_by_all_who_ask(config: Config) -> None:
    """One measurement: the metric and the control socket."""

    async def main() -> tuple[dict[str, float], float, list[str]]:
        async with serving(Daemon(FakeEngine(), config)):
            await until_health(config, 200)
            await asyncio.sleep(0.05)
            time.sleep(0.5)  # noqa: ASYNC251  what a loop must not do
            await asyncio.sleep(0.3)
            timers = [task.get_name() for task in asyncio.all_tasks() if "lag" in task.get_name()]
            status = await asyncio.to_thread(Client(Path(config.admin.socket)).call, "GET", "/v1/status")
            async with aiohttp.ClientSession(f"http://127.0.0.1:{config.server.port}") as session:
                text = await (await session.get("/metrics")).text()
            os.kill(os.getpid(), signal.SIGTERM)
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("specd_loop_lag_seconds"))
        return {name: float(value) for name, value in rows}, status["loop_lag_s"], timers

    samples, worst_s, timers = run(main)
    assert worst_s > 0.1
    count = samples["specd_loop_lag_seconds_count"]
    assert samples['specd_loop_lag_seconds_bucket{le="0.1"}'] < count
    assert samples["specd_loop_lag_seconds_sum"] >= worst_s
    assert timers == ["specd-loop-lag"]


def test_a_lossy_rule_is_named(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    async def main(acceptance: str) -> None:
        engine = FakeEngine()
        engine.info = dataclasses.replace(INFO, acceptance=acceptance)
        async with serving(Daemon(engine, config)):
            await until_health(config, 200)
            os.kill(os.getpid(), signal.SIGTERM)

    for acceptance, lossy in (("typical", True), ("ratio", False)):
        with structlog.testing.capture_logs() as logs:
            run(lambda acceptance=acceptance: main(acceptance))
        assert bool([line for line in logs if line["event"] == "lossy_acceptance"]) is lossy
        assert (f"acceptance {acceptance} (lossy)" in capsys.readouterr().out) is lossy


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
