"""`specd serve` as a process of its own, on a free port, asked over HTTP and its control socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from specd.commands.ctl_client import Client

_ACCOUNT = re.compile(r"accepted (\d+) == finished (\d+) \+ failed (\d+) \+ aborted (\d+)( \+ LOST -?\d+)?")
_LOAD_S, _END_S = 600.0, 180.0


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """How a daemon ended. account: accepted, finished, failed, aborted; None: it printed none that adds up."""

    code: int | None  # None: it did not
    account: tuple[int, int, int, int] | None
    errors: list[str]  # lines of its log of level error, and of tracebacks


@dataclasses.dataclass(slots=True)
class Served:
    """A daemon that answers at `url`; what it logs is in the file `log`."""

    process: asyncio.subprocess.Process
    control: Client
    log: Path
    url: str = ""

    async def call(self, method: str, path: str, body: object = None) -> Any:
        """One command of the control socket. Raises what `ctl_client.Client.call` raises."""
        return await asyncio.to_thread(self.control.call, method, path, body)

    async def metrics(self) -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as reply:
            return await reply.text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def wait_ready(self) -> None:
        """Reads what it prints up to its addresses, and asks until it is ready. RuntimeError when it ends before."""
        assert self.process.stdout is not None
        async with asyncio.timeout(_LOAD_S):
            while b" address " not in (line := await self.process.stdout.readline()):
                if not line:
                    raise RuntimeError(f"the daemon ended: {self.log.read_text(encoding='utf-8')[-2000:]}")
            self.url = line.split()[1].decode().rstrip(",")
            async with aiohttp.ClientSession() as session:
                while not await self._is_ready(session):  # noqa: ASYNC110  another process's state
                    await asyncio.sleep(0.05)

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        async with session.get(f"{self.url}/health") as reply:
            return reply.status == 200

    async def stop(self) -> End:
        """SIGTERM, and what it says of its requests at the end. RuntimeError, with its stacks, when it does not end."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            self.signal(signal.SIGTERM)
        ending = asyncio.ensure_future(self.process.communicate())
        await asyncio.wait((ending,), timeout=_END_S)
        if not ending.done():
            self.signal(signal.SIGUSR1)
            await asyncio.wait((ending,), timeout=10.0)
            ending.cancel()
            text = self.log.read_text(encoding="utf-8")
            raise RuntimeError(f"the daemon did not end within {_END_S:g} s of SIGTERM: {text[-8000:]}")
        out, _ = ending.result()
        assert self.process.returncode is not None
        found = _ACCOUNT.search(out.decode())
        account = None
        if found and found[5] is None:
            accepted, finished, failed, aborted = (int(found[i]) for i in range(1, 5))
            account = (accepted, finished, failed, aborted) if accepted == finished + failed + aborted else None
        return End(self.process.returncode, account, log_errors(self.log.read_text(encoding="utf-8")))


def log_errors(text: str) -> list[str]:
    """Lines of a JSON log that say that something went wrong, and those that are no JSON lines at all."""
    return [line for line in text.splitlines() if '"level":"error"' in line or not line.startswith("{")]


@contextlib.asynccontextmanager
async def serving(
    folder: Path, model: str, *, words: Sequence[str] = (), config: Path | None = None
) -> AsyncIterator[Served]:
    """A daemon on a free port of this machine; its log and control socket are in `folder`. Killed if it still runs.

    words: further words of its command line.
    """
    control, log = folder / "control" / "admin.sock", folder / "daemon.log"
    command = [sys.executable, "-m", "specd", "serve", model, "--port", "0", *words]
    command += ["--set", f"admin.socket={control}", "--set", "log.format=json"]
    command += ["--config", str(config)] if config is not None else []
    with log.open("wb") as err:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=err)
    served = Served(process, Client(control), log)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # or the daemon would be left behind
    try:
        await served.wait_ready()
        yield served
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        if process.returncode is None:
            process.kill()
            await process.communicate()
