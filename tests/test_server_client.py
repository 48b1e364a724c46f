"""The official OpenAI client against the server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from specd.errors import QueueFullError
from tests.fake_engine import FakeEngine, Script
from tests.http_server import Client, serve, until

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def connect(client: Client, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0, **options)


async def test_chat_and_completions() -> None:
    async with serve(FakeEngine()) as client, connect(client) as sdk:
        chat = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, seed=1)
        choice = chat.choices[0]
        assert choice.message.content == "hello world"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert chat.usage is not None
        assert len(choice.logprobs.content) == chat.usage.completion_tokens == 11
        assert [len(item.top_logprobs) for item in choice.logprobs.content] == [2] * 11
        assert chat._request_id is not None
        assert chat._request_id in chat.id
        completion = await sdk.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=4)
        assert [c.index for c in completion.choices] == [0, 1, 2, 3]
        models = [model.id async for model in sdk.models.list()]
        assert models == ["tiny", "org/alias"]
        assert (await sdk.models.retrieve("org/alias")).id == "org/alias"


async def test_streams() -> None:
    async with serve(FakeEngine(Script(blocks=(3, 1)))) as client, connect(client) as sdk:
        stream = await sdk.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
        )
        texts, finishes, usage = {0: "", 1: ""}, {}, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                finishes[choice.index] = choice.finish_reason
        assert texts == {0: "hello world", 1: "hello world"}
        assert finishes == {0: "stop", 1: "stop"}
        assert usage is not None
        assert usage.completion_tokens == 22
        lines = await sdk.completions.create(model="tiny", prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in lines]) == "hello world"


async def test_the_stream_helper_agrees_with_itself() -> None:
    """The SDK's helper builds a snapshot from the deltas and asserts that they fit together."""
    async with serve(FakeEngine(Script(blocks=(2,)))) as client, connect(client) as sdk:
        async with sdk.chat.completions.stream(model="tiny", messages=MESSAGES, logprobs=True) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.content == "hello world"


async def test_errors_become_exceptions() -> None:
    async with serve(FakeEngine()) as client, connect(client) as sdk:
        with pytest.raises(openai.BadRequestError) as bad:
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
        assert (bad.value.code, bad.value.param, bad.value.type) == (
            "out_of_range", "temperature", "invalid_request_error",
        )  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            await sdk.chat.completions.create(model="gpt-4", messages=MESSAGES)
        tool: Any = {"type": "custom", "custom": {"name": "f"}}
        with pytest.raises(openai.BadRequestError, match="tools"):
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES, tools=[tool])
    async with serve(FakeEngine(Script(refuse=QueueFullError("full")))) as client, connect(client) as sdk:
        with pytest.raises(openai.RateLimitError):
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES)


async def test_a_broken_stream_raises() -> None:
    engine = FakeEngine(Script(delay_s=0.01, fail_after=4))
    async with serve(engine) as client, connect(client) as sdk:
        stream = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "non_finite_logits"
    assert not engine.live


async def test_two_clients_and_one_that_leaves() -> None:
    engine = FakeEngine(Script(text=lambda request, index: "word " * 40, delay_s=0.002))
    async with serve(engine) as client, connect(client) as stays, connect(client) as leaves:
        whole = asyncio.create_task(stays.chat.completions.create(model="tiny", messages=MESSAGES))
        stream = await leaves.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        await anext(aiter(stream))
        await until(lambda: len(engine.live) == 2)
        await stream.close()
        await until(lambda: len(engine.live) == 1)
        assert (await whole).choices[0].message.content == "word " * 40
    assert len(engine.aborted) == 1
    assert not engine.live
