"""`echo` of completions: the prompt in front of the text, scored or not, whole and streamed alike."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from specd.errors import QueueFullError
from specd.request import Request, TokenLogprob
from specd.server import echo as module
from specd.server import sse
from specd.server.echo import Echo, echo_of
from specd.server.responses import ChoiceText, ResponseWriter
from specd.text import Tokenizer
from tests.fake_engine import FakeEngine, Script, byte_tokenizer
from tests.http_server import Reply, serve


def joined(reply: Reply, choice: int = 0) -> tuple[str, dict[str, list[Any]], str]:
    """Text, log-probabilities and finish reason of a streamed answer."""
    text, finish = "", ""
    found: dict[str, list[Any]] = {}
    for event in reply.events:
        for part in event["choices"]:
            if part["index"] == choice:
                text += part["text"]
                finish = part["finish_reason"] or finish
                for name, values in (part["logprobs"] or {}).items():
                    found.setdefault(name, []).extend(values)
    return text, found, finish


async def test_the_prompt_comes_first() -> None:
    engine = FakeEngine(Script(blocks=(2,)), tokenizer=byte_tokenizer(bos=True))
    async with serve(engine) as client:
        for prompt, text in (("say <|im_start|> é", "say <|im_start|> é"), ([5, 6], engine.tokenizer.decode([5, 6]))):
            whole = (await client.complete(prompt=prompt, echo=True)).body["choices"][0]
            assert whole["text"] == text + "hello world"
            assert joined(await client.complete(prompt=prompt, echo=True, stream=True))[0] == whole["text"]
        many = (await client.complete(prompt=["a", "bc"], n=2, echo=True)).body["choices"]
        assert [choice["text"] for choice in many] == [p + "hello world" for p in ("a", "a", "bc", "bc")]
        stops = (await client.complete(prompt="o w", echo=True, stop="o w")).body["choices"][0]
        assert (stops["text"], stops["finish_reason"]) == ("o whell", "stop"), "stops are looked for in the output"
    assert all(request.sampling.prompt_logprobs is None for request in engine.requests_seen)


@pytest.mark.parametrize("stream", [False, True])
async def test_scored_prompt(stream: bool) -> None:
    """The shape that lm-eval reads: one entry for each token, the first without a value."""
    async with serve(FakeEngine()) as client:
        ids = [10, 11, 12]
        reply = await client.complete(
            prompt=ids, echo=True, max_tokens=1, logprobs=1, temperature=0, seed=1234, stream=stream
        )
        if stream:
            text, logprobs, _ = joined(reply)
        else:
            choice = reply.body["choices"][0]
            text, logprobs = choice["text"], choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(ids) + 1}
        assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
        assert logprobs["top_logprobs"][0] is None
        assert all(max(top.values()) == -0.5 for top in logprobs["top_logprobs"][1:])
        assert "".join(logprobs["tokens"]) == text
        assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(4)]


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_alone(stream: bool) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        fields = {"echo": True, "max_tokens": 0, "logprobs": 0, "return_token_ids": True, "stream": stream}
        options = {"stream_options": {"include_usage": True}} if stream else {}
        reply = await client.complete(prompt="abc", **fields, **options)
        if stream:
            text, logprobs, finish = joined(reply)
            usage = reply.events[-1]["usage"]
            assert all(not choice["token_ids"] for event in reply.events for choice in event["choices"])
        else:
            choice = reply.body["choices"][0]
            text, logprobs, finish, usage = (
                choice["text"],
                choice["logprobs"],
                choice["finish_reason"],
                reply.body["usage"],
            )
            assert choice["token_ids"] == []
        assert (text, finish) == ("abc", "length")
        assert logprobs["tokens"] == ["a", "b", "c"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)
    assert engine.requests_seen[0].sampling.max_tokens == 1


async def test_refusals() -> None:
    async with serve(FakeEngine()) as client:
        reply = await client.complete(max_tokens=0)
        assert (reply.error["code"], reply.error["param"]) == ("out_of_range", "max_tokens")
        reply = await client.chat(echo=True)
        assert (reply.error["code"], reply.error["param"]) == ("unsupported_parameter", "echo")
        reply = await client.complete(prompt=[1] * 512, echo=True, max_tokens=0)
        assert reply.error["code"] == "context_length_exceeded"


class Full(FakeEngine):
    """Accepts nothing, which it says when it knows the prompts."""

    def admit(self, tenant: bytes, requests: Sequence[Request] = ()) -> None:
        super().admit(tenant, requests)
        if requests:
            raise QueueFullError("full")


@pytest.mark.parametrize("full", [False, True])
async def test_long_work_is_done_off_the_loop_and_for_what_is_accepted(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of long prompts take half a minute: nobody else waits for that, and none of it is for a 429."""
    engine = Full() if full else FakeEngine()
    admitted: list[int] = []
    threads: list[threading.Thread] = []
    score = ResponseWriter.echo_logprobs

    def read(prompt: str | None, ids: Sequence[int], tokenizer: Tokenizer) -> Echo:
        admitted.append(engine.admitted[-1][1])
        threads.append(threading.current_thread())
        return echo_of(prompt, ids, tokenizer)

    def write(self: ResponseWriter, choice: int, found: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        threads.append(threading.current_thread())
        return score(self, choice, found)

    monkeypatch.setattr(module, "echo_of", read)
    monkeypatch.setattr(ResponseWriter, "echo_logprobs", write)
    async with serve(engine) as client:
        reply = await client.complete(prompt=["a" * 200, "b" * 200], echo=True, max_tokens=1, logprobs=1)
    if full:
        assert reply.status == 429
        assert not threads
    else:
        assert [choice["text"][:200] for choice in reply.body["choices"]] == ["a" * 200, "b" * 200]
        assert admitted == [2, 2]
        assert len(threads) == 4
        assert threading.main_thread() not in threads


def test_a_hidden_bos_is_a_token_without_text() -> None:
    tokenizer = byte_tokenizer(bos=True)
    bos = tokenizer.bos_token
    echo = echo_of("he\u00e9", tokenizer.encode("he\u00e9"), tokenizer)
    assert (echo.text, echo.offsets) == ("heé", (0, 0, 2, 2))
    written = echo_of(bos + "he", tokenizer.encode(bos + "he"), tokenizer)
    assert (written.text, written.offsets) == (bos + "he", (0, len(bos)))
    ids = echo_of(None, tokenizer.encode("he"), tokenizer)
    assert (ids.text, ids.offsets) == (bos + "he", (0, len(bos)))


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"logprobs": 0, "max_tokens": 0}])
async def test_a_long_prompt_comes_in_several_chunks_that_say_the_same(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "_ECHO_TOKENS", 4)
    prompt = "<|im_start|>the é of a long prompt"
    async with serve(FakeEngine(tokenizer=byte_tokenizer(bos=True))) as client:
        whole = (await client.complete(prompt=prompt, echo=True, seed=1, **fields)).body["choices"][0]
        reply = await client.complete(prompt=prompt, echo=True, seed=1, stream=True, **fields)
    text, logprobs, _ = joined(reply)
    assert text == whole["text"]
    assert logprobs == (whole["logprobs"] or {})
    assert sum(bool(choice["text"]) for event in reply.events for choice in event["choices"]) > 5


async def test_a_long_scored_prompt_is_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    write = sse.StreamEncoder._echo

    def noted(self: sse.StreamEncoder, index: int, choice: ChoiceText) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return write(self, index, choice)

    monkeypatch.setattr(sse.StreamEncoder, "_echo", noted)
    async with serve(FakeEngine()) as client:
        for prompt in ("short", "a long one " * 20):
            await client.complete(prompt=prompt, echo=True, logprobs=1, stream=True)
    assert threads == [True, False]
