"""Other APIs as translations of chat completions: the same checks, limits and engine calls, another shape around them.

body of the other API -> chat body -> ... the path of /v1/chat/completions ... -> deltas -> its events or its body
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from specd.config import ChatConfig
from specd.errors import RequestError
from specd.request import Grammar, SequenceDelta
from specd.server.checks import Check, invalid_type, string, unsupported
from specd.server.fields import ENDPOINT_FIELDS, Endpoint, FieldTable
from specd.server.parts import PLAIN, Reading, reading_of
from specd.server.reasoning import Thinking
from specd.server.responses import ChoiceText, ResponseWriter
from specd.server.sse import event, padded_event

# Fields of chat completions that mean the same in every API.
SHARED = (
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "ignore_eos", "stop_token_ids",
    "include_stop_str_in_output", "skip_special_tokens", "stream", "speculation", "prediction", "priority",
    "request_id", "chat_template_kwargs", "cache_salt", "timeout",
)  # fmt: skip
_QUOTED = re.compile(r"'([a-z_][\w.\[\]-]*)'")
_INDEX = re.compile(r"\[\d+\]")
RESPONSE_PREFIX, MESSAGE_PREFIX = "resp_", "msg_"  # of an answer's `id`, instead of chat's
# Chat's own fields that ask for something when they are false.
_DEFAULT_TRUE = {"add_generation_prompt": (True,), "parallel_tool_calls": (True,)}


class Encoder(Protocol):
    """The events of one streamed answer. `start` once, `push` per delta, then `end`, or `failed` at any time."""

    @property
    def choices(self) -> Sequence[ChoiceText]: ...

    @property
    def keep_alive(self) -> bytes:
        """What is sent while there is nothing to say."""
        ...

    def start(self) -> bytes: ...

    def push(self, index: int, delta: SequenceDelta) -> bytes: ...

    def end(self) -> bytes: ...

    def failed(self, error: Mapping[str, Any], status: int) -> bytes:
        """The last event of an answer that broke off; error: an error body in OpenAI's shape, status: its own."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Translation:
    """A request as a chat completion, and who writes its answer."""

    body: Mapping[str, Any]  # of the chat completion
    encoder: Callable[[ResponseWriter], Encoder]
    whole: Callable[[ResponseWriter, Sequence[ChoiceText]], dict[str, Any]]
    ignored: tuple[str, ...] = ()  # dotted names in the request that nobody reads
    reads_parts: bool = False  # its answers tell thinking and calls apart from text
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)  # see `own_path`

    def reading(
        self, values: Mapping[str, Any], thinking: Thinking | None, chat: ChatConfig, grammar: Grammar | None
    ) -> Reading:
        """What to look for in the answer's text."""
        return reading_of(values, thinking, chat, grammar) if self.reads_parts else PLAIN


Translate = Callable[[dict[str, Any]], Translation]


@dataclasses.dataclass(frozen=True, slots=True)
class TranslatedChat:
    """The messages of a chat, and where in the request each place in them was."""

    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    places: dict[str, str] = dataclasses.field(default_factory=dict)  # "messages[2].content[0]" -> the request's own

    def add(self, message: dict[str, Any], places: Mapping[str, str]) -> None:
        """places: of paths below the message; "" is its own."""
        self.messages.append(message)
        self.place(places)

    def place(self, places: Mapping[str, str]) -> None:
        """More about the last message."""
        index = len(self.messages) - 1
        self.places.update({f"messages[{index}]{path}": own for path, own in places.items()})


def own_path(path: str, params: Mapping[str, str]) -> str:
    """The request's own name of a chat field's path: of the longest beginning of it that `params` have.

    Their keys are paths with indices, or with [*] for any; each [*] of the value is the index at the same place.
    """
    for end in [len(path), *(match.start() for match in reversed([*re.finditer(r"[.\[]", path)]))]:
        head = path[:end]
        own = params.get(head, params.get(_INDEX.sub("[*]", head)))
        if own is not None:
            for index in _INDEX.findall(head):
                own = own.replace("[*]", index, 1)
            return own + path[end:]
    return path


@contextlib.contextmanager
def own_names(params: Mapping[str, str]) -> Iterator[None]:
    """Refusals of a chat completion's fields in the words of the request that was translated."""
    try:
        yield
    except RequestError as error:
        message = str(error)
        if error.code != "template_error":  # which is in the template's own words
            told, got, value = message.partition("got ")  # the client's own value stays as it is
            message = _QUOTED.sub(lambda quoted: f"'{own_path(quoted[1], params)}'", told) + got + value
        param = own_path(error.param, params) if error.param else error.param
        raise RequestError(message, code=error.code, param=param) from error


def field_table(
    honoured: Mapping[str, Check], *, inert: Iterable[str], unbuilt: Mapping[str, tuple[Any, ...]]
) -> FieldTable:
    """Every name that an API knows: its own, those it shares with chat completions, and the rest of those refused.

    unbuilt: with the values that ask for nothing, as in `fields.py`.
    """
    chat = ENDPOINT_FIELDS[Endpoint.CHAT]
    own = {**{name: chat.honoured[name] for name in SHARED}, **honoured}
    refused = {**dict.fromkeys(chat.honoured, ()), **_DEFAULT_TRUE, **chat.unbuilt, **unbuilt}
    harmless = frozenset(inert) | (chat.inert - set(unbuilt) - set(own))
    return FieldTable(own, harmless, {k: v for k, v in refused.items() if k not in own and k not in harmless})


def shared_values(body: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into the chat body as it is."""
    return {name: body[name] for name in SHARED if body.get(name) is not None}


def text_parts(value: Any, param: str, kinds: tuple[str, ...]) -> str | list[dict[str, str]]:
    """A text, or a list of parts whose `type` is in `kinds`, for a chat message.

    What a part says is in `text`, a refusal in `refusal`.
    """
    if isinstance(value, str):
        return value
    if value is None:
        raise RequestError(f"'{param}' is required", code="missing_parameter", param=param)
    if not isinstance(value, list):
        raise invalid_type(param, "a string or a list of text parts", value)
    return [text_part(part, f"{param}[{i}]", kinds) for i, part in enumerate(value)]


def text_part(part: Any, param: str, kinds: tuple[str, ...]) -> dict[str, str]:
    """One part of such a list, for a chat message."""
    if not isinstance(part, dict):
        raise invalid_type(param, "an object", part)
    if part.get("type") not in kinds:
        raise unsupported(f"{param}.type", part.get("type"))
    field = "refusal" if part["type"] == "refusal" else "text"
    if part.get(field) is None:
        raise RequestError(f"'{param}.{field}' is required", code="missing_parameter", param=f"{param}.{field}")
    return {"type": "text", "text": string(part[field], f"{param}.{field}")}


def named_event(name: str, body: dict[str, Any], *, padded: bool) -> bytes:
    """One event with its name, which these APIs repeat in `type`. padded: see `sse.padded_event`."""
    write = padded_event if padded else event
    return write({"type": name, **body}, b"event: " + name.encode() + b"\ndata: ")
