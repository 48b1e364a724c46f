"""Texts as tokens and back, rendered prompts, limits and load; CORS; keys on all of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from specd.config import Config, SchedulerConfig, ServerConfig
from specd.server.openapi import ROUTES
from tests.fake_engine import CHAT_TEMPLATE, FakeEngine, Script, byte_tokenizer
from tests.http_server import HELLO, serve

LONG = "he said: naïve 漢字 " * 1000  # more than is tokenised on the event loop


async def test_tokenize_and_detokenize_are_inverse() -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer(bos=True))
    tokenizer = engine.tokenizer
    async with serve(engine) as client:
        for text in ("hello <|im_start|>", LONG):
            body = (await client.post("/tokenize", {"prompt": text, "add_special_tokens": False})).body
            assert body["tokens"] == tokenizer.encode(text, add_special=False)
            assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 512)
            assert "token_strs" not in body
            assert (await client.post("/detokenize", {"tokens": body["tokens"]})).body == {"prompt": text}
        with_bos = (await client.post("/tokenize", {"content": "he", "return_token_strs": True})).body
        assert with_bos["token_strs"] == ["<|bos|>", "he"]
        assert with_bos["tokens"] == tokenizer.encode("he")
        assert (await client.post("/tokenize", {"prompt": ""})).body["tokens"] == [tokenizer.bos_id]


async def test_a_chat_is_tokenised_as_it_is_answered() -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        for fields in ({}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"unread": 1}}):
            tokens = await client.post("/tokenize", {"messages": HELLO["messages"], **fields})
            await client.chat(**fields)
            assert tuple(tokens.body["tokens"]) == engine.requests_seen[-1].prompt_ids
        assert tokens.headers["x-specd-ignored-fields"] == "chat_template_kwargs.unread"


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {}, "missing_parameter", "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": 5}, "invalid_type", "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, None, None),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "invalid_value", "add_generation_prompt"),
        ("/tokenize", {**HELLO, "add_special_tokens": True}, "invalid_value", "add_special_tokens"),
        ("/tokenize", {"messages": []}, "out_of_range", "messages"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, "model_not_found", "model"),
        ("/detokenize", {}, "missing_parameter", "tokens"),
        ("/detokenize", {"tokens": [10_000]}, "out_of_range", "tokens"),
        ("/detokenize", {"tokens": [-1]}, "out_of_range", "tokens[0]"),
        ("/v1/completions/render", {}, "missing_parameter", "prompt"),
    ],
)
async def test_refusals(path: str, body: dict[str, Any], code: str | None, param: str | None) -> None:
    async with serve(FakeEngine()) as client:
        reply = await client.post(path, body)
        if code is None:
            assert (reply.status, reply.headers["x-specd-ignored-fields"]) == (200, "x")
            strict = await client.post(path, body, headers={"x-specd-strict": "1"})
            assert (strict.status, strict.error["code"]) == (400, "unknown_parameter")
        else:
            assert (reply.error["code"], reply.error["param"]) == (code, param)


async def test_render_gives_what_the_engine_would_get() -> None:
    engine = FakeEngine()
    prompts: list[Any] = [["hello", "<|im_start|>x"], [1, 2, 3], [[4], [5, 6]]]
    async with serve(engine) as client:
        for prompt in prompts:
            rendered = (await client.post("/v1/completions/render", {"prompt": prompt})).body["prompts"]
            engine.requests_seen.clear()
            await client.complete(prompt=prompt)
            seen = [request.prompt_ids for request in engine.requests_seen]
            assert [tuple(item["prompt_token_ids"]) for item in rendered] == seen
            assert [item["count"] for item in rendered] == [len(ids) for ids in seen]
        assert rendered[0]["prompt"] == engine.tokenizer.decode([4])
        chat = (await client.post("/v1/chat/completions/render", HELLO)).body["prompts"][0]
        assert chat["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert not engine.live


async def test_tokenizer_info_is_what_a_remote_tokenizer_needs() -> None:
    async with serve(FakeEngine(tokenizer=byte_tokenizer(bos=True))) as client:
        info = (await client.get("/tokenizer_info")).body
        assert (info["bos_token"], info["eos_token"], info["chat_template"]) == ("<|bos|>", "<|im_end|>", CHAT_TEMPLATE)
        tokens = (await client.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})).body
        assert tokens["tokens"] == info["eos_token_ids"]


async def test_limits_and_load() -> None:
    config = Config(server=ServerConfig(max_choices=2, max_stop=3), scheduler=SchedulerConfig(max_waiting=77))
    engine = FakeEngine(Script())
    async with serve(engine, config=config) as client:
        limits = (await client.get("/v1/limits")).body
        assert (limits["max_choices"], limits["max_stop"], limits["max_waiting"]) == (2, 3, 77)
        assert limits["max_model_len"] == 512
        assert (await client.chat(n=limits["max_choices"] + 1)).status == 400
        engine.snapshot = dataclasses.replace(engine.snapshot, waiting=4, pages_free=64)
        load = (await client.get("/load")).body
        assert (load["server_load"], load["running"], load["waiting"], load["kv_used"]) == (4, 0, 4, 0.75)
        assert load["state"] == "ready"
        engine.snapshot = dataclasses.replace(engine.snapshot, paused=True)
        assert (await client.get("/load")).body["state"] == "paused"


async def test_keys_are_asked_for_everywhere_but_for_health(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    async with serve(FakeEngine(), api_keys_file=str(keys)) as client:
        for route in ROUTES:
            path = route.path.replace("{name}", "tiny")
            reply = await client.request(route.method, path)
            assert (reply.status == 401) is not route.open, route.path


async def test_no_cors_unless_configured() -> None:
    origin = {"Origin": "https://a.example"}
    question = {**origin, "Access-Control-Request-Method": "POST"}
    async with serve(FakeEngine()) as client:
        reply = await client.get("/v1/models", headers=origin)
        assert not [name for name in reply.headers if name.lower().startswith("access-control") or name == "Vary"]
        assert (await client.request("OPTIONS", "/v1/chat/completions", headers=question)).status == 405


async def test_cors_names_listed_origins_and_no_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    allowed, other = {"Origin": "https://a.example"}, {"Origin": "https://a.example.evil"}
    question = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with serve(FakeEngine(), cors_origins=("https://a.example",), api_keys_file=str(keys)) as client:
        for method, path, headers in (("GET", "/v1/models", {}), ("OPTIONS", "/v1/completions", question)):
            reply = await client.request(method, path, headers={**allowed, **headers})
            assert reply.status == (204 if headers else 401), "a refusal can be read by the page too"
            assert reply.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert "Access-Control-Allow-Credentials" not in reply.headers
            assert reply.headers["Vary"] == "Origin"
            reply = await client.request(method, path, headers={**other, **headers})
            assert reply.status == 401
            assert "Access-Control-Allow-Origin" not in reply.headers
    async with serve(FakeEngine(), cors_origins=("*",)) as client:
        reply = await client.chat(stream=True)
        assert "Access-Control-Allow-Origin" not in reply.headers, "not a request of a page"
        reply = await client.post("/v1/chat/completions", {**HELLO, "stream": True}, headers=other)
        assert reply.headers["Access-Control-Allow-Origin"] == "*"
