"""GET /v1/limits against what is configured: every limit of a request has its place, and nothing is a constant."""

from __future__ import annotations

import dataclasses

from specd.config import Config, SchedulerConfig, ServerConfig, SpeculationConfig
from specd.server.limits import limits
from tests.fake_engine import FakeEngine, byte_tokenizer, make_info
from tests.http_server import serve

CHANGED = {
    "max_waiting": SchedulerConfig(max_waiting=3),
    "max_waiting_tokens": SchedulerConfig(max_waiting_tokens=3),
    "max_requests_per_key": SchedulerConfig(max_requests_per_key=3),
    "max_waiting_tokens_per_key": SchedulerConfig(max_waiting_tokens_per_key=3),
    "queue_timeout_s": SchedulerConfig(queue_timeout_s=3),
    "request_timeout_s": SchedulerConfig(request_timeout_s=3),
    "max_choices": ServerConfig(max_choices=3),
    "max_prompts": ServerConfig(max_prompts=3),
    "max_stop": ServerConfig(max_stop=3),
    "max_logprobs": ServerConfig(max_logprobs=3),
    "max_body_bytes": ServerConfig(max_body_bytes=3),
    "slow_client_timeout_s": ServerConfig(slow_client_timeout_s=3),
    "max_corpora_tokens": SpeculationConfig(corpora_tokens=3),
}


def test_every_setting_is_shown_as_it_is() -> None:
    info = make_info(byte_tokenizer())
    before = limits(Config(), info)
    for name, section in CHANGED.items():
        field = type(section).__name__.removesuffix("Config").lower()
        found = limits(dataclasses.replace(Config(), **{field: section}), info)
        assert {key for key in found if found[key] != before[key]} == {name}
        assert found[name] == 3


def test_no_limit_is_null_and_no_drafts_are_no_corpora() -> None:
    plain = limits(Config(), make_info(byte_tokenizer(), max_draft=0))
    assert plain["queue_timeout_s"] is plain["max_waiting_tokens"] is plain["max_requests_per_key"] is None
    assert plain["max_corpora_tokens"] == plain["max_corpora"] == 0


async def test_a_schema_of_the_limit_and_one_more() -> None:
    async with serve(FakeEngine()) as client:
        found = (await client.get("/v1/limits")).body
        schema: dict[str, object] = {"type": "object"}
        for _ in range(int(found["max_schema_depth"]) - 1):
            schema = {"items": schema}
        assert (await client.chat(structured_outputs={"json": schema})).status == 200
        refused = await client.chat(structured_outputs={"json": {"items": schema}})
        assert (refused.status, refused.body["error"]["code"]) == (400, "schema_too_complex")
