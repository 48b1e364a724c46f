"""What an engine has done since it started: plain counters, read by /metrics and the admin socket. No torch."""

from __future__ import annotations

import collections
import dataclasses

from specd.request import SequenceDelta, TokenOrigin
from specd.sequence import Sequence
from specd.step import DraftSource

_KEPT = frozenset({TokenOrigin.DRAFT, TokenOrigin.NGRAM, TokenOrigin.PREDICTION})


def num_kept(delta: SequenceDelta) -> int:
    """Drafts among a delta's emitted tokens: what stands behind a stop is not counted."""
    return sum(origin in _KEPT for origin, _, _ in delta.origins)


@dataclasses.dataclass(slots=True)
class Counters:
    """Only ever grows. Speculation is counted by source name and by position (0-based) in the draft."""

    max_draft: int
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    failed_drafts: int = 0
    failed_refills: int = 0
    finished: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    drafts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    draft_tokens: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    accepted_tokens: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    drafted_per_position: list[int] = dataclasses.field(default_factory=list)
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafted_per_position = [0] * self.max_draft
        self.accepted_per_position = [0] * self.max_draft

    def admitted(self, sequence: Sequence) -> None:
        """A sequence's first admission."""
        self.prompt_tokens += sequence.num_prompt
        self.cached_tokens += sequence.num_cached

    def committed(self, delta: SequenceDelta, source: DraftSource, num_drafts: int) -> None:
        """One row's emitted tokens."""
        self.generation_tokens += len(delta.token_ids)
        if num_drafts == 0:
            return
        kept = num_kept(delta)
        name = source.name.lower()
        self.drafts[name] += 1
        self.draft_tokens[name] += num_drafts
        self.accepted_tokens[name] += kept
        for i in range(num_drafts):
            self.drafted_per_position[i] += 1
            self.accepted_per_position[i] += i < kept

    def ended(self, delta: SequenceDelta) -> None:
        if delta.finish_reason is not None:
            self.finished[delta.finish_reason.value] += 1
