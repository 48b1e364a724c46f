"""The stream says the same as the whole answer, for every option and every grouping of tokens into deltas."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specd.config import Config
from specd.request import FinishReason, SequenceDelta
from specd.server.fields import Endpoint, read_fields
from specd.server.openai import GenerationCall, build_call
from specd.server.responses import ChoiceText, ResponseWriter
from specd.server.sse import DONE, StreamEncoder
from tests.fake_engine import Script, byte_tokenizer, group, make_info, say

TOKENIZER = byte_tokenizer()
INFO = make_info(TOKENIZER)
TEXTS = ("hello, hello world", "naïve 漢字 🎉 end", "aab\naabc stop here", "", "\ufffd mixed 한글 he")


def make_call(endpoint: Endpoint, fields: dict[str, Any], *, num_prompts: int = 1) -> GenerationCall:
    required: dict[str, Any] = {"prompt": "x"} if endpoint is Endpoint.COMPLETIONS else {"messages": []}
    values, _ = read_fields({"model": "tiny", "max_tokens": 64, **required, **fields}, endpoint)
    prompts = [tuple(range(5 + i)) for i in range(num_prompts)]
    return build_call(
        values,
        prompts,
        endpoint=endpoint,
        config=Config(),
        info=INFO,
        tokenizer=TOKENIZER,
        request_id="r1",
        created=1_700_000_001,
        arrival_s=0.0,
    )


def deltas_of(call: GenerationCall, script: Script, blocks: list[int]) -> list[list[tuple[int, SequenceDelta]]]:
    """Per choice: (choice, delta) in order."""
    found = []
    for prompt_index, request in enumerate(call.requests):
        for j in range(call.n):
            choice = prompt_index * call.n + j
            found.append([(choice, delta) for delta in group(say(request, j, script, TOKENIZER), blocks)])
    return found


def interleave(streams: list[list[tuple[int, SequenceDelta]]], order: list[int]) -> list[tuple[int, SequenceDelta]]:
    """Choices mixed in the given order, each in its own order."""
    streams = [list(stream) for stream in streams]
    result = []
    turn = 0
    while any(streams):
        alive = [stream for stream in streams if stream]
        result.append(alive[order[turn % len(order)] % len(alive)].pop(0))
        turn += 1
    return result


def stream_events(call: GenerationCall, deltas: list[tuple[int, SequenceDelta]]) -> list[dict[str, Any]]:
    encoder = StreamEncoder(ResponseWriter(call, INFO, TOKENIZER))
    data = encoder.start() + b"".join(encoder.push(choice, delta) for choice, delta in deltas) + encoder.end()
    assert all(choice.finish_reason is not None for choice in encoder.choices)
    assert data.endswith(DONE)
    lines = data.removesuffix(DONE).split(b"\n\n")[:-1]
    assert all(line.startswith(b"data: {") and b"\n" not in line for line in lines)
    return [orjson.loads(line.removeprefix(b"data: ")) for line in lines]


def whole_body(call: GenerationCall, deltas: list[tuple[int, SequenceDelta]]) -> dict[str, Any]:
    choices = [ChoiceText() for _ in range(call.num_choices)]
    for choice, delta in deltas:
        choices[choice].add(delta)
    body: dict[str, Any] = orjson.loads(orjson.dumps(ResponseWriter(call, INFO, TOKENIZER).whole(choices)))
    return body


def fold(call: GenerationCall, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that a stream amounts to, by the rules of a client that trusts nothing."""
    chat = call.endpoint is Endpoint.CHAT
    body: dict[str, Any] = {key: events[0][key] for key in ("id", "created", "model", "system_fingerprint")}
    choices: dict[int, dict[str, Any]] = {}
    rows: dict[int, list[Any]] = {}
    for chunk in events:
        assert {key: chunk[key] for key in body} == body, "the head is the same in every chunk"
        for choice in chunk["choices"]:
            _fold_choice(choices.setdefault(choice["index"], {"text": ""}), choice, chunk, chat)
            rows.setdefault(choice["index"], []).extend(chunk.get("specd", {}).get("tokens", []))
        if "metrics" in chunk:
            body_metrics = chunk["metrics"]
            choices[0].setdefault("root_metrics", body_metrics)
    return {"head": body, "choices": choices, "origins": rows}


def _fold_choice(into: dict[str, Any], choice: dict[str, Any], chunk: dict[str, Any], chat: bool) -> None:
    assert "finish_reason" in choice
    assert "finish_reason" not in into, "nothing follows the finish chunk"
    text = choice["delta"].get("content", "") if chat else choice["text"]
    is_role = chat and "role" in choice["delta"]
    is_finish = choice["finish_reason"] is not None
    assert bool(text) != (is_role or is_finish), "text chunks have text, role and finish chunks have none"
    if is_finish and chat:
        assert choice["delta"] == {}
    if is_role:
        assert not into["text"]
    into["text"] += text
    for key, value in (choice["logprobs"] or {}).items():
        if isinstance(value, list):
            into.setdefault("logprobs", {}).setdefault(key, []).extend(value)
    into.setdefault("token_ids", []).extend(choice.get("token_ids", []))
    prompt_ids = chunk.get("prompt_token_ids", choice.get("prompt_token_ids"))
    if prompt_ids is not None:
        assert "prompt_token_ids" not in into
        into["prompt_token_ids"] = prompt_ids
    if is_finish:
        into |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
        into["metrics"] = choice.get("metrics")


def whole_as_folded(call: GenerationCall, body: dict[str, Any]) -> dict[str, Any]:
    chat = call.endpoint is Endpoint.CHAT
    choices: dict[int, dict[str, Any]] = {}
    for choice in body["choices"]:
        item: dict[str, Any] = {"text": choice["message"]["content"] if chat else choice["text"]}
        if choice["logprobs"] is not None:
            item["logprobs"] = {key: value for key, value in choice["logprobs"].items() if isinstance(value, list)}
        item["token_ids"] = choice.get("token_ids", [])
        prompt_ids = body.get("prompt_token_ids", choice.get("prompt_token_ids"))
        if prompt_ids is not None:
            item["prompt_token_ids"] = prompt_ids
        item |= {key: choice[key] for key in ("finish_reason", "stop_reason")}
        item["metrics"] = choice.get("metrics")
        choices[choice["index"]] = item
    if "metrics" in body:
        choices[0]["root_metrics"] = body["metrics"]
    rows = {choice["index"]: choice.get("specd", body.get("specd", {})).get("tokens", []) for choice in body["choices"]}
    head = {key: body[key] for key in ("id", "created", "model", "system_fingerprint")}
    return {"head": head, "choices": choices, "origins": rows}


OPTIONS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 40),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "stop": st.sampled_from([None, "stop", ["aabc", "b\n"], ["lo, hello", "漢"]]),
        "stop_token_ids": st.sampled_from([[], [40]]),
        "speculation": st.builds(
            lambda detail: {"detail": detail}, st.sampled_from(["none", "summary", "detailed", "tokens"])
        ),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    endpoint=st.sampled_from(list(Endpoint)),
    options=OPTIONS,
    logprobs=st.sampled_from([None, 0, 2]),
    usage=st.sampled_from([None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]),
    num_prompts=st.integers(1, 2),
    text=st.sampled_from(TEXTS),
    blocks=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    order=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    finish=st.booleans(),
)
def test_stream_equals_whole(
    endpoint: Endpoint,
    options: dict[str, Any],
    logprobs: int | None,
    usage: dict[str, bool] | None,
    num_prompts: int,
    text: str,
    blocks: list[int],
    order: list[int],
    finish: bool,
) -> None:
    chat = endpoint is Endpoint.CHAT
    fields = {**options, "stream": True, "stream_options": usage}
    if logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}
    call = make_call(endpoint, fields, num_prompts=1 if chat else num_prompts)
    script = Script(text=lambda request, index: text[index:] + "x", finish=finish)
    token_by_token = [pair for stream in deltas_of(call, script, [1]) for pair in stream]
    body = whole_body(call, token_by_token)
    events = stream_events(call, interleave(deltas_of(call, script, blocks), order))
    assert fold(call, events) == whole_as_folded(call, body)
    check_usage(call, events, body, usage)


def check_usage(
    call: GenerationCall, events: list[dict[str, Any]], body: dict[str, Any], usage: dict[str, bool] | None
) -> None:
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    if usage is None:
        assert all("usage" not in chunk and chunk["choices"] for chunk in events)
        return
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == body["usage"]
    seen = [chunk["usage"] for chunk in events[:-1]]
    assert all(chunk["choices"] for chunk in events[:-1]), "no chunk without choices before the end"
    if usage.get("continuous_usage_stats"):
        counts = [item["completion_tokens"] for item in seen]
        assert counts == sorted(counts)
        assert counts[-1] == body["usage"]["completion_tokens"]
    else:
        assert seen == [None] * len(seen)


def test_a_finish_chunk_in_the_middle_would_be_seen() -> None:
    """The fold above is the judge of every test here: it must reject a broken stream."""
    call = make_call(Endpoint.CHAT, {"stream": True})
    events = stream_events(call, deltas_of(call, Script(), [3])[0])
    with pytest.raises(AssertionError, match="nothing follows"):
        fold(call, [*events, events[1]])
    events[1]["choices"][0]["delta"]["content"] = ""
    with pytest.raises(AssertionError, match="have none"):
        fold(call, events)


def test_chat_chunks_exactly() -> None:
    call = make_call(Endpoint.CHAT, {"stream": True, "stream_options": {"include_usage": True}})
    events = stream_events(call, deltas_of(call, Script(text=lambda r, i: "hey"), [4])[0])
    head = {
        "id": "chatcmpl-r1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_001,
        "model": "tiny",
        "system_fingerprint": "fp_0123456789",
    }
    role = {"role": "assistant", "content": "", "refusal": None}
    empty = {"index": 0, "logprobs": None, "finish_reason": None}
    assert events[0] == {**head, "choices": [{**empty, "delta": role}], "usage": None}
    assert events[1] == {**head, "choices": [{**empty, "delta": {"content": "hey"}}], "usage": None}
    finish = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert events[2] == {**head, "choices": [finish], "usage": None}
    assert events[3]["choices"] == []
    assert events[3]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,  # he, y, eos
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert events[3]["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.6,
        "acceptance_histogram": [1, 1, 1, 1, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 10,
        "num_spec_tokens": 4,
    }
    assert len(events) == 4


def test_tokens_without_text_travel_with_the_next_text() -> None:
    """An emoji over four tokens: three deltas without text, one chunk with four tokens and their logprobs."""
    call = make_call(Endpoint.COMPLETIONS, {"stream": True, "logprobs": 0, "return_token_ids": True})
    events = stream_events(call, deltas_of(call, Script(text=lambda r, i: "🎉"), [1])[0])
    texts = [chunk["choices"][0]["text"] for chunk in events]
    assert texts == ["🎉", ""]
    first, last = (chunk["choices"][0] for chunk in events)
    assert len(first["token_ids"]) == len(first["logprobs"]["tokens"]) == 4
    assert first["logprobs"]["tokens"][0] == "bytes:\\xf0"
    assert first["logprobs"]["text_offset"] == [0, 0, 0, 0]
    assert last["token_ids"] == [TOKENIZER.eos_ids[0]]
    assert last["logprobs"]["text_offset"] == [1]


def test_detail_levels() -> None:
    def metrics_of(detail: str) -> tuple[dict[str, Any], dict[str, Any]]:
        call = make_call(Endpoint.CHAT, {"speculation": {"detail": detail}})
        body = whole_body(call, deltas_of(call, Script(), [2])[0])
        return body.get("metrics", {}).get("speculative_decoding", {}), body

    assert metrics_of("none")[0] == {}
    assert "per_step_accepted" not in metrics_of("summary")[0]
    detailed = metrics_of("detailed")[0]
    assert sum(detailed["per_step_accepted"]) == detailed["num_accepted_draft_tokens"]
    assert sum(detailed["per_step_drafted"]) == detailed["num_draft_tokens"]
    assert len(detailed["acceptance_histogram"]) == detailed["num_spec_tokens"] + 1
    assert sum(detailed["acceptance_histogram"]) == detailed["num_spec_steps"]
    _, body = metrics_of("tokens")
    rejected = TOKENIZER.token_str(104)
    rows = [row[1:] for row in body["specd"]["tokens"][:2]]
    assert rows == [["d", 1, 0, 0.75, None], ["t", 2, 0, 0.25, rejected]]


def test_failures_are_never_encoded_as_a_finish() -> None:
    call = make_call(Endpoint.CHAT, {"stream": True})
    encoder = StreamEncoder(ResponseWriter(call, INFO, TOKENIZER))
    with pytest.raises(AssertionError):
        encoder.push(0, SequenceDelta("r1", 0, finish_reason=FinishReason.ERROR))
