"""What systemd and a service tell each other: NOTIFY_SOCKET, LISTEN_FDS, WATCHDOG_USEC. Standard library only.

Every function takes the environment as a mapping and removes what it read, so that child processes do not act on it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from specd.errors import ConfigError

_FIRST_FD = 3  # sd_listen_fds(3)
_SEND_S = 0.1  # for a manager whose queue is full: one that hangs must not take the caller's event loop along


class Notifier:
    """Sends state to the service manager; without one every call does nothing."""

    def __init__(self, address: str | None, *, watchdog_s: float | None = None) -> None:
        self.address = address
        self._hangs = False  # the latest datagram was not taken: the next one is not waited for
        self.watchdog_s = watchdog_s  # send WATCHDOG=1 more often than this; None = not asked for

    @classmethod
    def from_env(cls, env: MutableMapping[str, str]) -> Notifier:
        address = env.pop("NOTIFY_SOCKET", None)
        usec, pid = env.pop("WATCHDOG_USEC", None), env.pop("WATCHDOG_PID", None)
        ours = pid is None or pid == str(os.getpid())
        watchdog_s = int(usec) / 1e6 if usec and usec.isdecimal() and ours else None
        return cls(address or None, watchdog_s=watchdog_s)

    def send(self, *assignments: str) -> None:
        """One datagram of VARIABLE=value lines ("READY=1", "STATUS=3 running"). Raises OSError if nobody takes it."""
        if self.address is None:
            return
        # A leading @ is an abstract socket: the kernel wants a zero byte there.
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(0.0 if self._hangs else _SEND_S)
            self._hangs = True
            sock.sendto("\n".join(assignments).encode(), address)
            self._hangs = False


def listen_sockets(env: MutableMapping[str, str]) -> dict[str, list[socket.socket]]:
    """Activated listening sockets as "http" and "admin". Raises ConfigError.

    LISTEN_FDNAMES tells them apart; under any other name a Unix socket is the admin one.
    """
    pid, count, names = (env.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count:
        return {}
    if not count.isdecimal():
        raise ConfigError(f"LISTEN_FDS = {count!r}: must be a whole number; it is set by the service manager")
    given = names.split(":") if names else []
    sockets: dict[str, list[socket.socket]] = {}
    for i in range(int(count)):
        name = given[i] if i < len(given) else ""
        try:
            sock = socket.socket(fileno=_FIRST_FD + i)
        except OSError as error:
            raise ConfigError(f"LISTEN_FDS: descriptor {_FIRST_FD + i} ({name!r}) is not a socket: {error}") from error
        sock.setblocking(False)
        os.set_inheritable(sock.fileno(), False)
        kind = name if name in ("http", "admin") else "admin" if sock.family == socket.AF_UNIX else "http"
        sockets.setdefault(kind, []).append(sock)
    return sockets
