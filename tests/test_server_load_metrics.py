"""Metrics of load, and a dashboard that asks for nothing that is not there."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from specd.pipeline.counters import Counters
from specd.status import Distribution
from tests.engines import ask, generate, make_parts, running
from tests.fake_engine import FakeEngine
from tests.http_server import Client, serve
from tests.test_server_metrics import key, scrape

DASHBOARD = Path(__file__).parent.parent / "config" / "grafana.json"
VLLM = {"model_name": "tiny", "engine": "0"}


def engine_with(**stats: Any) -> FakeEngine:
    engine = FakeEngine()
    counters = Counters(4)
    engine.snapshot = dataclasses.replace(
        engine.snapshot, **{"stages": counters.stages, "step_tokens": counters.step_tokens} | stats
    )
    return engine


def test_a_distribution_counts_inclusive_upper_ends() -> None:
    found = Distribution((1, 2.5))
    for value in (0.5, 1, 1.5, 2.5, 3):
        found.observe(value)
    assert (found.counts, found.total) == ([2, 2, 1], 8.5)
    copy = found.copy()
    found.observe(1)
    assert copy.counts == [2, 2, 1]


async def test_load_is_exposed() -> None:
    stage = Distribution((0.1, 1.0), [3, 2, 1], 4.5)
    engine = engine_with(
        refused={"key_tokens": 4},
        waiting_tokens=70,
        waiting_keys=2,
        waiting_spread=12.5,
        accepted_requests=9,
        requests_finished=4,
        requests_failed=1,
        requests_aborted=1,
        live_requests=2,
        stages={"verify": stage},
        step_tokens=Distribution((8,), [5, 1], 30),
        waiting=3,
        prompt_tokens=100,
        cached_tokens=40,
    )
    async with serve(engine) as client:
        samples = await scrape(client)
    assert samples[key("specd_admission_refusals_total", limit="key_tokens")] == 4
    assert samples[key("specd_admission_refusals_total", limit="waiting_sequences")] == 0, "there from the start"
    assert samples[key("specd_waiting_tokens")] == 70
    assert samples[key("specd_waiting_keys")] == 2
    assert samples[key("specd_waiting_spread_tokens")] == 12.5
    assert samples[key("specd_requests_lost_total")] == 1
    assert samples[key("specd_stage_seconds_bucket", stage="verify", le="1.0")] == 5
    assert samples[key("specd_stage_seconds_count", stage="verify")] == 6
    assert samples[key("specd_stage_seconds_sum", stage="verify")] == 4.5
    assert samples[key("vllm:iteration_tokens_total_sum", **VLLM)] == 30
    assert samples[key("vllm:num_requests_waiting_by_reason", reason="capacity", **VLLM)] == 3
    assert samples[key("vllm:num_requests_waiting_by_reason", reason="deferred", **VLLM)] == 0
    by_source = {"local_compute": 60, "local_cache_hit": 40, "external_kv_transfer": 0}
    for source, count in by_source.items():
        assert samples[key("vllm:prompt_tokens_by_source_total", source=source, **VLLM)] == count
    assert samples[key("vllm:iteration_tokens_total_bucket", le="+Inf", **VLLM)] == 6


async def test_what_a_request_asked_for_and_took() -> None:
    async with serve(FakeEngine()) as client:
        await client.chat(n=2, max_tokens=7, stream=True)
        await client.chat(max_tokens=20)
        samples = await scrape(client)
    assert samples[key("vllm:request_params_n_sum", **VLLM)] == 3
    assert samples[key("vllm:request_params_max_tokens_sum", **VLLM)] == 27
    assert samples[key("vllm:request_max_num_generation_tokens_sum", **VLLM)] == 7 + 11
    assert samples[key("vllm:request_decode_time_seconds_count", **VLLM)] == 3
    assert samples[key("vllm:request_prefill_time_seconds_count", **VLLM)] == 3
    assert samples[key("vllm:request_inference_time_seconds_count", **VLLM)] == 3
    assert samples[key("specd_stream_backpressure_seconds_count")] == 1


async def test_a_real_engine_measures_its_stages() -> None:
    async with running(make_parts(draft="layers", draft_len=3)) as engine:
        await generate(engine, [ask("a", [5, 6, 7], max_tokens=12)])
        stats = engine.stats()
    stages = {"schedule", "draft", "verify", "accept", "refill", "commit", "detokenize", "step"}
    assert set(stats.stages) == stages
    for name, stage in stats.stages.items():
        assert 0 < sum(stage.counts) <= stats.steps, name
        assert stage.total > 0, name
    assert sum(stats.step_tokens.counts) == stats.steps
    assert (stats.live_requests, stats.waiting_tokens, stats.waiting_keys) == (0, 0, 0)


async def series(client: Client) -> set[str]:
    """Names of all series, and of families without one yet (a labelled counter that nobody has touched)."""
    families = list(text_string_to_metric_families((await client.get("/metrics")).raw.decode()))
    names = {sample.name for family in families for sample in family.samples}
    return names | {f"{family.name}_total" for family in families if family.type == "counter"}


async def test_the_dashboard_asks_for_series_that_exist() -> None:
    async with serve(engine_with()) as client:
        await client.chat()
        exposed = await series(client)
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 40
    for query in queries:
        asked = re.findall(r"\b(?:specd_|vllm:)[A-Za-z0-9_:]+", query)
        assert asked, query
        assert set(asked) <= exposed, query
        assert query.count("(") == query.count(")")
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert all(x + width <= 24 for x, _, width, _ in places)
