"""A real listener around a fake engine, for tests of the server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from specd.config import Config, ServerConfig
from specd.server.app import create_app, create_runner
from tests.fake_engine import FakeEngine

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "tiny", "prompt": "hi", "max_tokens": 64}


@dataclasses.dataclass(slots=True)
class Reply:
    status: int
    headers: Any
    raw: bytes

    @property
    def body(self) -> Any:
        return orjson.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; its shape is checked on the way."""
        assert self.headers["Content-Type"].startswith("application/json"), self.headers
        error: dict[str, Any] = self.body["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["code"], str)
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """JSON of every data line but [DONE]; anything else than data lines and comments is refused."""
        blocks = self.raw.split(b"\n\n")
        assert blocks.pop() == b"", "the last event is complete"
        lines = [block for block in blocks if not block.startswith(b": ")]
        assert all(line.startswith(b"data: ") for line in lines)
        return [orjson.loads(line[6:]) for line in lines if line != b"data: [DONE]"]


class Client:
    """Requests against one server; replies are read whole."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def get(self, path: str, **kwargs: Any) -> Reply:
        return await self.request("GET", path, **kwargs)

    async def post(self, path: str, body: Any, **kwargs: Any) -> Reply:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **kwargs.pop("headers", {})}
        return await self.request("POST", path, data=data, headers=headers, **kwargs)

    async def request(self, method: str, path: str, **kwargs: Any) -> Reply:
        async with self.session.request(method, self.url + path, **kwargs) as response:
            return Reply(response.status, response.headers, await response.read())

    async def chat(self, **fields: Any) -> Reply:
        return await self.post("/v1/chat/completions", {**HELLO, **fields})

    async def complete(self, **fields: Any) -> Reply:
        return await self.post("/v1/completions", {**PROMPT, **fields})


@contextlib.asynccontextmanager
async def serve(engine: FakeEngine, *, config: Config | None = None, **server: Any) -> AsyncIterator[Client]:
    """A server on a free port; leaving it closes everything."""
    config = config or Config(server=ServerConfig(**server))
    runner = create_runner(create_app(engine, config), shutdown_timeout_s=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            yield Client(f"http://{host}:{port}", session)
    finally:
        await runner.cleanup()


async def until(condition: Callable[[], bool], *, seconds: float = 5.0) -> None:
    """Waits for something that happens on the server's side of a connection."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  the other side has no event to wait for
            await asyncio.sleep(0.005)
