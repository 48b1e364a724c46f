"""What aiohttp refuses by itself: JSON with a request id, and a connection in a known state."""

from __future__ import annotations

import asyncio

import aiohttp.web
import orjson
import pytest
import structlog
from aiohttp import web

from specd.http_refusals import JsonRunner, json_refusal, refusal_of
from specd.listeners import bind, loading_site
from tests.fake_engine import FakeEngine
from tests.http_server import HELLO, Client, Reply, serve

HOST = b"Host: x\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
MANY = b"".join(b"x-%d: a\r\n" % i for i in range(200))
# Pieces are sent one after the other, so that a handler may already wait for the next.
MALFORMED: dict[str, tuple[int, str, tuple[bytes, ...]]] = {
    "method": (400, "malformed_request", (b"\x00\x01\r\n\r\n",)),
    "tls": (400, "malformed_request", (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",)),
    "version": (400, "malformed_request", (b"GET /health HTTP/9.7\r\n" + HOST + b"\r\n",)),
    "header": (400, "malformed_request", (b"GET /health HTTP/1.1\r\nfoo bar\r\n" + HOST + b"\r\n",)),
    "host": (400, "malformed_request", (b"GET /health HTTP/1.1\r\n\r\n",)),
    "url": (400, "malformed_request", (b"GET http://[\xff HTTP/1.1\r\n" + HOST + b"\r\n",)),
    "length": (400, "malformed_request", (POST + b"Content-Length: -1\r\n\r\n",)),
    "smuggling": (400, "malformed_request", (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",)),
    "encoding": (400, "malformed_request", (POST + b"Transfer-Encoding: bogus\r\n\r\n{}",)),
    "chunk": (400, "malformed_request", (CHUNKED + b"ZZ\r\n{}\r\n",)),
    "chunk, later": (400, "malformed_request", (CHUNKED, b"ZZ\r\n{}\r\n")),
    "end of a chunk, later": (400, "malformed_request", (CHUNKED + b"2\r\n{", b"}X\r\n")),
    "long line": (431, "headers_too_large", (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",)),
    "long header": (431, "headers_too_large", (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n" + HOST + b"\r\n",)),
    "many headers": (431, "headers_too_large", (b"GET /health HTTP/1.1\r\n" + HOST + MANY + b"\r\n",)),
}


async def send(client: Client, *pieces: bytes) -> tuple[Reply, bytes]:
    """The first answer to raw bytes, and what follows until the connection is closed."""
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for i, piece in enumerate(pieces):
            await asyncio.sleep(0.05 if i else 0)
            writer.write(piece)
        async with asyncio.timeout(5):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers["content-length"]))
            shown = {"Content-Type": headers["content-type"], **headers}
            return Reply(int(head[0].split()[1]), shown, body), await reader.read()
    finally:
        writer.close()


async def test_malformed_http_is_refused_in_json() -> None:
    async with serve(FakeEngine()) as client:
        with structlog.testing.capture_logs() as logs:
            for name, (status, code, pieces) in MALFORMED.items():
                reply, rest = await send(client, *pieces)
                assert (name, reply.status, reply.error["code"]) == (name, status, code)
                assert len(reply.headers["x-request-id"]) == 32, name
                assert reply.headers["server"] == "specd", name
                assert rest == b"", name  # one answer, and the connection is closed
        assert (await client.get("/health")).status == 200
    assert not [line for line in logs if line["log_level"] == "error"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/nowhere"])
async def test_a_wrong_expectation(path: str) -> None:
    async with serve(FakeEngine()) as client:
        headers = {"Expect": "nonsense", "X-Request-Id": "mine"}
        reply = await client.post(path, HELLO, headers=headers)
        assert reply.status == 417
        assert reply.headers["x-request-id"] == "mine"
        if path == "/v1/messages":
            assert reply.body["type"] == "error"
            assert reply.body["request_id"] == reply.headers["request-id"] == "mine"
        else:
            assert reply.error["code"] == "expectation_failed"
        again = await client.chat()  # the connection is as good as before
    assert again.status == 200


async def test_while_the_model_is_loaded() -> None:
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with structlog.testing.capture_logs() as logs:
        async with loading_site([listener]), aiohttp.ClientSession() as session:
            client = Client(url, session)
            for reply in (await client.chat(), (await send(client, b"GET / HTTP/1.1\r\nfoo bar\r\n\r\n"))[0]):
                assert reply.error["code"] == ("loading" if reply.status == 503 else "malformed_request")
                assert len(reply.headers["x-request-id"]) == 32
    listener.close()
    assert [line["event"] for line in logs] == ["malformed_request_refused"], "no traceback for garbage"


async def test_a_handler_that_breaks_outside_the_application() -> None:
    """Nothing of the exception's text is told."""

    @web.middleware
    async def broken(request: web.Request, handler: object) -> web.StreamResponse:
        raise RuntimeError("secret")

    runner = JsonRunner(web.Application(middlewares=[broken]), write=json_refusal, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with aiohttp.ClientSession() as session:
            client = Client(f"http://127.0.0.1:{runner.addresses[0][1]}", session)
            with structlog.testing.capture_logs() as logs:
                reply = await client.get("/")
    finally:
        await runner.cleanup()
    assert (reply.status, reply.error["code"], reply.error["type"]) == (500, "internal_error", "server_error")
    assert b"secret" not in reply.raw
    assert [line["event"] for line in logs] == ["http_failed"]


def test_a_text_of_aiohttp_is_bounded_and_printable() -> None:
    error = aiohttp.http_exceptions.BadHttpMessage("x" * 5000 + "\udcff")
    refusal = refusal_of(400, error)
    assert len(refusal.message) < 300
    bad = refusal_of(400, aiohttp.http_exceptions.BadHttpMessage("\udcff:\n\n  more"))
    assert orjson.dumps(bad.body())
    assert "more" not in bad.message


async def test_a_length_that_is_too_much_is_refused_before_the_body_has_come() -> None:
    """Nobody waits for what would be refused, or keeps so much of it."""
    async with serve(FakeEngine(), max_body_bytes=2000) as client:
        for length in (2001, 10**12):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
            writer.write(POST + b"Content-Length: %d\r\n\r\n{" % length)
            async with asyncio.timeout(5):
                head = await reader.readuntil(b"\r\n\r\n")
            assert int(head.split()[1]) == 413
            writer.close()


@pytest.mark.parametrize(("coding", "status"), [("gzip, chunked", 415), ("deflate,chunked", 415), ("Chunked", 200)])
async def test_a_transfer_coding_that_nobody_undoes_is_refused(coding: str, status: int) -> None:
    body = orjson.dumps(HELLO)
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with serve(FakeEngine()) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
        writer.write(POST + f"Transfer-Encoding: {coding}\r\n\r\n".encode() + chunks)
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        writer.close()
