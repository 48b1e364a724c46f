"""`specd serve` as a process of its own and the openai client: signals under load, kill -9, what a dead one leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest


@dataclasses.dataclass(slots=True)
class Daemon:
    process: asyncio.subprocess.Process
    port: int

    async def ready(self) -> None:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while await self._health(session) != 200:
                assert self.process.returncode is None, await self.end()
                await asyncio.sleep(0.05)

    async def _health(self, session: aiohttp.ClientSession) -> int:
        try:
            async with session.get(f"http://127.0.0.1:{self.port}/health") as reply:
                return reply.status
        except aiohttp.ClientError:
            return 0

    async def end(self) -> tuple[int | None, str, str]:
        async with asyncio.timeout(30):
            out, err = await self.process.communicate()
        return self.process.returncode, out.decode(), err.decode()

    async def stream(self, number: int, *, started: asyncio.Event, max_tokens: int) -> Any:
        """The finish reason that an openai client sees, or the error it raises."""
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0
        ) as client:
            reasons = []
            chunks = await client.completions.create(
                model="tiny",
                prompt=f"hello {number}",
                max_tokens=max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in chunks:
                started.set()
                reasons.append(chunk.choices[0].finish_reason)
            return reasons[-1]

    async def load(self, count: int, *, max_tokens: int) -> list[asyncio.Task[Any]]:
        """`count` streams, each of which has begun."""
        events = [asyncio.Event() for _ in range(count)]
        tasks = [
            asyncio.create_task(self.stream(i, started=event, max_tokens=max_tokens)) for i, event in enumerate(events)
        ]
        async with asyncio.timeout(30):
            await asyncio.gather(*(event.wait() for event in events))
        return tasks


@contextlib.asynccontextmanager
async def daemon(folder: Path, port: int, control: Path) -> AsyncIterator[Daemon]:
    settings = [f"admin.socket={control}", "log.level=warning", "scheduler.max_running=4"]
    command = [sys.executable, "-m", "specd", "serve", str(folder), "--port", str(port), "--threads", "1"]
    command += ["--served-name", "tiny", *(word for setting in settings for word in ("--set", setting))]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ}
    )
    try:
        yield Daemon(process, port)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_signals_crashes_and_what_they_leave(tiny_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    control = tmp_path / "control" / "admin.sock"
    async with daemon(tiny_folder, port, control) as first:
        await first.ready()
        async with (
            daemon(tiny_folder, port, tmp_path / "other.sock") as second,
            daemon(tiny_folder, 0, control) as third,
        ):
            for refused, reason in ((second, str(port)), (third, str(control))):
                code, _, err = await refused.end()
                assert code == 1
                assert reason in err
                assert "Traceback" not in err
        assert control.exists(), "the refused ones leave the first one's socket alone"
        tasks = await first.load(4, max_tokens=500)
        first.process.send_signal(signal.SIGKILL)
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, openai.APIError), "a stream that is cut off is not a whole answer"
    assert control.exists()
    async with daemon(tiny_folder, port, control) as after:
        await after.ready()
        tasks = await after.load(4, max_tokens=120)
        after.process.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*tasks) == ["length"] * 4
        code, out, err = await after.end()
        assert code == 0
        assert "accepted 4 == finished 4 + failed 0 + aborted 0\n" in out
        assert err == ""
    assert not control.exists()


@pytest.mark.slow  # its parts are shown in this process by test_daemon and test_break_server
async def test_a_second_signal_ends_streams_with_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    async with daemon(tiny_folder, 0, tmp_path / "admin.sock") as served:
        assert served.process.stdout is not None
        async with asyncio.timeout(60):
            while b"address" not in (line := await served.process.stdout.readline()):
                assert line, await served.end()
        served.port = int(line.rsplit(b":", 1)[1])
        tasks = await served.load(4, max_tokens=500)
        served.process.send_signal(signal.SIGTERM)
        served.process.send_signal(signal.SIGINT)
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, openai.APIError)
        code, out, err = await served.end()
        assert code == 75
        assert "accepted 4 == finished 0 + failed 0 + aborted 4\n" in out
        assert "Traceback" not in err
