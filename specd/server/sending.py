"""Bytes of a stream on their way to its client, who may read slowly or not at all.

What the kernel and the transport hold for one client is bounded; beyond that `send` waits, and what the engine makes
meanwhile is joined in `streams.py`.
"""

from __future__ import annotations

import asyncio
import socket
import time

from aiohttp import web

from specd.server.record import RequestRecord

KERNEL_BYTES = 128 << 10  # SO_SNDBUF; Linux doubles it for its own use
TRANSPORT_BYTES = 32 << 10  # from here on the transport says that it is full


class SlowClientError(Exception):
    """The client did not read its stream in time."""


def bound_buffers(transport: asyncio.Transport) -> None:
    """So much may be on its way to one client."""
    transport.set_write_buffer_limits(high=TRANSPORT_BYTES)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)


class Sender:
    """Writes to one prepared response; `record` counts bytes and the time spent waiting for the client."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, record: RequestRecord, *, timeout_s: float
    ) -> None:
        self._request = request
        self._response = response
        self._record = record
        self._timeout_s = timeout_s
        self.sent_s = time.monotonic()  # of the latest bytes
        bound_buffers(self.transport)

    @property
    def transport(self) -> asyncio.Transport:
        """Raises ConnectionResetError when the client is gone."""
        if self._request.transport is None:
            raise ConnectionResetError("the client is gone")
        return self._request.transport

    async def send(self, data: bytes) -> None:
        """Raises SlowClientError when the client reads nothing for so long, ConnectionError when it is gone."""
        if not data:
            return
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._response.write(data)
        except TimeoutError as error:
            raise SlowClientError(f"nothing was read for {self._timeout_s:g} s") from error
        finally:
            self._record.sent(time.monotonic() - start)
        self._record.bytes_sent += len(data)
        self.sent_s = time.monotonic()
