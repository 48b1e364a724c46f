"""The official OpenAI client against the real engine: a tiny random model for breadth, the real one through `specd`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from specd.config import Config, KVConfig, ModelConfig, SchedulerConfig, ServerConfig, SpeculationConfig
from specd.engine import Engine
from tests import real
from tests.http_server import serve, until
from tests.tiny import tiny_config, write_hf_folder

MESSAGES: list[Any] = [{"role": "user", "content": "the quick brown fox, the quick brown fox"}]
PROMPT = "Hello world, how are you? Hello world, how"
LONG = 8000  # tokens: many seconds, for requests that are meant to be cut off
DRAFTS = ["none", "ngram", "layers:2"]


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    engine: Engine
    url: str

    def connect(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="x", max_retries=0, timeout=60)

    def idle(self) -> bool:
        """Nothing runs and every page can be had again."""
        stats = self.engine.stats()
        return (stats.running, stats.waiting, stats.pages_free) == (0, 0, stats.pages_total)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(vocab_size=320, max_position=2 * LONG)
    return write_hf_folder(tmp_path_factory.mktemp("model"), config=config)


@contextlib.asynccontextmanager
async def serving(folder: Path, draft: str = "ngram") -> AsyncIterator[Server]:
    """The whole server around a real engine, in this process."""
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
            yield Server(engine, client.url)
    finally:
        await engine.close()


@dataclasses.dataclass(slots=True)
class Streamed:
    """What a stream amounts to, per choice."""

    texts: dict[int, str]
    finishes: dict[int, str]
    logprobs: dict[int, list[float]]
    completion_tokens: int


async def chat_stream(sdk: openai.AsyncOpenAI, **fields: Any) -> Streamed:
    streamed = Streamed({}, {}, {}, -1)
    stream: Any = await sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **fields
    )
    async for chunk in stream:
        if chunk.usage is not None:
            streamed.completion_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            streamed.texts[choice.index] = streamed.texts.get(choice.index, "") + (choice.delta.content or "")
            found = streamed.logprobs.setdefault(choice.index, [])
            found += [item.logprob for item in choice.logprobs.content] if choice.logprobs else []
            if choice.finish_reason:
                streamed.finishes[choice.index] = choice.finish_reason
    return streamed


@pytest.mark.parametrize("draft", DRAFTS)
async def test_chat_streamed_or_not(draft: str, folder: Path) -> None:
    async with serving(folder, draft) as server, server.connect() as sdk:
        fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 11, "n": 2, "logprobs": True}
        whole = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
        streamed = await chat_stream(sdk, **fields)
        assert whole.usage is not None
        assert streamed.completion_tokens == whole.usage.completion_tokens
        for choice in whole.choices:
            assert streamed.texts[choice.index] == choice.message.content
            assert streamed.finishes[choice.index] == choice.finish_reason
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            expected = [item.logprob for item in choice.logprobs.content]
            assert streamed.logprobs[choice.index] == pytest.approx(expected, abs=1e-4)
        assert whole.choices[0].message.content != whole.choices[1].message.content
        drafted = sum(server.engine.stats().draft_tokens.values())
        assert (drafted > 0) == (draft != "none")
        await until(server.idle)


@pytest.mark.parametrize("draft", DRAFTS)
async def test_completions_streamed_or_not(draft: str, folder: Path) -> None:
    async with serving(folder, draft) as server, server.connect() as sdk:
        fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "logprobs": 2}
        whole = await sdk.completions.create(model="tiny", prompt=[PROMPT, "fox"], **fields)
        texts = {0: "", 1: ""}
        stream: Any = await sdk.completions.create(model="tiny", prompt=[PROMPT, "fox"], stream=True, **fields)
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == {choice.index: choice.text for choice in whole.choices}
        assert whole.usage is not None
        tokens = 0
        for choice in whole.choices:
            assert choice.logprobs is not None
            chosen, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
            assert chosen is not None
            assert top is not None
            tokens += len(chosen)
            for logprob, alternatives in zip(chosen, top, strict=True):
                assert logprob == max(alternatives.values()), "greedy takes the most likely token"
        assert tokens == whole.usage.completion_tokens


async def test_the_text_does_not_depend_on_the_drafter(folder: Path) -> None:
    texts = []
    for draft in DRAFTS:
        async with serving(folder, draft) as server, server.connect() as sdk:
            texts.append((await chat_stream(sdk, max_tokens=60, temperature=1.0, seed=5, n=2)).texts)
    assert texts[0] == texts[1] == texts[2]
    assert min(map(len, texts[0].values())) > 5


async def test_seeds_repeat_and_choices_have_their_own(folder: Path) -> None:
    async with serving(folder) as server, server.connect() as sdk:

        async def texts(**fields: Any) -> list[str | None]:
            fields = {"max_tokens": 30, "temperature": 1.0} | fields
            answer = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
            return [choice.message.content for choice in answer.choices]

        first = await texts(seed=3, n=3)
        assert await texts(seed=3, n=3) == first
        assert await texts(seed=3) == first[:1]
        assert len(set(first)) == 3
        assert await texts(seed=4, n=3) != first
        unseeded = [(await texts())[0] for _ in range(2)]
        assert unseeded[0] != unseeded[1]


async def test_stop_strings(folder: Path) -> None:
    async with serving(folder) as server, server.connect() as sdk:
        fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 1.0, "seed": 2}
        text = (await sdk.completions.create(**fields, extra_body={"ignore_eos": True})).choices[0].text
        match = re.search(r"(?<=.{8})[\x20-\x7e]{2}", text, re.DOTALL)
        assert match is not None, text
        stop = match.group()
        expected = text[: text.index(stop)]
        fields |= {"stop": [stop], "extra_body": {"ignore_eos": True}}
        for stream in (False, True):
            answer: Any = await sdk.completions.create(**fields, stream=stream)
            chunks = [chunk async for chunk in answer] if stream else [answer]
            assert "".join(chunk.choices[0].text for chunk in chunks) == expected
            last = next(chunk.choices[0] for chunk in chunks if chunk.choices[0].finish_reason)
            assert (last.finish_reason, last.stop_reason) == ("stop", stop)


async def test_two_clients_at_once_get_what_each_gets_alone(folder: Path) -> None:
    async with serving(folder, "layers:2") as server, server.connect() as one, server.connect() as other:

        async def ask(sdk: openai.AsyncOpenAI, seed: int) -> str:
            fields: dict[str, Any] = {"max_tokens": 120, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
            answer: Any = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, seed=seed, **fields)
            return str(answer.choices[0].message.content)

        alone = [await ask(one, 1), await ask(other, 2)]
        asked = [asyncio.create_task(ask(one, 1)), asyncio.create_task(ask(other, 2))]
        await until(lambda: server.engine.stats().running == 2)
        assert await asyncio.gather(*asked) == alone
        assert alone[0] != alone[1]


@pytest.mark.parametrize("draft", DRAFTS)
async def test_a_client_that_leaves_frees_everything(draft: str, folder: Path) -> None:
    """Streamed and not, while another client stays."""
    async with serving(folder, draft) as server, server.connect() as leaves, server.connect() as stays:
        fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "extra_body": {"ignore_eos": True}}
        stream = await leaves.chat.completions.create(**fields, stream=True, n=2, max_tokens=LONG)
        await anext(aiter(stream))
        waits = asyncio.create_task(leaves.chat.completions.create(**fields, max_tokens=LONG))
        other = asyncio.create_task(stays.chat.completions.create(**fields, max_tokens=200))
        await until(lambda: server.engine.stats().running == 4)
        await stream.close()
        await until(lambda: server.engine.stats().running == 2)
        waits.cancel()
        answer = await other
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 200
        await until(server.idle)
        stats = server.engine.stats()
        assert (stats.requests_aborted, stats.requests_finished, stats.requests_failed) == (2, 1, 0)


# ---------------------------------------------------------------- the real model, the whole daemon


@contextlib.contextmanager
def daemon(*arguments: str) -> Iterator[str]:
    """`specd serve` in a process of its own; gives its address, and expects it to end well on SIGTERM."""
    command = [
        sys.executable,
        "-m",
        "specd",
        "serve",
        "--port",
        "0",
        "--set",
        "admin.enabled=false",
        "--set",
        "model.kernels=torch",
        *arguments,
    ]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if match := re.match(r"\s*address\s+(http://\S+)", line):
                    yield match.group(1)
                    break
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, (process.returncode, lines, out, err)
        finally:
            process.kill()


@pytest.mark.real
@pytest.mark.timeout(120)
def test_specd_serve_answers_two_clients_as_transformers_does(real_model_path: Path) -> None:
    """Text of the default model over HTTP, chats and raw prompts, against the committed reference tokens."""
    cases = [real.reference()[name] for name in ("chat-2", "chat-4")]
    num_tokens = 24
    with daemon(str(real_model_path), "--served-name", "smol", "--max-len", "512") as url:

        def ask(case: real.Case) -> tuple[str, tuple[int, ...]]:
            with openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0, timeout=60) as sdk:
                answer: Any = sdk.completions.create(
                    model="smol",
                    prompt=list(case.prompt_ids),
                    max_tokens=num_tokens,
                    temperature=0,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )
                stream = sdk.completions.create(
                    model="smol", prompt=list(case.prompt_ids), max_tokens=num_tokens, temperature=0, stream=True
                )
                assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text
                return answer.choices[0].text, tuple(answer.choices[0].token_ids)

        with ThreadPoolExecutor(len(cases)) as pool:
            answers = list(pool.map(ask, cases))
        for case, (text, ids) in zip(cases, answers, strict=True):
            assert min(case.gaps[:num_tokens]) > real.GAP
            assert ids == case.output_ids[:num_tokens]
            assert text.strip()
        with openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0, timeout=60) as sdk:
            messages: list[Any] = [{"role": "user", "content": "Say hello."}]
            chat = sdk.chat.completions.create(model="smol", messages=messages, max_tokens=8, temperature=0)
            assert chat.choices[0].message.content
