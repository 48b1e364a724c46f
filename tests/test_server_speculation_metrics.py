"""/metrics of what speculation costs and brings, of writes to streams, and of what a drain and a crash leave."""

from __future__ import annotations

import dataclasses
import math

import pytest

from specd.commands.ctl_top import screen
from specd.config import Config
from specd.reload import Reloader
from specd.server.load_metrics import JournalCollector, ReloadCollector
from specd.status import UNDRAFTED
from tests.daemons import FakeEngine as DaemonFake
from tests.fake_engine import FakeEngine, Script
from tests.http_server import serve
from tests.test_server_metrics import key, scrape


async def test_all_series_are_there_before_anything_happens() -> None:
    async with serve(FakeEngine()) as client:
        samples = await scrape(client)
    for reason in UNDRAFTED:
        assert samples[key("specd_spec_disabled_total", reason=reason)] == 0
    for name in ("spec_wasted_seconds_total", "requests_lost_total", "drains_total", "send_seconds_count"):
        assert samples[key(f"specd_{name}")] == 0
    assert math.isnan(samples[key("specd_spec_speedup_estimate")]), "not 0: it is not known"


async def test_values_come_from_the_engine() -> None:
    engine = FakeEngine()
    engine.snapshot = dataclasses.replace(
        engine.snapshot, undrafted={"admin": 3}, wasted_s=1.5, speedup=1.75, drains=2, lost_before=4
    )
    async with serve(engine) as client:
        samples = await scrape(client)
    assert samples[key("specd_spec_disabled_total", reason="admin")] == 3
    assert samples[key("specd_spec_wasted_seconds_total")] == 1.5
    assert samples[key("specd_spec_speedup_estimate")] == 1.75
    assert samples[key("specd_drains_total")] == 2
    assert samples[key("specd_requests_lost_total")] == 4


async def test_writes_to_streams_are_timed() -> None:
    async with serve(FakeEngine(Script(blocks=(2,)))) as client:
        await client.chat()
        assert (await scrape(client))[key("specd_send_seconds_count")] == 0, "an answer in one piece is no stream"
        await client.chat(stream=True)
        samples = await scrape(client)
    assert samples[key("specd_send_seconds_count")] >= 6  # 11 tokens in 6 deltas
    assert samples[key("specd_send_seconds_bucket", le="+Inf")] == samples[key("specd_send_seconds_count")]
    waited = samples[key("specd_stream_backpressure_seconds_sum")]
    assert samples[key("specd_send_seconds_sum")] == pytest.approx(waited)


def value(collector: JournalCollector | ReloadCollector, name: str) -> float:
    found = {sample.name: sample.value for family in collector.collect() for sample in family.samples}
    return found[name]


def test_a_daemon_without_a_journal_says_so() -> None:
    collector = JournalCollector(DaemonFake().account)
    assert value(collector, "specd_journal_enabled") == 0
    assert value(collector, "specd_journal_failed_events_total") == 0


def test_when_the_configuration_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specd.reload.time.time", lambda: 100.0)
    reloader = Reloader(Config(), Config)
    name = "specd_config_reload_success_timestamp_seconds"
    assert value(ReloadCollector(reloader), name) == 100
    monkeypatch.setattr("specd.reload.time.time", lambda: 200.0)
    reloader.reload(dry_run=True)
    assert value(ReloadCollector(reloader), name) == 100
    reloader.reload()
    assert value(ReloadCollector(reloader), name) == 200


@pytest.mark.parametrize(("speedup", "expected"), [(1.754, "speed-up 1.75 (estimate)"), (None, "")])
def test_top_shows_the_speed_up(speedup: float | None, expected: str) -> None:
    snapshot = {
        "model": "m",
        "state": "ready",
        "uptime_s": 1.0,
        "generation": 1,
        "loop_lag_s": 0.0,
        "drafter": "ngram",
        "speculation": {"k": "adaptive", "overridden": False, "ttl_left_s": None},
        "speedup": speedup,
        "rates": None,
        "pages": {"total": 4, "free": 4, "cached": 0},
        "accepted_per_position": (),
        "drafted_per_position": (),
        "num_requests": 0,
        "requests": [],
        **dict.fromkeys(("running", "waiting", "accepted", "finished", "failed", "aborted"), 0),
    }
    (line,) = [line for line in screen(snapshot, [], width=160, height=50).split("\n") if line.startswith("drafter")]
    assert line.endswith(expected or "- tokens a draft step")
