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
    "request_id", "chat_template_kwargs",
)  # fmt: skip
# Of a part of text; what surrounds it in answers comes back with them, and caching follows from the prompt alone.
_PART_NAMES = frozenset({"type", "cache_control", "citations", "annotations", "logprobs"})
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
    ignored: tuple[str, ...] = ()  # names in the request that nobody reads
    reads_parts: bool = False  # its answers tell thinking and calls apart from text
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)  # a chat field's path -> the request's own; [*]

    def reading(
        self, values: Mapping[str, Any], thinking: Thinking | None, chat: ChatConfig, grammar: Grammar | None
    ) -> Reading:
        """What to look for in the answer's text."""
        return reading_of(values, thinking, chat, grammar) if self.reads_parts else PLAIN


Translate = Callable[[dict[str, Any]], Translation]


@contextlib.contextmanager
def own_names(params: Mapping[str, str]) -> Iterator[None]:
    """Refusals of a chat completion's fields in the words of the request that was translated."""
    try:
        yield
    except RequestError as error:
        message, param = str(error), error.param or ""
        for name in sorted(params, key=len, reverse=True):  # the longest that fits says it
            path = re.escape(name).replace(r"\[\*\]", r"\[(\d+)\]")
            place = re.compile(rf"{path}(?![A-Za-z0-9_-])")
            if place.match(param):
                own = params[name].replace("[*]", r"[\1]")
                param = place.sub(own, param, count=1)
                message = re.sub(f"'{place.pattern}", f"'{own}", message)
                raise RequestError(message, code=error.code, param=param) from error
        raise


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


def text_parts(value: Any, param: str, kinds: tuple[str, ...], ignored: list[str]) -> str | list[dict[str, str]]:
    """A text, or a list of parts whose `type` is in `kinds`, for a chat message. ignored: takes the names nobody reads.

    What a part says is in `text`, a refusal in `refusal`.
    """
    if isinstance(value, str):
        return value
    if value is None:
        raise RequestError(f"'{param}' is required", code="missing_parameter", param=param)
    if not isinstance(value, list):
        raise invalid_type(param, "a string or a list of text parts", value)
    return [text_part(part, f"{param}[{i}]", kinds, ignored) for i, part in enumerate(value)]


def text_part(part: Any, param: str, kinds: tuple[str, ...], ignored: list[str]) -> dict[str, str]:
    """One part of such a list, for a chat message."""
    if not isinstance(part, dict):
        raise invalid_type(param, "an object", part)
    if part.get("type") not in kinds:
        raise unsupported(f"{param}.type", part.get("type"))
    field = "refusal" if part["type"] == "refusal" else "text"
    if part.get(field) is None:
        raise RequestError(f"'{param}.{field}' is required", code="missing_parameter", param=f"{param}.{field}")
    ignored += [f"{param}.{name}" for name in part if name not in (field, *_PART_NAMES)]
    return {"type": "text", "text": string(part[field], f"{param}.{field}")}


def named_event(name: str, body: dict[str, Any], *, padded: bool) -> bytes:
    """One event with its name, which these APIs repeat in `type`. padded: see `sse.padded_event`."""
    write = padded_event if padded else event
    return write({"type": name, **body}, b"event: " + name.encode() + b"\ndata: ")
