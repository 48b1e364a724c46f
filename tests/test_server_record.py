"""The `request_finished` line of ends that no client wished for, and streams that begin while they wait."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
import structlog

from specd.errors import AdminAbortedError, QueueTimeoutError, ShutdownError, SpecdError
from specd.request import FinishReason, SequenceDelta
from tests.fake_engine import FakeEngine, Script
from tests.http_server import HELLO, Client, serve, until
from tests.test_server_metrics import key, scrape

STREAM = {**HELLO, "stream": True, "stream_options": {"include_obfuscation": False}}


def ended_by(error: SpecdError, *, after: int, delay_s: float = 0.001) -> FakeEngine:
    engine = FakeEngine(Script(abort_after=after, delay_s=delay_s))

    def end(delta: SequenceDelta, reason: FinishReason, _: Any) -> SequenceDelta:
        return SequenceDelta(delta.request_id, delta.index, finish_reason=reason, error=error)

    engine._end = end  # type: ignore[method-assign, assignment]
    return engine


async def read(client: Client, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and bytes of a stream, whether it ends well or breaks off."""
    data = b""
    async with client.session.post(client.url + "/v1/chat/completions", json=body) as response:
        try:
            async for chunk in response.content.iter_any():
                data += chunk
        except aiohttp.ClientPayloadError:
            data += b"BROKEN"
        return response.status, data


async def finished(client: Client, body: dict[str, Any]) -> tuple[int, bytes, dict[str, Any]]:
    with structlog.testing.capture_logs() as logs:
        status, data = await read(client, body)
        await until(lambda: any(line["event"] == "request_finished" for line in logs))
    return status, data, next(dict(line) for line in logs if line["event"] == "request_finished")


@pytest.mark.parametrize(
    ("error", "aborted_by"), [(AdminAbortedError("ctl abort"), "admin"), (ShutdownError("stopped"), "drain")]
)
async def test_a_stream_that_the_server_ends_is_not_a_client_that_left(error: SpecdError, aborted_by: str) -> None:
    async with serve(ended_by(error, after=3)) as client:
        status, data, line = await finished(client, STREAM)
        whole = await finished(client, {**STREAM, "stream": False, "stream_options": None})
        samples = await scrape(client)
    assert status == line["status"] == 200, "the status line that was sent"
    assert data.endswith(b"BROKEN")
    assert (line["aborted_by"], line["error"]) == (aborted_by, error.code)
    assert (whole[0], whole[2]["status"], whole[2]["aborted_by"]) == (503, 503, aborted_by)
    labels = {"endpoint": "/v1/chat/completions"}
    assert samples[key("specd_http_responses_total", status="200", **labels)] == 1
    assert samples[key("specd_http_responses_total", status="503", **labels)] == 1
    assert samples[key("specd_client_disconnects_total")] == 0


async def test_a_fault_in_mid_stream_is_not_a_client_that_left() -> None:
    async with serve(FakeEngine(Script(fail_after=3))) as client:
        status, _, line = await finished(client, STREAM)
    assert (status, line["status"], line["aborted_by"], line["error"]) == (200, 200, None, "non_finite_logits")


async def test_a_client_has_a_name_that_tells_nothing() -> None:
    async with serve(FakeEngine()) as client:
        lines = [(await finished(client, STREAM))[2] for _ in range(2)]
    assert lines[0]["client"] == lines[1]["client"]
    assert len(lines[0]["client"]) == 12
    assert "127.0.0.1" not in str(lines)


# ---------------------------------------------------------------- streams that wait for their first token


async def test_a_stream_that_waits_long_is_begun_when_asked_for() -> None:
    engine = FakeEngine(Script(delay_s=0.25, blocks=(8,)))
    async with serve(engine, queued_stream_s=0.05, keep_alive_s=0.1) as client:
        status, data, _ = await finished(client, STREAM)
    head, _, rest = data.partition(b": keep-alive\n\n")
    assert status == 200
    assert b'"role":"assistant"' in head, "what does not depend on any token"
    assert b'"content":"h' not in head
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_what_goes_wrong_after_that_is_an_event() -> None:
    engine = ended_by(QueueTimeoutError("no token within 2 s"), after=0, delay_s=0.2)
    async with serve(engine, queued_stream_s=0.05) as client:
        status, data, line = await finished(client, STREAM)
    assert (status, line["status"], line["aborted_by"]) == (200, 200, "deadline")
    assert b'"code":"queue_timeout"' in data
    assert data.endswith(b"BROKEN")


async def test_by_default_a_stream_that_waits_has_a_status_of_its_own() -> None:
    engine = ended_by(QueueTimeoutError("no token within 2 s"), after=0, delay_s=0.3)
    async with serve(engine, keep_alive_s=0.1) as client:
        status, data, line = await finished(client, STREAM)
    assert (status, line["status"]) == (503, 503)
    assert b"keep-alive" not in data


async def test_metrics_without_vllm_s_names() -> None:
    async with serve(FakeEngine(), metrics_compat="off") as client, asyncio.timeout(10):
        await client.chat()
        samples = await scrape(client)
    names = {name for name, _ in samples}
    assert not [name for name in names if name.startswith("vllm:") or "spec_decode" in name]
    labels = {"model_name": "tiny", "engine": "0"}
    assert samples[key("specd_time_to_first_token_seconds_count", **labels)] == 1
    assert samples[key("specd_request_generation_tokens_sum", **labels)] == 11
    assert {
        "specd_num_requests_running",
        "specd_generation_tokens_total",
        "specd_iteration_tokens_total_count",
    } <= names
    assert "specd_spec_drafts_total" in names
