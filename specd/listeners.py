"""Listening TCP sockets, and what answers on them while the model is being loaded."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterable

import aiohttp.web

from specd.errors import AddressInUseError, ConfigError
from specd.http_refusals import JsonServer, Refusal, json_refusal

_BACKLOG = 1024
# A connection of which nothing is heard for a minute is probed; after three probes without an answer it is gone.
_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 60, 15, 3
_LEAST_UNREAD_S = 60


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises AddressInUseError, or ConfigError when the address can never be had."""
    listener = _bound(host, port)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    listener.setblocking(False)
    return listener


def check_address(host: str, port: int) -> None:
    """What can be said of an address without listening on it: nobody is refused meanwhile.

    A port in use is no error here: `specd check` runs beside the daemon that it checks for. Raises ConfigError.
    """
    with contextlib.suppress(AddressInUseError):
        _bound(host, port).close()


def _bound(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address. Raises AddressInUseError or ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"server.host = {host!r}: {error.strerror}; give an address of this machine") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> AddressInUseError | ConfigError:
    kind = AddressInUseError if error.errno == errno.EADDRINUSE else ConfigError
    return kind(f"cannot listen on {host} port {port}: {error.strerror}; change --host or --port")


def notice_lost_peers(listener: socket.socket, *, slow_client_s: float) -> None:
    """Connections that it accepts from now on end by themselves when their other end is gone.

    Idle ones by keep-alive probes; ones with data on the way when it was not taken for twice as long as a slow client
    may take: so long as a client is only slow it is the server that ends its stream, and says so.
    """
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return
    unread_s = max(2 * slow_client_s, _LEAST_UNREAD_S)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _PROBE_AFTER_S),
        (socket.TCP_KEEPINTVL, _PROBE_EVERY_S),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, int(unread_s * 1000)),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host` (an address, or the name localhost)."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def local_only(listeners: Iterable[socket.socket]) -> bool:
    """Whether only this machine can connect to any of them."""
    inet = [listener for listener in listeners if listener.family != socket.AF_UNIX]
    return all(is_loopback(listener.getsockname()[0]) for listener in inet)


def address_of(listener: socket.socket) -> str:
    """`http://127.0.0.1:8000`, with the port that was really bound; unix:PATH for a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def loading_site(listeners: list[socket.socket]) -> AsyncIterator[None]:
    """Answers 503 `loading` to everything on copies of the listeners; the originals stay open."""

    async def refuse(request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
        message = "The model is being loaded; try again in a few seconds."
        response = json_refusal(request, Refusal(503, "loading", message), {"Retry-After": "2"})
        response.force_close()  # the next request must reach the real application
        return response

    runner = aiohttp.web.ServerRunner(JsonServer(refuse, write=json_refusal, access_log=None), shutdown_timeout=1.0)
    await runner.setup()
    try:
        for listener in listeners:
            await aiohttp.web.SockSite(runner, listener.dup()).start()
        yield
    finally:
        await runner.cleanup()
