"""The engine's delta streams of one HTTP request, merged; closing them is what frees the engine's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from specd.request import SequenceDelta
from specd.server.openai import GenerationCall
from specd.server.protocol import EngineProtocol

_END = None


class DeltaStreams:
    """Reads every prompt's stream in a task of its own, so that waiting for a delta can time out without harm.

    `submit` accepts all prompts or none. Use as an async context manager: leaving it ends whatever still runs.
    """

    def __init__(self, engine: EngineProtocol, call: GenerationCall) -> None:
        self._engine = engine
        self._call = call
        self._streams: list[AsyncIterator[SequenceDelta]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, SequenceDelta] | BaseException | None] = asyncio.Queue()
        self._num_open = 0

    async def __aenter__(self) -> DeltaStreams:
        """Submits. Raises what the engine's submit raises; what it had accepted before is then aborted."""
        try:
            for request in self._call.requests:
                self._streams.append(self._engine.submit(request))
        except BaseException:
            await self._close()
            raise
        self._num_open = len(self._streams)
        self._tasks = [asyncio.create_task(self._read(i, stream)) for i, stream in enumerate(self._streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _read(self, prompt_index: int, stream: AsyncIterator[SequenceDelta]) -> None:
        try:
            async for delta in stream:
                self._queue.put_nowait((prompt_index * self._call.n + delta.index, delta))
        except Exception as error:  # noqa: BLE001  re-raised by get(), where the request is answered
            self._queue.put_nowait(error)
            return
        self._queue.put_nowait(_END)

    async def get(self, timeout_s: float | None = None) -> list[tuple[int, SequenceDelta]]:
        """(choice, delta) pairs that have arrived, at least one; empty when every stream has ended.

        Raises TimeoutError after timeout_s of silence, and whatever a stream raised.
        """
        found: list[tuple[int, SequenceDelta]] = []
        while self._num_open and not (found and self._queue.empty()):
            async with asyncio.timeout(timeout_s):
                item = await self._queue.get()
            if item is _END:
                self._num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                found.append(item)
        return found

    async def _close(self) -> None:
        """Ends every stream: by name first (at once, whatever happens to this task), then its reader and iterator."""
        for request, _ in zip(self._call.requests, self._streams, strict=False):
            self._engine.abort(request.request_id)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for stream in self._streams:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
