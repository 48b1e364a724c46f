"""Text that others wrote, as sequences to learn from: the target computes it as it stands.

A .txt file is one text. Each line of a .jsonl file is a text, `{"text": "..."}`, or a chat, `{"messages": [...]}` with
the messages of the API; other keys are not looked at. All of a text is learned from, of a chat the assistant's turns up
to the token that ends them; what comes after the last of these is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from specd.errors import ConfigError, RequestError
from specd.text import Tokenizer
from specd.train.corpus import GIVEN, HELD_OUT_EVERY, OTHERS, Text
from specd.train.template import ChatRenderer, Message


class _BadLineError(Exception):
    """Its text is the reason."""


class GivenReader:
    """render: None for a model without a chat template."""

    def __init__(self, tokenizer: Tokenizer, render: ChatRenderer | None, *, longest: int) -> None:
        """longest: tokens of a sequence; a longer text is cut into several, a longer chat is cut off."""
        self._tokenizer, self._render, self._longest = tokenizer, render, longest
        self._num_cut_off = 0

    def read(self, path: Path) -> list[Text]:
        """Every twentieth sequence is held out. Raises ConfigError naming the file, the line and what is wrong."""
        if path.suffix not in (".txt", ".jsonl"):
            raise ConfigError(f"{path}: neither .txt (one text) nor .jsonl (a text or a chat a line)")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        self._num_cut_off = 0
        sequences: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]] = []
        for number, line in enumerate([data] if path.suffix == ".txt" else data.split(b"\n"), 1):
            place = path if path.suffix == ".txt" else f"{path}:{number}"
            try:
                if path.suffix == ".txt":
                    sequences += self._text(_decoded(line))
                elif line.strip():
                    sequences += self._line(line)
            except (_BadLineError, RequestError) as error:
                raise ConfigError(f"{place}: {error}") from error
        if not sequences:
            raise ConfigError(f"{path}: is empty")
        if self._num_cut_off:
            print(f"{self._num_cut_off} chats were cut off at {self._longest} tokens", file=sys.stderr, flush=True)
        return [Text(ids, role, index % HELD_OUT_EVERY == 0) for index, (ids, role) in enumerate(sequences)]

    def _line(self, line: bytes) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise _BadLineError(f"not JSON: {error}") from error
        if not isinstance(record, dict) or ("text" in record) == ("messages" in record):
            raise _BadLineError('not an object with either "text" or "messages"')
        if "messages" in record:
            yield self._chat(_checked(record["messages"]))
        elif isinstance(record["text"], str):
            yield from self._text(record["text"])
        else:
            raise _BadLineError(f'"text" is {type(record["text"]).__name__}, not a string')

    def _text(self, text: str) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        ids = np.asarray(self._tokenizer.encode(text), np.int32)
        if not text or not len(ids):
            raise _BadLineError("the text is empty")
        for begin in range(0, len(ids), self._longest):
            piece = ids[begin : begin + self._longest]
            yield piece, np.full(len(piece), OTHERS, np.uint8)

    def _chat(self, messages: list[Message]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """A turn's place is seen from the chats that end before it and after it: tokens are the same up to there."""
        if self._render is None:
            raise _BadLineError("the model has no chat template; give one with --chat-template FILE")
        whole = self._render(messages, add_generation_prompt=False)
        ids = self._tokenizer.encode_chat(whole)
        role = np.full(len(ids), GIVEN, np.uint8)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:index], add_generation_prompt=True)
            after = self._render(messages[: index + 1], add_generation_prompt=False)
            if not after.plain.startswith(before.plain) or not whole.plain.startswith(after.plain):
                raise _BadLineError(f"messages[{index}]: the chat template writes what is before it otherwise with it")
            begin = _shared(ids, self._tokenizer.encode_chat(before))
            end = _shared(ids, self._tokenizer.encode_chat(after))
            ended = (i + 1 for i in range(begin, end) if ids[i] in self._tokenizer.eos_ids)
            role[begin : next(ended, end)] = OTHERS
        self._num_cut_off += len(ids) > self._longest
        role = role[: self._longest]
        if not (role == OTHERS).any():
            raise _BadLineError(f"no token of an assistant's turn among the first {self._longest}")
        size = int(np.flatnonzero(role == OTHERS)[-1]) + 1
        return np.asarray(ids[:size], np.int32), role[:size]


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _BadLineError(f"not UTF-8: {error}") from error


def _checked(messages: Any) -> list[Message]:
    """What the renderer needs; what the template wants of it, it says itself."""
    if not isinstance(messages, list) or not messages:
        raise _BadLineError('"messages" is not a list of messages')
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _BadLineError(f'messages[{index}] has no "role"')
        if not message.get("content"):
            raise _BadLineError(f'messages[{index}] has no "content"')
    if all(message["role"] != "assistant" for message in messages):
        raise _BadLineError("no message is the assistant's: there is nothing to learn")
    return messages


def _shared(ids: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = zip(ids, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(other)))
