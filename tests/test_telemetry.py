"""Spans of requests: what is in them, who gets them, and what a collector that is not there costs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from specd.config import Config
from specd.config_telemetry import TelemetryConfig
from specd.errors import ConfigError
from specd.server import telemetry
from specd.server.spans import check_telemetry, configured_telemetry
from specd.server.trace_context import TraceContext, trace_context
from tests.daemons import free_port
from tests.fake_engine import FakeEngine, Script
from tests.http_server import HELLO, Client, Reply, serve, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
CALLS: list[tuple[str, int]] = []  # addresses of every connect of this process


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        CALLS.append(arguments[1][:2])


sys.addaudithook(_audit)


@dataclasses.dataclass
class Collector:
    """What was sent to it, and as it came."""

    url: str = ""
    spans: list[Span] = dataclasses.field(default_factory=list)
    raw: bytes = b""
    service: str = ""

    async def take(self, request: web.Request) -> web.Response:
        self.raw += (body := await request.read())
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.service = str(_plain(resource.resource.attributes)["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response()

    def of(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    collector.url = f"http://{host}:{port}/v1/traces"
    try:
        yield collector
    finally:
        await runner.cleanup()


def sending(url: str, **settings: Any) -> Config:
    return Config(telemetry=TelemetryConfig(enabled=True, endpoint=url, **settings))


async def ask(client: Client, headers: dict[str, str], **fields: Any) -> Reply:
    return await client.post("/v1/chat/completions", {**HELLO, **fields}, headers=headers)


def _plain(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [entry.string_value for entry in value.values] if kind == "array_value" else value
    return found


async def test_a_request_is_a_tree_of_spans_without_any_text() -> None:
    engine = FakeEngine(Script(blocks=(1,), delay_s=0.002))
    async with collecting() as collector:
        async with serve(engine, config=sending(collector.url, decode_event_steps=4, service_name="mine")) as client:
            body = {"messages": [{"role": "user", "content": "PROMPT"}], "stop": ["STOPPER"], "seed": 7}
            reply = await ask(client, TRACEPARENT, temperature=0.5, **body)
        spans = {span.name: span for span in collector.spans}
    assert reply.status == 200
    root = spans.pop("chat tiny")
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.kind) == (TRACE, PARENT, Span.SPAN_KIND_SERVER)
    assert list(spans) == ["tokenize", "queue", "prefill", "decode"]
    for span in spans.values():
        assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    told = _plain(root.attributes)
    assert told["gen_ai.operation.name"] == "chat"
    assert (told["gen_ai.request.model"], told["gen_ai.request.temperature"], told["gen_ai.request.seed"]) == (
        "tiny", 0.5, 7,
    )  # fmt: skip
    assert told["gen_ai.usage.input_tokens"] == len(engine.requests_seen[0].prompt_ids)
    assert told["gen_ai.usage.output_tokens"] == 11
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["specd.request.num_stop_sequences"] == 1
    assert (told["specd.drafted"], told["specd.accepted"]) == (10, 6)
    assert "error.type" not in told
    events = [(event.name, _plain(event.attributes)["specd.steps"]) for event in spans["decode"].events]
    assert events == [("steps", 4), ("steps", 8)], "one in so many steps, never one a token"
    assert _plain(spans["decode"].events[-1].attributes)["specd.kept_drafts"] == 4
    assert collector.service == "mine"
    for secret in (b"PROMPT", b"STOPPER", b"hello", b"world"):
        assert secret not in collector.raw


async def test_failures_are_told_by_their_codes() -> None:
    engine = FakeEngine()
    async with collecting() as collector:
        async with serve(engine, config=sending(collector.url)) as client:
            await client.chat(temperature=9)
            engine.script = Script(fail_after=0)
            await client.complete()
            engine.script = Script(hang_after=2)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.complete(stream=True)
            await until(lambda: bool(engine.aborted))
        found = [(span.name, _plain(span.attributes), span.status.code) for span in collector.spans]
    roots = [(name, told, code) for name, told, code in found if "http.response.status_code" in told]
    assert [(told["error.type"], told["http.response.status_code"], code) for _, told, code in roots] == [
        ("out_of_range", 400, Status.STATUS_CODE_UNSET),
        ("non_finite_logits", 500, Status.STATUS_CODE_ERROR),
        ("aborted_by_client", 499, Status.STATUS_CODE_UNSET),
    ]
    assert [name for name, _, _ in roots] == ["chat", "text_completion tiny", "text_completion tiny"]
    assert not [told for name, told, _ in found if name == "prefill"], "nobody has measured any"


@pytest.mark.parametrize(
    ("headers", "ratio", "num_spans"),
    [({"traceparent": f"00-{TRACE}-{PARENT}-00"}, 1.0, 0), ({}, 0.0, 0), (TRACEPARENT, 0.0, 5)],
)
async def test_the_caller_decides_what_is_sampled(headers: dict[str, str], ratio: float, num_spans: int) -> None:
    async with collecting() as collector:
        async with serve(FakeEngine(), config=sending(collector.url, sample_ratio=ratio)) as client:
            assert (await ask(client, headers)).status == 200
        assert len(collector.spans) == num_spans


async def test_a_collector_that_is_down_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_CLOSE_S", 0.3)
    config = sending(f"http://127.0.0.1:{free_port()}/v1/traces", max_queued=8)
    with structlog.testing.capture_logs() as logs:
        async with serve(FakeEngine(), config=config) as client:
            async with asyncio.timeout(10):
                replies = await asyncio.gather(*[client.chat() for _ in range(8)])
            metrics = (await client.get("/metrics")).raw.decode()
    assert [reply.status for reply in replies] == [200] * 8
    assert f'specd_telemetry_spans_total{{result="dropped"}} {8 * 5 - 8}' in metrics.replace(".0\n", "\n")
    (ended,) = [line for line in logs if line["event"] == "spans_ended"]
    assert (ended["exported"], ended["failed"] + ended["dropped"]) == (0, 8 * 5)
    (told,) = [line for line in logs if line["event"] == "spans_not_exported"]
    assert "refused" in told["reason"]


async def _log_line(client: Client, headers: dict[str, str]) -> dict[str, Any]:
    with structlog.testing.capture_logs() as logs:
        await ask(client, headers)
        await until(lambda: any(line["event"] == "request_finished" for line in logs))
    return next(dict(line) for line in logs if line["event"] == "request_finished")


async def test_the_log_names_the_trace_and_nobody_is_called() -> None:
    async with serve(FakeEngine()) as client:
        CALLS.clear()
        known = await _log_line(client, TRACEPARENT)
        unknown = await _log_line(client, {"traceparent": "00-0-0-01"})
        metrics = (await client.get("/metrics")).raw.decode()
        port = int(client.url.rsplit(":", 1)[1])
    assert (known["trace_id"], unknown["trace_id"]) == (TRACE, None)
    assert "specd_telemetry" not in metrics
    assert set(CALLS) == {("127.0.0.1", port)}, "the server opens no socket of its own"


async def test_spans_that_fail_cost_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise RuntimeError("no spans today")

    monkeypatch.setattr(telemetry.Telemetry, "finish", fail)
    async with serve(FakeEngine(), config=sending("http://127.0.0.1:1/v1/traces")) as client:
        with structlog.testing.capture_logs() as logs:
            reply = await ask(client, TRACEPARENT)
            await until(lambda: any(line["event"] == "request_finished" for line in logs))
    assert reply.status == 200
    found = {line["event"]: line for line in logs}
    assert found["request_finished"]["trace_id"] == TRACE
    assert "no spans today" in str(found["spans_failed"]["exc_info"])


async def test_with_spans_the_collector_alone_is_called() -> None:
    async with collecting() as collector:
        CALLS.clear()
        async with serve(FakeEngine(), config=sending(collector.url)) as client:
            line = await _log_line(client, {})
            port = int(client.url.rsplit(":", 1)[1])
        (root,) = collector.of("chat tiny")
    assert line["trace_id"] == root.trace_id.hex()
    collected = int(collector.url.rsplit(":", 1)[1].split("/")[0])
    assert {at[1] for at in CALLS} == {port, collected}


def test_the_sdk_is_wanted_only_when_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import specd.server.app, sys; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert configured_telemetry(TelemetryConfig()) is None
    monkeypatch.delitem(sys.modules, "specd.server.telemetry")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    check_telemetry(TelemetryConfig())
    with pytest.raises(ConfigError, match=r"telemetry\.enabled needs OpenTelemetry .* extra 'otel'"):
        check_telemetry(TelemetryConfig(enabled=True))


@pytest.mark.parametrize(
    ("traceparent", "state", "context"),
    [
        (f"00-{TRACE}-{PARENT}-01", "a=1", TraceContext(TRACE, PARENT, sampled=True, state="a=1")),
        (f" 00-{TRACE}-{PARENT}-00 ", "", TraceContext(TRACE, PARENT, sampled=False)),
        (f"42-{TRACE}-{PARENT}-03-later", "x" * 600, TraceContext(TRACE, PARENT, sampled=True)),
        (f"00-{TRACE}-{PARENT}-01-more", "", None),
        (f"ff-{TRACE}-{PARENT}-01", "", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", "", None),
        (f"00-{'0' * 32}-{PARENT}-01", "", None),
        (f"00-{TRACE}-{'0' * 16}-01", "", None),
        ("", "", None),
    ],
)
def test_traceparent(traceparent: str, state: str, context: TraceContext | None) -> None:
    assert trace_context({"traceparent": traceparent, "tracestate": state}) == context
