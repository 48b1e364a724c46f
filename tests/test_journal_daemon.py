"""A daemon that is killed while it streams: the next one names what was lost, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from specd.account import Account
from specd.config import Config
from specd.daemon import serve
from specd.errors import ModelError
from specd.request import FinishReason
from tests.daemons import Daemon, FakeEngine, config_in, run, serving, until_health
from tests.engines import ask, generate, make_parts, running
from tests.service_manager import Manager
from tests.test_journal import killed, lost, started, until
from tests.tiny import tiny_config, write_hf_folder

ENDLESS = 16_000  # tokens: nobody waits for them


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "requests.journal"


@pytest.fixture
def manager(tmp_path: Path, journal: Path) -> Iterator[Manager]:
    folder = write_hf_folder(tmp_path / "model", config=tiny_config(vocab_size=320, max_position=ENDLESS + 384))
    settings = ("log.level=warning", "speculation.draft=none", "log.format=json", f"server.journal={journal}")
    words = [word for setting in settings for word in ("--set", setting)]
    manager = Manager(tmp_path, [str(folder), "--threads", "1", *words])
    yield manager
    manager.close()


class Stream:
    """One of which the first event has arrived."""

    def __init__(self, manager: Manager, name: str, prompt: object, max_tokens: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", manager.port, timeout=60)
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._reply = self._connection.getresponse()
        assert self._reply.status == 200
        while not self._reply.readline().startswith(b"data: {"):
            pass

    def rest(self) -> str:
        """What comes until the connection ends, however it ends."""
        with contextlib.closing(self._connection), contextlib.closing(self._reply):
            lines = []
            with contextlib.suppress(http.client.HTTPException, OSError, ValueError):
                while line := self._reply.readline():
                    lines.append(line.decode())
            return "".join(lines)


def metrics(manager: Manager) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{manager.port}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("specd_") and "{" not in line}


def test_a_kill_in_mid_stream(manager: Manager, journal: Path) -> None:
    manager.start()
    assert Stream(manager, "done", "to the end", 3).rest().endswith("data: [DONE]\n\n")
    streams = [Stream(manager, name, name, ENDLESS) for name in ("first", "second")]
    streams.append(Stream(manager, "both", ["one prompt", "and another"], ENDLESS))
    found = metrics(manager)
    assert (found["specd_requests_lost_total"], found["specd_journal_enabled"]) == (0, 1)
    _nobody_else_may_write(journal)

    manager.send(signal.SIGKILL)
    assert manager.end()[0] == -signal.SIGKILL
    assert not any('finish_reason":"' in (text := stream.rest()) or "[DONE]" in text for stream in streams)

    manager.start()
    (line,) = [json.loads(line) for line in manager.log.splitlines() if "requests_lost" in line]
    assert (line["level"], line["total"], line["ids"]) == ("warning", 4, ["cmpl-first", "cmpl-second", "cmpl-both"])
    found = metrics(manager)
    assert (found["specd_requests_lost_total"], found["specd_journal_failed_events_total"]) == (4, 0)
    cut = Stream(manager, "cut", "off by a second signal", ENDLESS)
    manager.send(signal.SIGTERM)
    until(lambda: metrics(manager)["specd_drains_total"] == 1)
    manager.send(signal.SIGTERM)
    assert "shutting_down" in cut.rest()
    assert manager.end() == (75, (1, 0, 0, 1))
    assert journal.read_bytes() == b"specd-journal 1\n", "whoever was told of the end is not lost"


def _nobody_else_may_write(journal: Path) -> None:
    words = ["serve", "none", "--port", "0", "--set", f"server.journal={journal}", "--set", "admin.enabled=false"]
    environment = {name: value for name, value in os.environ.items() if name != "STATE_DIRECTORY"}
    command = [sys.executable, "-m", "specd", *words]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert second.returncode == 1  # the other one may be gone at the next try
    assert f"specd: server.journal: another process writes {journal}" in second.stderr


async def test_the_engine_accounts_for_every_end(journal: Path) -> None:
    async with running(make_parts(draft="layers", draft_len=2)) as engine:
        engine.account.journal = written = started(journal)
        await generate(engine, [ask("a", [5, 6, 7], max_tokens=6), ask("b", [5, 6], max_tokens=6)])
        stream = engine.submit(ask("c", [5], max_tokens=60))
        await anext(stream)
        await stream.aclose()
        engine.submit(ask("d", [5], max_tokens=60))
    written.close()  # `running` has drained the engine: "d" has finished
    stats = engine.stats()
    assert (stats.requests_finished, stats.requests_aborted, stats.drains) == (3, 1, 1)
    assert lost(journal) == ()


def test_the_account_adds_up() -> None:
    account = Account()
    for reason in FinishReason:
        account.begin(str(reason))
        account.end(str(reason), reason)
    assert (account.accepted, account.failed, account.aborted) == (len(FinishReason), 1, 1)
    assert account.finished == len(FinishReason) - 2
    account.reset()
    assert (account.accepted, account.finished, account.num_lost_before, account.drains) == (0, 0, 0, 0)


def test_a_start_that_fails_leaves_the_losses_to_the_next_one(tmp_path: Path, journal: Path) -> None:
    """Whatever the load failed of: the process that serves again tells what was lost, once."""
    killed(journal, open_ids=("cmpl-a#1.0",))
    config = config_in(tmp_path)
    config = dataclasses.replace(config, server=dataclasses.replace(config.server, journal=str(journal)))
    written = journal.read_bytes()

    async def broken(config: Config) -> FakeEngine:
        raise ModelError("no such file")

    async def serves(engine: FakeEngine) -> None:
        daemon = Daemon(engine, config)
        async with serving(daemon):
            await until_health(config, 200)
            os.kill(os.getpid(), signal.SIGTERM)

    for _ in range(2):
        with structlog.testing.capture_logs() as logs, pytest.raises(ModelError):
            run(lambda: serve(config, create_engine=broken))
        assert journal.read_bytes() == written
        assert "requests_lost" not in [line["event"] for line in logs], "it is told where it is counted"
    first, second = FakeEngine(), FakeEngine()
    run(lambda: serves(first))
    run(lambda: serves(second))
    assert (first.account.num_lost_before, second.account.num_lost_before) == (1, 0)
