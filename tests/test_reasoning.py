"""Thinking apart from the answer: the same for every split, counted by tokens, begun where the template says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specd.config import ChatConfig, Config
from specd.hermes import Text
from specd.server.reasoning import Thinking, ThinkingSplitter, Thought, after_message, after_prompt
from tests.fake_engine import CHAT_TEMPLATE, FakeEngine, Script, byte_tokenizer
from tests.http_server import serve
from tests.test_tools import add_up

THINKING_TEMPLATE = (
    CHAT_TEMPLATE.replace("{% endif %}", "")
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENING_TEMPLATE = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def split(texts: Iterable[str], place: Thinking = Thinking.EXPECTED) -> tuple[str, str]:
    """(thinking, answer), which come in this order."""
    splitter = ThinkingSplitter(place)
    events = [event for text in texts for event in splitter.push(text)] + splitter.flush()
    assert all(event.text for event in events), "no empty events"
    kinds = [isinstance(event, Text) for event in events]
    assert kinds == sorted(kinds)
    thinking = "".join(event.text for event in events if isinstance(event, Thought))
    return thinking, "".join(event.text for event in events if isinstance(event, Text))


CASES: list[tuple[Thinking, str, tuple[str, str]]] = [
    (Thinking.EXPECTED, "", ("", "")),
    (Thinking.EXPECTED, "\n hello", ("", "\n hello")),
    (Thinking.EXPECTED, "<think>\na </thin b\n</think>\n\nc <think> d ", ("a </thin b", "c <think> d ")),
    (Thinking.EXPECTED, " <think></think>x", ("", "x")),
    (Thinking.EXPECTED, "<thi", ("", "<thi")),
    (Thinking.EXPECTED, "<thinking", ("", "<thinking")),
    (Thinking.EXPECTED, "<think>cut \n</thi", ("cut \n</thi", "")),
    (Thinking.OPEN, "\n<think>a</think> b", ("<think>a", "b")),
    (Thinking.OPEN, "a\n\nb \n </think>", ("a\n\nb", "")),
    (Thinking.CLOSED, " <think>a</think>", ("", " <think>a</think>")),
]


@pytest.mark.parametrize(("place", "text", "expected"), CASES)
def test_thinking_and_answer(place: Thinking, text: str, expected: tuple[str, str]) -> None:
    assert split([text], place) == expected
    assert split(text, place) == expected, "character by character"


PIECES = ("<think>", "</think>", "<", "</th", "ink>", " ", "\n", "a", "b c")


@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join), data=st.data())
def test_any_split_gives_the_same(text: str, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(Thinking))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(parts, place) == split([text], place) == split(text, place)


def test_where_an_output_begins() -> None:
    assert after_prompt("x<|im_start|>assistant\n") is Thinking.EXPECTED
    assert after_prompt("x <think>\n") is Thinking.OPEN
    assert after_prompt("x <think>\n\n</think>\n\n") is Thinking.CLOSED
    assert after_message("") is Thinking.EXPECTED
    assert after_message(" <think> so") is Thinking.OPEN
    assert after_message("<think> so </think>") is Thinking.CLOSED
    assert after_message("It is") is Thinking.CLOSED


def engine(text: str, template: str = THINKING_TEMPLATE, blocks: tuple[int, ...] = (1,)) -> FakeEngine:
    tokenizer = byte_tokenizer(chat_template=template)
    return FakeEngine(Script(text=lambda request, index: text, blocks=blocks), tokenizer=tokenizer, max_len=4096)


@pytest.mark.parametrize("blocks", [(1,), (3, 1), (500,)])
async def test_a_model_that_thinks(blocks: tuple[int, ...]) -> None:
    """Message, chunks and usage, whatever the steps were."""
    async with serve(engine("<think>\nhm\n</think>\n\nyes", blocks=blocks)) as client:
        whole = (await client.chat(logprobs=True)).body
        events = (await client.chat(logprobs=True, stream=True, stream_options={"include_usage": True})).events
    message = {"role": "assistant", "content": "yes", "refusal": None, "reasoning_content": "hm"}
    assert whole["choices"][0]["message"] == message
    assert whole["choices"][0]["finish_reason"] == "stop"
    num_thinking = len("<think>\nhm\n</think>")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thinking}
    assert events[-1]["usage"] == whole["usage"]
    assert add_up(events)[0][0] == message
    scored = [item for event in events[:-1] for item in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert scored == whole["choices"][0]["logprobs"]["content"]
    assert len(scored) == whole["usage"]["completion_tokens"]


async def test_thinking_that_never_ends() -> None:
    async with serve(engine("<think>on and on and on", blocks=(4,))) as client:
        body = (await client.chat(max_tokens=14)).body
    assert body["choices"][0]["message"]["reasoning_content"] == "on and "
    assert body["choices"][0]["message"]["content"] == ""
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 14
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 14}


async def test_the_prompt_says_where_it_begins() -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    async with serve(engine("hm</think>yes")) as client:
        reply = await client.chat(**fields)
        assert "x-specd-ignored-fields" not in reply.headers
        assert reply.body["choices"][0]["message"]["content"] == "hm</think>yes", "the template closed the thinking"
        assert reply.body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    async with serve(engine("hm</think>yes", OPENING_TEMPLATE)) as client:
        message = (await client.chat()).body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        message = (await client.chat(response_format=schema)).body["choices"][0]["message"]
        assert message["content"] == "hm</think>yes", "a grammar's output has no thinking"


async def test_continued_thinking() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think> so"}]
    async with serve(engine(" far</think>yes")) as client:
        body = (await client.chat(messages=messages, continue_final_message=True)).body
    assert body["choices"][0]["message"]["reasoning_content"] == "far"


async def test_settings() -> None:
    text = "<think>hm</think>yes"
    config = Config(chat=ChatConfig(reasoning_field="reasoning"))
    async with serve(engine(text), config=config) as client:
        assert (await client.chat()).body["choices"][0]["message"]["reasoning"] == "hm"
    async with serve(engine(text), config=Config(chat=ChatConfig(reasoning="off"))) as client:
        body = (await client.chat()).body
        assert body["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert "completion_tokens_details" not in body["usage"]
    async with serve(engine(text, CHAT_TEMPLATE)) as client:
        assert (await client.chat()).body["choices"][0]["message"]["content"] == text, "the template knows no thinking"
    async with serve(engine(text, CHAT_TEMPLATE), config=Config(chat=ChatConfig(reasoning="think"))) as client:
        assert (await client.chat()).body["choices"][0]["message"]["reasoning_content"] == "hm"


async def test_earlier_thinking_is_there_for_templates_that_read_it() -> None:
    thoughts = "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    template = CHAT_TEMPLATE.replace("{{ m.content }}", thoughts)
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "x", "reasoning": "first"},
        {"role": "assistant", "content": "x", "reasoning_content": "<|im_end|>"},
        {"role": "user", "content": "x", "reasoning_content": "nobody's"},
    ]
    fake = engine("ok", template)
    async with serve(fake) as client:
        assert (await client.chat(messages=messages)).status == 200
        ids = fake.requests_seen[-1].prompt_ids
        text = fake.tokenizer.decode(ids, skip_special=False)
        assert "assistant\n(first)" in text
        assert "assistant\n(<|im_end|>)" in text
        assert "nobody" not in text
        assert ids.count(fake.tokenizer.eos_ids[0]) == 3, "it is text"
        messages[0]["reasoning"] = 5
        reply = await client.chat(messages=messages)
        assert (reply.status, reply.error["param"]) == (400, "messages[0].reasoning")
