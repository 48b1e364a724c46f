"""Generated text on a terminal: each token in the colour of its origin, and what the generation cost."""

from __future__ import annotations

import sys
from typing import Literal, TextIO

from specd.request import SequenceDelta, SequenceStats, TokenOrigin
from specd.text import Detokenizer, PaddedTokens, Tokenizer

_COLORS = {
    TokenOrigin.TARGET: "",  # the terminal's own colour: nothing was saved
    TokenOrigin.DRAFT: "\x1b[32m",
    TokenOrigin.NGRAM: "\x1b[36m",
    TokenOrigin.PREDICTION: "\x1b[35m",
    TokenOrigin.CORPUS: "\x1b[34m",
    TokenOrigin.GRAMMAR: "\x1b[95m",
    TokenOrigin.BONUS: "\x1b[33m",
}
_NAMES = {
    TokenOrigin.TARGET: "target",
    TokenOrigin.DRAFT: "drafter",
    TokenOrigin.NGRAM: "n-gram",
    TokenOrigin.PREDICTION: "prediction",
    TokenOrigin.CORPUS: "corpus",
    TokenOrigin.GRAMMAR: "grammar",
    TokenOrigin.BONUS: "bonus",
}
_RESET = "\x1b[0m"


def wants_color(choice: Literal["auto", "always", "never"], out: TextIO) -> bool:
    return choice == "always" or (choice == "auto" and out.isatty())


class TextPrinter:
    """Writes one choice as it comes. With colour, text is written token by token, else as the engine releases it."""

    def __init__(self, out: TextIO, tokenizer: Tokenizer, *, color: bool) -> None:
        self._out = out
        self._color = color
        self._detokenizer = Detokenizer(PaddedTokens(tokenizer), True)
        self.text = ""  # everything released so far
        self._seen: dict[TokenOrigin, int] = {}

    def push(self, delta: SequenceDelta) -> None:
        self.text += delta.text
        if not self._color:
            self._out.write(delta.text)
        for token_id, (origin, _, _) in zip(delta.token_ids, delta.origins, strict=True):
            self._seen[origin] = self._seen.get(origin, 0) + 1
            if self._color:
                self._write(self._detokenizer.push(token_id), origin)
        if self._color and delta.finish_reason is not None:
            self._write(self._detokenizer.flush(), TokenOrigin.TARGET)
        self._out.flush()

    def _write(self, text: str, origin: TokenOrigin) -> None:
        color = _COLORS[origin]
        self._out.write(f"{color}{text}{_RESET}" if color and text else text)

    def legend(self) -> str:
        """Which colour stands for which origin, and how many tokens each gave."""
        parts = []
        for origin, count in sorted(self._seen.items(), key=lambda item: -item[1]):
            name = f"{_NAMES[origin]} {count}"
            parts.append(f"{_COLORS[origin]}{name}{_RESET}" if self._color and _COLORS[origin] else name)
        return "tokens by origin: " + ", ".join(parts) if parts else ""


def summary(stats: SequenceStats) -> str:
    """Speed and acceptance of one choice. Tokens/s counts the time after the first token."""
    decode_s = stats.total_s - stats.ttft_s
    rate = f"{(stats.completion_tokens - 1) / decode_s:.1f} tokens/s" if decode_s > 0 else "no decode"
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    lines = [
        f"{stats.prompt_tokens} prompt tokens{cached}, {stats.completion_tokens} new, {rate}, "
        f"first token after {stats.ttft_s:.2f} s"
    ]
    if stats.num_spec_steps:
        lines.append(
            f"{1 + stats.num_accepted_tokens / stats.num_spec_steps:.2f} tokens a draft step, "
            f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts kept; by position: {by_position(stats)}"
        )
    return "\n".join(lines)


def by_position(stats: SequenceStats) -> str:
    """`1: 80% (8/10), 2: 50% (3/6)`: of the drafts at each position, how many were kept."""
    parts = []
    for position in range(1, max(stats.per_step_drafted, default=0) + 1):
        drafted = sum(length >= position for length in stats.per_step_drafted)
        kept = sum(length >= position for length in stats.per_step_accepted)
        parts.append(f"{position}: {kept / drafted:.0%} ({kept}/{drafted})")
    return ", ".join(parts)


def note(text: str) -> None:
    """A line beside the output proper: standard error, so that `specd generate ... > file` holds the text alone."""
    if text:
        print(text, file=sys.stderr, flush=True)
