"""/metrics: names that others scrape, present from the start, truthful afterwards."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fake_engine import FakeEngine, Script
from tests.http_server import Client, serve

Key = tuple[str, frozenset[tuple[str, str]]]


async def scrape(client: Client) -> dict[Key, float]:
    reply = await client.get("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(reply.raw.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def key(name: str, **labels: str) -> Key:
    return name, frozenset(labels.items())


async def test_speculation_counters_exist_at_zero() -> None:
    async with serve(FakeEngine()) as client:
        samples = await scrape(client)
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert samples[key(f"vllm:spec_decode_num_{name}_total", model_name="tiny", engine="0")] == 0
    for position in "0123":
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert samples[key(name, model_name="tiny", engine="0", position=position)] == 0
        assert samples[key("specd_spec_drafted_per_position_total", position=position)] == 0
    assert not [name for name, _ in samples if name.endswith("_created")]


async def test_every_family_says_what_it_is() -> None:
    async with serve(FakeEngine()) as client:
        text = (await client.get("/metrics")).raw.decode()
    texts = {family.name: family.documentation for family in text_string_to_metric_families(text)}
    assert len(texts) > 30
    for name, documentation in texts.items():
        assert documentation.endswith("."), name
        assert len(documentation.split()) >= 4, name
        assert "as in vllm" not in documentation.lower(), name


@pytest.mark.parametrize(
    ("drafter", "sources"),
    [
        ("ngram", {"ngram", "prediction", "corpus", "grammar"}),
        ("lm:draft", {"drafter", "prediction", "corpus", "grammar"}),
        ("layers:4", {"drafter", "prediction", "corpus", "grammar"}),
        ("none", set()),
    ],
)
async def test_sources_exist_before_anybody_has_drafted(drafter: str, sources: set[str]) -> None:
    engine = FakeEngine(drafter=drafter)
    engine.snapshot = dataclasses.replace(engine.snapshot, drafts={}, draft_tokens={}, accepted_tokens={})
    async with serve(engine) as client:
        samples = await scrape(client)
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        found = {
            dict(labels)["source"]: n for (series, labels), n in samples.items() if series == f"specd_spec_{name}_total"
        }
        assert found == dict.fromkeys(sources, 0)


async def test_a_load_tool_s_parser_finds_the_counters() -> None:
    """Lines that begin with vllm:spec_decode, end in a number, and name the position in quotes."""
    async with serve(FakeEngine()) as client:
        lines = (await client.get("/metrics")).raw.decode().splitlines()
    found = [line for line in lines if line.startswith("vllm:spec_decode") and "_total" in line]
    assert len(found) == 3 + 4
    assert all(float(line.rsplit(" ", 1)[1]) == 0 for line in found)
    assert sum('position="' in line for line in found) == 4


async def test_values_come_from_the_engine() -> None:
    engine = FakeEngine()
    engine.snapshot = dataclasses.replace(
        engine.snapshot,
        drafts={"drafter": 2, "ngram": 3},
        draft_tokens={"drafter": 8, "ngram": 6},
        accepted_tokens={"drafter": 4, "ngram": 5},
        accepted_per_position=(5, 3, 1, 0),
        finished_requests={"stop": 7, "length": 2},
        prompt_tokens=100,
        cached_tokens=40,
        generation_tokens=55,
        pages_free=64,
        pages_cached=16,
        waiting=3,
        failed_drafts=2,
        failed_refills=1,
    )
    async with serve(engine) as client:
        samples = await scrape(client)
    model = {"model_name": "tiny", "engine": "0"}
    assert samples[key("vllm:spec_decode_num_drafts_total", **model)] == 5
    assert samples[key("vllm:spec_decode_num_draft_tokens_total", **model)] == 14
    assert samples[key("vllm:spec_decode_num_accepted_tokens_total", **model)] == 9
    assert samples[key("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1", **model)] == 3
    assert samples[key("vllm:request_success_total", finished_reason="stop", **model)] == 7
    assert samples[key("vllm:request_success_total", finished_reason="error", **model)] == 0
    assert samples[key("vllm:kv_cache_usage_perc", **model)] == 0.75
    assert samples[key("vllm:num_requests_waiting", **model)] == 3
    assert samples[key("vllm:prefix_cache_hits_total", **model)] == 40
    assert samples[key("specd_spec_accepted_tokens_total", source="ngram")] == 5
    assert samples[key("specd_spec_failed_drafts_total")] == 2
    assert samples[key("specd_spec_failed_refills_total")] == 1
    assert samples[key("specd_kv_pages", state="cached")] == 16
    assert samples[key("specd_engine_state", state="ready")] == 1
    assert samples[key("specd_engine_state", state="draining")] == 0


async def test_histograms_count_requests() -> None:
    async with serve(FakeEngine(Script(blocks=(2,)))) as client:
        await client.chat()
        await client.chat(stream=True)
        await client.chat(temperature=-1)
        await client.get("/nowhere/at/all")
        samples = await scrape(client)
    model = {"model_name": "tiny", "engine": "0"}
    assert samples[key("vllm:time_to_first_token_seconds_count", **model)] == 2
    assert samples[key("vllm:e2e_request_latency_seconds_count", **model)] == 2
    assert samples[key("vllm:request_queue_time_seconds_count", **model)] == 2
    assert samples[key("vllm:request_generation_tokens_sum", **model)] == 22
    assert samples[key("vllm:inter_token_latency_seconds_count", **model)] == 2 * 5  # 11 tokens in 6 deltas
    route = "/v1/chat/completions"
    assert samples[key("specd_http_responses_total", endpoint=route, status="200")] == 2
    assert samples[key("specd_http_responses_total", endpoint=route, status="400")] == 1
    assert samples[key("specd_http_responses_total", endpoint="other", status="404")] == 1


async def test_applications_do_not_share_a_registry() -> None:
    async with serve(FakeEngine()) as first, serve(FakeEngine()) as second:
        await first.chat()
        name = key("vllm:e2e_request_latency_seconds_count", model_name="tiny", engine="0")
        assert (await scrape(first))[name] == 1
        assert (await scrape(second))[name] == 0
