"""Deltas between the engine and whoever reads them: bounded queues, and the stream of one request. No torch.

The engine never waits for a reader. What a slow one has not read is joined, choice by choice, so that a backlog is
never more than `MOST` deltas (or two for each choice, where there are more of those) and no token of it is lost.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

from specd.request import Request, SequenceDelta

MOST = 256


def join(deltas: Sequence[SequenceDelta]) -> SequenceDelta:
    """Consecutive deltas of one choice as one."""
    parts = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return dataclasses.replace(
        deltas[-1],
        token_ids=tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas)),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(itertools.chain.from_iterable(parts)) if parts else None,
        origins=tuple(itertools.chain.from_iterable(delta.origins for delta in deltas)),
        drafts=tuple(itertools.chain.from_iterable(delta.drafts for delta in deltas)),
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
    )


class DeltaQueue:
    """(choice, delta) pairs in the order of their arrival, until there are too many."""

    def __init__(self, most: int = MOST) -> None:
        self.num_joined = 0  # deltas that lost their separate existence
        self._most = self._limit = most
        self._items: collections.deque[tuple[int, SequenceDelta]] = collections.deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, choice: int, delta: SequenceDelta) -> None:
        self._items.append((choice, delta))
        if len(self._items) > self._limit:
            self._join()

    def pop(self) -> tuple[int, SequenceDelta]:
        """The oldest. Raises IndexError when there is none."""
        return self._items.popleft()

    def take(self) -> list[tuple[int, SequenceDelta]]:
        """All of them."""
        found = list(self._items)
        self._items.clear()
        return found

    def _join(self) -> None:
        by_choice: dict[int, list[SequenceDelta]] = {}
        for choice, delta in self._items:
            by_choice.setdefault(choice, []).append(delta)
        self.num_joined += len(self._items) - len(by_choice)
        self._items = collections.deque((choice, join(deltas)) for choice, deltas in by_choice.items())
        self._limit = max(self._most, 2 * len(self._items))  # many choices: joining stays a rare thing


class TokenStream(AsyncIterator[SequenceDelta]):
    """The deltas of one request, all choices interleaved. Closing it early, or cancelling its reader, aborts."""

    def __init__(self, request: Request, abort: Callable[[str], object]) -> None:
        self.request = request
        self.left = request.n  # choices without a finish_reason yet
        self._abort = abort
        self._queue = DeltaQueue()
        self._arrived = asyncio.Event()
        self._unread = request.n  # choices whose last delta has not been read

    def put(self, delta: SequenceDelta) -> None:
        self._queue.put(delta.index, delta)
        self._arrived.set()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> SequenceDelta:
        if self._unread <= 0:
            raise StopAsyncIteration
        while not self._queue:
            self._arrived.clear()
            try:
                await self._arrived.wait()
            except asyncio.CancelledError:
                self._abort(self.request.request_id)
                raise
        _, delta = self._queue.pop()
        if delta.finish_reason is not None:
            self._unread -= 1
        return delta

    async def aclose(self) -> None:
        """Aborts what has not finished; without effect afterwards."""
        if self.left:
            self._abort(self.request.request_id)
        self._unread = 0
