"""One choice of a request while it lives: the scheduler's own mutable record. No torch.

Invariant while decoding: num_computed == len(tokens) - 1, that is, the newest token (the root) has been emitted and its
target KV has not been written. A sequence that was preempted computes all its tokens again, the root included.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import time
from array import array
from collections.abc import Iterable

import numpy as np

from specd.errors import SpecdError
from specd.grammar import GrammarMatcher
from specd.pages import BlockKeys
from specd.proposers.base import Proposer
from specd.request import Request, SamplingParams, SequenceStats, TokenLogprob
from specd.status import StepRecord
from specd.step import I32
from specd.text import Detokenizer, StopMatcher

HISTORY = 256  # steps of a sequence that are kept for `specd ctl request`


def page_ids(pages: Iterable[int] = ()) -> array[int]:
    """A list of pages that a plan copies as it lies: 32-bit integers, as in `StepPlan.page_indices`."""
    return array("i", pages)


class Phase(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"  # owns a slot and pages: prefilling until one token is left to compute, then decoding
    FINISHED = "finished"


@dataclasses.dataclass(slots=True)
class SpeculationRecord:
    """What a sequence's drafts did, counted by commit over tokens that were really emitted."""

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_predicted: int = 0  # drafts out of the request's prediction
    num_predicted_accepted: int = 0
    histogram: list[int] = dataclasses.field(default_factory=list)  # [engine's max_draft + 1]
    per_step_drafted: list[int] = dataclasses.field(default_factory=list)
    per_step_accepted: list[int] = dataclasses.field(default_factory=list)

    def record(self, *, drafted: int, accepted: int, detailed: bool, predicted: int = 0) -> None:
        """One step with `drafted` >= 1 drafts of which `accepted` were emitted; `predicted` begin the drafts."""
        self.num_steps += 1
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.num_predicted += predicted
        self.num_predicted_accepted += min(accepted, predicted)
        self.histogram[accepted] += 1
        if detailed:
            self.per_step_drafted.append(drafted)
            self.per_step_accepted.append(accepted)


class Sequence:
    """Tokens, pages and counts of one choice. `pages` and `slot` belong to the RUNNING phase, else they are empty.

    Slots, because every step reads every sequence, and by then the forward has emptied the processor's caches.
    """

    __slots__ = (
        "_prompt_ids", "abort_error", "abort_requested", "carry_valid", "detokenizer", "draft_len", "drafter_len",
        "eos_ids", "first_token_s", "grammar", "history", "index", "keys", "limit", "matcher", "max_draft",
        "num_cached", "num_computed", "num_marked", "num_preemptions", "num_prompt", "num_published", "output_counts",
        "pages", "phase", "prompt_logprobs", "proposers", "request", "scheduled_s", "slot", "speculation", "text_s",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        eos_ids: tuple[int, ...],
        max_len: int,
        max_draft: int,
        histogram_len: int,
        detokenizer: Detokenizer,
        keys: BlockKeys,
        proposers: tuple[Proposer, ...] = (),
        grammar: GrammarMatcher | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.eos_ids = eos_ids
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.limit = min(max_len, self.num_prompt + request.sampling.max_tokens)  # tokens, prompt included
        self.max_draft = max_draft  # the request's wish and the engine's maximum
        self.detokenizer = detokenizer
        self.text_s = 0.0  # of the latest step: tokens to text, and looking for stops in it
        self.matcher = StopMatcher(request.sampling.stop, request.sampling.include_stop_str_in_output)
        self.grammar = grammar
        self.keys = keys
        self.proposers = proposers  # the first one that has a guess proposes
        for proposer in proposers:
            proposer.extend(self.tokens)
        self._prompt_ids: I32 | None = None
        self.output_counts: collections.Counter[int] = collections.Counter()  # empty unless `sampling.penalised`

        self.phase = Phase.WAITING
        self.slot = -1
        self.pages = page_ids()
        self.num_published = 0  # leading blocks handed to the prefix index
        self.num_computed = 0  # leading tokens whose target KV is final
        self.drafter_len = 0  # leading slots with valid drafter KV
        self.num_marked = 0  # leading blocks whose pages are known to hold drafter KV throughout
        self.carry_valid = False  # the carry of `slot` follows the newest token
        self.draft_len = 0  # drafts of the latest step
        self.abort_requested = False
        self.abort_error: SpecdError | None = None  # what its client is told, when it was not the client itself

        self.history: collections.deque[StepRecord] = collections.deque(maxlen=HISTORY)

        self.speculation = SpeculationRecord(histogram=[0] * histogram_len)
        self.num_cached = 0  # prompt tokens found in the prefix cache when it was first admitted
        self.num_preemptions = 0
        self.prompt_logprobs: list[TokenLogprob] = []  # of prompt tokens 1.., as far as they are computed
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def reusable(self, page_size: int) -> int | None:
        """Leading blocks that may be taken from the prefix cache, None for all: what is not computed is not scored."""
        num_scored = len(self.prompt_logprobs)
        lacking = self.sampling.prompt_logprobs is not None and num_scored < self.num_prompt - 1
        return num_scored // page_size if lacking else None

    def prompt_ids(self) -> I32:
        """Distinct ids of the prompt, computed once."""
        if self._prompt_ids is None:
            self._prompt_ids = np.unique(np.asarray(self.request.prompt_ids, np.int32))
        return self._prompt_ids

    @property
    def decoding(self) -> bool:
        """Exactly the newest token is left to compute and the prompt is done."""
        return self.phase is Phase.RUNNING and self.num_output > 0 and self.num_computed == len(self.tokens) - 1

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.sampling.penalised:
            self.output_counts[token] += 1
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()

    def stats(self) -> SequenceStats:
        now = time.monotonic()
        arrival = self.request.arrival_s
        record = self.speculation
        return SequenceStats(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached,
            completion_tokens=self.num_output,
            num_spec_steps=record.num_steps,
            num_draft_tokens=record.num_drafted,
            num_accepted_tokens=record.num_accepted,
            acceptance_histogram=tuple(record.histogram),
            per_step_drafted=tuple(record.per_step_drafted),
            per_step_accepted=tuple(record.per_step_accepted),
            num_preemptions=self.num_preemptions,
            queue_s=(self.scheduled_s or now) - arrival,
            ttft_s=(self.first_token_s or now) - arrival,
            total_s=now - arrival,
            accepted_prediction_tokens=record.num_predicted_accepted,
            rejected_prediction_tokens=record.num_predicted - record.num_predicted_accepted,
        )
