"""Other APIs as translations of chat completions: the same checks, limits and engine calls, another shape around them.

body of the other API -> chat body -> ... the path of /v1/chat/completions ... -> deltas -> its events or its body
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import orjson

from specd.errors import RequestError
from specd.request import SequenceDelta
from specd.server.checks import Check, invalid_type, string, unsupported
from specd.server.fields import ENDPOINT_FIELDS, Endpoint, FieldTable
from specd.server.responses import ChoiceText, ResponseWriter

# Fields of chat completions that mean the same in every API.
SHARED = (
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "ignore_eos", "stop_token_ids",
    "include_stop_str_in_output", "skip_special_tokens", "stream", "speculation", "prediction", "priority",
    "request_id", "chat_template_kwargs",
)  # fmt: skip
RESPONSE_PREFIX, MESSAGE_PREFIX = "resp_", "msg_"  # of an answer's `id`, instead of chat's
_DEFAULT_TRUE = {"add_generation_prompt": (True,)}  # chat's own fields that ask for something when they are false
_BUCKET_BYTES = 64


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

    def failed(self, error: Mapping[str, Any]) -> bytes:
        """The last event of an answer that broke off; error: an error body in OpenAI's shape."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Translation:
    """A request as a chat completion, and who writes its answer."""

    body: Mapping[str, Any]  # of the chat completion
    encoder: Callable[[ResponseWriter], Encoder]
    whole: Callable[[ResponseWriter, Sequence[ChoiceText]], dict[str, Any]]
    ignored: tuple[str, ...] = ()  # names in the request that nobody reads
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)  # a chat field's path -> the request's own


Translate = Callable[[dict[str, Any]], Translation]


@contextlib.contextmanager
def own_names(params: Mapping[str, str]) -> Iterator[None]:
    """Refusals of a chat completion's fields in the words of the request that was translated."""
    try:
        yield
    except RequestError as error:
        message, param = str(error), error.param or ""
        for name in sorted(params, key=len, reverse=True):  # the longest that fits says it
            place = re.compile(rf"{re.escape(name)}(?![A-Za-z0-9_-])")
            if place.match(param):
                param = place.sub(params[name], param, count=1)
                message = re.sub(f"'{place.pattern}", f"'{params[name]}", message)
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


def text_parts(value: Any, param: str, kinds: tuple[str, ...]) -> str | list[dict[str, str]]:
    """A text, or a list of parts whose `type` is in `kinds` and whose text is in `text`, for a chat message."""
    if isinstance(value, str):
        return value
    if value is None:
        raise RequestError(f"'{param}' is required", code="missing_parameter", param=param)
    if not isinstance(value, list):
        raise invalid_type(param, "a string or a list of text parts", value)
    return [{"type": "text", "text": _part(part, f"{param}[{i}]", kinds)} for i, part in enumerate(value)]


def _part(part: Any, param: str, kinds: tuple[str, ...]) -> str:
    if not isinstance(part, dict):
        raise invalid_type(param, "an object", part)
    if part.get("type") not in kinds:
        raise unsupported(f"{param}.type", part.get("type"))
    if part.get("text") is None:
        raise RequestError(f"'{param}.text' is required", code="missing_parameter", param=f"{param}.text")
    return string(part["text"], f"{param}.text")


def named_event(name: str, body: dict[str, Any], *, padded: bool) -> bytes:
    """One event with its name, which these APIs repeat in `type`. padded: see `sse.padded_event`."""
    data = {"type": name, **body}
    line = b"event: " + name.encode() + b"\ndata: "
    if padded:
        missing = -len(line + orjson.dumps(data | {"obfuscation": ""}) + b"\n\n") % _BUCKET_BYTES
        data["obfuscation"] = secrets.token_urlsafe(_BUCKET_BYTES)[:missing]
    return line + orjson.dumps(data) + b"\n\n"
