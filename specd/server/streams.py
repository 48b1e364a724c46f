"""The engine's delta streams of one HTTP request, merged; closing them is what frees the engine's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from specd.deltas import DeltaQueue
from specd.request import SequenceDelta
from specd.server.alarm import Alarm
from specd.server.openai import GenerationCall
from specd.server.protocol import EngineProtocol


class DeltaStreams:
    """Reads every prompt's stream in a task of its own, so that waiting for a delta can time out without harm.

    `submit` accepts all prompts or none. Use as an async context manager: leaving it ends whatever still runs.
    """

    def __init__(self, engine: EngineProtocol, call: GenerationCall) -> None:
        self._engine = engine
        self._call = call
        self._streams: list[AsyncIterator[SequenceDelta]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived = DeltaQueue()
        self._news = asyncio.Event()  # a delta, a failure, an end, or silence
        self._silence = Alarm(self._fell_silent)
        self._silent = False
        self._failure: Exception | None = None
        self._num_open = 0

    async def __aenter__(self) -> DeltaStreams:
        """Submits. Raises what the engine's submit raises; what it had accepted before is then aborted."""
        try:
            self._engine.admit(self._call.requests[0].tenant, self._call.requests)
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
                self._arrived.put(prompt_index * self._call.n + delta.index, delta)
                self._news.set()
        except Exception as error:  # noqa: BLE001  re-raised by get(), where the request is answered
            self._failure = error
        self._num_open -= 1
        self._news.set()

    @property
    def num_joined(self) -> int:
        """Deltas that were joined to others because they were not fetched in time."""
        return self._arrived.num_joined

    async def get(self, timeout_s: float | None = None) -> list[tuple[int, SequenceDelta]]:
        """(choice, delta) pairs that have arrived, at least one; empty when every stream has ended.

        Raises TimeoutError after timeout_s of silence, and whatever a stream raised once all before it was fetched.
        """
        self._silent = False
        if timeout_s is not None:
            self._silence.set(timeout_s)
        while self._num_open and not self._arrived and self._failure is None:
            if self._silent:
                raise TimeoutError
            self._news.clear()
            await self._news.wait()
        self._silence.clear()
        if not self._arrived and self._failure is not None:
            raise self._failure
        return self._arrived.take()

    def _fell_silent(self) -> None:
        self._silent = True
        self._news.set()

    async def _close(self) -> None:
        """Ends every stream: by name first (at once, whatever happens to this task), then its reader and iterator."""
        self._silence.close()
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
