"""What an engine tells about itself: records for /metrics, the admin socket and the printed plan. No torch."""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Mapping

REFUSALS = ("waiting_sequences", "waiting_tokens", "key_requests", "key_tokens")  # limits that a 429 may name


UNDRAFTED = (  # why a row of a step has no drafts
    "request",
    "admin",
    "not_paying",
    "failing",
    "catching_up",
    "no_proposal",
    "mixed_batch",
    "no_room",
    "context",
)


@dataclasses.dataclass(slots=True)
class Distribution:
    """How often a value fell into each bucket, and the sum of all."""

    bounds: tuple[float, ...]  # inclusive upper ends, rising
    counts: list[int] = dataclasses.field(default_factory=list)  # [len(bounds) + 1]; the last one has no end
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Distribution:
        return Distribution(self.bounds, self.counts.copy(), self.total)


class EngineState(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine lives."""

    model: str  # what was asked for: alias, path or hub id
    served_names: tuple[str, ...]  # the first one is canonical
    weight_bytes: int
    dtype: str
    max_len: int  # tokens of prompt and output together
    vocab_size: int
    eos_ids: tuple[int, ...]
    drafter: str  # "none", "ngram", "layers:4", "lm:..."
    max_draft: int
    acceptance: str
    kv_tokens: int  # what the page pool holds
    page_size: int
    max_running: int
    fingerprint: str  # "fp_..." hash of model, revision, dtype, drafter, version
    generation_defaults: Mapping[str, float | int]  # temperature, top_p, ... of the model's own configuration
    created: int  # unix seconds
    kernels: str = "torch"  # whose arithmetic: "torch", "native fast", "native exact"
    kv_bytes: int = 0  # of the page pool, the drafter's share counted; memory is taken as pages are first used


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: gauges of now and counters since the start."""

    state: EngineState
    uptime_s: float
    last_progress_s: float  # seconds since a step finished, 0 when idle
    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int  # unused but holding a reusable prefix; counted in pages_free too
    accepted_requests: int  # accepted == finished + failed + aborted + running + waiting (in requests)
    finished_requests: Mapping[str, int]  # by finish reason, per choice
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    preemptions: int
    steps: int
    drafts: Mapping[str, int]  # rows that verified at least one draft, by source
    draft_tokens: Mapping[str, int]
    accepted_tokens: Mapping[str, int]
    accepted_per_position: tuple[int, ...]  # [max_draft]: drafts kept at position i (0-based)
    drafted_per_position: tuple[int, ...]
    requests_failed: int = 0
    requests_aborted: int = 0
    requests_finished: int = 0
    lost_before: int = 0  # requests that the process before this one left open, by its journal
    drains: int = 0  # times that it stopped accepting, to end or until it is resumed
    failed_drafts: int = 0  # steps whose drafter failed: they went on without drafts
    failed_refills: int = 0
    undrafted: Mapping[str, int] = dataclasses.field(default_factory=dict)  # rows' steps, by UNDRAFTED
    wasted_s: float = 0.0  # computing drafts that were not kept
    speedup: float | None = None  # over decoding without drafts; None while it is not known
    paused: bool = False  # no step is scheduled; requests are accepted and wait
    live_requests: int = 0  # accepted and not ended
    refused: Mapping[str, int] = dataclasses.field(default_factory=dict)  # requests, by REFUSALS
    waiting_tokens: int = 0  # prompt tokens of the requests that have not begun
    waiting_keys: int = 0  # API keys with such requests
    waiting_spread: float = 0.0  # tokens per weight between the most and the least served of them
    stages: Mapping[str, Distribution] = dataclasses.field(default_factory=dict)  # seconds, by stage of a step
    step_tokens: Distribution = dataclasses.field(default_factory=lambda: Distribution(()))

    @property
    def shown_state(self) -> str:
        """What people and routers are told: the state, or "paused"."""
        return "paused" if self.paused and self.state is EngineState.READY else str(self.state)


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one sequence that emitted tokens."""

    step: int
    source: str  # who proposed: none, drafter, ngram, prediction, corpus, grammar
    drafted: int
    emitted: int  # kept drafts and the target's own token


@dataclasses.dataclass(frozen=True, slots=True)
class KVStatus:
    """The page pool. free + cached + owned == total."""

    page_size: int  # tokens
    bytes: int
    total: int
    free: int  # hold nothing
    cached: int  # nobody's, and a reusable prefix
    owned: int
    shared: int  # of the owned ones: by several sequences
    prompt_tokens: int  # since the start: asked for ...
    cached_tokens: int  # ... and found in the prefix cache


@dataclasses.dataclass(frozen=True, slots=True)
class PageMap:
    """The pool in the order of page ids: one character for `cell_pages` pages, the state of the busiest of them."""

    cell_pages: int
    cells: str  # "." holds nothing, "c" cached, "u" one sequence's, "s" shared by several


@dataclasses.dataclass(frozen=True, slots=True)
class LengthPolicy:
    """How many drafts a step makes."""

    mode: str  # auto, off
    k: int | str  # "adaptive", or exactly so many; 0 where mode is off
    configured: int | str  # speculation.draft_len
    overridden: bool


@dataclasses.dataclass(frozen=True, slots=True)
class RequestDetail:
    """One live choice with its parameters and its latest steps, for `specd ctl request`. Never any text."""

    status: RequestStatus
    params: Mapping[str, object]  # user text (stop strings) as counts, a grammar as kind and length
    preemptions: int
    cached_tokens: int
    acceptance_histogram: tuple[int, ...]
    steps: tuple[StepRecord, ...]  # the latest ones, oldest first


@dataclasses.dataclass(frozen=True, slots=True)
class RequestStatus:
    """One live choice, for `specd ctl requests`. Never any text."""

    request_id: str
    index: int
    state: str  # waiting, prefilling, decoding
    age_s: float
    prompt_tokens: int
    output_tokens: int
    pages: int
    draft_len: int  # drafts of its latest step
    num_draft_tokens: int
    num_accepted_tokens: int
