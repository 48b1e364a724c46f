"""The server around a real engine on a tiny model, attacked: faults found that way, and the classes they belong to."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from aiohttp import ClientSession, ClientTimeout, web

from specd.config import Config, ModelConfig, SchedulerConfig, ServerConfig, SpeculationConfig
from specd.engine import Engine
from specd.server.app import create_app, create_runner
from specd.status import EngineState
from tests.http_server import Client, Reply, until
from tests.tiny import tiny_config, tiny_tokenizer, write_hf_folder

PROMPT = {"model": "tiny", "prompt": "the quick brown", "max_tokens": 12, "seed": 7}
LONG = {**PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}


@contextlib.asynccontextmanager
async def running(folder: Path, *, draft: str = "layers:2") -> AsyncIterator[tuple[Engine, Client]]:
    config = Config(
        model=ModelConfig(path=str(folder), threads=1),
        speculation=SpeculationConfig(draft=draft, draft_len=4, self_check=False),
        scheduler=SchedulerConfig(max_running=8),
        server=ServerConfig(served_names=("tiny",)),
    )
    engine = await Engine.create(config)
    runner = create_runner(create_app(engine, config), shutdown_timeout_s=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with ClientSession(timeout=ClientTimeout(total=60)) as session:
            yield engine, Client(f"http://{host}:{port}", session)
        await settled(engine)
        assert engine.state is EngineState.READY
        assert engine.stats().pages_free == engine.stats().pages_total
    finally:
        await runner.cleanup()
        await engine.close()


async def settled(engine: Engine) -> None:
    def over() -> bool:
        stats = engine.stats()
        ended = stats.requests_finished + stats.requests_failed + stats.requests_aborted
        return stats.running + stats.waiting == 0 and stats.accepted_requests == ended

    await until(over)


def joined(reply: Reply) -> dict[str, Any]:
    """What a stream's chunks say in all, in the shape of `whole`."""
    choices = [event["choices"][0] for event in reply.events if event["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return {
        "text": "".join(choice["text"] for choice in choices),
        "token_ids": [token for choice in choices for token in choice["token_ids"]],
        "tokens": [token for part in logprobs for token in part["tokens"]],
        "offsets": [offset for part in logprobs for offset in part["text_offset"]],
        "finish": (choices[-1]["finish_reason"], choices[-1]["stop_reason"]),
        "usage": reply.events[-1]["usage"]["completion_tokens"],
    }


def whole(reply: Reply) -> dict[str, Any]:
    choice = reply.body["choices"][0]
    logprobs = choice["logprobs"] or {"tokens": [], "text_offset": []}
    return {
        "text": choice["text"],
        "token_ids": choice["token_ids"],
        "tokens": logprobs["tokens"],
        "offsets": logprobs["text_offset"],
        "finish": (choice["finish_reason"], choice["stop_reason"]),
        "usage": reply.body["usage"]["completion_tokens"],
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_stream_whole_and_plain_decoding_agree(tiny_folder: Path, temperature: float) -> None:
    """Stop strings cut out of the text itself, at every place of a block; logprobs, min_tokens, include_stop."""
    async with running(tiny_folder) as (engine, client):
        base = {**PROMPT, "temperature": temperature, "max_tokens": 28, "return_token_ids": True, "ignore_eos": True}
        text = (await client.post("/v1/completions", base)).body["choices"][0]["text"]
        options: list[dict[str, Any]] = [{"logprobs": 2}, {"max_tokens": 7, "logprobs": 0}, {"stop": "\u2603"}]
        for start in (3, 8, 13, 18):
            stop = [text[start : start + 1 + start % 3], "never there"]
            include = start % 2 == 1
            options.append({"stop": stop, "include_stop_str_in_output": include, "logprobs": 1})
            options.append({"stop": stop, "min_tokens": 12, "include_stop_str_in_output": not include})
        for option in options:
            body = {**base, **option}
            plain = whole(await client.post("/v1/completions", {**body, "speculation": {"mode": "off"}}))
            assert plain["usage"] == len(plain["token_ids"])
            assert len(plain["tokens"]) == (len(plain["token_ids"]) if "logprobs" in option else 0)
            assert whole(await client.post("/v1/completions", body)) == plain, option
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            assert joined(await client.post("/v1/completions", streamed)) == plain, option
        assert sum(engine.stats().accepted_tokens.values()) > 0, "blocks of several tokens were met"


HOSTILE: list[Any] = [
    None, True, 0, -1, 1, 4.0, 0.5, 1e-320, 1e300, 2**63, -(2**63), "", "a", "\u0000", "\U0001f600", [], [0], [319],
    [320], ["a"], ["\ufffd"], {}, {"319": 100}, {"0": -100}, {"max_draft": 2**62}, {"mode": "off"},
]  # fmt: skip
FIELDS = [
    "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "n", "stop", "stop_token_ids", "seed", "logit_bias", "allowed_token_ids", "bad_words",
    "min_tokens", "ignore_eos", "skip_special_tokens", "stream", "logprobs", "speculation", "return_token_ids",
    "request_id", "echo", "user",
]  # fmt: skip


async def test_no_body_is_a_fault_or_changes_another_request(tiny_folder: Path) -> None:
    """Each field with each hostile value, some in pairs, while one stream runs: its text is what it is alone."""
    async with running(tiny_folder, draft="ngram") as (engine, client):
        witness = {**LONG, "prompt": "a witness", "temperature": 1.0, "max_tokens": 300}
        alone = (await client.post("/v1/completions", witness)).events
        bodies = [{**PROMPT, "max_tokens": 2, field: value} for field in FIELDS for value in HOSTILE]
        draws = random.Random(0)
        bodies += [{**PROMPT, **{draws.choice(FIELDS): draws.choice(HOSTILE) for _ in range(3)}} for _ in range(150)]
        draws.shuffle(bodies)
        watched = asyncio.create_task(client.post("/v1/completions", witness))
        statuses = set()
        for start in range(0, len(bodies), 8):
            part = bodies[start : start + 8]
            for body, reply in zip(part, await asyncio.gather(*(attack(client, b) for b in part)), strict=True):
                assert reply.status in (200, 400), body
                statuses.add(reply.status)
            if watched.done():
                texts = [[e["choices"][0]["text"] for e in events] for events in (alone, watched.result().events)]
                assert "".join(texts[0]) == "".join(texts[1])
                watched = asyncio.create_task(client.post("/v1/completions", witness))
        await watched
        assert statuses == {200, 400}
        assert engine.stats().requests_failed == 0


async def attack(client: Client, body: dict[str, Any]) -> Reply:
    """orjson cannot write every number that a client can."""
    text = orjson.dumps({k: v for k, v in body.items() if not (type(v) is int and v > 2**63)})
    return await client.post("/v1/completions", text)


async def test_ids_of_the_heads_padding_have_no_text(tmp_path: Path) -> None:
    """A head wider than the vocabulary: one such id, drawn or asked for, ended the engine for everybody."""
    folder = write_hf_folder(tmp_path / "padded", config=tiny_config(vocab_size=352))
    tiny_tokenizer(320).save(str(folder / "tokenizer.json"))
    async with running(folder, draft="none") as (engine, client):
        assert engine.tokenizer.vocab_size < 330 < engine.info.vocab_size
        for fields in ({}, {"logprobs": 2}, {"stop_token_ids": [330], "include_stop_str_in_output": True}):
            for stream in (False, True):
                body = {**PROMPT, "allowed_token_ids": [330, 331], "max_tokens": 4, **fields, "stream": stream}
                reply = await client.post("/v1/completions", body)
                assert reply.status == 200
                texts = [c["text"] for e in (reply.events if stream else [reply.body]) for c in e["choices"]]
                assert "".join(texts) == ""
        assert (await client.post("/v1/completions", {**PROMPT, "prompt": [330, 5]})).status == 200


async def test_a_name_can_be_used_again_at_once(tiny_folder: Path) -> None:
    """A client that left and asks again with its own X-Request-Id was refused while the engine cleaned up."""
    async with running(tiny_folder) as (_, client):
        for _ in range(8):
            headers = {"X-Request-Id": "mine"}
            async with client.session.post(client.url + "/v1/completions", json=LONG, headers=headers) as response:
                await response.content.readany()
            again = await client.post("/v1/completions", {**PROMPT, "max_tokens": 1}, headers=headers)
            assert again.status == 200
            assert again.headers["x-request-id"].startswith("mine")


async def test_names_of_a_lists_prompts_are_nobody_elses(tiny_folder: Path) -> None:
    """`x-0` is a name that a client may choose, whatever the engine calls the prompts of request `x`."""
    async with running(tiny_folder) as (_, client):
        names = [("x-0", "a"), ("x", ["a", "b"]), ("x-1", "a"), ("x", ["c", "d"]), ("x-0", ["a", "b"])]
        replies = await asyncio.gather(
            *(
                client.post("/v1/completions", {**PROMPT, "prompt": prompt, "request_id": name, "ignore_eos": True})
                for name, prompt in names
            )
        )
        assert [reply.status for reply in replies] == [200] * len(names)
        assert len({reply.headers["x-request-id"] for reply in replies}) == len(names)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_at_any_moment_frees_everything(tiny_folder: Path, stream: bool) -> None:
    """Whole head, half a body, at once, after a few steps, by RST and by half-close; `running` looks at the pages."""
    async with running(tiny_folder) as (engine, client):
        body = orjson.dumps({**LONG, "stream": stream, "n": 2, "logprobs": 2})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        data = head.encode() + b"\r\n\r\n" + body
        for sent in (data[:20], data[: -len(body)], data[:-5], data):
            for wait_s, how in ((0.0, "close"), (0.02, "close"), (0.08, "rst"), (0.02, "half")):
                await asyncio.to_thread(leave, client.url, sent, wait_s, how)
        await settled(engine)
        assert (await client.post("/v1/completions", PROMPT)).status == 200
        assert engine.stats().requests_aborted > 0


def leave(url: str, data: bytes, wait_s: float, how: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(data)
        connection.settimeout(wait_s or 0.001)
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection.recv(1 << 16)
        if how == "rst":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if how == "half":
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection.recv(1 << 16)


async def test_fifty_streams_some_of_which_leave(tiny_folder: Path) -> None:
    async with running(tiny_folder) as (_, client):
        stay = {**LONG, "max_tokens": 20}
        expected = [(await client.post("/v1/completions", {**stay, "seed": seed})).events for seed in range(3)]

        async def one(number: int) -> None:
            body = {**stay, "seed": number % 3}
            async with client.session.post(client.url + "/v1/completions", json=body) as response:
                assert response.status == 200
                if number % 5 == 0:
                    await response.content.readany()
                    return
                events = Reply(200, response.headers, await response.read()).events
            texts = ["".join(e["choices"][0]["text"] for e in found) for found in (events, expected[number % 3])]
            assert texts[0] == texts[1]

        async def probe() -> None:
            while True:
                assert (await client.get("/health")).status == 200
                await asyncio.sleep(0.02)

        probing = asyncio.create_task(probe())
        await asyncio.gather(*(one(number) for number in range(50)))
        assert not probing.done()
        probing.cancel()


async def test_an_operators_abort_is_no_fault_in_the_log(tiny_folder: Path) -> None:
    """A drain that runs out ends many streams: each used to write a traceback."""
    async with running(tiny_folder) as (engine, client):
        with structlog.testing.capture_logs() as logs:
            for stream in (True, False):
                asked = asyncio.create_task(attack(client, {**LONG, "stream": stream}))
                await until(lambda: any(status.output_tokens > 4 for status in engine.requests()))
                assert engine.abort(engine.requests()[0].request_id)
                if stream:
                    with pytest.raises(Exception, match="payload"):
                        await asked
                else:
                    assert (await asked).error["code"] == "aborted"
        assert [line for line in logs if line["event"] == "stream_aborted"]
        assert not [line for line in logs if line["log_level"] == "error"]


async def test_malformed_http_is_refused_without_a_traceback(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [
        b"\x00\x01\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    ]
    async with running(tiny_folder) as (_, client):
        host, port = client.url.removeprefix("http://").split(":")
        with structlog.testing.capture_logs() as logs:
            for data in requests:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                assert (await reader.readline()).split()[1] in (b"400", b"431")
                writer.close()
        assert (await client.get("/health")).status == 200
    refused = [line for line in logs if line["event"] == "malformed_request_refused"]
    assert len(refused) == len(requests) - 1  # aiohttp takes the first for TLS on the wrong port: below info
    assert all(line["log_level"] == "info" and "exc_info" not in line for line in refused)
    assert not caplog.records
