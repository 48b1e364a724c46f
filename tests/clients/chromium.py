"""A headless Chromium, driven over its DevTools protocol: a plain WebSocket, without a library for it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
_START_S = 60.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--force-color-profile=srgb", "--remote-debugging-port=0",
)  # fmt: skip


def find() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Page:
    """One tab. `errors` gathers exceptions, console errors and what the browser itself complains about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.urls: list[str] = []  # of every request
        self._socket = socket
        self._serial = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loads = asyncio.Event()

    async def read(self) -> None:
        async for message in self._socket:
            self._take(message.json())

    def _take(self, found: dict[str, Any]) -> None:
        params = found.get("params", {})
        match found.get("method"):
            case None:
                self._answers.pop(found["id"]).set_result(found)
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str([item.get("value") for item in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
            case "Page.loadEventFired":
                self._loads.set()

    async def call(self, method: str, **params: Any) -> Any:
        self._serial += 1
        answer = self._answers[self._serial] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._serial, "method": method, "params": params})
        found = await answer
        assert "error" not in found, f"{method}: {found}"
        return found["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        self._loads.clear()
        await self.call("Page.navigate", url=url)
        await self._loads.wait()

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited. Raises AssertionError when it throws."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str, *, seconds: float = 60.0) -> None:
        """Waits until an expression is true."""
        async with asyncio.timeout(seconds):
            while not await self.evaluate(f"Boolean({expression})"):  # noqa: ASYNC110  it happens in the browser
                await asyncio.sleep(0.05)

    async def shape(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def point(self, selector: str) -> None:
        """Moves the mouse over the first element that matches."""
        where = f"document.querySelector({selector!r}).getClientRects()[0]"
        x, y = await self.evaluate(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({where})")
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        data = await asyncio.to_thread(base64.b64decode, found["data"])
        await asyncio.to_thread(path.write_bytes, data)


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Callable[[], contextlib.AbstractAsyncContextManager[Page]]]:
    """A browser with a profile in `folder`; gives what opens an empty tab."""
    program = find()
    assert program is not None
    command = (program, *_FLAGS, f"--user-data-dir={folder}", "about:blank")
    devnull = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=devnull, stderr=devnull)
    try:
        port = await _port(folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:

            @contextlib.asynccontextmanager
            async def tab() -> AsyncIterator[Page]:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as reply:
                    url = (await reply.json())["webSocketDebuggerUrl"]
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    page = Page(socket)
                    reader = asyncio.create_task(page.read())
                    try:
                        yield page
                    finally:
                        reader.cancel()
                        await asyncio.wait((reader,))

            yield tab
    finally:
        process.terminate()
        await process.wait()


async def _port(file: Path) -> int:
    """The port that the browser chose, once it has written it down."""
    async with asyncio.timeout(_START_S):
        while True:
            if file.exists() and (text := file.read_text()):  # noqa: ASYNC240  a few bytes, on a local disk
                return int(text.split()[0])
            await asyncio.sleep(0.05)
