"""Reload, restart and crash under load with a service manager that keeps the socket: no connection is refused."""

from __future__ import annotations

import collections
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service_manager import Clients, Manager

_CLIENTS = 8


@pytest.fixture
def manager(tiny_folder: Path, tmp_path: Path) -> Iterator[Manager]:
    words = [str(tiny_folder), "--threads", "1", "--set", "log.level=warning", "--set", "scheduler.max_running=8"]
    manager = Manager(tmp_path, [*words, "--set", "speculation.self_check=false"])
    yield manager
    manager.close()


def test_reload_crash_and_restart_under_load(manager: Manager) -> None:
    clients = Clients(manager.port, _CLIENTS, max_tokens=24)  # they come before there is a daemon
    try:
        manager.start()
        clients.wait_for_more(_CLIENTS)
        manager.send(signal.SIGHUP)
        manager.wait_for("RELOADING=1", "READY=1")
        clients.wait_for_more(_CLIENTS)

        killed_s = time.monotonic()
        manager.send(signal.SIGKILL)
        assert manager.end() == (-signal.SIGKILL, None)
        down_s = time.monotonic()
        manager.start()
        clients.wait_for_more(_CLIENTS)

        manager.send(signal.SIGTERM)
        restarted = manager.end()
        manager.start()  # those who wait in the backlog are answered by the next one
        clients.wait_for_more(_CLIENTS)
    finally:
        calls = clients.stop()
    manager.send(signal.SIGTERM)
    stopped = manager.end()

    found = collections.Counter(call.outcome for call in calls)
    assert set(found) <= {"finished", "cut", "refused loading", "refused draining"}, found  # none was not connected
    cut = [call for call in calls if call.outcome == "cut"]
    others = [call for call in cut if not (call.began_s < down_s and call.ended_s > killed_s)]
    assert not others, f"cut by something else than the crash, from {killed_s} to {down_s}: {others}"
    assert 0 < len(cut) <= _CLIENTS, f"each client lost at most the one stream that it had: {sorted(map(str, cut))}"
    for code, account in (restarted, stopped):
        assert code == 0
        assert account is not None
        assert account == (account[0], account[0], 0, 0), "SIGTERM waits for all who were accepted"
    accounted = restarted[1][0] + stopped[1][0] if restarted[1] and stopped[1] else 0
    finished = [call for call in calls if call.outcome == "finished"]
    assert sum(call.began_s > down_s for call in finished) <= accounted  # what clients have, a daemon has counted
    assert accounted <= sum(call.ended_s > killed_s for call in finished)  # and the other way round
    assert "Traceback" not in manager.log


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_signals_at_random_under_load(manager: Manager, seed: int) -> None:
    """Six signals, each at any time: while it loads, serves or drains."""
    draw = random.Random(seed)
    clients = Clients(manager.port, _CLIENTS, max_tokens=24)
    down: list[tuple[float, float]] = []  # from the SIGKILL to the death of its daemon
    accounts = []
    try:
        manager.start()
        for number in draw.choices((signal.SIGHUP, signal.SIGTERM, signal.SIGKILL), k=6):
            time.sleep(draw.random())
            sent_s = time.monotonic()
            manager.send(number)
            if number is signal.SIGHUP:
                continue
            code, account = manager.end()
            if number is signal.SIGKILL:
                down.append((sent_s, time.monotonic()))
            else:
                accounts.append((code, account))
            manager.start(ready=draw.random() < 0.5)
        clients.wait_for_more(_CLIENTS)
    finally:
        calls = clients.stop()
    manager.send(signal.SIGTERM)
    accounts.append(manager.end())
    assert {call.outcome for call in calls} <= {"finished", "cut", "refused loading", "refused draining"}
    for call in calls:
        if call.outcome == "cut":
            assert any(call.began_s < end and call.ended_s > start for start, end in down), call
    for code, account in accounts:
        assert code == 0
        assert account is None or account == (account[0], account[0], 0, 0)  # none: stopped while it loaded
    assert "Traceback" not in manager.log
