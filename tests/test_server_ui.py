"""The page at /ui: who may see it, how a browser is told to treat it, and what its events say."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket
from pathlib import Path

import aiohttp
import orjson
import pytest
from aiohttp import web

from specd.config import Config, ServerConfig
from specd.listeners import local_only
from specd.request import Request, SamplingParams
from specd.server import ui
from specd.server.app import create_app, create_runner
from tests.fake_engine import FakeEngine, Script
from tests.http_server import Client, serve, until

FOLDER = Path(ui.__file__).parent / "ui"
SECRET = "a sentence that only its sender knows"


async def events(client: Client, count: int, **headers: str) -> list[dict[str, object]]:
    found = []
    async with client.session.get(client.url + "/ui/events", headers=headers) as reply:
        assert reply.status == 200
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        assert reply.headers["Cache-Control"] == "no-store"
        async for line in reply.content:
            if line.startswith(b"data: "):
                found.append(orjson.loads(line[6:]))
            if len(found) == count:
                break
    return found


# ---------------------------------------------------------------- the page


async def test_the_page_and_its_files() -> None:
    async with serve(FakeEngine()) as client:
        page = await client.get("/ui")
        assert page.status == 200
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        for file in FOLDER.iterdir():
            reply = await client.get(f"/ui/{file.name}")
            assert reply.status == 200, file
            assert reply.raw == file.read_bytes()
        assert (await client.get("/ui/style.css")).headers["Content-Type"] == "text/css; charset=utf-8"
        assert (await client.get("/ui/app.js")).headers["Content-Type"] == "text/javascript; charset=utf-8"
        slash = await client.get("/ui/", allow_redirects=False)
        assert (slash.status, slash.headers["Location"]) == (308, "../ui"), "links of the page are relative to /ui"
        assert (await client.get("/ui/")).raw == page.raw
        again = await client.get("/ui", headers={"If-None-Match": page.headers["ETag"]})
        assert (again.status, again.raw) == (304, b"")


async def test_the_browser_is_told_to_run_nothing_else() -> None:
    async with serve(FakeEngine()) as client:
        for path in ("/ui", "/ui/app.js", "/ui/style.css"):
            headers = (await client.get(path)).headers
            policy = dict(part.split(maxsplit=1) for part in headers["Content-Security-Policy"].split("; "))
            assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Referrer-Policy"] == "no-referrer"


def test_the_files_hold_nothing_that_the_policy_forbids() -> None:
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, file
        assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}, file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage", text), file
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\bstyle=|\bon[a-z]+=|<script(?![^>]*\bsrc=)", page), "inline script or style"
    named = set(re.findall(r"(?:src|href)=\"([^\"#]+)\"", page))
    assert named <= {f"ui/{file.name}" for file in FOLDER.iterdir()}
    ids = set(re.findall(r"\bid=\"([^\"]+)\"", page))
    used = {name for file in FOLDER.glob("*.js") for name in re.findall(r"\$\(\"([^\"]+)\"\)", file.read_text())}
    assert used <= ids


@pytest.mark.parametrize(
    "path", ["/ui/../app.py", "/ui/..%2fapp.py", "/ui/%2e%2e/app.py", "/ui/..\\app.py", "/ui/%00", "/ui//etc/passwd"]
)
async def test_only_its_own_files_are_sent(path: str) -> None:
    async with serve(FakeEngine()) as client:
        reader, writer = await asyncio.open_connection(client.url.split("/")[2].split(":")[0], port_of(client))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        reply = await reader.read()
        writer.close()
        assert reply.split()[1] in (b"404", b"400"), reply
        assert b"import" not in reply


def port_of(client: Client) -> int:
    return int(client.url.rpartition(":")[2])


# ---------------------------------------------------------------- who may see it


def served(*, local: bool | None, **server: str) -> bool:
    app = create_app(FakeEngine(), Config(server=ServerConfig(**server)), local=local)
    return any(route.resource and route.resource.canonical == "/ui" for route in app.router.routes())


def test_it_is_off_where_others_can_connect() -> None:
    assert served(local=True)
    assert not served(local=False)
    assert served(local=False, ui="on")
    assert not served(local=True, ui="off")
    assert served(local=None)
    assert not served(local=None, host="0.0.0.0")


async def test_without_it_there_is_nothing_at_its_paths() -> None:
    async with serve(FakeEngine(), ui="off") as client:
        for path in ("/ui", "/ui/", "/ui/app.js", "/ui/events"):
            assert (await client.get(path)).error["code"] == "not_found"


def test_what_is_bound_counts(tmp_path: Path) -> None:
    def bound(family: int, address: object) -> socket.socket:
        listener = socket.socket(family)
        listener.bind(address)
        return listener

    with (
        bound(socket.AF_INET, ("127.0.0.1", 0)) as loopback,
        bound(socket.AF_INET, ("0.0.0.0", 0)) as everywhere,
        bound(socket.AF_UNIX, str(tmp_path / "s")) as unix,
    ):
        assert local_only([loopback, unix])
        assert not local_only([loopback, everywhere])


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:8000", True),
        ("10.1.2.3", True),
        ("[::1]:8000", True),
        ("localhost", True),
        ("LOCALHOST.:80", True),
        ("a.localhost:1", True),
        ("llm.example.org:8000", True),
        (socket.gethostname(), True),
        ("evil.example.org", False),
        ("localhost.evil.org", False),
        ("127.0.0.1.evil.org", False),
        ("evil.org:127.0.0.1", False),
        ("llm.example.org@evil.org", False),
        ("[::1", False),
        ("", False),
    ],
)
async def test_names_of_others_are_refused(host: str, *, known: bool) -> None:
    async with serve(FakeEngine(), ui_hosts=("llm.example.org",)) as client:
        for path in ("/ui", "/ui/app.js", "/ui/"):
            reply = await client.get(path, headers={"Host": host}, allow_redirects=False)
            assert (reply.status < 400) is known
            if not known:
                assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
        if not known:
            assert (await client.get("/ui/events", headers={"Host": host})).status == 403


async def test_events_ask_for_a_key_and_the_page_does_not(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    async with serve(FakeEngine(), api_keys_file=str(keys)) as client:
        assert (await client.get("/ui")).status == 200
        assert (await client.get("/ui/app.js")).status == 200
        assert (await client.get("/ui/events")).error["code"] == "invalid_api_key"
        assert (await client.get("/ui/events", headers={"Authorization": "Bearer sk-two"})).status == 401
        (event,) = await events(client, 1, Authorization="Bearer sk-one")
        assert b"sk-one" not in orjson.dumps(event)


# ---------------------------------------------------------------- events


async def test_events_tell_figures_and_no_text() -> None:
    engine = FakeEngine(Script(hang_after=1))
    snapshot = dataclasses.replace(engine.snapshot, generation_tokens=7, accepted_per_position=(3, 2, 0, 0))
    engine.snapshot = dataclasses.replace(snapshot, pages_free=200, pages_cached=20)
    engine.trace = lambda seconds: {  # type: ignore[method-assign]
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "args": {"name": SECRET}},
            {"ph": "X", "name": "verify", "ts": 2_000.0, "dur": 500.0, "args": {"step": 3}},
            {"ph": "X", "name": "report", "ts": 2_500.0, "dur": 5.0, "args": {"step": 3}},
        ]
    }
    async with serve(engine) as client:
        request = Request(f"id {SECRET}", tuple(client.url.encode()), SamplingParams(max_tokens=4, seed=1))
        running = aiter(engine.submit(request))
        await anext(running)
        first, second = await events(client, 2)
        assert first["generation_tokens"] == 7
        assert first["accepted_per_position"] == [3, 2, 0, 0]
        assert first["running"] == 1
        assert first["stages"] == [["verify", 3, 2.0, 0.5]]
        pages = first["pages"]
        assert isinstance(pages, dict)
        assert (pages["total"], pages["free"], pages["cached"]) == (256, 180, 20)
        assert set(pages["cells"]) <= set("usc.")
        assert second["now_ms"] - first["now_ms"] > 500  # type: ignore[operator]
        assert SECRET.encode() not in orjson.dumps([first, second])
        await running.aclose()  # type: ignore[attr-defined]


async def test_events_end_with_the_page_and_with_the_server() -> None:
    app, page = web.Application(), ui.Ui(FakeEngine(), Config())
    page.add_to(app)
    runner = create_runner(app, shutdown_timeout_s=30.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/ui/events"
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as reply:
            await reply.content.readuntil(b"\n\n")
            assert page.num_streams == 1
        await until(lambda: page.num_streams == 0)
        async with session.get(url) as reply:
            await reply.content.readuntil(b"\n\n")
            async with asyncio.timeout(5):  # long before the runner's own limit
                await runner.cleanup()
            assert await reply.content.read() == b"", "it ended cleanly"


async def test_events_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "_MOST_STREAMS", 1)
    async with serve(FakeEngine()) as client, client.session.get(client.url + "/ui/events") as reply:
        await reply.content.readuntil(b"\n\n")
        assert (await client.get("/ui/events")).status == 429


async def test_who_reads_no_events_loses_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon: the kernel holds some 300 KB for a client, and not the 4 MB that it would take by itself."""
    monkeypatch.setattr(ui, "_PERIOD_S", 0.001)
    monkeypatch.setattr(ui.Ui, "_latest", lambda page: sent.append(0) or b"data: " + b"x" * 4000 + b"\n\n")
    sent: list[int] = []
    page = ui.Ui(FakeEngine(), Config(server=ServerConfig(slow_client_timeout_s=0.3)))
    app = web.Application()
    page.add_to(app)
    runner = create_runner(app, shutdown_timeout_s=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        reader, writer = await asyncio.open_connection(host, port, limit=1)
        writer.write(f"GET /ui/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        await until(lambda: page.num_streams == 1)
        await until(lambda: page.num_streams == 0, seconds=20)
        assert len(sent) * 4000 < 1_000_000
        writer.transport.abort()
        assert reader is not None
    finally:
        await runner.cleanup()
