"""What an engine has done since it started: plain counters, read by /metrics and the admin socket. No torch."""

from __future__ import annotations

import collections
import dataclasses

from specd.pipeline.speedup import SpeedUp
from specd.request import SequenceDelta, TokenOrigin
from specd.sequence import Sequence
from specd.status import Distribution
from specd.step import DraftSource, StepStats

_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STAGES = ("schedule", "draft", "verify", "accept", "refill", "commit", "detokenize", "step")
_KEPT = frozenset(TokenOrigin) - {TokenOrigin.TARGET, TokenOrigin.BONUS}


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
    wasted_s: float = 0.0  # see `_wasted_s`
    text_s: float = 0.0  # of the step that is being committed: tokens to text
    speedup: SpeedUp = dataclasses.field(default_factory=SpeedUp)
    undrafted: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    finished: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    drafts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    draft_tokens: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    accepted_tokens: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    drafted_per_position: list[int] = dataclasses.field(default_factory=list)
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)

    stages: dict[str, Distribution] = dataclasses.field(
        default_factory=lambda: {name: Distribution(_SECONDS) for name in _STAGES}
    )
    step_tokens: Distribution = dataclasses.field(default_factory=lambda: Distribution(_TOKENS))

    def __post_init__(self) -> None:
        self.drafted_per_position = [0] * self.max_draft
        self.accepted_per_position = [0] * self.max_draft

    def admitted(self, sequence: Sequence) -> None:
        """A sequence's first admission."""
        self.prompt_tokens += sequence.num_prompt
        self.cached_tokens += sequence.num_cached

    def measured(self, stats: StepStats) -> None:
        """One step; stages that it did not have count nowhere."""
        self.steps += 1
        self.step_tokens.observe(stats.num_tokens)
        self.wasted_s += _wasted_s(stats)
        self.speedup.observe(stats)
        self._spent(
            draft=stats.draft_s,
            verify=stats.verify_s - stats.accept_s,
            accept=stats.accept_s,
            refill=stats.refill_s,
            step=stats.duration_s,
        )

    def worked(self, *, commit_s: float, schedule_s: float) -> None:
        """The host's part of one step: committing the reports, and the next schedule."""
        self._spent(detokenize=self.text_s, commit=commit_s - self.text_s, schedule=schedule_s)
        self.text_s = 0.0

    def _spent(self, **seconds: float) -> None:
        for name, value in seconds.items():
            if value > 0:
                self.stages[name].observe(value)

    def committed(self, delta: SequenceDelta, source: DraftSource, num_drafts: int, *, num_planned: int) -> None:
        """One row's emitted tokens. num_planned: drafts that it was to have; a drafter that fails makes none."""
        self.generation_tokens += len(delta.token_ids)
        if num_drafts == 0:
            if num_planned:
                self.undrafted["failing"] += 1
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


def _wasted_s(stats: StepStats) -> float:
    """Seconds of computing that went into drafts that were not kept: the draft stage's are divided evenly among the
    step's drafts, whoever made them, and those of verify and accept among all tokens that were computed."""
    rejected = stats.num_draft_tokens - stats.num_accepted
    if rejected <= 0:
        return 0.0
    return stats.draft_s * rejected / stats.num_draft_tokens + stats.verify_s * rejected / stats.num_tokens
