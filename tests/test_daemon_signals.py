"""Signals while the daemon serves: reload, stacks, log level; and what the service manager sees of a reload."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from specd.commands.ctl_client import Client, Refusal
from specd.config import Config, LogConfig
from specd.errors import ConfigError
from specd.sdnotify import Notifier
from specd.signals import StopSignal
from specd.status import EngineState
from specd.supervision import LoopLag, Supervisor, status_line
from tests.daemons import STATS, Daemon, FakeEngine, config_in, run, serving, until_health


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path)


def with_server(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, server=dataclasses.replace(config.server, **changes))


async def told(logs: list[Any], name: str) -> Any:
    async with asyncio.timeout(5):
        while not (found := [line for line in logs if line["event"] == name]):  # noqa: ASYNC110  a signal comes late
            await asyncio.sleep(0.005)
    return found[-1]


def test_sighup_takes_the_new_configuration(config: Config) -> None:
    new = with_server(config, max_stop=9, drain_timeout_s=3.0, port=1)
    scheduler = dataclasses.replace(config.scheduler, max_waiting=5)
    daemon = Daemon(FakeEngine(), config, reread=lambda: dataclasses.replace(new, scheduler=scheduler))

    async def main() -> Any:
        with structlog.testing.capture_logs() as logs:
            async with serving(daemon):
                await until_health(config, 200)
                os.kill(os.getpid(), signal.SIGHUP)
                line = await told(logs, "reloaded")
                status = await asyncio.to_thread(Client(Path(config.admin.socket)).call, "GET", "/v1/status")
                os.kill(os.getpid(), signal.SIGTERM)
        return line, status

    line, status = run(main)
    assert line["applied"].keys() == {"server.max_stop", "server.drain_timeout_s", "scheduler.max_waiting"}
    assert line["needs_restart"] == ["server.port"]
    assert daemon.engine.limits == scheduler
    assert status["generation"] == 2


def test_a_bad_file_changes_nothing(config: Config, tmp_path: Path) -> None:
    """Neither a file that cannot be read nor one whose parts cannot all be taken."""
    answers: list[Callable[[], Config]] = []
    keys = str(tmp_path / "no-such-keys")
    daemon = Daemon(FakeEngine(), config, reread=lambda: answers.pop()())

    def broken() -> Config:
        raise ConfigError("specd.toml: is not TOML")

    async def main() -> list[str]:
        client = Client(Path(config.admin.socket))
        found = []
        async with serving(daemon):
            await until_health(config, 200)
            for answer in (broken, lambda: with_server(config, max_stop=9, api_keys_file=keys)):
                answers.append(answer)
                with pytest.raises(Refusal) as refusal:
                    await asyncio.to_thread(client.call, "POST", "/v1/reload", {})
                found.append(str(refusal.value))
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    first, second = run(main)
    assert "config_error" in first
    assert "no-such-keys" in second
    assert daemon.engine.limits is None


def test_sighup_while_loading_is_kept(config: Config) -> None:
    daemon = Daemon(FakeEngine(), config, reread=lambda: with_server(config, max_stop=9))

    async def main() -> None:
        with structlog.testing.capture_logs() as logs:
            async with serving(daemon, loaded=False):
                await until_health(config, 503)
                os.kill(os.getpid(), signal.SIGHUP)
                await told(logs, "reload_postponed")
                assert not [line for line in logs if line["event"] == "reloaded"]
                daemon.ready.set()
                await told(logs, "reloaded")
                os.kill(os.getpid(), signal.SIGTERM)

    run(main)


def test_the_service_manager_sees_a_reload(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        answers: list[Callable[[], Config]] = []
        daemon = Daemon(FakeEngine(), config, reread=lambda: answers.pop()())

        def broken() -> Config:
            raise ConfigError("bad")

        async def main() -> None:
            async with serving(daemon):
                await until_health(config, 200)
                client = Client(Path(config.admin.socket))
                answers.append(lambda: with_server(config, port=1))
                await asyncio.to_thread(client.call, "POST", "/v1/reload", {})
                answers.append(broken)
                with pytest.raises(Refusal):
                    await asyncio.to_thread(client.call, "POST", "/v1/reload", {})
                os.kill(os.getpid(), signal.SIGTERM)

        run(main)
        messages = []
        while True:
            try:
                messages.append(manager.recv(4096).decode().split("\n"))
            except BlockingIOError:
                break
    order = [next((w for w in ("READY=1", "RELOADING=1", "STOPPING=1") if w in lines), None) for lines in messages]
    order = [word for word in order if word]
    assert order[:6] == ["READY=1", "RELOADING=1", "READY=1", "RELOADING=1", "READY=1", "STOPPING=1"]
    reloads = [lines for lines in messages if "RELOADING=1" in lines]
    assert all(lines[1].startswith("MONOTONIC_USEC=") for lines in reloads)
    ends = [lines for lines in messages if "READY=1" in lines][1:]
    assert ends[0][1] == "STATUS=configuration reloaded; a restart is needed for server.port"
    assert ends[1][1] == "STATUS=the configuration was refused; the old one stays"


def test_sigusr1_shows_where_everything_stands(config: Config, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> Any:
        with structlog.testing.capture_logs() as logs:
            async with serving(Daemon(FakeEngine(), config)):
                await until_health(config, 200)
                os.kill(os.getpid(), signal.SIGUSR1)
                line = await told(logs, "stacks_dumped")
                os.kill(os.getpid(), signal.SIGTERM)
        return line

    assert any("LoopLag._run" in name for name in run(main)["tasks"])
    assert "most recent call first" in capfd.readouterr().err  # the threads, written without the event loop


def test_sigusr2_toggles_debug(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[str] = []
    monkeypatch.setattr("specd.log.configure", lambda level, format: levels.append(level))
    config = dataclasses.replace(config, log=LogConfig(level="warning"))

    async def main() -> None:
        async with serving(Daemon(FakeEngine(), config)):
            await until_health(config, 200)
            for count in (1, 2):
                os.kill(os.getpid(), signal.SIGUSR2)
                async with asyncio.timeout(5):
                    while len(levels) < count:  # noqa: ASYNC110  a signal comes late
                        await asyncio.sleep(0.005)
            os.kill(os.getpid(), signal.SIGTERM)

    run(main)
    assert levels == ["debug", "warning"]


STUCK = """
import asyncio, signal, time
from specd.signals import Signals

async def main():
    with Signals(1.0).handled():
        print("ready", flush=True)
        time.sleep(60)  # the event loop hangs

asyncio.run(main())
"""


def test_sigusr1_speaks_even_when_the_loop_hangs() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stderr is not None
        assert "most recent call first" in process.stderr.readline()
    finally:
        process.kill()
        process.communicate()


class Beats:
    """A notifier that keeps what is sent."""

    def __init__(self) -> None:
        self.notifier = Notifier(None, watchdog_s=0.02)
        self.sent: list[tuple[str, ...]] = []
        self.notifier.send = lambda *lines: self.sent.append(lines)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("since_progress_s", "lag_s", "fed"), [(0.0, 0.0, True), (59.0, 4.0, True), (61.0, 0.0, False), (0.0, 6.0, False)]
)
@pytest.mark.parametrize("draining", [False, True])
async def test_the_watchdog_is_fed_by_progress(
    since_progress_s: float, lag_s: float, fed: bool, draining: bool
) -> None:
    engine, beats, lag = FakeEngine(pending=1), Beats(), LoopLag()
    engine.changes["last_progress_s"] = since_progress_s
    lag._recent.append(lag_s)
    stop = StopSignal(0.1)
    supervisor = Supervisor(engine, beats.notifier, stop, lag, stall_s=lambda: 60.0)
    if draining:
        assert not await supervisor.drain()
    else:
        asyncio.get_running_loop().call_later(0.1, stop.ask, "test")
        assert not await supervisor.watch()
    assert any("WATCHDOG=1" in lines for lines in beats.sent) is fed
    extended = any(line.startswith("EXTEND_TIMEOUT_USEC=") for lines in beats.sent for line in lines)
    assert extended is (draining and since_progress_s < 60)


async def test_loop_lag_is_seen() -> None:
    lag = LoopLag()
    async with lag.measured():
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251  the lag that is to be seen
        await asyncio.sleep(0.05)
    assert lag.worst_s > 0.1


def test_a_state_that_is_not_ready_is_said() -> None:
    paused = dataclasses.replace(STATS, paused=True)
    assert status_line(STATS, paused).startswith("STATUS=paused: 0 running")
    draining = dataclasses.replace(STATS, state=EngineState.DRAINING)
    assert status_line(STATS, draining).startswith("STATUS=draining: 0 running")
