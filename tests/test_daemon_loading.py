"""Signals while the model loads: the daemon leaves at once, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from specd.config import Config
from specd.daemon import LoadAbandoned, load_engine, load_serving_engine, serve
from specd.errors import FetchError
from tests.daemons import FakeEngine, config_in, health, run

# Stands in for pip: says who it is, then downloads for ever.
PIP = """
import os, time
with open(os.environ["PRETEND_PID"] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(os.environ["PRETEND_PID"] + ".part", os.environ["PRETEND_PID"])
time.sleep(300)
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path)


def test_a_load_that_goes_on_is_abandoned(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specd.daemon._ABANDON_S", 0.05)
    release = threading.Event()

    async def load(config: Config) -> FakeEngine:
        await asyncio.to_thread(release.wait, 60)
        return FakeEngine()

    async def main() -> float:
        serving = asyncio.ensure_future(serve(config, create_engine=load))
        try:
            assert await health(config) == 503
            started = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(LoadAbandoned):
                await serving
            return time.monotonic() - started
        finally:
            release.set()

    assert run(main) < 5
    assert not Path(config.admin.socket).exists()


def test_a_load_that_ends_in_time_is_closed(config: Config) -> None:
    """The signal comes while the last of the load runs: the engine is there after all, and must not leak."""
    engine, asked = FakeEngine(), asyncio.Event()

    async def load(config: Config) -> FakeEngine:
        await asked.wait()
        await asyncio.sleep(0.1)
        return engine

    async def main() -> int:
        serving = asyncio.ensure_future(serve(config, create_engine=load))
        assert await health(config) == 503
        os.kill(os.getpid(), signal.SIGTERM)
        asked.set()
        return await serving

    assert run(main) == 0
    assert engine.closed == 1


def test_a_load_that_fails_after_the_signal_is_an_ordinary_end(config: Config) -> None:
    async def load(config: Config) -> FakeEngine:
        await asyncio.sleep(0.3)
        raise FetchError("interrupted")

    async def main() -> int:
        serving = asyncio.ensure_future(serve(config, create_engine=load))
        assert await health(config) == 503
        os.kill(os.getpid(), signal.SIGTERM)
        return await serving

    assert run(main) == 0


def test_the_load_is_announced(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async def create(config: Config, *, grammars: bool) -> FakeEngine:
        assert [line["event"] for line in lines] == ["model_loading"]
        asked.append(grammars)
        return FakeEngine()

    monkeypatch.setitem(sys.modules, "specd.engine", SimpleNamespace(Engine=SimpleNamespace(create=create)))  # type: ignore[arg-type]
    asked: list[bool] = []
    with structlog.testing.capture_logs() as lines:
        assert isinstance(run(lambda: load_engine(config)), FakeEngine)
    assert lines[0]["path"] == "smollm2-135m"
    with structlog.testing.capture_logs() as lines:
        run(lambda: load_serving_engine(config))
    assert asked == [False, True], "what grammars need is loaded where they will be asked for"


SLOW_LOAD = """
import asyncio, sys, time
from specd import cli
from specd.commands import serve

async def load(config):
    await asyncio.to_thread(time.sleep, 300)

serve.load_serving_engine = load
sys.exit(cli.main(sys.argv[1:]))
"""


def stop_while_loading(command: list[str], env: dict[str, str], control: Path, loading: Path) -> tuple[int, str]:
    """Exit code and standard error of a daemon that gets SIGTERM once `loading` exists."""
    process = subprocess.Popen(
        command, env=os.environ | env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not loading.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert control.exists()
        process.terminate()
        _, err = process.communicate(timeout=10)  # the load takes 300 s
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert not control.exists()
    return process.returncode, err


def test_the_process_does_not_wait_for_the_loading_thread(tmp_path: Path) -> None:
    control = tmp_path / "admin.sock"
    words = ["serve", "--port", "0", "--set", f"admin.socket={control}"]
    code, err = stop_while_loading([sys.executable, "-c", SLOW_LOAD, *words], {}, control, loading=control)
    assert code == 0
    assert "load_abandoned" in err
    assert "Traceback" not in err


def test_a_download_ends_with_the_daemon(tmp_path: Path) -> None:
    """The real way down to pip, which is slow here."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text("")
    (tmp_path / "pip" / "__main__.py").write_text(PIP)
    control, started, cache = tmp_path / "admin.sock", tmp_path / "pid", tmp_path / "cache"
    env = {"PYTHONPATH": str(tmp_path), "PRETEND_PID": str(started), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "specd", "serve", "smollm2-135m", "--port", "0", "--threads", "1"]
    command += ["--set", f"admin.socket={control}"]
    code, err = stop_while_loading(command, env, control, loading=started)
    assert code == 0
    assert "load_stopped" in err
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert [p.name for p in (cache / "specd" / "models").iterdir()] == [".smollm2-135m.lock"]
