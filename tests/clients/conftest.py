"""One daemon for all of these tests, and every client against it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.programs import LlmCommand, OpenAINode, VercelAI
from tests.clients.sdks import Anthropic, AsyncOpenAI, Client, LangChain, LiteLLM, OpenAI
from tests.clients.served import Served, serve

CLIENTS: dict[str, Any] = {
    "openai": OpenAI,
    "openai-async": AsyncOpenAI,
    "openai-node": OpenAINode,
    "anthropic": Anthropic,
    "litellm": LiteLLM,
    "langchain": LangChain,
    "llm": LlmCommand,
    "ai-sdk": VercelAI,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Clients:
    """Makes clients by name, for any daemon. A client that is not installed skips the test that asks for it."""

    folder: Path
    stack: contextlib.ExitStack

    def make(self, name: str, url: str, **options: Any) -> Client:
        if name == "llm":
            options["folder"] = self.folder / f"llm-{len(list(self.folder.iterdir()))}"
        client: Client = CLIENTS[name](url, **options)
        if isinstance(client, AsyncOpenAI):
            self.stack.callback(client.close)
        return client

    def all(self, url: str, **options: Any) -> tuple[dict[str, Client], list[str]]:
        """Every client that is installed by name, and what was said about the others."""
        made, missing = {}, []
        for name in CLIENTS:
            try:
                made[name] = self.make(name, url, **options)
            except pytest.skip.Exception as skipped:
                missing.append(f"{name}: {skipped}")
        return made, missing


@pytest.fixture(scope="session", autouse=True)
def _left_open() -> Iterator[None]:
    """Libraries leave sockets and event loops to the collector, whose warnings would be errors after the last test."""
    yield
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    with contextlib.ExitStack() as stack:
        yield Clients(tmp_path_factory.mktemp("clients"), stack)


@pytest.fixture(scope="session")
def served(real_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(real_model_path, tmp_path_factory.mktemp("served")) as found:
        yield found
