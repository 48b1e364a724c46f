"""A stream that breaks must never look like a whole answer: an error event, and a daemon that is killed."""

from __future__ import annotations

import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.clients.conftest import CLIENTS, Clients
from tests.clients.served import LONG, LONG_PROMPT, Served, serve

pytestmark = [
    pytest.mark.clients,
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore"),  # those of other people's libraries
]


def broken(name: str, stream: Generator[str, None, None]) -> str:
    """Class of what reading on raises; one that the client has for it."""
    with pytest.raises(Exception) as found:
        for _ in stream:
            pass
    kind = getattr(found.value, "kind", type(found.value).__name__)
    assert kind in CLIENTS[name].broken, found.value
    return kind


@pytest.mark.parametrize("name", CLIENTS)
def test_an_error_event_raises(name: str, served: Served, clients: Clients) -> None:
    stream = clients.make(name, served.url).stream(LONG_PROMPT, LONG)
    assert next(stream)
    assert served.abort_all() == 1
    broken(name, stream)
    served.until_idle()


@pytest.mark.timeout(600)
def test_a_daemon_that_is_killed_ends_no_stream_well(real_model_path: Path, tmp_path: Path, clients: Clients) -> None:
    """kill -9 while every client is in the middle of a text. Nothing is computed but to start the next client."""
    streams = {}
    with serve(real_model_path, tmp_path / "killed") as served:
        made, missing = clients.all(served.url)
        for name, client in made.items():
            streams[name] = client.stream(LONG_PROMPT, LONG)
            served.control("POST", "/v1/unpause")
            assert next(streams[name])
            served.control("POST", "/v1/pause")
        assert served.stats()["live_requests"] == len(streams)
        served.process.send_signal(signal.SIGKILL)
        served.process.wait()
        for name, stream in streams.items():
            broken(name, stream)
    if missing:
        pytest.skip(f"the others raised; not tried: {', '.join(missing)}")
