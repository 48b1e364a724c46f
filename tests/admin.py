"""The control socket around a scripted engine: what its tests share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from specd.config import Config, SchedulerConfig
from specd.errors import RequestError
from specd.reload import Reloader, ReloadReport
from specd.server.admin.app import create_admin_app
from specd.server.admin.console import Console, Daemon, Shutdown
from specd.server.admin.keyfile import KeyFile
from specd.server.admin.peers import Levels
from specd.server.admin.sockets import bind_admin_socket
from specd.server.app import create_runner
from specd.server.auth import ApiKeys
from specd.status import EngineState, KVStatus, LengthPolicy, RequestDetail, RequestStatus, StepRecord


class Controls:
    """The operator's side of an engine, for scripted ones: remembers what it was told."""

    state: EngineState
    paused = False
    k: int | str | None = None
    configured: int | str = "adaptive"
    cached_pages = 3
    limits: SchedulerConfig | None = None

    def requests(self, most: int | None = None) -> list[RequestStatus]:
        raise NotImplementedError

    def resume(self) -> None:
        if self.state is EngineState.DRAINING:
            self.state = EngineState.READY

    def pause(self) -> None:
        self.paused = True

    def unpause(self) -> None:
        self.paused = False

    def kv(self) -> KVStatus:
        return KVStatus(16, 1 << 20, 64, 64 - self.cached_pages, self.cached_pages, 0, 0, 100, 25)

    def flush_kv(self) -> int:
        flushed, self.cached_pages = self.cached_pages, 0
        return flushed

    def request(self, request_id: str) -> list[RequestDetail]:
        steps = (StepRecord(1, "ngram", 4, 3),)
        found = [status for status in self.requests() if status.request_id == request_id]
        return [RequestDetail(status, {"temperature": 0.0, "stop": 2}, 0, 1, (1, 0), steps) for status in found]

    @property
    def draft_length(self) -> LengthPolicy:
        k = self.configured if self.k is None else self.k
        return LengthPolicy("auto" if k else "off", k, self.configured, self.k is not None)

    def set_draft_length(self, k: int | str | None) -> None:
        if isinstance(k, int) and not 0 <= k <= 8:
            raise RequestError(f"k = {k}: must be in 0..8", code="out_of_range", param="k")
        self.k = k

    def set_limits(self, limits: SchedulerConfig) -> None:
        self.limits = limits


@dataclasses.dataclass
class Desk:
    """What a test can turn, and what was asked."""

    config: Config = dataclasses.field(default_factory=Config)
    reread: Callable[[], Config] = Config
    key_file: str = ""
    stopping: bool = False
    levels: Levels = dataclasses.field(default_factory=Levels)
    shutdowns: list[Shutdown] = dataclasses.field(default_factory=list)
    log_levels: list[str | None] = dataclasses.field(default_factory=list)

    def console(self, engine: Any) -> Console:
        reloader = Reloader(self.config, lambda: self.reread())

        def reload(dry_run: bool) -> ReloadReport:
            return reloader.reload(dry_run=dry_run)

        daemon = Daemon(
            reload=reload,
            shutdown=self.shutdowns.append,
            stopping=lambda: self.stopping,
            loop_lag_s=lambda: 0.001,
            set_log_level=self.log_levels.append,
        )
        keys = KeyFile(ApiKeys.configured(self.key_file), self.key_file)
        return Console(engine, daemon, reloader=reloader, keys=keys, levels=self.levels)


class Caller:
    """One who calls; replies are read whole."""

    def __init__(self, session: aiohttp.ClientSession, console: Console) -> None:
        self.session = session
        self.console = console

    async def ask(self, method: str, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        if body is not None:
            kwargs["json"] = body
        async with self.session.request(method, f"http://admin{path}", **kwargs) as response:
            assert response.content_type == "application/json"
            assert 1 <= int(response.headers["ETag"].strip('"')) <= self.console.generation
            return response.status, await response.json()

    async def result(self, method: str, path: str, body: Any = None, **kwargs: Any) -> Any:
        status, reply = await self.ask(method, path, body, **kwargs)
        assert (status, reply["ok"]) == (200, True), reply
        return reply["result"]

    async def refusal(self, method: str, path: str, body: Any = None, **kwargs: Any) -> tuple[int, str]:
        status, reply = await self.ask(method, path, body, **kwargs)
        assert not reply["ok"], reply
        assert reply["error"]["message"]
        return status, reply["error"]["code"]


@contextlib.asynccontextmanager
async def serving(path: Path, engine: Any, desk: Desk | None = None) -> AsyncIterator[Caller]:
    console = (desk or Desk()).console(engine)
    runner = create_runner(create_admin_app(console), shutdown_timeout_s=2.0)
    await runner.setup()
    try:
        await web.SockSite(runner, bind_admin_socket(path)).start()
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
            yield Caller(session, console)
    finally:
        await runner.cleanup()
