"""Clients that leave in crowds, at each phase of their requests: everything they held comes back.

A real engine on a tiny model behind a real listener. What is watched: pages, tasks, timers, the account of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from specd.config import Config, KVConfig, ModelConfig, SchedulerConfig, ServerConfig, SpeculationConfig
from specd.engine import Engine
from specd.server.app import create_app, create_runner
from tests.http_server import Client, until

PROMPT = "the quick brown fox jumps over the lazy dog. " * 3  # several chunks of the step's budget
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0.0}
NUM_CLIENTS = 24


@contextlib.asynccontextmanager
async def serving(folder: Path, **scheduler: Any) -> AsyncIterator[tuple[Engine, Client]]:
    """Leaving it checks that nothing is left of anybody."""
    config = Config(
        model=ModelConfig(path=str(folder), threads=1),
        speculation=SpeculationConfig(draft="ngram", self_check=False),
        scheduler=SchedulerConfig(**{"max_running": 4, "max_tokens": 32, "request_timeout_s": 60.0} | scheduler),
        kv=KVConfig(prefix_cache=True),
        server=ServerConfig(served_names=("tiny",)),
    )
    engine = await Engine.create(config)
    runner = create_runner(create_app(engine, config), shutdown_timeout_s=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        connector = TCPConnector(force_close=True, limit=0)  # a connection that is kept is a task that is kept
        async with ClientSession(timeout=ClientTimeout(total=60), connector=connector) as session:
            client = Client(f"http://{host}:{port}", session)
            assert (await client.post("/v1/completions", {**BODY, "max_tokens": 1})).status == 200
            tasks = len(asyncio.all_tasks())
            yield engine, client
            await until(lambda: is_empty(engine), seconds=20)
            await until(lambda: len(asyncio.all_tasks()) == tasks)
        assert not engine._deadlines._timers
    finally:
        await runner.cleanup()
        await engine.close()


def is_empty(engine: Engine) -> bool:
    stats = engine.stats()
    ended = stats.requests_finished + stats.requests_failed + stats.requests_aborted
    return (
        stats.running + stats.waiting == 0
        and stats.pages_free == stats.pages_total
        and stats.accepted_requests == ended
        and all(key.num_live == 0 for key in engine._admission._keys.values())
    )


async def connect(client: Client, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a connection of its own, sent and not yet answered."""
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = orjson.dumps({**BODY, **fields})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    return reader, writer


async def crowd(client: Client, **fields: Any) -> list[asyncio.StreamWriter]:
    draw = random.Random(1)
    found = []
    for number in range(NUM_CLIENTS):
        own = {"seed": number, "prompt": f"{number} " + PROMPT, "stream": draw.random() < 0.7, **fields}
        found.append((await connect(client, **own))[1])
    return found


def leave(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.transport.abort()


def is_queued(engine: Engine) -> bool:
    return any(status.state == "waiting" for status in engine.requests())


def is_prefilling(engine: Engine) -> bool:
    return any(status.state == "prefilling" and status.pages for status in engine.requests())


def is_decoding(engine: Engine) -> bool:
    return any(status.state == "decoding" and status.output_tokens > 3 for status in engine.requests())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("phase", [is_queued, is_prefilling, is_decoding])
async def test_a_crowd_leaves(tiny_folder: Path, phase: Callable[[Engine], bool], n: int) -> None:
    async with serving(tiny_folder) as (engine, client):
        writers = await crowd(client, n=n)
        await until(lambda: engine.stats().accepted_requests >= NUM_CLIENTS)
        await until(lambda: phase(engine), seconds=20)
        leave(writers)
        await until(lambda: is_empty(engine), seconds=20)
        assert engine.stats().requests_aborted > NUM_CLIENTS // 2
        again = await client.post("/v1/completions", {**BODY, "max_tokens": 4})
        assert again.body["usage"]["completion_tokens"] == 4, "the server serves on"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_crowd_leaves_between_verify_and_send(
    tiny_folder: Path, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is there and committed, its deltas are not yet published."""
    async with serving(tiny_folder) as (engine, client):
        scheduler = engine._scheduler
        original = scheduler.apply
        writers: list[asyncio.StreamWriter] = []
        left = 0

        def apply(*args: Any) -> Any:
            nonlocal left
            deltas = original(*args)
            if left < NUM_CLIENTS and any(delta.token_ids for delta in deltas):
                leave(writers[left : left + 3])
                left += 3
            return deltas

        writers += await crowd(client, n=n, max_tokens=40)
        monkeypatch.setattr(scheduler, "apply", apply)
        await until(lambda: left >= NUM_CLIENTS and is_empty(engine), seconds=30)
        assert engine.stats().requests_aborted > 0


async def test_a_crowd_comes_and_goes_at_random_while_pages_are_short(tiny_folder: Path) -> None:
    """Preemptions among them; one who stays is answered as if alone."""
    draw = random.Random(3)
    async with serving(tiny_folder) as (_, client):
        stays = {**BODY, "prompt": "one who stays", "max_tokens": 60}
        alone = (await client.post("/v1/completions", stays)).body["choices"][0]["text"]

        async def visit(number: int) -> None:
            _, writer = await connect(client, n=1 + number % 3, seed=number, stream=number % 2 == 0)
            await asyncio.sleep(draw.random() * 0.3)
            writer.transport.abort()

        watched = asyncio.create_task(client.post("/v1/completions", stays))
        await asyncio.gather(*(visit(number) for number in range(60)))
        assert (await watched).body["choices"][0]["text"] == alone


async def test_deadlines_free_everything(tiny_folder: Path) -> None:
    """Half of the crowd asks for less time than it needs, none of it leaves."""
    async with serving(tiny_folder, queue_timeout_s=0.3) as (engine, client):

        async def one(number: int) -> int:
            headers = {"x-request-timeout": "0.2"} if number % 2 else {}
            body = {**BODY, "prompt": f"{number} " + PROMPT, "max_tokens": 150}
            return (await client.post("/v1/completions", body, headers=headers)).status

        statuses = await asyncio.gather(*(one(number) for number in range(16)))
        assert set(statuses) <= {200, 503, 504}
        assert statuses.count(503) > 0
        stats = engine.stats()
        assert stats.requests_failed == 0
        assert stats.requests_aborted == sum(status != 200 for status in statuses)


async def test_limits_of_a_real_queue(tiny_folder: Path) -> None:
    async with serving(tiny_folder, max_running=1, max_waiting=3, max_requests_per_key=0) as (engine, client):
        replies = await asyncio.gather(
            *(client.post("/v1/completions", {**BODY, "seed": i, "max_tokens": 20}) for i in range(12))
        )
        statuses = [reply.status for reply in replies]
        assert set(statuses) == {200, 429}
        for reply in replies:
            if reply.status == 429:
                assert 1 <= int(reply.headers["Retry-After"]) <= 60
                assert reply.error["code"] == "queue_full"
        assert engine.stats().accepted_requests == 1 + statuses.count(200)
