"""What the chat template writes around turns, as token ids, for turns that the model itself writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from specd.errors import ModelError, RequestError
from specd.text import RenderedChat, Tokenizer

Message = Mapping[str, Any]
_MARKS = ("uqxvturn", "aqxvturn", "wqxvturn")  # contents that no template writes by itself


class ChatRenderer(Protocol):
    """The model's chat template. Raises RequestError for messages that it refuses."""

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> RenderedChat: ...


@dataclasses.dataclass(frozen=True, slots=True)
class TurnTokens:
    """A chat is opening, user turn, after_user, answer, after_answer, user turn, ...; turns carry their end token."""

    opening: tuple[int, ...]
    after_user: tuple[int, ...]
    after_answer: tuple[int, ...]
    user_end: int
    answer_end: int


def turn_tokens(tokenizer: Tokenizer, render: ChatRenderer, eos_ids: Sequence[int]) -> TurnTokens:
    """Raises ModelError for a template in which a turn does not end with one of eos_ids: it could not be sampled."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
    try:
        text = render(messages, add_generation_prompt=True).text
    except RequestError as error:
        raise ModelError(f"no chat can be rendered: {error}") from error
    pieces: list[str] = []
    for mark in _MARKS:
        before, found, text = text.partition(mark)
        if not found:
            raise ModelError("the chat template leaves out a turn of three (user, assistant, user)")
        pieces.append(before)
    opening, user, answer = pieces
    after_user, after_answer = (tokenizer.encode(piece, add_special=False) for piece in (user, answer))
    for whose, ids in (("user's", after_user), ("assistant's", after_answer)):
        if not ids or ids[0] not in eos_ids:
            begin = tokenizer.decode(ids[:4], skip_special=False)
            raise ModelError(f"the {whose} turn ends with {begin!r} and not with an end token: it cannot be sampled")
    return TurnTokens(
        opening=tuple(tokenizer.encode_chat(RenderedChat(opening))),
        after_user=tuple(after_user[1:]),
        after_answer=tuple(after_answer[1:]),
        user_end=after_user[0],
        answer_end=after_answer[0],
    )
