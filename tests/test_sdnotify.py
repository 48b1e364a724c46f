"""systemd's side: activated sockets and the notification socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from specd.errors import ConfigError
from specd.listeners import bind
from specd.sdnotify import Notifier, listen_sockets


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
