"""`echo` of completions: what stands before the generated text, and where each of its tokens begins."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from specd.text import Detokenizer, PaddedTokens, Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """One prompt as it is repeated in front of each of its choices."""

    text: str
    offsets: tuple[int, ...]  # characters of `text` before each prompt token

    def part(self, tokens: slice) -> str:
        """The text of some prompt tokens; the last ones have all that is left."""
        start, stop, _ = tokens.indices(len(self.offsets))
        return self.text[self.offsets[start] : self.offsets[stop] if stop < len(self.offsets) else None]


async def echoes_of(
    given: str | Sequence[Any], prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> tuple[Echo, ...]:
    """One for each prompt. given: the request's `prompt`, prompts: its token ids.

    Takes about 14 us a token: in a thread, prompt by prompt, so that it ends soon after a client has left.
    """
    texts = [given] if isinstance(given, str) else given if isinstance(given[0], str) else [None] * len(prompts)
    return tuple([await asyncio.to_thread(echo_of, *one, tokenizer) for one in zip(texts, prompts, strict=True)])


def echo_of(prompt: str | None, ids: Sequence[int], tokenizer: Tokenizer) -> Echo:
    """prompt: the client's own text, repeated as it is; None for a prompt of ids, which is decoded, special tokens too.

    A BOS that was put in front of a text is a token of the prompt, but not of the text.
    """
    hidden = prompt is not None and ids[0] == tokenizer.bos_id and not prompt.startswith(tokenizer.bos_token)
    detokenizer = Detokenizer(PaddedTokens(tokenizer), skip_special=False)
    offsets, text = [], ""
    for i, token_id in enumerate(ids):
        offsets.append(len(text))
        if i or not hidden:
            text += detokenizer.push(token_id)
    text += detokenizer.flush()
    return Echo(text if prompt is None else prompt, tuple(offsets))
