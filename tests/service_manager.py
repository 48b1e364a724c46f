"""A service manager for tests: it keeps the listening socket, starts the daemon on it as fd 3, and starts it again.

What systemd does for `specd@.socket` and `Restart=on-failure`, in one process: connections that come while no daemon
runs wait in the socket's backlog. And clients in threads, which call whether a daemon runs or not.
"""

from __future__ import annotations

import collections
import dataclasses
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

# LISTEN_PID is the daemon's own pid, and the socket is fd 3: both are only known in the child.
_EXEC = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = str(os.getpid()); " + (
    "os.execv(sys.argv[2], sys.argv[2:])"
)
_ACCOUNT = re.compile(r"^accepted (\d+) == finished (\d+) \+ failed (\d+) \+ aborted (\d+)$", re.MULTILINE)
_PATIENCE_S = 120.0


class Manager:
    """`start` runs a daemon until it is ready; `end` waits for it and gives what it printed."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self._folder = folder
        self._arguments = [*arguments, "--set", f"admin.socket={folder / 'admin.sock'}"]
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = int(self.listener.getsockname()[1])
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(folder / "notify"))
        self._notify.settimeout(_PATIENCE_S)
        self.process: subprocess.Popen[str] | None = None

    def start(self, *, ready: bool = True) -> None:
        """Until it is ready, or only until it loads: from then on it knows what to do with signals."""
        environment = {**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"}
        environment["NOTIFY_SOCKET"] = str(self._folder / "notify")
        command = [sys.executable, "-c", _EXEC, str(self.listener.fileno()), sys.executable, "-m", "specd", "serve"]
        with (self._folder / "daemon.log").open("ab") as err:
            self.process = subprocess.Popen(
                [*command, *self._arguments],
                pass_fds=[self.listener.fileno()],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )
        self.wait_for("READY=1" if ready else "STATUS=loading the model")

    def wait_for(self, *words: str) -> None:
        """Until each of the words has been said, in this order, by the daemon that runs now."""
        assert self.process is not None
        for word in words:
            while word not in self._notify.recv(4096).decode().split("\n"):
                assert self.process.poll() is None, self.log

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> tuple[int, tuple[int, ...] | None]:
        """The exit code, and the account (accepted, finished, failed, aborted) where one was printed that adds up."""
        assert self.process is not None
        out, _ = self.process.communicate(timeout=_PATIENCE_S)
        found = _ACCOUNT.search(out)
        account = tuple(int(number) for number in found.groups()) if found else None
        assert account is None or account[0] == sum(account[1:])
        return self.process.returncode, account

    @property
    def log(self) -> str:
        return (self._folder / "daemon.log").read_text(encoding="utf-8")

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self.listener.close()
        self._notify.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One request, as its client saw it: finished, refused CODE, ended CODE (in the stream), cut, or not connected."""

    began_s: float
    ended_s: float
    outcome: str


class Clients:
    """Threads that ask for one stream after the other, each on a connection of its own, until they are told to stop."""

    def __init__(self, port: int, count: int, *, max_tokens: int) -> None:
        self._port = port
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._calls: collections.deque[Call] = collections.deque()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Call]:
        self._stop.set()
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads)
        return list(self._calls)

    def wait_for_more(self, count: int) -> None:
        """Until so many more streams have finished."""
        wanted, until = self._finished + count, time.monotonic() + _PATIENCE_S
        while self._finished < wanted:
            assert time.monotonic() < until, self._calls
            time.sleep(0.01)

    @property
    def _finished(self) -> int:
        return sum(call.outcome == "finished" for call in self._calls.copy())

    def _run(self, number: int) -> None:
        for count in itertools.count():
            if self._stop.is_set():
                return
            began = time.monotonic()
            outcome = self._call(f"client {number} asks {count}")
            self._calls.append(Call(began, time.monotonic(), outcome))
            if outcome.startswith("refused"):
                time.sleep(0.05)

    def _call(self, prompt: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE_S)
        try:
            connection.connect()
        except OSError:
            return "not connected"
        body = {"prompt": prompt, "max_tokens": self._max_tokens, "stream": True, "ignore_eos": True}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                return f"refused {json.loads(reply.read())['error']['code']}"
            return _outcome(reply.read().decode())
        except (OSError, http.client.HTTPException):
            return "cut"
        finally:
            connection.close()


def _outcome(text: str) -> str:
    """Of a body that was complete by HTTP's own rules."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    errors = [event["error"]["code"] for event in events if "error" in event]
    if errors:
        return f"ended {errors[0]}"
    finished = any(choice["finish_reason"] for event in events for choice in event["choices"])
    return "finished" if finished and text.endswith("data: [DONE]\n\n") else "silently truncated"
