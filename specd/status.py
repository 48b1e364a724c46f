"""What an engine tells about itself: records for /metrics, the admin socket and the printed plan. No torch."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping


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
    failed_drafts: int = 0  # steps whose drafter failed: they went on without drafts
    failed_refills: int = 0


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
