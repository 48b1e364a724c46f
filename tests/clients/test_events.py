"""Streams as bytes: only what the standard and every client allows, and the same events wherever the bytes are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.clients.sdks import library
from tests.clients.served import KEY, MODEL, Served

pytestmark = [
    pytest.mark.clients,
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore"),  # those of other people's libraries
]

TEXT = "naïve 漢字 🎉 한글\u2028 \r\n end"  # two, three and four bytes, and what some take for an end of line
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": TEXT, "echo": True, "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": {**CHAT, "max_tokens": 4, "logprobs": True, "stream_options": {"include_usage": True}},
    "/v1/responses": {"model": MODEL, "input": "Say hello.", "max_output_tokens": 4},
    "/v1/messages": {**CHAT, "max_tokens": 4},
}
Event = tuple[str, str]  # name and data


def stream_of(served: Served, path: str) -> bytes:
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = httpx2.post(f"{served.url}{path}", json={**BODIES[path], "stream": True}, headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert "content-encoding" not in reply.headers
    return reply.content


def strict(raw: bytes) -> list[Event]:
    """Events, by a parser that refuses what some client trips over: `id`, `retry`, CR, data of several lines."""
    assert raw.endswith(b"\n\n")
    events = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert len(fields) == block.count("\n") + 1, "a field is there once"
        assert "\r" not in block
        if "" in fields:
            assert len(fields) == 1, "a comment stands alone"
            continue
        assert set(fields) in ({"data"}, {"event", "data"}), fields
        events.append((fields.get("event", "message"), fields["data"]))
    return events


@pytest.mark.parametrize("path", BODIES)
def test_events_are_the_same_wherever_bytes_are_cut(path: str, served: Served) -> None:
    raw = stream_of(served, path)
    events = strict(raw)
    assert len(events) > 3
    assert all(data == "[DONE]" or json.loads(data) for _, data in events)
    assert ("message", "[DONE]") in events[-1:] or path in ("/v1/responses", "/v1/messages")
    assert parsed([raw[i : i + 1] for i in range(len(raw))]) == events
    short = raw[: raw.index(b"\n\n", 300) + 2]
    first = strict(short)
    for cut in range(len(short) + 1):
        assert parsed([short[:cut], short[cut:]]) == first, cut
    assert parsed([raw[: len(raw) // 2]]) != events, "half of it would be seen"


def parsed(chunks: list[bytes]) -> list[Event]:
    """What httpx-sse makes of a body that comes in these chunks."""
    httpx, sse = library("httpx"), library("httpx_sse")

    class Body(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from chunks

    response = httpx.Response(200, headers={"content-type": "text/event-stream; charset=utf-8"}, stream=Body())
    return [(event.event, event.data) for event in sse.EventSource(response).iter_sse()]


def test_text_of_many_bytes_arrives_whole(served: Served) -> None:
    events = strict(stream_of(served, "/v1/completions"))
    text = "".join(json.loads(data)["choices"][0]["text"] for _, data in events[:-1])
    assert text.startswith(TEXT)
