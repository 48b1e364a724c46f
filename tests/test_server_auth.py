"""API keys: closed by default, however a path is written."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from specd.errors import ConfigError
from specd.server.auth import ApiKeys
from tests.fake_engine import FakeEngine
from tests.http_server import HELLO, Client, serve

POSTS = ("/v1/completions", "/v1/chat/completions")


def write_keys(folder: Path, text: str) -> str:
    path = folder / "keys"
    path.write_text(text)
    return str(path)


async def test_keys(tmp_path: Path) -> None:
    """Closed by default: every route but health, however its path is written, and paths that do not exist."""
    engine = FakeEngine()
    hashed = "sha256:" + hashlib.sha256(b"second").hexdigest()
    path = write_keys(tmp_path, f"# people\nfirst\n\n{hashed}\n")
    closed = ("/v1/models", "/v1/models/tiny", "/metrics", "/version", "//v1/models", "/v1%2fmodels", "/nope", "/")
    async with serve(engine, api_keys_file=path) as client:
        for wanted in closed:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"Host": "/health"}):
                reply = await client.get(wanted, headers=headers)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), (wanted, headers)
                assert reply.headers["WWW-Authenticate"] == "Bearer"
        for wanted in POSTS:
            assert (await client.post(wanted, HELLO)).status == 401
        assert not engine.requests_seen
        for wanted in ("/health", "/health/live", "/health/ready", "/ping"):
            assert (await client.get(wanted)).status == 200
        for key in ("first", "second"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=headers)).status == 200
            assert (await client.post(POSTS[1], HELLO, headers=headers)).status == 200
        assert (await client.get("/nope", headers={"Authorization": "bearer first"})).status == 404
    salts = [request.cache_salt for request in engine.requests_seen]
    assert len(set(salts)) == 2, "caches of different keys are apart"
    assert all(salts)


async def test_a_client_s_own_salt_narrows_what_its_key_shares(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serve(engine, api_keys_file=write_keys(tmp_path, "first\nsecond\n")) as client:
        for key in ("first", "second"):
            for salt in ("a", "b", "a"):
                headers = {"Authorization": f"Bearer {key}"}
                reply = await client.post("/v1/completions", {"prompt": "a", "cache_salt": salt}, headers=headers)
                assert reply.status == 200
        for bad in ("", "s" * 1025, 3):
            body = {"prompt": "a", "cache_salt": bad}
            reply = await client.post("/v1/completions", body, headers={"Authorization": "Bearer first"})
            assert (reply.status, reply.error["param"]) == (400, "cache_salt")
    salts = [request.cache_salt for request in engine.requests_seen]
    assert (salts[0], salts[3]) == (salts[2], salts[5])
    assert len(set(salts)) == 4
    assert len({request.tenant for request in engine.requests_seen}) == 2, "the share of the queue is the key's"


def test_key_files_that_do_not_work(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "sha256:zz\n", "sha256:00\n"):
        with pytest.raises(ConfigError):
            ApiKeys.from_file(write_keys(tmp_path, text))
    with pytest.raises(ConfigError):
        ApiKeys.from_file(str(tmp_path / "absent"))


async def raw_exchange(client: Client, data: bytes) -> bytes:
    """Bytes as they are, without a client that tidies them up."""
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "target", ["//v1/models", "/v1%2fmodels", "/health/../v1/models", "http://x/v1/models", "/v1/models?/health", "/%"]
)
async def test_odd_targets_need_the_key(tmp_path: Path, target: str) -> None:
    async with serve(FakeEngine(), api_keys_file=write_keys(tmp_path, "k")) as client:
        head = f"GET {target} HTTP/1.1\r\nHost: /health\r\nConnection: close\r\n\r\n"
        reply = await raw_exchange(client, head.encode())
    assert reply.split(b"\r\n")[0].split()[1] in (b"401", b"400")
    assert b'"tiny"' not in reply
