"""The load client against a scripted server: what it measures, what it counts as failed, how it alternates."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from specd import cli
from specd.bench.client import Sample, _Stream
from specd.bench.load import Load, describe, num_requests, run_load
from specd.bench.prompts import SETS, built_in, read_prompts
from specd.bench.report import compare, percentile, render, summarise
from specd.commands.bench import _load, _without_key
from specd.errors import ConfigError, SpecdError, UsageError

PROMPTS = built_in("all")


def events(tokens: int, *, off: bool) -> list[dict[str, Any]]:
    """A stream of `tokens` tokens, two a chunk."""
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    chunks += [{"choices": [{"index": 0, "delta": {"content": "ab "}}]} for _ in range(tokens // 2)]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}]
    spec = {"num_spec_steps": 0 if off else 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 0 if off else 6}
    usage = {"prompt_tokens": 5, "completion_tokens": tokens}
    return [*chunks, {"choices": [], "usage": usage, "metrics": {"speculative_decoding": spec}}]


class FakeServer:
    """Answers /v1/models and /v1/chat/completions; `answer` can be replaced."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self.delay_s = delay_s
        self.tail = b"data: [DONE]\n\n"

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        off = body.get("speculation") == {"mode": "off"}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events(body["max_tokens"], off=off):
            await response.write(b": keep-alive\n\ndata: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(2 * self.delay_s if off else self.delay_s)
        self.in_flight -= 1
        await response.write(self.tail)
        return response

    async def use(self, action: Callable[[str], Awaitable[Any]]) -> Any:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        async with TestServer(app) as server:
            return await action(str(server.make_url("")))


def load(url: str, **changes: Any) -> Load:
    return Load(**{"url": url, "prompts": PROMPTS, "requests": 6, "max_tokens": 8, **changes})


async def test_a_run_measures_every_request() -> None:
    server = FakeServer(delay_s=0.005)
    ended: list[int] = []
    report = await server.use(lambda url: run_load(load(url, concurrency=3), progress=ended.append))
    summary = report["summary"]["auto"]
    assert report["model"] == "fake"
    assert (summary["requests"], summary["failed"], summary["completion_tokens"]) == (6, 0, 48)
    assert summary["acceptance_length"] == pytest.approx(1 + 6 / 4)
    assert summary["ttft_ms"]["p50"] >= 4
    assert 3 <= summary["itl_ms"]["p50"] < 100
    assert summary["tokens_per_s"] == pytest.approx(48 / summary["wall_s"])
    assert server.most_in_flight == 3  # closed loop: never more, and as many as asked for
    assert sum(ended) == 6
    assert [body["messages"] for body in server.bodies[:3]] == PROMPTS[:3]
    assert all("text" not in record for record in report["samples"])


async def test_compare_alternates_and_takes_ratios_within_rounds() -> None:
    server = FakeServer(delay_s=0.004)
    asked = load("", concurrency=2, requests=1, compare_off=True)
    report = await server.use(lambda url: run_load(load(url, concurrency=2, requests=1, compare_off=True)))
    assert report["compare"]["rounds"] == 5  # the least that gives a median
    assert num_requests(asked) == 20
    modes = ["off" if "speculation" in body else "auto" for body in server.bodies if body["max_tokens"] == 8]
    assert modes == (["auto"] * 2 + ["off"] * 4 + ["auto"] * 2) * 2 + ["auto"] * 2 + ["off"] * 2
    assert len([body for body in server.bodies if body["max_tokens"] == 1]) == 10  # both modes find a warm prefix
    ratios = report["compare"]["ratios"]
    assert 1.3 < ratios["tokens_per_s"]["median"] < 2.5  # off waits twice as long
    assert 0.3 < ratios["itl_p50"]["median"] < 0.8
    assert (report["compare"]["identical_texts"], report["compare"]["compared_texts"]) == (10, 10)
    assert report["summary"]["off"]["acceptance_length"] is None
    assert "median of 5 rounds" in render(report)


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (b"", "without [DONE]"),
        (b'data: {"error": {"message": "broken engine"}}\n\n', "broken engine"),
        (b"data: {oops\n\n", "not JSON"),
        (b"data: [1]\n\n", "an event is no object"),
        (b'data: {"choices": {"a": 1}}\n\n', "choices is no list"),
        (b'data: {"choices": [1]}\n\n', "a choice is no object"),
        (b'data: {"choices": [{"delta": [1]}]}\n\n', "delta is no object"),
        (b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', "content is no string"),
        (b'data: {"usage": "much"}\n\n', "usage is no object"),
        (b'data: {"usage": {"completion_tokens": -1}}\n\n', "usage.completion_tokens is no count"),
        (b'data: {"metrics": {"speculative_decoding": {"num_spec_steps": "x"}}}\n\n', "num_spec_steps is no count"),
        (b"data: " + b"x" * (1 << 20), "too long"),
    ],
)
async def test_broken_streams_are_failures(tail: bytes, message: str) -> None:
    server = FakeServer()
    server.tail = tail
    report = await server.use(lambda url: run_load(load(url)))
    assert report["summary"]["auto"]["failed"] == 6
    assert message in report["summary"]["auto"]["errors"][0]
    assert message in render(report)


async def test_a_server_that_is_not_there() -> None:
    with pytest.raises(SpecdError, match=r"^http://127\.0\.0\.1:9: Connection refused; is the server running\?$"):
        await run_load(load("http://127.0.0.1:9"))


async def test_load_goes_where_it_was_sent() -> None:
    """Not where the server sends it: that may be another machine."""
    server = FakeServer()

    async def elsewhere(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": "http://example.org/v1/chat/completions"})

    server.chat = elsewhere  # type: ignore[method-assign]
    report = await server.use(lambda url: run_load(load(url)))
    assert report["summary"]["auto"]["errors_by_kind"] == {"http.307": 6}


async def test_a_server_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specd.bench.client._MODELS_S", 0.1)
    server = FakeServer()

    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.json_response({"data": [{"id": "late"}]})

    server.models = hang  # type: ignore[method-assign]
    with pytest.raises(SpecdError, match=r"TimeoutError.*; is the server running"):
        await server.use(lambda url: run_load(load(url)))


def test_what_is_sent_is_said() -> None:
    assert describe(load("", concurrency=8)) == "6 requests, 6 in flight"
    asked = load("", concurrency=4, requests=2, compare_off=True)
    assert describe(asked).startswith("40 requests: 5 rounds (at least 5) of 4 in flight")


async def test_refusals_are_failures() -> None:
    server = FakeServer()

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=429)

    server.chat = refuse  # type: ignore[method-assign]
    report = await server.use(lambda url: run_load(load(url)))
    assert report["summary"]["auto"]["failed"] == 6
    assert "HTTP 429" in report["summary"]["auto"]["errors"][0]


def test_percentile_interpolates() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile(range(101), 99) == 99


def sample(*, text: str = "a", ok: bool = True, tokens: int = 3, arrivals: tuple[float, ...] = (1.0, 2.0)) -> Sample:
    return Sample(
        ok=ok, speculation="auto", total_s=2.0, arrivals=arrivals, completion_tokens=tokens, text=text, error=""
    )


def test_rates_leave_the_prompt_out() -> None:
    assert sample(tokens=5, arrivals=(10.0, 11.0, 12.0)).decode_tokens_per_s == pytest.approx(2.0)
    assert sample(arrivals=(1.0,)).decode_tokens_per_s is None
    assert sample(arrivals=()).ttft_s is None


def test_compare_counts_different_texts() -> None:
    summary = {mode: summarise([sample()], 1.0) for mode in ("auto", "off")}
    result = compare([summary], [(sample(), sample()), (sample(), sample(text="b")), (sample(), sample(ok=False))])
    assert (result["identical_texts"], result["compared_texts"]) == (1, 2)
    assert result["ratios"]["tokens_per_s"]["median"] == 1.0


def test_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('one\n\n{"prompt": "two"}\n{"messages": [{"role": "user", "content": "three"}]}\n')
    assert [messages[0]["content"] for messages in read_prompts(file)] == ["one", "two", "three"]
    for text, word in (("", "no prompt"), ("{}", ":1"), ("{oops", ":1")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=word):
            read_prompts(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none")


def test_built_in_sets() -> None:
    assert len(built_in("all")) == len(SETS["chat"]) + len(SETS["copy"])
    assert len({messages[0]["content"] for messages in PROMPTS}) == len(PROMPTS)


def parse(*words: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(["bench", *words])


def test_only_this_machine_unless_allowed() -> None:
    for url in ("http://10.0.0.1:8000", "http://example.com", "http://127.0.0.1.example.com:80", "nonsense"):
        with pytest.raises(UsageError, match="--url"):
            _load(parse("--url", url))
    assert _load(parse("--url", "http://10.0.0.1:8000", "--allow-remote")).url == "http://10.0.0.1:8000"
    assert _load(parse("--url", "http://[::1]:8000")).concurrency == 1
    with pytest.raises(UsageError, match="--concurrency 0"):
        _load(parse("--concurrency", "0"))
    for option, wrong in (("--timeout", "nan"), ("--timeout", "0"), ("--timeout", "inf"), ("--temperature", "nan")):
        with pytest.raises(UsageError, match=f"{option} {wrong}"):
            _load(parse(option, wrong))
    assert cli.main(["bench", "--requests", "0"]) == 2


async def test_the_command_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    words = ["bench", "--requests", "2", "--max-tokens", "4", "-o", str(file), "--api-key", "secret"]
    server = FakeServer()
    code = await server.use(lambda url: asyncio.to_thread(cli.main, [*words, "--url", url]))
    assert code == 0
    report = json.loads(file.read_text())
    assert report["summary"]["auto"]["requests"] == 2
    assert report["machine"]["cores"] >= 1
    assert "secret" not in file.read_text()
    assert "2 requests done, 0 failed" in capsys.readouterr().out
    server.tail = b""
    assert await server.use(lambda url: asyncio.to_thread(cli.main, [*words, "--url", url])) == 1


def test_keys_stay_out_of_the_command_line() -> None:
    assert _without_key(["specd", "--api-key", "k", "--api-key=k"]) == ["specd", "--api-key", "...", "--api-key=..."]


def test_thinking_is_text_too() -> None:
    """A model that thinks has said something before its answer begins."""
    stream = _Stream(0.0)
    for name in ("reasoning_content", "reasoning", "content", "refusal"):
        assert stream._event({"choices": [{"delta": {"role": "assistant", name: name}}]}) is None
    sample = stream.sample("auto", None, late_s=0.0)
    assert len(sample.arrivals) == 3
    assert sample.text == "reasoning_contentreasoningcontent"
