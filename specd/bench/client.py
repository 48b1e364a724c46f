"""One streamed chat completion, measured from outside: what a user of the server sees.

A request that fails is of one kind: http.STATUS.CODE (refused), stream.CODE (an error within the stream), connection,
timeout, cut (the stream ended without [DONE]), not_json, malformed (JSON, and no chunk of a chat completion), or
unfinished (nobody waited for it any more).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import AsyncIterable
from typing import Any

import aiohttp
import orjson
from aiohttp.http_exceptions import LineTooLong

from specd.bench.prompts import Messages
from specd.errors import SpecdError

UNFINISHED = "unfinished"
_USED = ("prompt_tokens", "completion_tokens")
_DRAFTED = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
_MODELS_S = 30.0  # for the list of models, which costs a server nothing
_TEXTS = ("reasoning_content", "reasoning", "content")  # of a delta: what it thinks is text that a user waits for, too


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times are seconds; arrivals are seconds from the start to each chunk that carried text.

    The start is the send, or with a schedule the time at which it was due: late_s before it was sent.
    """

    ok: bool
    speculation: str  # "auto" or "off"
    total_s: float
    arrivals: tuple[float, ...]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    text: str = ""
    error: str = ""
    kind: str = ""  # of the error
    retry_after_s: float | None = None  # what a refusal asked for
    late_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals[0] if self.arrivals else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first, over the time after the first: prompt work is not in it."""
        if len(self.arrivals) < 2 or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / (self.arrivals[-1] - self.arrivals[0])

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Inter-token latency as it is seen: between chunks, whatever number of tokens each holds."""
        return tuple(late - early for early, late in zip(self.arrivals, self.arrivals[1:], strict=False))


class Client:
    """Talks to one OpenAI-compatible server."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, api_key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        self._session = session
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def first_model(self) -> str:
        """The server's first model. Raises SpecdError when it does not answer."""
        timeout = aiohttp.ClientTimeout(total=min(self._timeout.total or _MODELS_S, _MODELS_S))
        try:
            url = f"{self._url}/v1/models"
            async with self._session.get(url, headers=self._headers, timeout=timeout) as reply:
                if reply.status in (401, 403):
                    words = f"the server asks for a key ({reply.status}): give it in SPECD_API_KEY, or with --api-key"
                    raise SpecdError(f"{self._url}: {words}")
                body = orjson.loads(await reply.read())
                reply.raise_for_status()
            return str(body["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            if isinstance(error, aiohttp.ClientResponseError) and error.status == 503:
                raise SpecdError(f"{self._url}: the server is not ready (503): it loads, or it drains") from error
            raise SpecdError(f"{self._url}: {_reason(error)}; is the server running?") from error
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise SpecdError(f"{self._url}/v1/models: not an OpenAI model list") from error

    async def complete(self, body: dict[str, Any], *, speculation: str, due: float | None = None) -> Sample:
        """Sends one request; a failure is a Sample with ok = False, so that a run goes on and counts it.

        due: when it was to be sent (time.perf_counter); its times then count from there.
        """
        if speculation == "off":
            body = {**body, "speculation": {"mode": "off"}}
        now = time.perf_counter()
        start = now if due is None else due
        stream = _Stream(start)
        failure: Failure | None
        try:
            async with self._session.post(
                f"{self._url}/v1/chat/completions",
                data=orjson.dumps(body),
                headers={**self._headers, "Content-Type": "application/json"},
                timeout=self._timeout,
                allow_redirects=False,  # to whom the load may go has been checked
            ) as reply:
                failure = await stream.read(reply.content) if reply.status == 200 else await _refusal(reply)
        except TimeoutError as error:
            failure = Failure("timeout", _reason(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            failure = Failure("connection", _reason(error))
        return stream.sample(speculation, failure, late_s=now - start)


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    kind: str
    text: str
    retry_after_s: float | None = None


async def _refusal(reply: aiohttp.ClientResponse) -> Failure:
    text = await reply.text(errors="replace")
    try:
        code = orjson.loads(text)["error"]["code"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        code = None
    after = reply.headers.get("Retry-After", "")
    kind = f"http.{reply.status}" + (f".{code}" if code else "")
    return Failure(kind, f"HTTP {reply.status}: {text[:300]}", float(after) if after.isdecimal() else None)


def _reason(error: Exception) -> str:
    """A failure in words: of a connection that was not made the system's own, without aiohttp's internals."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return os.strerror(number) if number and number > 0 else str(error.os_error.strerror or error.os_error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class _Stream:
    """Reads server-sent events into a Sample."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._arrivals: list[float] = []
        self._pieces: list[str] = []
        self._usage: dict[str, int] = {}
        self._spec: dict[str, int] = {}

    async def read(self, lines: AsyncIterable[bytes]) -> Failure | None:
        """None when the stream was complete: an end without [DONE] is a cut stream."""
        try:
            async for line in lines:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return None
                failure = self._line(data) if line.startswith(b"data:") else None
                if failure:
                    return failure
        except LineTooLong:
            return Failure("malformed", "a line of the stream is too long to be read")
        return Failure("cut", "the stream ended without [DONE]")

    def _line(self, data: bytes) -> Failure | None:
        try:
            return self._event(_object(orjson.loads(data), "an event"))
        except orjson.JSONDecodeError:
            return Failure("not_json", f"an event is not JSON: {data[:100]!r}")
        except _MalformedError as error:
            return Failure("malformed", f"{error}: {data[:100]!r}")

    def _event(self, event: dict[str, Any]) -> Failure | None:
        """Raises _MalformedError."""
        error = event.get("error")
        if error:
            code = error.get("code") if isinstance(error, dict) else None
            text = str((isinstance(error, dict) and error.get("message")) or error)
            return Failure(f"stream.{code}" if code else "stream", text)
        choices = event.get("choices") or []
        if not isinstance(choices, list):
            raise _MalformedError("choices is no list")
        deltas = [_object(_object(choice, "a choice").get("delta"), "delta") for choice in choices]
        text = "".join(_text(delta, name) for delta in deltas for name in _TEXTS)
        if text:
            self._arrivals.append(time.perf_counter() - self._start)
            self._pieces.append(text)
        self._usage = _counts(event.get("usage"), "usage", _USED) or self._usage
        metrics = _object(event.get("metrics"), "metrics").get("speculative_decoding")
        self._spec = _counts(metrics, "speculative_decoding", _DRAFTED) or self._spec
        return None

    def sample(self, speculation: str, failure: Failure | None, *, late_s: float) -> Sample:
        return Sample(
            ok=failure is None,
            speculation=speculation,
            total_s=time.perf_counter() - self._start,
            arrivals=tuple(self._arrivals),
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            completion_tokens=self._usage.get("completion_tokens", 0),
            num_spec_steps=self._spec.get("num_spec_steps", 0),
            num_draft_tokens=self._spec.get("num_draft_tokens", 0),
            num_accepted_tokens=self._spec.get("num_accepted_draft_tokens", 0),
            text="".join(self._pieces),
            error=failure.text if failure else "",
            kind=failure.kind if failure else "",
            retry_after_s=failure.retry_after_s if failure else None,
            late_s=late_s,
        )


class _MalformedError(Exception):
    """What came is no chunk of a chat completion."""


def _object(value: Any, name: str) -> dict[str, Any]:
    """null is an empty one."""
    if value is not None and not isinstance(value, dict):
        raise _MalformedError(f"{name} is no object")
    return value or {}


def _text(delta: dict[str, Any], name: str) -> str:
    value = delta.get(name)
    if value is not None and not isinstance(value, str):
        raise _MalformedError(f"{name} is no string")
    return value or ""


def _counts(value: Any, name: str, of: tuple[str, ...]) -> dict[str, int]:
    found = {key: count for key, count in _object(value, name).items() if key in of and count is not None}
    for key, count in found.items():
        if type(count) is not int or count < 0:
            raise _MalformedError(f"{name}.{key} is no count")
    return found


def request_body(
    model: str, messages: Messages, *, max_tokens: int, temperature: float, ignore_eos: bool = False
) -> dict[str, Any]:
    """A streamed chat completion with usage."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return {**body, "ignore_eos": True} if ignore_eos else body
