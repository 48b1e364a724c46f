"""Sequences over an awkward vocabulary, and blocks of tokens for the one loop over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from collections.abc import Sequence as Items
from typing import Any

from specd.commit import RowReport, commit
from specd.pages import BlockKeys
from specd.request import FinishReason, Request, SamplingParams, SequenceDelta, SpeculationParams, TokenLogprob
from specd.sequence import Sequence
from specd.step import DraftSource
from specd.text import Detokenizer, LeadingSpace

# A vocabulary with everything that is awkward: characters over several tokens, several characters in one token,
# bytes that are never a character, special tokens.
PIECES = [
    b"a",
    b"b",
    b"c",
    b"ab",
    b"ca b",
    *(bytes([byte]) for byte in "é한😀".encode()),
    b"\xff",
    b" ",
    b"",
    b"<e>",
    b"<s>",
]
EOS, SPECIAL = len(PIECES) - 2, len(PIECES) - 1
PROMPT = (0, 1, 2)


class Pieces:
    special_ids: Collection[int] = frozenset({EOS, SPECIAL})
    leading_space = LeadingSpace.KEEP

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]


class Recorder:
    """A proposer that notes what it is shown."""

    source = DraftSource.NGRAM
    tally = None

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def extend(self, tokens: Items[int]) -> None:
        self.tokens += tokens

    def propose(self, max_tokens: int) -> list[int]:
        return []


def sequence_of(params: SamplingParams, *, detail: Any = "detailed", max_len: int = 100) -> Sequence:
    request = Request("r", PROMPT, params, speculation=SpeculationParams(detail=detail))
    return Sequence(
        request,
        3,
        eos_ids=(EOS,),
        max_len=max_len,
        max_draft=8,
        histogram_len=9,
        detokenizer=Detokenizer(Pieces(), params.skip_special_tokens),
        keys=BlockKeys(secret=b"", salt=b"", page_size=4, lookahead=False),
        proposers=(Recorder(),),
    )


def params_of(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "seed": 0, **changes})


def block(tokens: Items[int], *, num_drafts: int | None = None, logprobs: bool = False) -> RowReport:
    """A row that emits `tokens`: all but the last one were drafts."""
    drafts = len(tokens) - 1 if num_drafts is None else num_drafts
    told = tuple(TokenLogprob(token, -token / 7, ((token, -token / 7),)) for token in tokens) if logprobs else None
    return RowReport(tuple(tokens), len(tokens) - 1, drafts, False, told)


def run(sequence: Sequence, blocks: Items[Items[int]], *, spare: int = 0) -> list[SequenceDelta]:
    """Commits blocks until one ends the sequence; each had `spare` more drafts than were kept."""
    deltas = []
    for step, tokens in enumerate(blocks):
        row = block(tokens, num_drafts=len(tokens) - 1 + spare, logprobs=sequence.sampling.logprobs is not None)
        deltas.append(commit(sequence, row, source=DraftSource.DRAFTER, step=step))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


@dataclasses.dataclass
class Whole:
    """What a client has in the end."""

    ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


def whole(deltas: list[SequenceDelta]) -> Whole:
    told = [delta.logprobs for delta in deltas]
    last = deltas[-1] if deltas else SequenceDelta("r", 3)
    return Whole(
        ids=[token for delta in deltas for token in delta.token_ids],
        text="".join(delta.text for delta in deltas),
        logprobs=None if None in told else [one for part in told if part is not None for one in part],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
