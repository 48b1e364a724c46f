"""A scripted engine for the control socket: what is live is what a test says."""

from __future__ import annotations

import asyncio
import dataclasses

from specd.corpora import Corpora
from specd.errors import SpecdError
from specd.request import Request, SamplingParams
from specd.status import EngineState, EngineStats
from tests import fake_engine
from tests.admin import Controls


class Engine(fake_engine.FakeEngine, Controls):
    """Requests that `start` puts in are live until they are aborted or `finish`ed."""

    errors: list[SpecdError | None]

    def __init__(self) -> None:
        fake_engine.FakeEngine.__init__(self)
        self.errors = []
        self.corpora = Corpora(self.tokenizer, vocab_size=self.info.vocab_size, max_tokens=1000)
        self.idle = asyncio.Event()
        self.idle.set()

    def start(self, *names: str) -> None:
        for name in names:
            self.submit(Request(name, (1, 2, 3), SamplingParams(max_tokens=4, seed=1)))
        self.idle.clear()

    def finish(self) -> None:
        self.live.clear()
        self.idle.set()

    def abort(self, request_id: str, error: SpecdError | None = None) -> bool:
        self.errors.append(error)
        found = fake_engine.FakeEngine.abort(self, request_id)
        if not self.live:
            self.idle.set()
        return found

    def stats(self) -> EngineStats:
        stats = fake_engine.FakeEngine.stats(self)
        return dataclasses.replace(
            stats,
            paused=self.paused,
            accepted_requests=len(self.requests_seen),
            requests_aborted=len(self.aborted),
            live_requests=len(self.live),
        )

    async def drain(self, timeout_s: float) -> bool:
        self.state = EngineState.DRAINING
        try:
            await asyncio.wait_for(self.idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
