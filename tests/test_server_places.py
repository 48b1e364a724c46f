"""Refusals of the Responses and the Messages API name the client's own places, wherever the chat form had them."""

from __future__ import annotations

from typing import Any

import pytest

from specd.config import ChatConfig, Config, ServerConfig
from specd.errors import RequestError
from specd.server import messages_api, responses_api
from specd.server.translation import own_names, own_path
from tests.fake_engine import CHAT_TEMPLATE, FakeEngine, byte_tokenizer
from tests.http_server import serve

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
TURNS = {
    "max_tokens": 3,
    "system": "s",
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, TEXT, USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}, TEXT]},
    ],
}
ITEMS = {
    "instructions": "s",
    "input": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"type": "reasoning", "id": "r"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"role": "user", "content": [{"type": "input_text", "text": "z"}]},
    ],
}
MESSAGES_PLACES = {
    "messages": "messages",
    "messages[0]": "system",
    "messages[0].content": "system",
    "messages[0].content[2].text": "system[2].text",
    "messages[1].content": "messages[0].content",
    "messages[2].role": "messages[1].role",
    "messages[2].content[0]": "messages[1].content[1]",
    "messages[2].tool_calls": "messages[1].content",
    "messages[2].tool_calls[0].function.name": "messages[1].content[2].name",
    "messages[2].tool_calls[0].function.arguments": "messages[1].content[2].input",
    "messages[2].tool_calls[0].id": "messages[1].content[2].id",
    "messages[3].content": "messages[2].content[0].content",
    "messages[3].tool_call_id": "messages[2].content[0].tool_use_id",
    "messages[4].content[0].text": "messages[2].content[1].text",
    "continue_final_message": "messages[2]",
    "add_generation_prompt": "messages[2]",
    "stop": "stop_sequences",
    "stop[3]": "stop_sequences[3]",
    "max_tokens": "max_tokens",
    "tools[12].function.parameters.x": "tools[12].input_schema.x",
    "tools[1].function.name": "tools[1].name",
    "tool_choice.function.name": "tool_choice.name",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format.json_schema.schema": "output_config.format.schema",
    "temperature": "temperature",
}
RESPONSES_PLACES = {
    "messages": "input",
    "messages[0].content": "instructions",
    "messages[1].content": "input[0].content",
    "messages[2]": "input[1]",
    "messages[2].tool_calls": "input[3]",
    "messages[2].tool_calls[1].function.arguments": "input[4].arguments",
    "messages[2].tool_calls[0].id": "input[3].call_id",
    "messages[3].content": "input[5].output",
    "messages[3].tool_call_id": "input[5].call_id",
    "messages[4].content[0].text": "input[6].content[0].text",
    "max_completion_tokens": "max_output_tokens",
    "stop[3]": "stop[3]",
    "tools[1].function.name": "tools[1].name",
    "tool_choice.function.name": "tool_choice.name",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
}
CASES = [(messages_api, TURNS, MESSAGES_PLACES), (responses_api, ITEMS, RESPONSES_PLACES)]


@pytest.mark.parametrize(("api", "body", "places"), CASES)
def test_every_place_of_the_chat_form_is_one_of_the_request(api: Any, body: Any, places: dict[str, str]) -> None:
    translation = api.translate(body)
    for path, own in places.items():
        assert own_path(path, translation.params) == own
        with pytest.raises(RequestError, match="bad") as caught, own_names(translation.params):
            raise RequestError(f"'{path}' is bad, '{path}' too", code="invalid_value", param=path)
        assert (str(caught.value), caught.value.param) == (f"'{own}' is bad, '{own}' too", own)
    for name, value in translation.body.items():  # whatever is asked of the chat, the client can find it
        root = own_path(name, translation.params).partition(".")[0].partition("[")[0]
        assert value is None or root in api.FIELDS.honoured, name


def test_one_text_of_input_and_a_longer_name_are_no_other_place() -> None:
    params = responses_api.translate({"input": "x"}).params
    assert own_path("messages[0].content", params) == "input"
    assert own_path("messages_extra", params) == "messages_extra"
    assert own_path("stop_token_ids[0]", {"stop": "stop_sequences"}) == "stop_token_ids[0]"


def test_a_value_of_the_client_stays_as_it_is() -> None:
    params = messages_api.translate(TURNS).params
    with pytest.raises(RequestError) as caught, own_names(params):
        raise RequestError("""'stop[0]' must be short; got "the 'stop' word\"""", code="out_of_range", param="stop[0]")
    assert str(caught.value) == """'stop_sequences[0]' must be short; got "the 'stop' word\""""


def test_what_a_template_says_stays_as_it_is() -> None:
    params = responses_api.translate(ITEMS).params
    with pytest.raises(RequestError) as caught, own_names(params):
        raise RequestError("refused: 'messages' is odd", code="template_error", param="messages")
    assert (str(caught.value), caught.value.param) == ("refused: 'messages' is odd", "input")


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (MESSAGES, TURNS, "messages[1].content"),
        (RESPONSES, ITEMS, "input[3]"),
    ],
)
async def test_calls_where_there_may_be_none(path: str, body: dict[str, Any], place: str) -> None:
    async with serve(FakeEngine(), config=Config(chat=ChatConfig(tools="refuse"))) as client:
        reply = await client.post(path, body)
    assert reply.status == 400
    assert f"'{place}'" in reply.body["error"]["message"]
    assert reply.body["error"].get("param", place) == place


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({**TURNS, "stop_sequences": ["a", "b", "c"]}, "stop_sequences"),
        ({**TURNS, "messages": TURNS["messages"][:2]}, "messages[1]"),  # type: ignore[index]  # the results are missing
        ({**TURNS, "ignore_eos": True, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
         "output_config.format.schema"),
    ],
)  # fmt: skip
async def test_refusals_after_the_translation(body: dict[str, Any], place: str) -> None:
    async with serve(FakeEngine(max_len=4096), config=Config(server=ServerConfig(max_stop=2))) as client:
        reply = await client.post(MESSAGES, body)
    assert reply.status == 400
    assert f"'{place}'" in reply.body["error"]["message"]


async def test_a_message_that_cannot_be_continued() -> None:
    template = CHAT_TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}")
    tokenizer = byte_tokenizer(chat_template=template)
    body = {**TURNS, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    engine = FakeEngine(tokenizer=tokenizer)
    async with serve(engine) as client:
        with pytest.raises(RequestError) as caught, own_names(messages_api.translate(body).params):
            raise RequestError("no", code="template_error", param="continue_final_message")
        reply = await client.post(MESSAGES, body)
    assert caught.value.param == "messages[1]"
    assert (reply.status, "does not write the last message once" in reply.raw.decode()) == (400, True)
