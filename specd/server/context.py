"""What the context has room for: a prompt that is too long is refused, before it is tokenised where its bytes tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from specd.errors import RequestError
from specd.text import RenderedChat, Tokenizer

# Characters of a text that is tokenised for its own sake, and of a chat: about ten seconds of one core.
MAX_TEXT_CHARS = 4_000_000


def check_chars(text: str, param: str) -> str:
    """Raises RequestError for a text that is too long to be tokenised for its own sake."""
    if len(text) > MAX_TEXT_CHARS:
        message = f"'{param}' has {len(text)} characters; at most {MAX_TEXT_CHARS} can be tokenised at once"
        raise RequestError(message, code="request_too_large", param=param)
    return text


def least_tokens(text: str | RenderedChat, tokenizer: Tokenizer) -> int:
    """As many tokens as a text has at least."""
    if tokenizer.bound is None:
        return 0
    return tokenizer.bound.least_tokens(*((text,) if isinstance(text, str) else (text.text, text.masked)))


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """The context of a request: prompt and output together."""

    max_len: int
    asked: int | None = None  # tokens of output that the request wants
    param: str = "prompt"  # where its prompt is

    def check(self, prompt_len: int, *, least: bool = False) -> int:
        """Tokens that are left for the output. Raises RequestError when they are too few.

        least: prompt_len is what the prompt has at least.
        """
        room = self.max_len - prompt_len
        if room >= 1 and (self.asked is None or self.asked <= room):
            return room
        wanted = "" if self.asked is None else f" and {self.asked} more were requested for the output"
        # LangChain knows a context that overflows by the words "prompt is too long", LiteLLM by the ones before.
        advice = "the prompt is too long" if room < 1 else "shorten the prompt or the output"
        has = f"has at least {prompt_len} tokens" if least else f"has {prompt_len} tokens"
        raise RequestError(
            f"this model's maximum context length is {self.max_len} tokens, but the prompt {has}{wanted}; {advice}",
            code="context_length_exceeded",
            param=self.param,
        )

    def check_texts(self, texts: Iterable[str | RenderedChat], tokenizer: Tokenizer) -> None:
        """Refuses a text that cannot fit, whatever its tokens and the output are. Raises RequestError."""
        for text in texts:
            least = least_tokens(text, tokenizer)
            if least >= self.max_len:
                self.check(least, least=True)
