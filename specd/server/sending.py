"""Bytes of a stream on their way to its client, who may read slowly or not at all.

What the kernel and the transport hold for one client is bounded; beyond that `send` waits, and what the engine makes
meanwhile is joined in `streams.py`.
"""

from __future__ import annotations

import asyncio
import socket
import time

from aiohttp import web

from specd.server.alarm import Alarm
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
    """Writes to one prepared response; `record` counts bytes and the time spent waiting for the client.

    Used by the task that makes it, and closed by it.
    """

    def __init__(
        self, request: web.Request, response: web.StreamResponse, record: RequestRecord, *, timeout_s: float
    ) -> None:
        self._request = request
        self._response = response
        self._record = record
        self._timeout_s = timeout_s
        self.sent_s = time.monotonic()  # of the latest bytes
        task = asyncio.current_task()
        assert task is not None, "made outside a task"
        self._task = task
        self._stall = Alarm(self._stalled)
        self._has_stalled = False
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
        start, cancelling = time.monotonic(), self._task.cancelling()
        self._has_stalled = False
        self._stall.set(self._timeout_s)
        try:
            await self._response.write(data)
        except asyncio.CancelledError:
            if not self._has_stalled or self._task.uncancel() > cancelling:
                raise  # by somebody else, too
            raise SlowClientError(f"nothing was read for {self._timeout_s:g} s") from None
        finally:
            self._stall.clear()
            self._record.sent(time.monotonic() - start)
        self._record.bytes_sent += len(data)
        self.sent_s = time.monotonic()

    def close(self) -> None:
        """Nothing more is sent."""
        self._stall.close()

    def _stalled(self) -> None:
        """The write that waits is given up, as `asyncio.timeout` does it."""
        self._has_stalled = True
        self._task.cancel()
