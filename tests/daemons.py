"""A daemon in this process around a scripted engine: what its tests share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import uvloop

from specd.account import Account
from specd.config import AdminConfig, Config, ServerConfig
from specd.daemon import serve
from specd.errors import DrainingError, SpecdError
from specd.request import Request, SequenceDelta
from specd.status import EngineInfo, EngineState, EngineStats, RequestStatus
from tests.admin import Controls

INFO = EngineInfo(
    model="fake",
    served_names=("fake", "other"),
    weight_bytes=98_400_000,
    dtype="float32",
    max_len=64,
    vocab_size=100,
    eos_ids=(2,),
    drafter="ngram",
    max_draft=4,
    acceptance="exact",
    kv_tokens=1024,
    page_size=16,
    max_running=8,
    fingerprint="fp_1",
    generation_defaults={},
    created=0,
)
STATS = EngineStats(
    state=EngineState.READY,
    uptime_s=10.0,
    last_progress_s=0.0,
    running=0,
    waiting=0,
    pages_total=64,
    pages_free=64,
    pages_cached=0,
    accepted_requests=0,
    finished_requests={},
    prompt_tokens=0,
    cached_tokens=0,
    generation_tokens=0,
    preemptions=0,
    steps=0,
    drafts={"ngram": 0},
    draft_tokens={"ngram": 0},
    accepted_tokens={"ngram": 0},
    accepted_per_position=(0, 0, 0, 0),
    drafted_per_position=(0, 0, 0, 0),
)


class FakeEngine(Controls):
    """Holds `pending` requests that never end by themselves; `finish` ends one."""

    def __init__(self, pending: int = 0) -> None:
        self.info = INFO
        self.account = Account()
        self.tokenizer: Any = SimpleNamespace(chat_template=None)
        self.changes: dict[str, Any] = {"accepted_requests": pending, "running": pending}
        self.state = EngineState.READY
        self.closed = 0
        self._idle = asyncio.Event()
        if not pending:
            self._idle.set()

    def finish(self) -> None:
        self.changes["running"] -= 1
        self._idle.set()
        self.changes["requests_finished"] = self.changes.get("requests_finished", 0) + 1

    def admit(self, tenant: bytes, requests: Sequence[Request] = ()) -> None:
        raise DrainingError("draining")

    def submit(self, request: Request) -> AsyncIterator[SequenceDelta]:
        raise DrainingError("draining")

    def abort(self, request_id: str, error: SpecdError | None = None) -> bool:
        return False

    def stats(self) -> EngineStats:
        return dataclasses.replace(STATS, state=self.state, paused=self.paused, **self.changes)

    def requests(self, most: int | None = None) -> list[RequestStatus]:
        return []

    def trace(self, seconds: float) -> dict[str, Any]:
        return {"traceEvents": [{"name": "draft"}]}

    async def drain(self, timeout_s: float) -> bool:
        self.state = EngineState.DRAINING
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self.closed += 1
        self.state = EngineState.STOPPED
        self.changes["requests_aborted"] = self.changes["running"]
        self.changes["running"] = 0


@dataclasses.dataclass
class Daemon:
    """One served daemon in this process, on uvloop, in the test's own thread's loop."""

    engine: FakeEngine
    config: Config
    ready: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    reread: Callable[[], Config] | None = None

    async def load(self, config: Config) -> FakeEngine:
        await self.ready.wait()
        return self.engine


def run(main: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config_in(folder: Path) -> Config:
    """A free port, and a control socket in `folder`."""
    socket_path = folder / "control" / "admin.sock"
    return Config(server=ServerConfig(port=free_port()), admin=AdminConfig(socket=str(socket_path)))


@contextlib.asynccontextmanager
async def serving(daemon: Daemon, *, loaded: bool = True) -> AsyncIterator[asyncio.Task[int]]:
    if loaded:
        daemon.ready.set()
    task = asyncio.ensure_future(serve(daemon.config, create_engine=daemon.load, reread=daemon.reread))
    async with asyncio.timeout(10):
        yield task
        await task


async def health(config: Config) -> int:
    """Status of GET /health on a new connection, as soon as somebody listens."""
    url = f"http://127.0.0.1:{config.server.port}/health"
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as reply:
                    await reply.read()
                    return reply.status
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.01)


async def until_health(config: Config, status: int) -> None:
    async with asyncio.timeout(5):
        while await health(config) != status:  # noqa: ASYNC110  it is another process's state, as a probe sees it
            await asyncio.sleep(0.01)
