"""What a reload changes for clients: limits of the next request, and whose key is let in."""

from __future__ import annotations

import dataclasses

import aiohttp
from aiohttp import web

from specd.config import Config, ServerConfig
from specd.server.app import RECONFIGURE_KEY, create_app, create_runner
from specd.server.auth import ApiKeys
from tests.fake_engine import FakeEngine
from tests.http_server import PROMPT, Client


async def test_limits_and_keys_count_from_the_next_request() -> None:
    config = Config(server=ServerConfig(max_choices=1))
    keys = ApiKeys()
    app = create_app(FakeEngine(), config, keys=keys)
    runner = create_runner(app, shutdown_timeout_s=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            client = Client("http://{}:{}".format(*runner.addresses[0][:2]), session)
            assert (await client.complete(n=2)).status == 400
            new = dataclasses.replace(config, server=ServerConfig(max_choices=2))
            for take in app[RECONFIGURE_KEY]:
                take(new)
            assert (await client.complete(n=2)).status == 200
            assert (await client.get("/v1/limits")).body["max_choices"] == 2
            keys.replace(ApiKeys({b"x" * 32: 1}))
            assert (await client.post("/v1/completions", PROMPT)).status == 401
            keys.replace(ApiKeys())
            assert (await client.post("/v1/completions", PROMPT)).status == 200
    finally:
        await runner.cleanup()
