"""`specd serve` with the default model in a process of its own, as clients and its operator see it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2

MODEL = "smol"
KEY = "sk-everybody"
SMALL_KEY = "sk-small"  # another tenant: what it fills is not everybody's
REQUESTS_PER_KEY = 12
MAX_LEN = 8192
LONG = 6000  # tokens: longer than any test waits
LONG_PROMPT = "Write the numbers from 1 to 2000 in English words, one on each line, and nothing else."
_WAIT_S = 90.0


class Served:
    """One daemon; `url` has no path."""

    def __init__(self, process: subprocess.Popen[str], url: str, control: httpx2.Client) -> None:
        self.process = process
        self.url = url
        self._control = control

    def control(self, method: str, path: str, body: Any = None) -> Any:
        """The result of one command of the control socket."""
        reply = self._control.request(method, path, json=body).json()
        assert reply["ok"], reply
        return reply["result"]

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.control("GET", "/v1/status")["stats"]
        return found

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step is scheduled: what streams now stays in the middle of its text."""
        self.control("POST", "/v1/pause")
        try:
            yield
        finally:
            self.control("POST", "/v1/unpause")

    def abort_all(self) -> int:
        """Ends every live request, as an operator does: a stream gets an error event."""
        requests = {row["request_id"] for row in self.control("GET", "/v1/requests")}
        for name in requests:
            self.control("DELETE", f"/v1/requests/{name}")
        return len(requests)

    def until_idle(self) -> dict[str, Any]:
        """Waits until nothing runs and every page can be had again; the counters then."""

        def idle() -> bool:
            stats = self.stats()
            return stats["live_requests"] == 0 and stats["pages_free"] == stats["pages_total"]

        until(idle)
        return self.stats()

    def responses(self, path: str) -> dict[str, int]:
        """Answers so far of one path, by status."""
        text = httpx2.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        found = {}
        for line in text.splitlines():
            match = re.fullmatch(r"specd_http_responses_total\{([^}]*)\} (\S+)", line)
            if match and f'="{path}"' in match[1]:
                status = re.search(r'status="(\d+)"', match[1])
                assert status is not None, line
                found[status[1]] = int(float(match[2]))
        return found


def until(condition: Callable[[], bool]) -> None:
    """Polls what another process does."""
    end = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@contextlib.contextmanager
def serve(model: Path, folder: Path, *settings: str) -> Iterator[Served]:
    """A daemon that asks for keys, has a control socket in `folder`, and must end well unless it was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    keys, control, log = folder / "keys", folder / "control" / "admin.sock", folder / "log"
    keys.write_text(f"{KEY}\n{SMALL_KEY}\n")
    keys.chmod(0o600)
    own = [
        f"server.api_keys_file={keys}",
        f"admin.socket={control}",
        "log.level=warning",
        f"model.max_len={MAX_LEN}",
        "speculation.self_check=false",
        f"scheduler.max_requests_per_key={REQUESTS_PER_KEY}",
    ]
    command = [sys.executable, "-u", "-m", "specd", "serve", str(model), "--port", "0", "--served-name", MODEL]
    command += [word for setting in (*own, *settings) for word in ("--set", setting)]
    transport = httpx2.HTTPTransport(uds=str(control))
    with (
        log.open("w") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process,
        httpx2.Client(transport=transport, base_url="http://admin", timeout=_WAIT_S) as client,
    ):
        try:
            served = Served(process, _address(process, log), client)
            until(lambda: httpx2.get(f"{served.url}/health").status_code == 200)
            yield served
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()


def _address(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.match(r"\s*address\s+(http://\S+)", line):
            return match[1]
    raise AssertionError(log.read_text())
