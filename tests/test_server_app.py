"""The HTTP server against a scripted engine: whole answers, other pages, health, ids, the log line."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
from typing import Any

import orjson
import pytest
import structlog

from specd.http_refusals import _protocol_logger
from specd.request import TokenLogprob
from specd.status import EngineState
from tests.fake_engine import FakeEngine, Script, byte_tokenizer
from tests.http_server import HELLO, PROMPT, serve, until

POSTS = ("/v1/completions", "/v1/chat/completions")


async def test_models() -> None:
    async with serve(FakeEngine()) as client:
        listed = (await client.get("/v1/models")).body
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["tiny", "org/alias"]
        card = (await client.get("/v1/models/org/alias")).body
        assert card == listed["data"][1]
        assert card["max_model_len"] == 512
        assert card["specd"] == {"drafters": ["ngram"], "max_draft": 4}
        assert (card["object"], card["created"], card["owned_by"]) == ("model", 1_700_000_000, "specd")
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


async def test_stop_strings() -> None:
    async with serve(FakeEngine()) as client:
        choice = (await client.complete(stop=["o w", "ld"])).body["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hell", "stop", "o w")
        reply = await client.complete(stop="o w", stream=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in reply.events) == "hell"


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


@pytest.mark.parametrize("name", ["x-request-timeout", "x-specd-speculation", "x-specd-strict"])
async def test_a_header_that_is_no_text_is_refused_with_its_bytes(name: str) -> None:
    async with serve(FakeEngine()) as client:
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps(PROMPT)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(head.encode() + name.encode() + b": \xff\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        status, _, rest = (await reader.read()).partition(b"\r\n")
        writer.close()
    assert status.split()[1] == b"400"
    assert name in orjson.loads(rest.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert b"udcff" in rest


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
    assert good["bytes_sent"] > 0
    assert good["stream"] is True
    assert (bad["status"], bad["error"]) == (400, "out_of_range")
    assert "SECRET" not in str(lines)
    assert "hello" not in str(lines)


@pytest.mark.parametrize(("error", "level"), [(ConnectionResetError("gone"), "debug"), (RuntimeError("ours"), "error")])
def test_a_client_who_leaves_while_his_answer_begins_is_no_fault(error: Exception, level: str) -> None:
    with structlog.testing.capture_logs() as lines:
        _protocol_logger().error("Error handling request", exc_info=error)
    assert [line["log_level"] for line in lines] == [level]
