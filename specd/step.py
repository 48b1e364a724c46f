"""One step's records on the host: the plan out, the report back. No torch.

    StepPlan (schedule) -> device -> AcceptanceReport -> commit

Legend: B rows, T packed query tokens, K = widest draft of the step, P page ids.
Three counts that are never mixed: `num_accepted` (drafts kept, 0..K), `num_new = num_accepted + 1` (growth),
`query_len = num_known + num_drafts` (rows the target computes).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np
import numpy.typing as npt

from specd.grammar import GrammarMatcher
from specd.request import SamplingParams, TokenOrigin

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

_MAGIC = 0x53504344  # "SPCD"
_ARRAYS = (
    "slots", "query_lens", "kv_lens", "num_drafts", "sources", "host_drafts", "page_indptr", "page_indices", "tokens",
    "next_prompt_tokens", "emits", "drafter_lens", "refills", "refill_indptr", "refill_tokens",
)  # fmt: skip
_PER_ROW = (
    "slots", "query_lens", "kv_lens", "num_drafts", "sources", "next_prompt_tokens", "emits", "drafter_lens", "refills",
)  # fmt: skip


class DraftSource(enum.IntEnum):
    """Who proposes a row's drafts this step."""

    NONE = 0
    DRAFTER = 1  # the engine's drafter: tokens appear on the device
    NGRAM = 2
    PREDICTION = 3
    CORPUS = 4
    GRAMMAR = 5

    @property
    def origin(self) -> TokenOrigin:
        return _ORIGINS[self]


_ORIGINS = {
    DraftSource.NONE: TokenOrigin.TARGET,
    DraftSource.DRAFTER: TokenOrigin.DRAFT,
    DraftSource.NGRAM: TokenOrigin.NGRAM,
    DraftSource.PREDICTION: TokenOrigin.PREDICTION,
    DraftSource.CORPUS: TokenOrigin.CORPUS,
    DraftSource.GRAMMAR: TokenOrigin.GRAMMAR,
}


class Refill(enum.IntEnum):
    """How far the drafter catches up on a row after verify."""

    NONE = 0  # it does not follow this row
    NEWEST = 1  # everything it lacks and the tokens that this step emits; its carry is valid afterwards
    KNOWN = 2  # the given tokens only: a prompt chunk, or a part of a long catch-up


class Topology(enum.StrEnum):
    CHAIN = "chain"
    TREE = "tree"


class RefillMode(enum.StrEnum):
    """EXACT awaits the report and computes just what is missing; PADDED reuses the target's batch without waiting."""

    EXACT = "exact"
    PADDED = "padded"


@dataclasses.dataclass(frozen=True, slots=True)
class DraftTraits:
    """How one drafter differs from another: values, checked against target and config at start."""

    name: str
    max_depth: int  # most drafts a step
    max_context: int | None = None  # longest context it was made for; sequences beyond it are not drafted
    topology: Topology = Topology.CHAIN
    refill_mode: RefillMode = RefillMode.EXACT
    shifted: bool = False  # a head: slot i holds (h_i, t_{i+1}); an LM draft: slot i holds t_i
    features: str | None = None  # which target features refill reads: None, "last", "aux"
    leader_only: bool = True  # runs on rank 0 alone

    @property
    def extra_slots(self) -> int:
        """Drafter KV slots past the target's: an LM draft has also processed the newest token."""
        return 0 if self.shifted else 1


@dataclasses.dataclass(frozen=True, slots=True)
class RowSampling:
    """A row's sampling state when the plan was made; arrays are snapshots and never change.

    position: index in the sequence of the first token this row emits (noise key). num_output: tokens emitted so far.
    """

    params: SamplingParams
    eos_ids: tuple[int, ...]
    noise_key: tuple[int, int, int]  # (seed, prompt index, choice)
    position: int
    num_output: int
    output_ids: I32 | None = None  # distinct emitted ids and ...
    output_counts: I32 | None = None  # ... how often; None when no penalty reads them
    prompt_ids: I32 | None = None  # distinct prompt ids, for the repetition penalty
    tail: tuple[int, ...] = ()  # last tokens before `position`, for bad words longer than one token
    grammar: GrammarMatcher | None = None  # the sequence's own, which stands still until the step's report is there
    tells_drafts: bool = False  # the drafter's probabilities of its drafts are reported


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Prompt tokens whose log-probabilities a row gives: those after its known tokens `first`, `first` + 1, ..."""

    first: int
    targets: I32  # the tokens after them
    num_top: int  # alternatives


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step of one batch. Frozen; its arrays are never written after construction.

    A row's query tokens are `num_known` tokens that the host knows (a prompt chunk, or the root) and then its drafts.
    """

    step: int
    page_size: int
    slots: I32  # [B] carry slot of each row
    query_lens: I32  # [B] known + drafts
    kv_lens: I32  # [B] context length, this step's query rows counted
    num_drafts: I32  # [B]
    sources: I32  # [B] DraftSource
    host_drafts: I32  # [B, K] proposer tokens; -1 = the drafter's, or none
    page_indptr: I32  # [B + 1]
    page_indices: I32  # [P] pages of each row, the drafter's extra slot included
    tokens: I32  # [sum known] the known tokens, row after row
    next_prompt_tokens: I32  # [B] token after the known ones that the drafter gets, -1 when it is emitted by this step
    emits: I32  # [B] 1 when the row's last known token is the newest one: it samples
    drafter_lens: I32  # [B] leading slots that hold valid drafter KV before the step
    refills: I32  # [B] Refill
    refill_indptr: I32  # [B + 1]
    refill_tokens: I32  # known tokens the drafter lacks: tokens[drafter_len : num_computed + num_known]
    sampling: tuple[RowSampling | None, ...] = ()  # [B], not packed: rank 0 alone samples
    prompt_scores: tuple[PromptScores | None, ...] = ()  # [B] or none at all, not packed: rank 0 alone reports
    split: int = 0  # rows of the first half when the batch is split in two, 0 = whole

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    @property
    def num_known(self) -> I32:
        return self.query_lens - self.num_drafts

    @property
    def max_drafts(self) -> int:
        return int(self.num_drafts.max(initial=0))

    def pages(self, row: int) -> I32:
        return self.page_indices[self.page_indptr[row] : self.page_indptr[row + 1]]

    def select(self, rows: list[int], *, drafts: bool) -> StepPlan:
        """The same step for some of its rows; without drafts every row is plain decoding. Used to isolate a fault."""
        known = self.num_known
        num_drafts = self.num_drafts[rows] if drafts else np.zeros(len(rows), np.int32)
        known_indptr = indptr(known)
        return dataclasses.replace(
            self,
            slots=self.slots[rows],
            query_lens=known[rows] + num_drafts,
            kv_lens=self.kv_lens[rows] - self.num_drafts[rows] + num_drafts,
            num_drafts=num_drafts,
            sources=self.sources[rows] * (num_drafts > 0),
            host_drafts=self.host_drafts[rows][:, : int(num_drafts.max(initial=0))],
            page_indptr=indptr(np.diff(self.page_indptr)[rows]),
            page_indices=_ragged(self.page_indices, self.page_indptr, rows),
            tokens=_ragged(self.tokens, known_indptr, rows),
            next_prompt_tokens=self.next_prompt_tokens[rows],
            emits=self.emits[rows],
            drafter_lens=self.drafter_lens[rows],
            refills=self.refills[rows],
            refill_indptr=indptr(np.diff(self.refill_indptr)[rows]),
            refill_tokens=_ragged(self.refill_tokens, self.refill_indptr, rows),
            sampling=tuple(self.sampling[i] for i in rows) if self.sampling else (),
            prompt_scores=tuple(self.prompt_scores[i] for i in rows) if self.prompt_scores else (),
            split=0,
        )

    def pack(self) -> I32:
        """One contiguous int32 buffer, for the other ranks and for one upload: a header, then every array.

        Header: magic, step (low, high), page_size, split, then per array its rank and two dimensions.
        """
        header = [_MAGIC, self.step & 0x7FFFFFFF, self.step >> 31, self.page_size, self.split]
        arrays: list[I32] = [getattr(self, name) for name in _ARRAYS]
        for array in arrays:
            header += [array.ndim, array.shape[0], array.shape[1] if array.ndim == 2 else 1]
        return np.concatenate([np.asarray(header, np.int32), *(array.ravel() for array in arrays)])

    @classmethod
    def unpack(cls, buffer: I32) -> StepPlan:
        """Inverse of `pack`; the arrays are views of `buffer`. Raises ValueError on anything that is not a plan."""
        head = 5 + 3 * len(_ARRAYS)
        if buffer.dtype != np.int32 or buffer.ndim != 1 or len(buffer) < head or buffer[0] != _MAGIC:
            raise ValueError("not a packed StepPlan: wrong magic or too short")
        fields: dict[str, Any] = {}
        offset = head
        for i, name in enumerate(_ARRAYS):
            ndim, rows, cols = (int(x) for x in buffer[5 + 3 * i : 8 + 3 * i])
            size = rows * cols
            if ndim not in (1, 2) or rows < 0 or cols < 0 or offset + size > len(buffer):
                raise ValueError(f"packed StepPlan: array {name} of {rows} x {cols} does not fit")
            flat = buffer[offset : offset + size]
            fields[name] = flat.reshape(rows, cols) if ndim == 2 else flat
            offset += size
        step, page_size, split = int(buffer[1]) | int(buffer[2]) << 31, int(buffer[3]), int(buffer[4])
        plan = cls(step=step, page_size=page_size, split=split, **fields)
        if not plan._consistent():
            raise ValueError("packed StepPlan: its lengths and offsets do not agree")
        return plan

    def _consistent(self) -> bool:
        """Whether no stage that trusts lengths and offsets can index past an array."""
        size = self.num_rows
        return (
            all(getattr(self, name).shape == (size,) for name in _PER_ROW)
            and bool(((self.num_drafts >= 0) & (self.num_drafts <= self.query_lens)).all())
            and self.host_drafts.shape == (size, self.max_drafts)
            and self.tokens.shape == (int(self.num_known.sum()),)
            and _partitions(self.page_indptr, size, self.page_indices)
            and _partitions(self.refill_indptr, size, self.refill_tokens)
            and self.page_size > 0
            and 0 <= self.split <= size
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PromptReport:
    """Log-probabilities of the M targets of a plan's `prompt_scores`, row after row; N alternatives each."""

    logprobs: F32  # [M]
    top_ids: I32  # [M, N]
    top_logprobs: F32  # [M, N]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AcceptanceReport:
    """`Acceptance` on the host. Row order is the plan's; rows that do not emit have num_accepted 0 and tokens -1."""

    tokens: I32  # [B, K + 1] emitted tokens, padded -1
    num_accepted: I32  # [B]
    failed: I32  # [B] 1 when the row's logits were not finite
    drafts: I32  # [B, K] what was verified, -1 where nothing was
    logprobs: F32 | None = None  # [B, K + 1] raw log-probability of each emitted token
    top_ids: I32 | None = None  # [B, K + 1, N]
    top_logprobs: F32 | None = None  # [B, K + 1, N]
    prompt: PromptReport | None = None
    draft_probs: F32 | None = None  # [B, K] `DraftTokens.confidence`


@dataclasses.dataclass(frozen=True, slots=True)
class StepStats:
    """What one step was and cost, for metrics and the length policy."""

    step: int
    num_rows: int
    num_tokens: int
    num_prefill_tokens: int
    num_draft_tokens: int
    num_draft_steps: int  # forwards of the drafter before verify
    num_accepted: int
    num_emitted: int
    num_refill_rows: int  # of the refill whose time this is; 0: not that of one decode step
    verify_s: float  # computing: verify and accept
    draft_s: float  # computing: the drafter's forwards before verify
    refill_s: float  # computing: refills that ended since the step before
    duration_s: float  # from the report of the step before (or the launch) to this step's
    accept_s: float = 0.0  # of verify_s: sampling and acceptance


def indptr(lens: I32) -> I32:
    """Row lengths [B] to offsets [B + 1]."""
    out = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=out[1:])
    return out


def _partitions(offsets: I32, size: int, values: I32) -> bool:
    """Whether offsets [size + 1] cut values [offsets[-1]] into `size` parts."""
    rises = offsets.shape == (size + 1,) and offsets[0] == 0 and bool((offsets[1:] >= offsets[:-1]).all())
    return rises and values.shape == (int(offsets[-1]),)


def _ragged(values: I32, offsets: I32, rows: list[int]) -> I32:
    parts = [values[offsets[i] : offsets[i + 1]] for i in rows]
    return np.concatenate(parts) if parts else values[:0]
