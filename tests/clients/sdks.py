"""The Python SDKs behind one face: a text, a stream of texts, a value of a schema, a call of a tool.

Each sends greedy chats and raises its own exceptions. A library is imported when its client is made: where it is not
installed the test is skipped by name, except in CI.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Generator
from typing import Any, Literal, Protocol

import pydantic
import pytest

from tests.clients.served import KEY, MODEL

SCHEMA_PROMPT = "Who wrote the first computer program? Answer in JSON."
TOOL_PROMPT = "What is the weather in Paris?"
TOOL = "get_weather"


class Person(pydantic.BaseModel):
    """Small enough for any model to finish: nothing else may be said."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: Literal["Ada Lovelace", "Alan Turing"]
    born: int = pydantic.Field(ge=1800, le=1999)


class Weather(pydantic.BaseModel):
    """Arguments of the tool."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


PARAMETERS = Weather.model_json_schema()
TOOL_DEFINITION = {"type": "function", "function": {"name": TOOL, "description": "Now.", "parameters": PARAMETERS}}


class Client(Protocol):
    """One SDK with one key. `wrong` is the class of its exceptions by HTTP status, `broken` of a stream that breaks."""

    wrong: dict[int, str]
    broken: tuple[str, ...]

    def answer(self, prompt: str, max_tokens: int, **fields: Any) -> str: ...

    def stream(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        """Pieces of the text as they come; closing it is leaving."""
        ...

    def person(self) -> dict[str, Any]:
        """SCHEMA_PROMPT's answer in the shape of Person, by the way that the SDK has for it."""
        ...

    def call(self, choice: str) -> tuple[str, dict[str, Any]]:
        """Name and arguments of the one tool that is called; choice: required or named. The llm command has none."""
        ...


def library(name: str) -> Any:
    """The module. Where it is not installed: skips by name, and fails in CI."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed (pip install -e '.[clients]')")


def chat(prompt: str) -> list[Any]:
    return [{"role": "user", "content": prompt}]


def tool_choice(choice: str) -> Any:
    """In OpenAI's form."""
    return choice if choice != "named" else {"type": "function", "function": {"name": TOOL}}


OPENAI_WRONG = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}


class OpenAI:
    wrong = OPENAI_WRONG
    broken = ("APIError", "APIConnectionError", "RemoteProtocolError", "ReadError")

    def __init__(self, url: str, *, key: str = KEY, retries: int = 0, model: str = MODEL) -> None:
        self._sdk = library("openai").OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=120)
        self._model = model

    def _fields(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return {"model": self._model, "messages": chat(prompt), "max_tokens": max_tokens, "temperature": 0}

    def answer(self, prompt: str, max_tokens: int, **fields: Any) -> str:
        found = self._sdk.chat.completions.create(**self._fields(prompt, max_tokens) | fields)
        return str(found.choices[0].message.content)

    def stream(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        with self._sdk.chat.completions.create(**self._fields(prompt, max_tokens), stream=True) as chunks:
            for chunk in chunks:
                if chunk.choices and chunk.choices[0].delta.content:
                    yield chunk.choices[0].delta.content

    def person(self) -> dict[str, Any]:
        found = self._sdk.chat.completions.parse(**self._fields(SCHEMA_PROMPT, 100), response_format=Person)
        person: Person = found.choices[0].message.parsed
        return person.model_dump()

    def call(self, choice: str) -> tuple[str, dict[str, Any]]:
        fields = {"tools": [TOOL_DEFINITION], "tool_choice": tool_choice(choice), "parallel_tool_calls": False}
        found = self._sdk.chat.completions.create(**self._fields(TOOL_PROMPT, 100), **fields)
        (call,) = found.choices[0].message.tool_calls
        return call.function.name, Weather.model_validate_json(call.function.arguments).model_dump()


class AsyncOpenAI(OpenAI):
    """The same through the asynchronous client; the stream of chunks is read with its `stream()` helper."""

    def __init__(self, url: str, *, key: str = KEY, retries: int = 0, model: str = MODEL) -> None:
        sdk = library("openai").AsyncOpenAI
        self._sdk = sdk(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=120)
        self._model = model
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self._loop.run_until_complete(self._sdk.close())
        self._loop.close()

    def answer(self, prompt: str, max_tokens: int, **fields: Any) -> str:
        asked = self._sdk.chat.completions.create(**self._fields(prompt, max_tokens) | fields)
        return str(self._loop.run_until_complete(asked).choices[0].message.content)

    def stream(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        manager = self._sdk.chat.completions.stream(**self._fields(prompt, max_tokens))
        events = self._loop.run_until_complete(manager.__aenter__())
        try:
            while (event := self._loop.run_until_complete(anext(events, None))) is not None:
                if event.type == "content.delta" and event.delta:
                    yield event.delta
        finally:
            self._loop.run_until_complete(manager.__aexit__(None, None, None))

    def person(self) -> dict[str, Any]:
        asked = self._sdk.chat.completions.parse(**self._fields(SCHEMA_PROMPT, 100), response_format=Person)
        person: Person = self._loop.run_until_complete(asked).choices[0].message.parsed
        return person.model_dump()

    def call(self, choice: str) -> tuple[str, dict[str, Any]]:
        """Its deltas are put together by the helper."""

        async def streamed() -> Any:
            fields = {"tools": [TOOL_DEFINITION], "tool_choice": tool_choice(choice), "parallel_tool_calls": False}
            async with self._sdk.chat.completions.stream(**self._fields(TOOL_PROMPT, 100), **fields) as events:
                return await events.get_final_completion()

        (call,) = self._loop.run_until_complete(streamed()).choices[0].message.tool_calls
        return call.function.name, Weather.model_validate_json(call.function.arguments).model_dump()


class Anthropic:
    """/v1/messages."""

    wrong = OPENAI_WRONG
    broken = ("APIStatusError", "APIConnectionError", "OverloadedError", "RemoteProtocolError", "ReadError")

    def __init__(self, url: str, *, key: str = KEY, retries: int = 0, model: str = MODEL) -> None:
        self._sdk = library("anthropic").Anthropic(base_url=url, api_key=key, max_retries=retries, timeout=120)
        self._model = model

    def _fields(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        greedy = {"temperature": 0}  # the SDK has no name for it any more
        return {"model": self._model, "messages": chat(prompt), "max_tokens": max_tokens, "extra_body": greedy}

    def answer(self, prompt: str, max_tokens: int, **fields: Any) -> str:
        (block,) = self._sdk.messages.create(**self._fields(prompt, max_tokens) | fields).content
        return str(block.text)

    def stream(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        with self._sdk.messages.stream(**self._fields(prompt, max_tokens)) as events:
            yield from events.text_stream

    def person(self) -> dict[str, Any]:
        found = self._sdk.messages.parse(**self._fields(SCHEMA_PROMPT, 100), output_format=Person)
        person: Person = found.parsed_output
        return person.model_dump()

    def call(self, choice: str) -> tuple[str, dict[str, Any]]:
        tools = [{"name": TOOL, "description": "Now.", "input_schema": PARAMETERS}]
        wanted = {"type": "any"} if choice == "required" else {"type": "tool", "name": TOOL}
        wanted["disable_parallel_tool_use"] = True
        found = self._sdk.messages.create(**self._fields(TOOL_PROMPT, 100), tools=tools, tool_choice=wanted)
        (block,) = (block for block in found.content if block.type == "tool_use")
        return block.name, Weather.model_validate(block.input).model_dump()


class LiteLLM:
    wrong = OPENAI_WRONG
    broken = ("MidStreamFallbackError", "APIError", "APIConnectionError", "ServiceUnavailableError",
              "InternalServerError")  # fmt: skip

    def __init__(self, url: str, *, key: str = KEY, retries: int = 0, model: str = MODEL) -> None:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read when it is imported: else it asks the network
        self._completion = library("litellm").completion
        self._fixed = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key, "num_retries": retries,
                       "max_retries": 0, "timeout": 120, "temperature": 0}  # fmt: skip

    def _ask(self, prompt: str, max_tokens: int, **fields: Any) -> Any:
        return self._completion(messages=chat(prompt), max_tokens=max_tokens, **self._fixed | fields)

    def answer(self, prompt: str, max_tokens: int, **fields: Any) -> str:
        return str(self._ask(prompt, max_tokens, **fields).choices[0].message.content)

    def stream(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        chunks = self._ask(prompt, max_tokens, stream=True)
        try:
            for chunk in chunks:
                if chunk.choices[0].delta.content:
                    yield chunk.choices[0].delta.content
        finally:
            if chunks.completion_stream is not None:  # it has not come to its end
                chunks.completion_stream.close()

    def person(self) -> dict[str, Any]:
        found = self._ask(SCHEMA_PROMPT, 100, response_format=Person)
        return Person.model_validate_json(found.choices[0].message.content).model_dump()

    def call(self, choice: str) -> tuple[str, dict[str, Any]]:
        fields = {"tools": [TOOL_DEFINITION], "tool_choice": tool_choice(choice), "parallel_tool_calls": False}
        found = self._ask(TOOL_PROMPT, 100, **fields)
        (call,) = found.choices[0].message.tool_calls
        return call.function.name, Weather.model_validate_json(call.function.arguments).model_dump()


class LangChain:
    wrong = {400: "OpenAIInvalidRequestError", 401: "OpenAIAuthenticationError", 404: "OpenAIModelNotFoundError",
             429: "OpenAIRateLimitError"}  # fmt: skip
    broken = ("APIError", "OpenAIAPIError", "OpenAIConnectionError", "RemoteProtocolError", "ReadError")

    def __init__(self, url: str, *, key: str = KEY, retries: int = 0, model: str = MODEL) -> None:
        self._make = library("langchain_openai").ChatOpenAI
        self._fixed = {"base_url": f"{url}/v1", "api_key": key, "model": model, "max_retries": retries, "timeout": 120,
                       "temperature": 0, "stream_usage": True}  # fmt: skip

    def answer(self, prompt: str, max_tokens: int, **fields: Any) -> str:
        return str(self._make(max_tokens=max_tokens, **self._fixed | fields).invoke(prompt).content)

    def stream(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        chunks = self._make(max_tokens=max_tokens, **self._fixed).stream(prompt)
        try:
            for chunk in chunks:
                if chunk.content:
                    yield chunk.content
        finally:
            chunks.close()

    def person(self) -> dict[str, Any]:
        model = self._make(max_tokens=100, **self._fixed).with_structured_output(Person, method="json_schema")
        person: Person = model.invoke(SCHEMA_PROMPT)
        return person.model_dump()

    def call(self, choice: str) -> tuple[str, dict[str, Any]]:
        model = self._make(max_tokens=100, **self._fixed)
        wanted = TOOL if choice == "named" else choice
        bound = model.bind_tools([TOOL_DEFINITION], tool_choice=wanted, parallel_tool_calls=False)
        (call,) = bound.invoke(TOOL_PROMPT).tool_calls
        return call["name"], Weather.model_validate(call["args"]).model_dump()
