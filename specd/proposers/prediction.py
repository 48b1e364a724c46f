"""A predicted output followed by the real one: what comes next in it is the proposal.

    prediction   a b c d e f g h        the output follows it from the start;
    output       a b x e f .            `x` is not in it: lost. `e`, the next token, is: its place is found again

While the output agrees, one comparison a token. Where it leaves, the place is sought anew with each token: where the
output's last tokens, as many as possible, stand in the prediction; of equal places the one nearest to where it was last
followed for sure, for a text repeats itself. A place found by few tokens is believed only so far: it proposes twice as
many as it was found by. So what was replaced, inserted or left out costs a few tokens, and a text that has nothing to
do with the prediction costs little more. One search is a scan with NumPy: microseconds for a whole context.

Source: the request field is OpenAI's `prediction` ("predicted outputs"); to propose from a text that the output is
likely to copy is Yang et al., "Inference with Reference" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specd.corpora import Tally
from specd.step import I32, DraftSource

_LONGEST = 8  # tokens that tell places apart
_SURE = 4  # tokens in a row after which a place is no accident


class PredictionProposer:
    """Proposes from `prediction`; num_prompt: tokens of the prompt, which is not predicted."""

    source = DraftSource.PREDICTION
    tally: Tally | None = None

    def __init__(self, prediction: Sequence[int], *, num_prompt: int) -> None:
        self._prediction = prediction
        self._array: I32 | None = None  # of the prediction, once it is searched
        self._prompt_left = num_prompt
        self._tail: list[int] = []  # the output's last tokens
        self._next = 0  # place in the prediction: what the output says next if it follows
        self._matched = 1  # tokens before `_next` that the output said too; the start is believed like one
        self._sure = 0  # the last place of which that was no accident

    def extend(self, tokens: Sequence[int]) -> None:
        """The prompt first, then the output."""
        skipped = min(self._prompt_left, len(tokens))
        self._prompt_left -= skipped
        for token in tokens[skipped:]:
            self._follow(token)

    def propose(self, max_tokens: int) -> list[int]:
        count = min(max_tokens, 2 * self._matched)
        return list(self._prediction[self._next : self._next + count])

    def _follow(self, token: int) -> None:
        self._tail = [*self._tail[1 - _LONGEST :], token]
        if self._next < len(self._prediction) and self._prediction[self._next] == token:
            self._next, self._matched = self._next + 1, self._matched + 1
        else:
            self._next, self._matched = self._find()
        if self._matched >= _SURE:
            self._sure = self._next

    def _find(self) -> tuple[int, int]:
        """The place after the longest suffix of the output, and its length: 0, and no more proposals, without one."""
        if self._array is None:
            self._array = np.asarray(self._prediction, np.int32)
        places, length = np.flatnonzero(self._array == self._tail[-1]) + 1, 1
        if not len(places):
            return len(self._array), 0
        for token in self._tail[-2::-1]:
            fitting = places[places > length]
            fitting = fitting[self._array[fitting - 1 - length] == token]
            if not len(fitting):
                break
            places, length = fitting, length + 1
        return int(places[np.abs(places - self._sure).argmin()]), length
