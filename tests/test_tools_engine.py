"""Calls that a grammar makes, on the whole server around a tiny random model: the same with every drafter.

What this model would like to say never fits, so a call comes out of the masks alone.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from specd.config import Config, KVConfig, ModelConfig, SchedulerConfig, ServerConfig, SpeculationConfig
from specd.engine import Engine
from specd.grammar import Grammars
from specd.request import Grammar
from tests.http_server import Client, Reply, serve
from tests.test_tools import add_up, told
from tests.tiny import tiny_config, write_hf_folder

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
CASES: dict[str, dict[str, Any]] = {
    "required": {"tool_choice": "required"},
    "required, one": {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0},
    "named": {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "calls or JSON": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER}}},
}


@asynccontextmanager
async def serving(folder: Path, draft: str) -> AsyncIterator[Client]:
    config = Config(
        server=ServerConfig(served_names=("tiny",)),
        model=ModelConfig(path=str(folder), threads=1),
        speculation=SpeculationConfig(draft=draft, draft_len="adaptive" if draft == "none" else 3, self_check=False),
        scheduler=SchedulerConfig(max_running=4),
        kv=KVConfig(memory="64MiB"),
    )
    engine = await Engine.create(config)
    app_engine: Any = engine
    try:
        async with serve(app_engine, config=config) as client:
            yield client
        stats = engine.stats()
        assert (sum(stats.draft_tokens.values()) > 0) == (draft != "none")
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(vocab_size=320, max_position=4096)
    return write_hf_folder(tmp_path_factory.mktemp("model"), config=config)


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process an engine: `test_grammar.py` is about that."""

    async def harmless(self: Grammars, grammar: Grammar) -> dict[str, Any]:
        return {"error": None, "bytes": 0}

    monkeypatch.setattr(Grammars, "_try_out", harmless)


def check(reply: Reply) -> tuple[Any, ...]:
    assert reply.status == 200, reply.raw
    choice = reply.body["choices"][0]
    content, calls = told(choice["message"])
    for index, (name, arguments) in enumerate(calls):
        if choice["finish_reason"] != "length" or index < len(calls) - 1:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return content, calls, choice["finish_reason"], reply.body["usage"]["completion_tokens"]


async def test_every_drafter_makes_the_same_calls(folder: Path) -> None:
    found: dict[str, list[Any]] = {}
    for draft in ("none", "layers:2"):
        async with serving(folder, draft) as client:
            blanks = (await client.post("/tokenize", {"prompt": " \n\t\r"})).body["tokens"]
            bias = dict.fromkeys(map(str, blanks), -100)  # this model would fill its JSON with them
            for name, fields in CASES.items():
                fields = {"tools": TOOLS, "max_tokens": 150, "seed": 5, "logit_bias": bias, **fields}
                answer = check(await client.chat(**fields))
                streamed = add_up((await client.chat(**fields, stream=True)).events)[0]
                assert (*told(streamed[0]), streamed[1]) == answer[:3]
                found.setdefault(name, []).append(answer)
    for name, answers in found.items():
        assert answers[0] == answers[1], name
    assert found["required"][0][0] is None
    assert found["required, one"][0][2] == "tool_calls"
    assert len(found["required, one"][0][1]) == 1
    assert found["named"][0][2] == "stop"
    assert [name for name, _ in found["named"][0][1]] == ["weather"]
    content, calls, *_ = found["calls or JSON"][0]
    if content is not None:
        jsonschema.validate(json.loads(content), WEATHER)
    assert (content is None) == bool(calls), "one or the other"
