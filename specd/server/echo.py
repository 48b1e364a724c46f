"""`echo` of completions: what stands before the generated text, and where each of its tokens begins. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specd.text import Detokenizer, PaddedTokens, Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """One prompt as it is repeated in front of each of its choices."""

    text: str
    offsets: tuple[int, ...]  # characters of `text` before each prompt token


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
