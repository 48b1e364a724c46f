"""Listening sockets: addresses, ports in use, and who can reach them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from specd.errors import AddressInUseError, ConfigError
from specd.listeners import address_of, bind, check_address, is_loopback, notice_lost_peers


def test_a_port_in_use_may_be_free_later() -> None:
    """Another code than the configuration's: a service manager should try again."""
    assert not issubclass(AddressInUseError, ConfigError)
    with bind("127.0.0.1", 0) as first:
        with pytest.raises(AddressInUseError, match=str(first.getsockname()[1])):
            bind("127.0.0.1", first.getsockname()[1])
        assert address_of(first) == f"http://127.0.0.1:{first.getsockname()[1]}"
    with pytest.raises(ConfigError, match=r"server\.host"):
        bind("not-a-host.invalid", 1)


def test_an_address_is_checked_without_listening() -> None:
    for host in ("not-a-host.invalid", "192.0.2.1"):  # no name, and no address of this machine
        with pytest.raises(ConfigError, match=host):
            check_address(host, 8000)
    with bind("127.0.0.1", 0) as first:
        check_address("127.0.0.1", first.getsockname()[1])


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


@pytest.mark.parametrize(("slow_client_s", "unread_ms"), [(5.0, 60_000), (100.0, 200_000)])
def test_connections_notice_that_their_peer_is_gone(slow_client_s: float, unread_ms: int) -> None:
    """What is set on the listener holds for what it accepts: nobody has to touch each connection."""
    with bind("127.0.0.1", 0) as listener:
        notice_lost_peers(listener, slow_client_s=slow_client_s)
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            numbers = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            found = [accepted.getsockopt(socket.IPPROTO_TCP, number) for number in numbers]
            assert found == [60, 15, 3, unread_ms]


def test_a_unix_listener_needs_none_of_that(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "http.sock"))
        notice_lost_peers(listener, slow_client_s=30)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
