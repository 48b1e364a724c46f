"""Every client gets the same texts, streamed or not, values of a schema, and its own exceptions."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import CLIENTS, Clients
from tests.clients.sdks import TOOL, Person
from tests.clients.served import LONG, LONG_PROMPT, MAX_LEN, REQUESTS_PER_KEY, SMALL_KEY, Served, until

pytestmark = [
    pytest.mark.clients,
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore"),  # those of other people's libraries
]

PROMPT = "Name three colours of the rainbow, and say something about each."
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def expected(served: Served, clients: Clients) -> str:
    """What the first client is told: the others must be told the same."""
    text = clients.make("openai", served.url).answer(PROMPT, 32)
    assert len(text) > 40
    return text


@pytest.mark.parametrize("name", CLIENTS)
def test_a_text_is_the_same_streamed_or_not_whoever_asks(
    name: str, served: Served, clients: Clients, expected: str
) -> None:
    client = clients.make(name, served.url)
    assert client.answer(PROMPT, 32) == expected
    pieces = list(client.stream(PROMPT, 32))
    assert "".join(pieces) == expected
    assert len(pieces) > 1


@pytest.mark.parametrize("name", CLIENTS)
def test_a_value_of_a_schema(name: str, served: Served, clients: Clients) -> None:
    assert Person.model_validate(clients.make(name, served.url).person())


@pytest.mark.parametrize("name", [name for name in CLIENTS if name != "llm"])  # it has no tool_choice
@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_tool_that_must_be_called(name: str, choice: str, served: Served, clients: Clients) -> None:
    called, arguments = clients.make(name, served.url).call(choice)
    assert called == TOOL
    assert arguments["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_that_leaves_frees_everything(name: str, served: Served, clients: Clients) -> None:
    before = served.until_idle()
    stream = clients.make(name, served.url).stream(LONG_PROMPT, LONG)
    assert next(stream)
    assert served.stats()["live_requests"] == 1
    stream.close()
    after = served.until_idle()
    assert after["requests_aborted"] == before["requests_aborted"] + 1
    assert after["generation_tokens"] - before["generation_tokens"] < LONG, "it was not computed to its end"


# ---------------------------------------------------------------- errors before the first token


def failure(client: Any, *, prompt: str = PROMPT, max_tokens: int = 8, **fields: Any) -> tuple[str, int | None]:
    """Class and HTTP status of what an answer raises."""
    with pytest.raises(Exception) as found:
        client.answer(prompt, max_tokens, **fields)
    return getattr(found.value, "kind", type(found.value).__name__), getattr(found.value, "status_code", None)


@pytest.mark.parametrize("name", CLIENTS)
def test_refusals_are_the_client_s_own_errors(name: str, served: Served, clients: Clients) -> None:
    wrong = CLIENTS[name].wrong
    good, bad_key = clients.make(name, served.url), clients.make(name, served.url, key="sk-wrong")
    assert failure(good, prompt="word " * MAX_LEN) == (context_error(name), 400)
    assert failure(bad_key) == (wrong[401], 401)
    assert failure(clients.make(name, served.url, model="nobody")) == (wrong[404], 404)


def context_error(name: str) -> str:
    """Two know a prompt that is too long by the words of its message."""
    own = {"litellm": "ContextWindowExceededError", "langchain": "OpenAIContextOverflowError"}
    return own.get(name, CLIENTS[name].wrong[400])


@contextlib.contextmanager
def full(served: Served, clients: Clients) -> Iterator[None]:
    """One key has as many requests as it may."""
    served.until_idle()
    client = clients.make("openai", served.url, key=SMALL_KEY)
    streams = [client.stream(LONG_PROMPT, LONG) for _ in range(REQUESTS_PER_KEY)]
    for stream in streams:
        next(stream)
    try:
        yield
    finally:
        for stream in streams:
            stream.close()


def test_a_full_queue_is_a_rate_limit(served: Served, clients: Clients) -> None:
    made, missing = clients.all(served.url, key=SMALL_KEY)
    del made["llm"]  # it tries again, as its openai client does by default
    with full(served, clients), served.paused():
        found = {name: failure(client) for name, client in made.items()}
    assert found == {name: (CLIENTS[name].wrong[429], 429) for name in made}
    if missing:
        pytest.skip(f"the others raised; not tried: {', '.join(missing)}")


def test_a_full_queue_is_tried_again_and_a_deadline_is_not(served: Served, clients: Clients) -> None:
    """`Retry-After` and `x-should-retry` are followed by those that read them."""
    patient = clients.make("openai", served.url, key=SMALL_KEY, retries=2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with full(served, clients):
            before = served.responses(CHAT).get("429", 0)
            asked = pool.submit(patient.answer, PROMPT, 4)
            until(lambda: served.responses(CHAT).get("429", 0) > before)
        assert asked.result(120)
    before = served.responses(CHAT).get("504", 0)
    endless = {"extra_body": {"ignore_eos": True}, "max_tokens": LONG}
    assert failure(patient, extra_headers={"x-request-timeout": "4"}, **endless) == ("InternalServerError", 504)
    assert served.responses(CHAT)["504"] == before + 1
