"""What the server needs of an engine. The real one is `specd.engine.Engine`; tests use a scripted one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from specd.request import Request, SequenceDelta
from specd.status import EngineInfo, EngineState, EngineStats, PageMap, RequestStatus
from specd.text import Tokenizer


class EngineProtocol(Protocol):
    """All methods are called on the event loop and none of them blocks it."""

    info: EngineInfo
    tokenizer: Tokenizer

    @property
    def state(self) -> EngineState: ...

    def submit(self, request: Request) -> AsyncIterator[SequenceDelta]:
        """Accepts the request at once (or raises RequestError, QueueFullError, DrainingError) and streams its deltas.

        The stream interleaves all n choices and ends after each has had its delta with a finish_reason. Closing the
        stream early, or cancelling the task that reads it, aborts the request and frees what it held.
        """
        ...

    async def prepare_grammar(self, request: Request) -> None:
        """Compiles what a request to be submitted next has in `SamplingParams.grammar`, if it has anything there.

        Raises RequestError for one that cannot be used or is too complex, OverloadedError when too many are compiled,
        QueueTimeoutError when the request's time is over, DrainingError.
        """
        ...

    def admit(self, tenant: bytes, requests: Sequence[Request] = ()) -> None:
        """Raises unless all of them (none given: one more) would be accepted now: QueueFullError, RateLimitError, or
        RequestError when they never would."""
        ...

    def abort(self, request_id: str) -> bool:
        """Ends a live request with FinishReason.ABORT; False when there is none of that name."""
        ...

    def stats(self) -> EngineStats: ...

    def requests(self, most: int | None = None) -> list[RequestStatus]:
        """The first `most` of what is live, running choices before waiting ones; None: all."""
        ...

    def page_map(self) -> PageMap:
        """The page pool as the page at /ui draws it."""
        ...

    def trace(self, seconds: float) -> dict[str, Any]:
        """Chrome trace JSON of the last `seconds` of the stage timeline."""
        ...
