"""The HTTP server against a scripted engine: shapes, errors, order, and what happens when somebody leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import hashlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from specd.config import Config, SamplingConfig
from specd.errors import ConfigError, DrainingError, EngineError, QueueFullError
from specd.request import Request, TokenLogprob
from specd.server.auth import ApiKeys
from specd.status import EngineState
from tests.fake_engine import FakeEngine, Script, byte_tokenizer
from tests.http_server import HELLO, PROMPT, Client, serve, until

POSTS = ("/v1/completions", "/v1/chat/completions")


def body_of(path: str) -> dict[str, Any]:
    return dict(HELLO if "chat" in path else PROMPT)


async def test_models() -> None:
    async with serve(FakeEngine()) as client:
        listed = (await client.get("/v1/models")).body
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["tiny", "org/alias"]
        card = (await client.get("/v1/models/org/alias")).body
        assert card == listed["data"][1]
        assert card["max_model_len"] == 512
        assert card["specd"] == {"drafters": ["ngram"], "max_draft": 4}
        assert card["object"] == "model" and card["created"] == 1_700_000_000 and card["owned_by"] == "specd"
        missing = await client.get("/v1/models/nope")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_chat_whole() -> None:
    async with serve(FakeEngine()) as client:
        reply = await client.chat()
    assert reply.status == 200
    body = reply.body
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "hello world", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert body["usage"]["completion_tokens"] == 11  # "he" is one token, eos is counted
    assert body["metrics"]["speculative_decoding"]["num_spec_tokens"] == 4
    assert body["system_fingerprint"] == "fp_0123456789"
    assert reply.headers["Server"] == "specd"
    assert int(reply.headers["x-specd-seed"]) >= 0
    assert reply.headers["x-request-id"] in body["id"]


async def test_completion_whole() -> None:
    async with serve(FakeEngine()) as client:
        body = (await client.complete(logprobs=1, max_tokens=3)).body
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    choice = body["choices"][0]
    assert choice["text"] == "hell"
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["he", "l", "l"]
    assert logprobs["text_offset"] == [0, 2, 3]
    assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert [max(top.values()) for top in logprobs["top_logprobs"]] == [-0.5, -0.5, -0.5]


async def test_the_engine_sees_the_request() -> None:
    engine = FakeEngine()
    fields = {
        "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1.5,
        "repetition_penalty": 1.25, "n": 2, "stop": "zz", "stop_token_ids": [3, 3], "seed": -5,
        "logit_bias": {"5": 1, "2": -3.5}, "allowed_token_ids": [9, 4, 9], "min_tokens": 2, "ignore_eos": True,
        "skip_special_tokens": False, "include_stop_str_in_output": True, "max_completion_tokens": 9, "max_tokens": 30,
        "logprobs": True, "top_logprobs": 2, "speculation": {"mode": "off", "max_draft": 1, "detail": "tokens"},
        "bad_words": ["the"],
    }  # fmt: skip
    async with serve(engine) as client:
        assert (await client.chat(**fields)).status == 200
    request = engine.requests_seen[0]
    params = request.sampling
    assert engine.tokenizer.decode(request.prompt_ids, skip_special=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (request.n, params.seed, params.max_tokens, params.min_tokens) == (2, -5, 9, 2)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.25, 0.5, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1.5, 1.25)
    assert params.logit_bias == ((2, -3.5), (5, 1.0))
    assert params.allowed_token_ids == (4, 9)
    assert params.stop == ("zz",)
    assert params.stop_token_ids == (3,)
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (True, False, True)
    assert params.logprobs == 2
    assert (request.speculation.mode, request.speculation.max_draft, request.speculation.detail) == ("off", 1, "tokens")
    encode = engine.tokenizer.encode
    assert params.bad_words_ids[0] == tuple(encode("the", add_special=False))
    assert all(encode(" the", add_special=False) != list(ids) for ids in params.bad_words_ids)  # longer: vLLM's rule


async def test_defaults() -> None:
    """The model's own defaults, then OpenAI's; the operator's come before both; completions stop after 16 tokens."""
    engine = FakeEngine(Script(finish=False))
    async with serve(engine) as client:
        await client.chat()
        await client.post("/v1/completions", {"prompt": "hi"})
        await client.chat(temperature=None, top_k=None, max_tokens=None)
    chat, completion, nulls = (request.sampling for request in engine.requests_seen)
    assert (chat.temperature, chat.top_k, chat.top_p, chat.min_p) == (0.6, 40, 1.0, 0.0)
    assert chat.max_tokens == 512 - len(engine.requests_seen[0].prompt_ids)
    assert completion.max_tokens == 16
    assert (nulls.temperature, nulls.top_k, nulls.max_tokens) == (0.6, 40, chat.max_tokens)
    assert len({chat.seed, completion.seed, nulls.seed}) == 3
    config = Config(sampling=SamplingConfig(temperature=0.1, max_tokens=5))
    async with serve(engine, config=config) as client:
        await client.chat()
    assert engine.requests_seen[-1].sampling.temperature == 0.1
    assert engine.requests_seen[-1].sampling.max_tokens == 5


async def test_n_and_prompts() -> None:
    engine = FakeEngine(Script(text=lambda request, index: f"prompt {request.prompt_index} choice {index}"))
    async with serve(engine) as client:
        body = (await client.complete(prompt=["a", "bcd"], n=2)).body
        assert [(c["index"], c["text"]) for c in body["choices"]] == [
            (0, "prompt 0 choice 0"), (1, "prompt 0 choice 1"), (2, "prompt 1 choice 0"), (3, "prompt 1 choice 1"),
        ]  # fmt: skip
        assert body["usage"]["prompt_tokens"] == 1 + 3
        assert "metrics" not in body
        assert all("speculative_decoding" in choice["metrics"] for choice in body["choices"])
        ids = (await client.complete(prompt=[[1, 2], [3]], return_token_ids=True)).body["choices"]
        assert [choice["prompt_token_ids"] for choice in ids] == [[1, 2], [3]]
        single = (await client.complete(prompt=[5, 6, 7.0], return_token_ids=True)).body["choices"][0]
        assert single["prompt_token_ids"] == [5, 6, 7]
    assert not engine.live


async def test_stream_headers_and_order() -> None:
    async with serve(FakeEngine(Script(blocks=(3,)))) as client:
        reply = await client.chat(stream=True)
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["Cache-Control"] == "no-cache"
    assert reply.headers["X-Accel-Buffering"] == "no"
    assert reply.raw.endswith(b"data: [DONE]\n\n")
    events = reply.events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "hello world"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert "speculative_decoding" in events[-1]["metrics"]  # no usage chunk to carry it


async def test_stream_of_several_prompts() -> None:
    script = Script(text=lambda request, index: f"<{request.prompt_index}.{index}>", blocks=(2, 1))
    async with serve(FakeEngine(script)) as client:
        reply = await client.complete(prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True})
    texts: dict[int, str] = {}
    for chunk in reply.events:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "<0.0>", 1: "<0.1>", 2: "<1.0>", 3: "<1.1>"}
    assert reply.events[-1]["usage"]["prompt_tokens"] == 2


async def test_stop_strings() -> None:
    async with serve(FakeEngine()) as client:
        choice = (await client.complete(stop=["o w", "ld"])).body["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hell", "stop", "o w")
        reply = await client.complete(stop="o w", stream=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in reply.events) == "hell"


BAD_BODIES: list[tuple[Any, str, str | None]] = [
    (b"", "invalid_json", None),
    (b"{", "invalid_json", None),
    (b"[1]", "invalid_json", None),
    (b'"x"', "invalid_json", None),
    (b'{"a": "\xff"}', "invalid_json", None),
    (b"[" * 100_000, "invalid_json", None),
    ({"model": 3}, "invalid_type", "model"),
    ({"temperature": "1"}, "invalid_type", "temperature"),
    ({"temperature": True}, "invalid_type", "temperature"),
    ({"temperature": 2.1}, "out_of_range", "temperature"),
    ({"top_p": -0.1}, "out_of_range", "top_p"),
    ({"top_k": -2}, "out_of_range", "top_k"),
    ({"top_k": 1.5}, "invalid_type", "top_k"),
    ({"top_k": True}, "invalid_type", "top_k"),
    ({"repetition_penalty": 0}, "out_of_range", "repetition_penalty"),
    ({"n": 0}, "out_of_range", "n"),
    ({"n": 17}, "out_of_range", "n"),
    ({"n": 1_000_000}, "out_of_range", "n"),
    ({"max_tokens": 0}, "out_of_range", "max_tokens"),
    ({"max_tokens": -45}, "out_of_range", "max_tokens"),
    ({"seed": 2**63}, "out_of_range", "seed"),
    (b'{"seed": 18446744073709551616}', "out_of_range", "seed"),
    (b'{"seed": 1e400}', "invalid_json", None),
    (b'{"prompt": [1180591620717411303424]}', "out_of_range", "prompt[0]"),
    (b'{"prompt": [9223372036854775808]}', "out_of_range", "prompt[0]"),
    ({"seed": 1.5}, "invalid_type", "seed"),
    ({"stop": ""}, "out_of_range", "stop[0]"),
    ({"stop": ["a", 1]}, "invalid_type", "stop[1]"),
    ({"stop": list("abcde")}, "out_of_range", "stop"),
    ({"stop": 4}, "invalid_type", "stop"),
    ({"stop_token_ids": [-1]}, "out_of_range", "stop_token_ids[0]"),
    ({"stop_token_ids": [10_000]}, "out_of_range", "stop_token_ids"),
    ({"logit_bias": {"10000": 1}}, "out_of_range", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "out_of_range", "logit_bias"),
    ({"logit_bias": {"x": 1}}, "out_of_range", "logit_bias"),
    ({"logit_bias": {"1": 101}}, "out_of_range", "logit_bias.1"),
    ({"logit_bias": {"1": 1, "01": 2}}, "out_of_range", "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "out_of_range", "logit_bias"),
    ({"logit_bias": [1]}, "invalid_type", "logit_bias"),
    ({"allowed_token_ids": []}, "out_of_range", "allowed_token_ids"),
    ({"allowed_token_ids": [1, "2"]}, "invalid_type", "allowed_token_ids[1]"),
    ({"bad_words": [" "]}, "out_of_range", "bad_words[0]"),
    ({"min_tokens": 65, "max_tokens": 64}, "out_of_range", "min_tokens"),
    ({"stream": "yes"}, "invalid_type", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "unsupported_parameter",
     "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"nope": 1}}, "unknown_parameter", "stream_options.nope"),
    ({"speculation": {"mode": "on"}}, "out_of_range", "speculation.mode"),
    ({"speculation": {"max_draft": -1}}, "out_of_range", "speculation.max_draft"),
    ({"speculation": {"depth": 1}}, "unknown_parameter", "speculation.depth"),
    ({"speculation": []}, "invalid_type", "speculation"),
    ({"request_id": "a b"}, "out_of_range", "request_id"),
    ({"max_tokens": 513}, "context_length_exceeded", "prompt"),
    ({"model": "gpt-4"}, "model_not_found", "model"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "param"), BAD_BODIES, ids=lambda value: str(value)[:40])
async def test_bad_fields(fields: Any, code: str, param: str | None) -> None:
    engine = FakeEngine()
    body = fields
    if isinstance(fields, dict):
        body = {**PROMPT, **fields}
    elif fields.startswith(b'{"'):
        body = b'{"prompt": "x", ' + fields[1:]
    async with serve(engine) as client:
        reply = await client.post("/v1/completions", body)
        assert reply.status == (404 if code == "model_not_found" else 400)
        assert (reply.error["code"], reply.error["param"]) == (code, param)
        assert len(reply.raw) < 2000
        assert "x-request-id" in reply.headers
    assert not engine.requests_seen


BAD_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt"), ([], "prompt"), (3, "prompt"), ({}, "prompt"), ([[]], "prompt[0]"), ([1, "a"], "prompt[1]"),
    (["a", 1], "prompt[1]"), ([[1], "a"], "prompt[1]"), ([-1], "prompt[0]"), ([1, True], "prompt[1]"),
    ([99_999], "prompt"), ([[1], [99_999]], "prompt[1]"), ([None], "prompt[0]"), ("", "prompt"),
    (["a", ""], "prompt[1]"), ([1.5], "prompt[0]"), (["x"] * 1025, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "param"), BAD_PROMPTS, ids=lambda value: str(value)[:30])
async def test_bad_prompts(prompt: Any, param: str) -> None:
    async with serve(FakeEngine()) as client:
        reply = await client.complete(prompt=prompt)
        assert (reply.status, reply.error["param"]) == (400, param)


BAD_MESSAGES: list[tuple[Any, str, str]] = [
    (None, "missing_parameter", "messages"),
    ([], "out_of_range", "messages"),
    ("hi", "invalid_type", "messages"),
    (["hi"], "invalid_type", "messages[0]"),
    ([{"content": "x"}], "missing_parameter", "messages[0].role"),
    ([{"role": "king", "content": "x"}], "out_of_range", "messages[0].role"),
    ([{"role": 1, "content": "x"}], "invalid_type", "messages[0].role"),
    ([{"role": "user"}], "missing_parameter", "messages[0].content"),
    ([{"role": "user", "content": 5}], "invalid_type", "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "invalid_type", "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "unsupported_parameter",
     "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "missing_parameter", "messages[0].content[0].text"),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}],
     "unsupported_parameter", "messages[1].tool_calls"),
    ([{"role": "user", "content": "x", "name": 3}], "invalid_type", "messages[0].name"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "code", "param"), BAD_MESSAGES, ids=lambda value: str(value)[:40])
async def test_bad_messages(messages: Any, code: str, param: str) -> None:
    async with serve(FakeEngine()) as client:
        reply = await client.chat(messages=messages)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param)


async def test_messages_that_sdks_send_back() -> None:
    """What a client gets out of `message.model_dump()` must be accepted; unknown names are reported."""
    engine = FakeEngine()
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "<|im_end|>", "name": "bob"},
        {"role": "assistant", "content": "ok", "refusal": None, "audio": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "go", "mood": "good"},
    ]
    async with serve(engine) as client:
        reply = await client.chat(messages=messages)
    assert reply.status == 200
    assert reply.headers["x-specd-ignored-fields"] == "messages[3].mood"
    ids = engine.requests_seen[0].prompt_ids
    text = engine.tokenizer.decode(ids, skip_special=False)
    assert text.startswith("<|im_start|>system\nbe\nbrief<|im_end|>")
    assert ids.count(engine.tokenizer.eos_ids[0]) == 4, "special text in a message is ordinary text"


async def test_an_empty_prompt_is_bos_where_there_is_one() -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer(bos=True))
    async with serve(engine) as client:
        assert (await client.complete(prompt="")).status == 200
    assert engine.requests_seen[0].prompt_ids == (engine.tokenizer.bos_id,)


async def test_context_length() -> None:
    engine = FakeEngine(max_len=20)
    async with serve(engine) as client:
        reply = await client.complete(prompt=[1] * 20, max_tokens=None)
        assert reply.error["code"] == "context_length_exceeded"
        assert "maximum context length is 20 tokens" in reply.error["message"]
        assert "has 20 tokens" in reply.error["message"]
        reply = await client.complete(prompt=[1] * 10, max_tokens=11)
        assert "11 more" in reply.error["message"]
        assert (await client.complete(prompt=[1] * 10, max_tokens=10)).status == 200
        assert (await client.complete(prompt=[1] * 10, max_tokens=None)).status == 200
    assert [request.sampling.max_tokens for request in engine.requests_seen] == [10, 10]


async def test_no_chat_template() -> None:
    async with serve(FakeEngine(tokenizer=byte_tokenizer(chat_template=None))) as client:
        reply = await client.chat()
        assert (reply.status, reply.error["code"]) == (400, "chat_template_missing")


async def test_template_errors_are_the_clients() -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    async with serve(FakeEngine(tokenizer=byte_tokenizer(chat_template=template))) as client:
        reply = await client.chat(messages=[{"role": "assistant", "content": "x"}])
        assert (reply.status, reply.error["code"]) == (400, "template_error")
        assert "user first" in reply.error["message"]


async def test_unknown_fields_and_strict() -> None:
    async with serve(FakeEngine()) as client:
        names = {"frobnicate": 1, "gro\u00dfe": 2, "x\r\ny": 3}
        reply = await client.complete(**names)
        assert reply.status == 200
        assert reply.headers["x-specd-ignored-fields"] == "frobnicate,gro?e,x??y"
        strict = await client.post("/v1/completions", {**PROMPT, **names}, headers={"x-specd-strict": "1"})
        assert (strict.status, strict.error["code"], strict.error["param"]) == (400, "unknown_parameter", "frobnicate")
        known = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s"}
        reply = await client.post("/v1/completions", {**PROMPT, **known}, headers={"x-specd-strict": "1"})
        assert reply.status == 200
        assert "x-specd-ignored-fields" not in reply.headers
        assert "specd_ignored_fields_total 3.0" in (await client.get("/metrics")).raw.decode()


async def test_http_errors_are_json() -> None:
    async with serve(FakeEngine(), max_body_bytes=2000) as client:
        missing = await client.get("/v1/embeddings")
        assert (missing.status, missing.error["code"]) == (404, "not_found")
        method = await client.get("/v1/completions")
        assert (method.status, method.error["code"], method.headers["Allow"]) == (405, "method_not_allowed", "POST")
        large = await client.complete(prompt="x" * 3000)
        assert (large.status, large.error["code"]) == (413, "request_too_large")
        for kind in ("text/plain", "multipart/form-data; boundary=x", ""):
            reply = await client.post("/v1/completions", PROMPT, headers={"Content-Type": kind})
            assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
        packed = gzip.compress(b'{"prompt": "x"}')
        reply = await client.post("/v1/completions", packed, headers={"Content-Encoding": "gzip"})
        assert (reply.status, reply.error["code"]) == (415, "unsupported_encoding")
        assert (await client.complete()).status == 200


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (QueueFullError("64 requests are waiting"), 429, "rate_limit_error", "queue_full"),
        (DrainingError(), 503, "server_error", "draining"),
        (EngineError("/secret/path"), 500, "server_error", "engine_error"),
        (RuntimeError("/secret/path"), 500, "server_error", "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refused_by_the_engine(error: Exception, status: int, kind: str, code: str, stream: bool) -> None:
    async with serve(FakeEngine(Script(refuse=error))) as client:
        reply = await client.chat(stream=stream)
    assert (reply.status, reply.error["type"], reply.error["code"]) == (status, kind, code)
    assert b"secret" not in reply.raw
    if status in (429, 503):
        assert int(reply.headers["Retry-After"]) > 0
    if status == 500:
        assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["fail_after", "abort_after", "raise_after", "stop_short_after"])
async def test_a_failure_before_the_first_delta_has_a_status(how: str, stream: bool) -> None:
    engine = FakeEngine(Script(**{how: 0}))
    async with serve(engine) as client:
        reply = await client.chat(stream=stream)
        assert reply.status == (503 if how == "abort_after" else 500)
        assert reply.error["code"] in ("non_finite_logits", "aborted", "internal_error", "engine_error")
        assert b"secret" not in reply.raw
    assert not engine.live


@pytest.mark.parametrize("how", ["fail_after", "abort_after", "raise_after", "stop_short_after"])
async def test_a_failure_in_mid_stream(how: str) -> None:
    """Error event, no finish, no [DONE], and a body that does not end: no client may take it for an answer."""
    engine = FakeEngine(Script(delay_s=0.01, **{how: 3}))
    async with serve(engine) as client:
        data = b""
        async with client.session.post(client.url + POSTS[1], json={**HELLO, "stream": True}) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                async for chunk in response.content.iter_any():
                    data += chunk
        *chunks, error = (line for line in data.split(b"\n\n") if line)
        assert error.startswith(b'data: {"error":{"message"')
        assert b"secret" not in data and b"[DONE]" not in data
        assert all(b'"finish_reason":null' in chunk for chunk in chunks)
        assert (await client.get("/health")).status == 200
    assert not engine.live


async def test_a_failure_of_the_whole_answer_in_the_middle() -> None:
    engine = FakeEngine(Script(fail_after=3))
    async with serve(engine) as client:
        reply = await client.chat(n=2)
    assert (reply.status, reply.error["code"]) == (500, "non_finite_logits")
    assert not engine.live


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3, "stream": True}], ids=str)
@pytest.mark.parametrize("hang_after", [0, 2])
async def test_disconnect_aborts(fields: dict[str, Any], hang_after: int) -> None:
    """At any phase: before the first delta, between deltas; one body or a stream."""
    engine = FakeEngine(Script(hang_after=hang_after))
    async with serve(engine) as client:
        task = asyncio.create_task(client.chat(**fields))
        await until(lambda: bool(engine.live))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not engine.live)
        assert len(engine.aborted) == 1
        await asyncio.sleep(0.02)
        reply = await client.get("/metrics")
        assert "specd_client_disconnects_total 1.0" in reply.raw.decode()


async def test_disconnect_aborts_every_prompt() -> None:
    engine = FakeEngine(Script(hang_after=1))
    async with serve(engine) as client:
        task = asyncio.create_task(client.complete(prompt=["a", "b", "c"]))
        await until(lambda: len(engine.live) == 3)
        task.cancel()
        await until(lambda: not engine.live)
    assert len(engine.aborted) == 3


async def test_a_refused_prompt_takes_the_others_along() -> None:
    """All prompts of a request are accepted, or none."""

    class Full(FakeEngine):
        def submit(self, request: Request) -> Any:
            if request.prompt_index == 2:
                raise QueueFullError("full")
            return super().submit(request)

    engine = Full()
    async with serve(engine) as client:
        assert (await client.complete(prompt=["a", "b", "c"])).status == 429
    assert not engine.live
    assert len(engine.aborted) == 2


async def test_keep_alive_comments() -> None:
    engine = FakeEngine(Script(delay_s=0.35, text=lambda request, index: "a"))
    async with serve(engine, keep_alive_s=0.1) as client:
        reply = await client.chat(stream=True)
    assert b": keep-alive\n\n" in reply.raw
    assert b"id:" not in reply.raw.replace(b'"id":', b"")
    assert reply.events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_request_ids() -> None:
    engine = FakeEngine(Script(hang_after=0))
    async with serve(engine) as client:
        tasks = [asyncio.create_task(client.chat(request_id="same")) for _ in range(3)]
        await until(lambda: len(engine.live) == 3)
        assert all(name.startswith("chatcmpl-same") for name in engine.live)
        for name in list(engine.live):
            engine.abort(name)
        for task in tasks:
            task.cancel()
        engine.script = Script()
        reply = await client.post(POSTS[1], HELLO, headers={"X-Request-Id": "from-header.1"})
        assert reply.headers["x-request-id"] == "from-header.1"
        assert reply.body["id"] == "chatcmpl-from-header.1"
        reply = await client.post(POSTS[1], HELLO, headers={"X-Request-Id": "not/valid"})
        assert "/" not in reply.headers["x-request-id"]


async def test_seed_is_echoed() -> None:
    async with serve(FakeEngine()) as client:
        assert (await client.chat(seed=123)).headers["x-specd-seed"] == "123"
        assert (await client.chat(seed=-(2**63))).headers["x-specd-seed"] == str(-(2**63))
        drawn = (await client.chat(stream=True)).headers["x-specd-seed"]
        assert 0 <= int(drawn) < 2**63


async def test_token_names_in_logprobs() -> None:
    """Ids in the padding of wide logits have a name and no bytes; ids on request."""
    tokenizer = byte_tokenizer()
    engine = FakeEngine(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size + 5)
    wide = TokenLogprob(5, -0.5, ((5, -0.5), (tokenizer.vocab_size + 2, float("-inf"))))
    engine.change = lambda delta: dataclasses.replace(delta, logprobs=(wide,) * len(delta.token_ids))
    async with serve(engine) as client:
        chat = (await client.chat(logprobs=True, top_logprobs=2)).body["choices"][0]["logprobs"]["content"][0]
        padding = {"token": f"token_id:{tokenizer.vocab_size + 2}", "logprob": -9999.0, "bytes": []}
        assert chat["top_logprobs"][1] == padding
        assert chat["bytes"] == list(tokenizer.token_bytes(5))
        as_ids = (await client.complete(logprobs=0, return_tokens_as_token_ids=True)).body["choices"][0]["logprobs"]
        assert as_ids["tokens"][0] == "token_id:5"
        assert as_ids["top_logprobs"][0] == {"token_id:5": -0.5, f"token_id:{tokenizer.vocab_size + 2}": -9999.0}


async def test_health_follows_the_engine() -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        for path in ("/health", "/health/ready", "/ping", "/health/live"):
            assert (await client.get(path)).status == 200
        for state, code in ((EngineState.LOADING, "loading"), (EngineState.DRAINING, "draining")):
            engine.state = state
            reply = await client.get("/health")
            assert (reply.status, reply.error["code"]) == (503, code)
            assert (await client.get("/health/live")).status == 200
            refused = await client.chat()
            assert (refused.status, refused.error["code"]) == (503, code)
            assert "Retry-After" in refused.headers
        engine.state = EngineState.FAILED
        assert (await client.get("/health/live")).status == 503


async def test_live_means_progress() -> None:
    engine = FakeEngine(Script(hang_after=0))
    async with serve(engine) as client:
        engine.snapshot = dataclasses.replace(engine.snapshot, last_progress_s=1000.0)
        assert (await client.get("/health/live")).status == 200, "idle is not stalled"
        task = asyncio.create_task(client.chat())
        await until(lambda: bool(engine.live))
        stalled = await client.get("/health/live")
        assert (stalled.status, stalled.error["code"]) == (503, "stalled")
        task.cancel()


async def test_version() -> None:
    async with serve(FakeEngine()) as client:
        assert (await client.get("/version")).body["version"]


def write_keys(folder: Path, text: str) -> str:
    path = folder / "keys"
    path.write_text(text)
    return str(path)


async def test_keys(tmp_path: Path) -> None:
    """Closed by default: every route but health, however its path is written, and paths that do not exist."""
    engine = FakeEngine()
    hashed = "sha256:" + hashlib.sha256(b"second").hexdigest()
    path = write_keys(tmp_path, f"# people\nfirst\n\n{hashed}\n")
    closed = ("/v1/models", "/v1/models/tiny", "/metrics", "/version", "//v1/models", "/v1%2fmodels", "/nope", "/")
    async with serve(engine, api_keys_file=path) as client:
        for wanted in closed:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"Host": "/health"}):
                reply = await client.get(wanted, headers=headers)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), (wanted, headers)
                assert reply.headers["WWW-Authenticate"] == "Bearer"
        for wanted in POSTS:
            assert (await client.post(wanted, body_of(wanted))).status == 401
        assert not engine.requests_seen
        for wanted in ("/health", "/health/live", "/health/ready", "/ping"):
            assert (await client.get(wanted)).status == 200
        for key in ("first", "second"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=headers)).status == 200
            assert (await client.post(POSTS[1], HELLO, headers=headers)).status == 200
        assert (await client.get("/nope", headers={"Authorization": "bearer first"})).status == 404
    salts = [request.cache_salt for request in engine.requests_seen]
    assert len(set(salts)) == 2 and all(salts), "caches of different keys are apart"


def test_key_files_that_do_not_work(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "sha256:zz\n", "sha256:00\n"):
        with pytest.raises(ConfigError):
            ApiKeys.from_file(write_keys(tmp_path, text))
    with pytest.raises(ConfigError):
        ApiKeys.from_file(str(tmp_path / "absent"))


async def test_concurrent_streams_do_not_mix() -> None:
    engine = FakeEngine(Script(blocks=(1, 3, 2)))
    engine.script.text = lambda request, index: engine.tokenizer.decode(request.prompt_ids) * 3

    async def one(client: Client, name: str) -> str:
        reply = await client.complete(prompt=name, stream=True)
        return "".join(chunk["choices"][0]["text"] for chunk in reply.events)

    async with serve(engine) as client:
        names = [f"p{i:02}" for i in range(20)]
        assert await asyncio.gather(*(one(client, name) for name in names)) == [name * 3 for name in names]
    assert not engine.live


async def test_unicode_through_the_wire() -> None:
    text = "naïve 漢字 한글 🎉👩‍👩‍👧 \u2028 end"
    async with serve(FakeEngine(Script(text=lambda request, index: text, blocks=(1,)))) as client:
        reply = await client.chat(stream=True)
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in reply.events) == text
        assert "\ufffd" not in reply.raw.decode()
        assert (await client.chat()).body["choices"][0]["message"]["content"] == text


async def test_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per request, refused ones included, and never any text."""
    lines: list[tuple[str, dict[str, Any]]] = []

    class Recorder:
        def info(self, name: str, **fields: Any) -> None:
            lines.append((name, fields))

    monkeypatch.setattr("specd.server.record.log", Recorder())
    async with serve(FakeEngine(Script(blocks=(4,)))) as client:
        await client.chat(stream=True, messages=[{"role": "user", "content": "SECRET"}])
        await client.chat(temperature=9)
        await client.get("/health")
    assert [name for name, _ in lines] == ["request_finished"] * 2
    good, bad = (fields for _, fields in lines)
    assert (good["status"], good["finish_reason"], good["completion_tokens"]) == (200, "stop", 11)
    assert (good["spec_steps"], good["drafted"], good["accepted"], good["accept_len"]) == (4, 10, 6, 2.5)
    assert good["bytes_sent"] > 0 and good["stream"] is True
    assert (bad["status"], bad["error"]) == (400, "out_of_range")
    assert "SECRET" not in str(lines) and "hello" not in str(lines)


async def raw_exchange(client: Client, data: bytes) -> bytes:
    """Bytes as they are, without a client that tidies them up."""
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "target", ["//v1/models", "/v1%2fmodels", "/health/../v1/models", "http://x/v1/models", "/v1/models?/health", "/%"]
)
async def test_odd_targets_need_the_key(tmp_path: Path, target: str) -> None:
    async with serve(FakeEngine(), api_keys_file=write_keys(tmp_path, "k")) as client:
        head = f"GET {target} HTTP/1.1\r\nHost: /health\r\nConnection: close\r\n\r\n"
        reply = await raw_exchange(client, head.encode())
    assert reply.split(b"\r\n")[0].split()[1] in (b"401", b"400")
    assert b'"tiny"' not in reply


async def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specd.server.generation._SEND_DEADLINE_S", 0.2)
    huge = "x" * (1 << 16)
    engine = FakeEngine(Script(text=lambda request, index: huge, finish=False), max_len=1 << 24)
    engine.change = lambda delta: dataclasses.replace(delta, text=huge)
    async with serve(engine) as client:
        host, port = client.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = b'{"prompt": "x", "stream": true, "max_tokens": 4000000}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await until(lambda: bool(engine.live))
        await until(lambda: not engine.live)
        await asyncio.sleep(0.05)
        assert b"specd_slow_client_aborts_total 1.0" in (await client.get("/metrics")).raw
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_half_closed_clients_are_gone() -> None:
    engine = FakeEngine(Script(hang_after=1))
    async with serve(engine) as client:
        host, port = client.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt": "x", "stream": true}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await until(lambda: bool(engine.live))
        writer.write_eof()
        await until(lambda: not engine.live)
        writer.close()
        await writer.wait_closed()
