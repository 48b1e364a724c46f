"""Prompts in every form that the API takes, as token ids. Pure, and possibly slow: long texts belong in a thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specd.config import ChatConfig
from specd.errors import RequestError
from specd.server.chat import ChatTemplate, ChatTooLongError
from specd.server.checks import asks_nothing, invalid_type, out_of_range, string, token_ids, unsupported
from specd.server.context import Room, check_chars
from specd.server.message_schemas import MESSAGE_UNBUILT, ROLES, THOUGHTS
from specd.server.openai import check_ids
from specd.server.reasoning import Thinking, after_message, after_prompt
from specd.server.tools import Tool, content_text, hermes_messages, offered_tools, tool_calls
from specd.text import Tokenizer

_MESSAGE_STRINGS = ("name", "tool_call_id")


@dataclasses.dataclass(frozen=True, slots=True)
class Prompts:
    """What one body asks to be continued."""

    ids: list[tuple[int, ...]]
    unread: tuple[str, ...] = ()  # variables of the chat template that it does not read
    thinking: Thinking | None = None  # where the outputs stand; None where no thinking is looked for


def completion_prompts(
    value: Any, tokenizer: Tokenizer, *, vocab_size: int, max_prompts: int, room: Room | None = None
) -> list[tuple[int, ...]]:
    """`prompt` as one or more token sequences: a string, strings, ids, or lists of ids. Raises RequestError.

    room: texts that cannot fit into it are refused; None: those that would take too long.
    Special tokens written in a string prompt are parsed as such, as peers do on this endpoint.
    """
    given = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    texts = [text for text in given if isinstance(text, str)]
    if room is not None:
        room.check_texts(texts, tokenizer)
    elif texts:
        check_chars(max(texts, key=len), "prompt")
    if isinstance(value, str):
        return [_encode(value, "prompt", tokenizer)]
    if not isinstance(value, list):
        raise invalid_type("prompt", "a string, a list of strings, or token ids", value)
    if not value:
        raise out_of_range("prompt", "a string, or a list that is not empty", value)
    if type(value[0]) in (int, float):
        return [_ids(value, "prompt", vocab_size)]
    if len(value) > max_prompts:
        raise out_of_range("prompt", f"a list of at most {max_prompts} prompts", value)
    prompts = []
    for i, item in enumerate(value):
        param = f"prompt[{i}]"
        if isinstance(value[0], str):
            prompts.append(_encode(string(item, param), param, tokenizer))
        elif isinstance(item, list):
            prompts.append(_ids(item, param, vocab_size))
        else:
            raise invalid_type(param, "a list of token ids", item)
    return prompts


def _encode(text: str, param: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tuple(tokenizer.encode(text))
    if ids:
        return ids
    if tokenizer.bos_id is None:
        raise out_of_range(param, "a text with at least one token: this model has no token to begin with", text)
    return (tokenizer.bos_id,)


def _ids(value: list[Any], param: str, vocab_size: int) -> tuple[int, ...]:
    if not value:
        raise out_of_range(param, "a list of at least one token id", value)
    ids = token_ids(value, param)
    check_ids(ids, param, vocab_size)
    return ids


def check_messages(value: Any, *, calls: bool = True) -> list[dict[str, Any]]:
    """`messages` as a template wants them. Raises RequestError.

    calls: whether there may be calls of tools in them.
    Content parts come back as text parts (the template joins them); `developer` is OpenAI's newer name for `system`.
    """
    if not isinstance(value, list):
        raise invalid_type("messages", "a list of messages", value)
    if not value:
        raise out_of_range("messages", "a list of at least one message", value)
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(value):
        param = f"messages[{i}]"
        if not isinstance(item, dict):
            raise invalid_type(param, "an object", item)
        message = _message(item, param)
        if item.get("tool_calls") not in (None, []):
            message["tool_calls"] = _calls(item, param, allowed=calls)
        messages.append(message)
    return messages


def _calls(item: dict[str, Any], param: str, *, allowed: bool) -> list[dict[str, Any]]:
    if not allowed:
        raise unsupported(f"{param}.tool_calls", item["tool_calls"])
    if item["role"] != "assistant":
        text = f"'{param}.tool_calls' are an assistant's; the role of this message is {item['role']}"
        raise RequestError(text, code="invalid_value", param=f"{param}.tool_calls")
    return tool_calls(item["tool_calls"], f"{param}.tool_calls")


def _message(item: dict[str, Any], param: str) -> dict[str, Any]:
    for name in MESSAGE_UNBUILT:
        if not asks_nothing(item.get(name), ()):
            raise unsupported(f"{param}.{name}", item[name])
    role = item.get("role")
    if role is None:
        raise RequestError(f"'{param}.role' is required", code="missing_parameter", param=f"{param}.role")
    if not isinstance(role, str):
        raise invalid_type(f"{param}.role", "a string", role)
    if role not in ROLES:
        raise out_of_range(f"{param}.role", "one of " + ", ".join(ROLES), role)
    content = _content(item, f"{param}.content")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    for name in _MESSAGE_STRINGS:
        if item.get(name) is not None:
            message[name] = string(item[name], f"{param}.{name}")
    for name in THOUGHTS if role == "assistant" else ():
        if item.get(name) is not None:
            message["reasoning_content"] = string(item[name], f"{param}.{name}")  # the name that templates know
    return message


def _content(item: dict[str, Any], param: str) -> str | list[dict[str, str]]:
    content = item.get("content")
    if isinstance(content, str):
        return content
    if content is None and item.get("tool_calls"):
        return ""
    if content is None:
        raise RequestError(f"'{param}' is required", code="missing_parameter", param=param)
    if not isinstance(content, list):
        raise invalid_type(param, "a string or a list of text parts", content)
    return [{"type": "text", "text": _part(part, f"{param}[{i}]")} for i, part in enumerate(content)]


def _part(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise invalid_type(param, "an object", part)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise unsupported(f"{param}.type", kind)
    if part.get(kind) is None:
        raise RequestError(f"'{param}.{kind}' is required", code="missing_parameter", param=f"{param}.{kind}")
    return string(part[kind], f"{param}.{kind}")


@dataclasses.dataclass(frozen=True, slots=True)
class ChatOptions:
    """How the chat template is asked to write the end of a chat, and what else it is told."""

    add_generation_prompt: bool = True
    continue_final: bool = False
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def chat_options(values: Mapping[str, Any], messages: list[dict[str, Any]]) -> ChatOptions:
    """From checked fields. Raises RequestError where they contradict each other."""
    continue_final = values.get("continue_final_message", False)
    if not continue_final:
        add = values.get("add_generation_prompt", True)
        return ChatOptions(add, kwargs=values.get("chat_template_kwargs", {}))
    if values.get("add_generation_prompt"):
        text = "'continue_final_message' continues a message, 'add_generation_prompt' begins one: both cannot be true"
        raise RequestError(text, code="invalid_value", param="continue_final_message")
    last, where = messages[-1], f"messages[{len(messages) - 1}]"
    if last["role"] != "assistant":
        raise out_of_range(f"{where}.role", "assistant: 'continue_final_message' continues that message", last["role"])
    if last.get("tool_calls"):
        raise out_of_range(f"{where}.tool_calls", "empty with 'continue_final_message'", last["tool_calls"])
    return ChatOptions(False, continue_final=True, kwargs=values.get("chat_template_kwargs", {}))


def unread_kwargs(values: Mapping[str, Any], template: ChatTemplate | None) -> tuple[str, ...]:
    """Names in `chat_template_kwargs` that the template does not read: they change nothing."""
    known = frozenset() if template is None else template.variables
    return tuple(f"chat_template_kwargs.{name}" for name in values.get("chat_template_kwargs", {}) if name not in known)


def chat_prompts(
    values: Mapping[str, Any],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    chat: ChatConfig,
    *,
    room: Room | None = None,
) -> Prompts:
    """The chat of checked fields through the model's own template. room: see above. Raises RequestError."""
    messages = check_messages(values["messages"], calls=chat.tools != "refuse")
    options = chat_options(values, messages)
    if template is None:
        raise RequestError(
            "this model has no chat template; use /v1/completions", code="chat_template_missing", param="messages"
        )
    offered = offered_tools(values)
    if chat.tools == "hermes" or (chat.tools == "auto" and not template.reads_tools):
        messages, offered = hermes_messages(messages, offered), ()
    else:
        _check_tools_are_read(messages, offered, template)
    try:
        rendered = template.render(
            messages,
            add_generation_prompt=options.add_generation_prompt,
            continue_final=options.continue_final,
            tools=[tool.spec for tool in offered],
            kwargs=options.kwargs,
        )
    except ChatTooLongError as error:
        if room is not None:
            room.check_texts([error.begun], tokenizer)
        raise
    if room is not None:
        room.check_texts([rendered], tokenizer)
    ids = tuple(tokenizer.encode_chat(rendered))
    if not ids:
        raise out_of_range("messages", "messages that make at least one token", messages)
    thinks = chat.reasoning == "think" or (chat.reasoning == "auto" and template.thinks)
    place = _thinking(messages, rendered.text, options) if thinks else None
    return Prompts([ids], unread_kwargs(values, template), place)


def _check_tools_are_read(messages: list[dict[str, Any]], offered: tuple[Tool, ...], template: ChatTemplate) -> None:
    calls = [f"messages[{i}].tool_calls" for i, message in enumerate(messages) if "tool_calls" in message]
    for param in (["tools"] if offered else []) + calls:
        if not template.reads_tools:
            text = f"'{param}': this model's chat template knows no tools, and the server adds none (chat.tools)"
            raise RequestError(text, code="unsupported_parameter", param=param)


def _thinking(messages: list[dict[str, Any]], text: str, options: ChatOptions) -> Thinking:
    """Where the output of a prompt stands."""
    if options.continue_final:
        return after_message(content_text(messages[-1]["content"]))
    return after_prompt(text) if options.add_generation_prompt else Thinking.EXPECTED
