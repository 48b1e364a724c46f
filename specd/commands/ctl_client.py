"""The caller's side of the control socket. Standard library only."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specd.errors import SpecdError

_TIMEOUT_S = 30.0
_SILENCE_S = 90.0  # events come every 60 s at least


class Unreachable(SpecdError):
    """Nobody answers on the control socket, or not as specd does."""

    code = "unreachable"


class Refusal(SpecdError):
    """The daemon's own answer: it will not, or it could not."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Client:
    """if_generation: refuse to change anything that somebody has changed since."""

    def __init__(self, path: Path, *, if_generation: int | None = None) -> None:
        self._path = path
        self._headers = {"Content-Type": "application/json"}
        if if_generation is not None:
            self._headers["If-Match"] = f'"{if_generation}"'

    def call(
        self, method: str, target: str, body: object = None, *, text: bytes | None = None, timeout_s: float = _TIMEOUT_S
    ) -> Any:
        """The `result` of the reply. text: the body of a call that takes one. Raises Unreachable or Refusal."""
        connection = _UnixConnection(self._path, timeout_s)
        try:
            content = json.dumps(body).encode() if body is not None else text
            kind = {} if text is None else {"Content-Type": "text/plain; charset=utf-8"}
            connection.request(method, target, content, {**self._headers, **kind})
            raw = connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        return self._result(raw)

    def events(self, interval_s: float) -> Iterator[dict[str, Any]]:
        """What /v1/events says, until the daemon ends. Raises Unreachable or Refusal."""
        connection = _UnixConnection(self._path, _SILENCE_S)
        try:
            connection.request("GET", f"/v1/events?interval={interval_s:g}", None, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                self._result(response.read())
            for line in response:
                event = json.loads(line)
                if not isinstance(event, dict) or not isinstance(event.get("type"), str):
                    raise self._strange()
                yield event
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        except (ValueError, RecursionError) as error:
            raise self._strange() from error
        finally:
            connection.close()

    def _result(self, raw: bytes) -> Any:
        try:
            reply = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self._strange() from error
        if isinstance(reply, dict) and reply.get("ok"):
            return reply.get("result")
        refusal = reply.get("error") if isinstance(reply, dict) else None
        if not isinstance(refusal, dict):
            raise self._strange()
        raise Refusal(f"{refusal.get('code')}: {refusal.get('message')}", str(refusal.get("code")))

    def _unreachable(self, error: Exception) -> Unreachable:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return Unreachable(f"{self._path}: {reason}; is `specd serve` running, with this admin.socket?")

    def _strange(self) -> Unreachable:
        return Unreachable(f"{self._path}: the reply is not JSON, or not specd's; is it specd's control socket?")
