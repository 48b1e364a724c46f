"""Extensions of answers: obfuscation, timings, headers; and chats that are continued."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specd.server import generation
from specd.server.sse import padded_event
from tests.fake_engine import FakeEngine, Script
from tests.http_server import Reply, serve

WORDS = "a bb ccc dddd eeeee ffffff ggggggg hhhhhhhh iiiiiiiii " * 4


def sizes(reply: Reply) -> list[int]:
    """Bytes of each event but [DONE], its blank line counted."""
    events = [block for block in reply.raw.split(b"\n\n") if block.startswith(b"data: {")]
    return [len(event) + 2 for event in events]


async def test_obfuscation_hides_how_much_an_event_holds() -> None:
    rng = random.Random(1)
    blocks = [rng.choice((1, 1, 2, 3, 5, 8)) for _ in range(40)]
    async with serve(FakeEngine(Script(text=lambda request, index: WORDS, blocks=blocks))) as client:
        fields = {"stream": True, "max_tokens": 300}
        plain = await client.chat(**fields)
        hidden = await client.chat(**fields, stream_options={"include_obfuscation": True})
    assert len(set(sizes(plain))) > 6, "without it sizes follow the tokens of each step"
    assert len(set(sizes(hidden)[1:-1])) == 1, "all text events are of one size"
    assert all(size % 64 == 0 for size in sizes(hidden))
    assert all(event["obfuscation"] or size % 64 == 0 for event, size in zip(hidden.events, sizes(hidden), strict=True))
    assert len({event["obfuscation"] for event in hidden.events}) > len(hidden.events) // 2, "random, not a pattern"
    assert all("obfuscation" not in event for event in plain.events)

    def text(reply: Reply) -> str:
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in reply.events)

    assert text(hidden) == text(plain) == WORDS


async def test_obfuscation_is_on_where_others_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off on this machine, on for any other peer, and as the client says where it says."""
    async with serve(FakeEngine()) as client:
        assert all("obfuscation" not in event for event in (await client.chat(stream=True)).events)
        monkeypatch.setattr(generation, "is_loopback", lambda host: False)
        assert all("obfuscation" in event for event in (await client.complete(stream=True)).events)
        for option, wanted in ((False, False), (True, True)):
            reply = await client.chat(stream=True, stream_options={"include_obfuscation": option})
            assert all(("obfuscation" in event) is wanted for event in reply.events)


def test_padding_reaches_every_size() -> None:
    for length in range(140):
        assert len(padded_event({"x": "y" * length})) % 64 == 0


async def test_timings() -> None:
    """llama.cpp's: in every chunk the numbers so far, in a whole answer those of the end."""
    async with serve(FakeEngine(Script(blocks=(2,)))) as client:
        whole = (await client.chat(timings_per_token=True)).body["timings"]
        assert whole["prompt_n"] + whole["cache_n"] == 21
        assert (whole["predicted_n"], whole["draft_n"], whole["draft_n_accepted"]) == (11, 10, 6)
        assert whole["prompt_ms"] == pytest.approx(9.0)
        assert whole["predicted_per_second"] == pytest.approx(11 / 0.09)
        events = (await client.chat(timings_per_token=True, stream=True)).events
        counts = [event["timings"]["predicted_n"] for event in events if "timings" in event]
        assert counts == sorted(counts)
        assert counts[-1] == 11
        assert len(set(counts)) > 3
        assert "timings" not in events[0], "the role chunk comes before any token"
        assert "timings" not in (await client.chat()).body
        both = (await client.chat(timings_per_token=True, n=2)).body
        assert all(choice["timings"]["predicted_n"] == 11 for choice in both["choices"])


async def test_headers() -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        whole = await client.chat()
        assert (whole.headers["x-specd-drafter"], whole.headers["x-specd-accept-length"]) == ("ngram", "2.500")
        stream = await client.chat(stream=True)
        assert stream.headers["x-specd-drafter"] == "ngram"
        assert "x-specd-accept-length" not in stream.headers
        off = {"x-specd-speculation": "off"}
        body = {"prompt": "hi"}
        assert (await client.post("/v1/completions", body, headers=off)).status == 200
        assert engine.requests_seen[-1].speculation.mode == "off"
        assert (
            await client.post("/v1/completions", {**body, "speculation": {"max_draft": 2}}, headers=off)
        ).status == 200
        assert (engine.requests_seen[-1].speculation.mode, engine.requests_seen[-1].speculation.max_draft) == ("off", 2)
        for headers, fields in (({"x-specd-speculation": "on"}, {}), (off, {"speculation": {"mode": "auto"}})):
            reply = await client.post("/v1/completions", {**body, **fields}, headers=headers)
            assert reply.error["code"] == "out_of_range"
            assert reply.error["param"].startswith("x-specd-speculation")


def assistant(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "say"}, {"role": "assistant", "content": content}]


async def test_a_final_message_is_continued() -> None:
    engine = FakeEngine()
    start = "<|im_start|>user\nsay<|im_end|>\n<|im_start|>assistant\n"
    async with serve(engine) as client:
        for content in ("I th ", "", "ends like <|im_", [{"type": "text", "text": "I th "}]):
            reply = await client.chat(messages=assistant(content), continue_final_message=True)
            assert reply.status == 200
            text = content if isinstance(content, str) else "I th "
            assert engine.tokenizer.decode(engine.requests_seen[-1].prompt_ids, skip_special=False) == start + text
        await client.chat(messages=assistant("x"), add_generation_prompt=False)
        prompt = engine.tokenizer.decode(engine.requests_seen[-1].prompt_ids, skip_special=False)
        assert prompt == start + "x<|im_end|>\n"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True, "messages": assistant("x")}, "invalid_value",
         "continue_final_message"),
        ({"continue_final_message": True}, "out_of_range", "messages[0].role"),
        ({"continue_final_message": 1}, "invalid_type", "continue_final_message"),
        ({"chat_template_kwargs": []}, "invalid_type", "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "unsupported_parameter", "chat_template_kwargs.messages"),
    ],
)  # fmt: skip
async def test_contradictions_are_refused(fields: dict[str, Any], code: str, param: str) -> None:
    async with serve(FakeEngine()) as client:
        reply = await client.chat(**fields)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param)


async def test_speculation_by_sglang_s_names() -> None:
    async with serve(FakeEngine()) as client:
        plain = await client.chat()
        whole = await client.chat(return_spec_tokens_details=True, n=2)
        events = (await client.complete(return_spec_tokens_details=True, stream=True)).events
        alone = await client.chat(return_spec_tokens_details=True, speculation={"detail": "none"})
    assert "sglext" not in plain.body
    for body in (*whole.body["choices"], events[-1]):
        told, ours = body["sglext"]["spec_tokens_details"], body["metrics"]["speculative_decoding"]
        assert told["spec_accept_length"] == ours["mean_acceptance_length"] == 2.5
        assert told["spec_accept_rate"] == told["spec_num_correct_drafts"] / told["spec_num_proposed_drafts"]
        assert sum(told["spec_correct_drafts_histogram"]) == told["spec_verify_ct"] == ours["num_spec_steps"]
    assert alone.body.keys() >= {"sglext"}
    assert "metrics" not in alone.body


async def test_every_answer_of_the_application_says_how_long_it_took() -> None:
    async with serve(FakeEngine()) as client:
        replies = [
            await client.get("/v1/models"),
            await client.get("/nowhere"),
            await client.chat(),
            await client.chat(n=0),
        ]
    assert [reply.status for reply in replies] == [200, 404, 200, 400]
    assert all(int(reply.headers["openai-processing-ms"]) >= 0 for reply in replies)
