"""Server-sent events of one streamed answer. Pure: deltas in, bytes out; no HTTP.

    role chunk of each choice (chat) | chunks of text, thinking and calls | finish chunk of each choice | usage chunk |
    [DONE]

Such a chunk is never empty: tokens that release nothing yet travel with the next chunk of their choice that has some,
or with its finish chunk. Of several chunks that one delta makes, the first carries its tokens. So the concatenation of
chunks does not depend on how tokens were grouped into deltas.
Only `data:` lines and comments are written: `id:` and `retry:` break a widely used client.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import orjson

from specd.request import FinishReason, SequenceDelta
from specd.server.fields import Endpoint
from specd.server.parts import chat_delta
from specd.server.responses import ChoiceText, Piece, ResponseWriter

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_HEAD = b"data: "
_ECHO_TOKENS = 2048  # of a chunk
_BUCKET_BYTES = 64


def event(body: dict[str, Any], head: bytes = _HEAD) -> bytes:
    """One event; JSON has no raw newlines, so one line is always enough. head: up to the body."""
    return head + orjson.dumps(body) + b"\n\n"


def padded_event(body: dict[str, Any], head: bytes = _HEAD) -> bytes:
    """One event whose size is a multiple of 64 bytes, by a random string in `obfuscation`, as OpenAI's API does.

    Sizes of packets tell how many tokens a step gave, which tells about the text (arXiv 2411.01076).
    """
    missing = -len(event(body | {"obfuscation": ""}, head)) % _BUCKET_BYTES
    return event(body | {"obfuscation": secrets.token_urlsafe(_BUCKET_BYTES)[:missing]}, head)


class StreamEncoder:
    """Encodes one call. `start` once, `push` per delta, `end` once after every choice has finished."""

    keep_alive = KEEP_ALIVE

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer
        self._call = writer.call
        self._chat = self._call.endpoint is Endpoint.CHAT
        self._started = [False] * self._call.num_choices
        self._echoed = [not self._call.echoes] * self._call.num_choices
        self.choices = writer.choices()

    def start(self) -> bytes:
        """The role chunks. Completions have none."""
        if not self._chat:
            return b""
        content = None if self._call.reading.forced else ""
        roles = [
            self._chunk(i, {"delta": {"role": "assistant", "content": content, "refusal": None}}, Piece())
            for i in range(self._call.num_choices)
        ]
        return b"".join(roles)

    def push(self, index: int, delta: SequenceDelta) -> bytes:
        """What one delta of choice `index` adds to the stream; nothing while no text is released."""
        assert delta.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT), "failures end the stream elsewhere"
        choice = self.choices[index]
        choice.add(delta)
        chunks = b"" if self._echoed[index] else self._echo(index, choice)
        if choice.has_parts:
            piece = choice.take()
            for content in self._contents(piece):
                chunks += self._chunk(index, content, piece)
                piece = Piece()
        if choice.finish_reason is not None:
            chunks += self._finish(index, choice)
        return chunks

    def _contents(self, piece: Piece) -> list[dict[str, Any]]:
        """What each chunk of a piece says."""
        if not self._chat:
            return [{"text": piece.text}]
        return [{"delta": chat_delta(part, self._call.reading)} for part in piece.parts]

    def _echo(self, index: int, choice: ChoiceText) -> bytes:
        """The prompt of a choice, before its first token; a long one in several chunks: each holds the GIL."""
        self._echoed[index] = True
        echo = self._writer.echo(index)
        chunks = b""
        for start in range(0, len(echo.offsets), _ECHO_TOKENS):
            part = slice(start, start + _ECHO_TOKENS)
            text, logprobs = echo.part(part), self._writer.echo_logprobs(index, choice.prompt_logprobs, part)
            if text or logprobs:
                chunks += self._chunk(index, {"text": text}, Piece(), logprobs=logprobs)
        return chunks

    def _finish(self, index: int, choice: ChoiceText) -> bytes:
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        metrics = self._writer.metrics(choice.stats)
        alone = self._call.num_choices == 1
        return self._chunk(
            index,
            content,
            choice.take(),
            finish=choice,
            choice_extra={} if alone else metrics,
            root_extra=metrics if alone and not self._call.include_usage else {},
        )

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        piece: Piece,
        *,
        finish: ChoiceText | None = None,
        choice_extra: dict[str, Any] | None = None,
        root_extra: dict[str, Any] | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        body = self._writer.head("chat.completion.chunk" if self._chat else "text_completion")
        logprobs = logprobs or self._writer.logprobs(index, piece)
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": None}
        if finish is not None:
            choice |= {"finish_reason": finish.finish_reason, "stop_reason": finish.stop_reason}
        if self._call.return_token_ids:
            self._add_token_ids(index, piece, body, choice)
        body["choices"] = [choice | (choice_extra or {})]
        if self._call.continuous_usage:
            body["usage"] = self._writer.usage(self.choices)
        elif self._call.include_usage:
            body["usage"] = None
        body |= {**self._writer.origins(piece), **self._writer.timings(self.choices[index].running_stats)}
        return self._event(body | (root_extra or {}))

    def _add_token_ids(self, index: int, piece: Piece, body: dict[str, Any], choice: dict[str, Any]) -> None:
        """Token ids of the chunk, and the prompt's with the first one of a choice."""
        choice["token_ids"] = list(piece.token_ids)
        if not self._started[index]:
            self._started[index] = True
            (body if self._chat else choice)["prompt_token_ids"] = list(self._writer.prompt_ids(index))

    def failed(self, error: Mapping[str, Any], status: int) -> bytes:
        """An error body as an event, with what has been used so far where usage was asked for."""
        usage = {"usage": self._writer.usage(self.choices)} if self._call.include_usage else {}
        return event({**error, **usage})

    def end(self) -> bytes:
        """The usage chunk when asked for, and [DONE]."""
        if not self._call.include_usage:
            return DONE
        body = self._writer.head("chat.completion.chunk" if self._chat else "text_completion")
        body |= {"choices": [], "usage": self._writer.usage(self.choices)}
        if self._call.num_choices == 1:
            stats = self.choices[0].stats
            body |= {**self._writer.metrics(stats), **self._writer.timings(stats)}
        return self._event(body) + DONE

    def _event(self, body: dict[str, Any]) -> bytes:
        """An event; where others may count bytes, filled up to a size that many different ones share."""
        return padded_event(body) if self._call.obfuscated else event(body)
