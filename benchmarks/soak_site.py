"""What a client of the soak needs: requests over HTTP, read to their end or not, and the word for how each ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson

from benchmarks.served import Served

SENTENCE = "The harbour has two piers, a lighthouse of red brick and a small shipyard. "
_PEOPLE = ("a sailor", "the baker", "an engineer", "the cook", "a farmer", "the librarian")


class Violation(Exception):
    """Something that must not happen."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """how: finished, refused (an error instead of an answer), ended (an error within it), left (by the client)."""

    how: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.how} {self.code}".strip()


@dataclasses.dataclass(slots=True)
class Site:
    """What a visit needs. config: the file that a reload reads; answers: text of each greedy prompt, as first seen."""

    served: Served
    session: aiohttp.ClientSession
    draw: random.Random
    model: str
    max_len: int
    config: Path
    answers: dict[str, str] = dataclasses.field(default_factory=dict)
    operating: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)  # there is one operator

    def chat(self, **fields: Any) -> dict[str, Any]:
        text = f"Tell {self.draw.choice(_PEOPLE)} something about {self.draw.choice(_PEOPLE)}."
        if self.draw.random() < 0.3:
            text = SENTENCE * self.draw.randint(1, max(1, self.max_len // 200)) + text
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.draw.randint(1, 48),
            "temperature": self.draw.choice((0.0, 0.7, 1.0)),
            **fields,
        }

    def stream(self, **fields: Any) -> dict[str, Any]:
        return self.chat(stream=True, stream_options={"include_usage": True}, **fields)

    @contextlib.asynccontextmanager
    async def post(
        self, path: str, body: object, headers: Mapping[str, str] = MappingProxyType({})
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        sent = {"Content-Type": "application/json", **headers}
        url = self.served.url + path
        async with self.session.post(url, data=orjson.dumps(body), headers=sent) as reply:
            yield reply

    async def ask(self, path: str, body: object) -> tuple[Outcome, Any]:
        """A whole answer, or how it was refused."""
        async with self.post(path, body) as reply:
            content = orjson.loads(await reply.read())
            return (Outcome("finished"), content) if reply.status == 200 else (refusal(reply, content), content)

    async def follow(
        self, path: str, body: object, *, pause_s: float = 0.0, headers: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[Outcome, str]:
        """A stream to its end and its text; pause_s: between lines."""
        async with self.post(path, body, headers) as reply:
            if reply.status != 200:
                return refusal(reply, orjson.loads(await reply.read())), ""
            return await _read(reply, pause_s)

    async def connect(self, path: str, body: object, *, share: float = 1.0) -> Leaver:
        """A request on a connection of its own of which `share` is sent."""
        parts = urllib.parse.urlsplit(self.served.url)
        assert parts.hostname is not None
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        data = orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        writer.write(request[: max(1, int(share * len(request)))])
        return Leaver(reader, writer)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaver:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def leave(self) -> Outcome:
        self.writer.transport.abort()
        return Outcome("left")


def refusal(reply: aiohttp.ClientResponse, content: Any) -> Outcome:
    """Raises Violation when it is not as the contract says."""
    error = content.get("error") if isinstance(content, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        raise Violation(f"HTTP {reply.status} without an error object")
    if reply.status == 429 and not reply.headers.get("Retry-After", "").isdecimal():
        raise Violation("429 without Retry-After")
    return Outcome("refused", error["code"])


async def _read(reply: aiohttp.ClientResponse, pause_s: float) -> tuple[Outcome, str]:
    text, open_choices = "", set[int]()
    async for line in reply.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            if open_choices:
                raise Violation(f"[DONE] before choices {sorted(open_choices)} had finished")
            return Outcome("finished"), text
        event = orjson.loads(data)
        if event.get("error"):
            return Outcome("ended", event["error"]["code"]), text
        for choice in event.get("choices", ()):
            open_choices.add(choice["index"])
            if choice["finish_reason"] is not None:
                open_choices.discard(choice["index"])
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if pause_s:
            await asyncio.sleep(pause_s)
    raise Violation("a stream ended without [DONE] and without an error")
