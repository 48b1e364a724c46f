"""Listening sockets: addresses, ports in use, and who can reach them."""

from __future__ import annotations

import pytest

from specd.errors import AddressInUseError, ConfigError
from specd.listeners import address_of, bind, check_address, is_loopback


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
