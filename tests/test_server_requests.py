"""What a request body becomes: refusals by name, defaults, and what the engine is asked."""

from __future__ import annotations

from typing import Any

import pytest

from specd.config import Config, SamplingConfig
from tests.fake_engine import FakeEngine, Script, byte_tokenizer
from tests.http_server import PROMPT, serve


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
    ({"repetition_penalty": 1e-45}, "out_of_range", "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "out_of_range", "repetition_penalty"),
    ({"n": 0}, "out_of_range", "n"),
    ({"n": 17}, "out_of_range", "n"),
    ({"n": 1_000_000}, "out_of_range", "n"),
    ({"max_tokens": 0}, "out_of_range", "max_tokens"),
    ({"max_tokens": -45}, "out_of_range", "max_tokens"),
    ({"seed": 2**63}, "out_of_range", "seed"),
    (b'{"seed": 18446744073709551616}', "out_of_range", "seed"),
    (b'{"seed": 1e400}', "invalid_json", None),
    (b'{"prompt": [1180591620717411303424]}', "out_of_range", "prompt[0]"),
    (b'{"prompt": [9223372036854775808]}', "out_of_range", "prompt"),
    ({"seed": 1.5}, "invalid_type", "seed"),
    ({"stop": ""}, "out_of_range", "stop[0]"),
    ({"stop": ["a", 1]}, "invalid_type", "stop[1]"),
    ({"stop": list("abcde")}, "out_of_range", "stop"),
    ({"stop": 4}, "invalid_type", "stop"),
    ({"stop": ["a", "b" * 1025]}, "out_of_range", "stop[1]"),
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
    ({"bad_words": ["w" * 129]}, "out_of_range", "bad_words[0]"),
    ({"bad_words": ["w"] * 129}, "out_of_range", "bad_words"),
    ({"allowed_token_ids": [7, 8], "stop_token_ids": [7, 8], "min_tokens": 1}, "invalid_value", "allowed_token_ids"),
    ({"stop_token_ids": list(range(FakeEngine().info.vocab_size)), "min_tokens": 1}, "invalid_value", "stop_token_ids"),
    ({"min_tokens": 65, "max_tokens": 64}, "out_of_range", "min_tokens"),
    ({"stream": "yes"}, "invalid_type", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": 1}}, "invalid_type",
     "stream_options.include_obfuscation"),
    ({"speculation": {"mode": "on"}}, "out_of_range", "speculation.mode"),
    ({"speculation": {"max_draft": -1}}, "out_of_range", "speculation.max_draft"),
    ({"speculation": []}, "invalid_type", "speculation"),
    ({"request_id": "a b"}, "out_of_range", "request_id"),
    ({"max_tokens": 513}, "context_length_exceeded", "prompt"),
    ({"model": "gpt-4"}, "model_not_found", "model"),
]  # fmt: skip


async def test_bad_fields() -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        for fields, code, param in BAD_BODIES:
            body = {**PROMPT, **fields} if isinstance(fields, dict) else fields
            if isinstance(body, bytes) and body.startswith(b'{"seed"'):
                body = b'{"prompt": "x", ' + body[1:]
            reply = await client.post("/v1/completions", body)
            found = (reply.status, reply.error["code"], reply.error["param"])
            assert found == (404 if code == "model_not_found" else 400, code, param), str(fields)[:100]
            assert len(reply.raw) < 2000
            assert "x-request-id" in reply.headers
    assert not engine.requests_seen


BAD_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt"), ([], "prompt"), (3, "prompt"), ({}, "prompt"), ([[]], "prompt[0]"), ([1, "a"], "prompt[1]"),
    (["a", 1], "prompt[1]"), ([[1], "a"], "prompt[1]"), ([-1], "prompt[0]"), ([1, True], "prompt[1]"),
    ([99_999], "prompt"), ([[1], [99_999]], "prompt[1]"), ([None], "prompt[0]"), ("", "prompt"),
    (["a", ""], "prompt[1]"), ([1.5], "prompt[0]"), (["x"] * 1025, "prompt"),
]  # fmt: skip


async def test_bad_prompts() -> None:
    async with serve(FakeEngine()) as client:
        for prompt, param in BAD_PROMPTS:
            reply = await client.complete(prompt=prompt)
            assert (reply.status, reply.error["param"]) == (400, param), str(prompt)[:100]


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
     "missing_parameter", "messages[1].tool_calls[0].function"),
    ([{"role": "user", "content": "x", "name": 3}], "invalid_type", "messages[0].name"),
]  # fmt: skip


async def test_bad_messages() -> None:
    async with serve(FakeEngine()) as client:
        for messages, code, param in BAD_MESSAGES:
            reply = await client.chat(messages=messages)
            assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param), messages


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


@pytest.mark.parametrize(("name", "value"), [("x-specd-strict", "true"), ("x-request-timeout", "1_0")])
async def test_headers_that_say_nothing_known_are_refused(name: str, value: str) -> None:
    paths = ["/v1/completions"] + ["/tokenize"] * (name == "x-specd-strict")
    async with serve(FakeEngine()) as client:
        for path in paths:
            body = PROMPT if path == "/v1/completions" else {"prompt": "x"}
            reply = await client.post(path, body, headers={name: value})
            assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "out_of_range", name)
            assert f'"{value}"' in reply.error["message"]
