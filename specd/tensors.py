"""One step's records on the device.

Legend: B rows, T packed query tokens, R logits rows, K drafts, N tree nodes, V vocabulary, H hidden, F features,
S slots, P page ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from specd.frames import Upload, fresh_upload
from specd.step import I32, indptr


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BatchInfo:
    """Where a forward's packed tokens stand: what every model and attention backend reads.

    Device tensors, and their host twins (`_cpu`, numpy) for planners that run on the host.
    FlashInfer's names: query rows of row b are qo_indptr[b] : qo_indptr[b+1]; its pages are
    kv_indices[kv_indptr[b] : kv_indptr[b+1]], the last one filled to kv_last_page_len[b]. Query rows are the *last*
    query_len positions of the kv_len (bottom-right causal).
    """

    positions: torch.Tensor  # i64[T]
    qo_indptr: torch.Tensor  # i32[B + 1]
    kv_indptr: torch.Tensor  # i32[B + 1]
    kv_indices: torch.Tensor  # i32[P]
    kv_last_page_len: torch.Tensor  # i32[B]
    write_slots: torch.Tensor  # i64[T] flat KV slot (page * page_size + offset) of each query token
    slots: torch.Tensor  # i64[B] carry slot
    query_lens_cpu: I32  # [B]
    kv_lens_cpu: I32  # [B]
    kv_indptr_cpu: I32  # [B + 1]
    kv_indices_cpu: I32  # [P]
    page_size: int
    attention: Any = None  # what the model planned for this batch (`Model.prepare`); None: it plans in its forward
    tree: TokenTree | None = None  # see `with_tree`: the N query rows of every row are the nodes of its tree

    @property
    def num_rows(self) -> int:
        return len(self.query_lens_cpu)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


def batch_info(
    *,
    query_lens: I32,
    kv_lens: I32,
    page_indptr: I32,
    page_indices: I32,
    slots: I32,
    page_size: int,
    device: torch.device | None = None,
    upload: Upload | None = None,
    tree: TokenTree | None = None,
) -> BatchInfo:
    """Builds a BatchInfo from host lengths. kv_lens count the query rows. A row's pages beyond its kv_len are left out.

    page_indptr i32[B + 1] and page_indices i32[P] may hold more pages than kv_lens need. With a tree: `with_tree`.
    The tensors are fresh ones on `device`, or where `upload` puts them.
    """
    put = upload or fresh_upload(device or torch.device("cpu"))
    offsets = indptr(query_lens)
    total = int(offsets[-1])
    rows = np.repeat(np.arange(len(query_lens)), query_lens)
    positions = (np.arange(total) - offsets[rows] + (kv_lens - query_lens)[rows]).astype(np.int64)
    pages_of_token = page_indices[page_indptr[rows] + positions // page_size].astype(np.int64)
    write_slots = pages_of_token * page_size + positions % page_size
    num_pages = ((kv_lens + page_size - 1) // page_size).astype(np.int32)
    kv_indptr = indptr(num_pages)
    page_rows = np.repeat(np.arange(len(num_pages)), num_pages)
    page_cols = np.arange(int(kv_indptr[-1])) - kv_indptr[page_rows]
    kv_indices = page_indices[page_indptr[page_rows] + page_cols].astype(np.int32)
    last_page_len = (kv_lens - (num_pages - 1) * page_size).astype(np.int32)

    info = BatchInfo(
        positions=put("positions", positions),
        qo_indptr=put("qo_indptr", offsets),
        kv_indptr=put("kv_indptr", kv_indptr),
        kv_indices=put("kv_indices", kv_indices),
        kv_last_page_len=put("kv_last_page_len", last_page_len),
        write_slots=put("write_slots", write_slots),
        slots=put("slots", slots.astype(np.int64)),
        query_lens_cpu=query_lens,
        kv_lens_cpu=kv_lens,
        kv_indptr_cpu=kv_indptr,
        kv_indices_cpu=kv_indices,
        page_size=page_size,
    )
    return info if tree is None else with_tree(info, tree)


def with_tree(info: BatchInfo, tree: TokenTree) -> BatchInfo:
    """The batch of a step that verifies a tree per row, from the chain batch of the same lengths (N query rows each).

    A tree may be known only once it is drafted, while the chain batch can be uploaded before: nothing here looks at the
    tree from the host. Node i keeps slot i of the block, so siblings do not overwrite each other, but stands at
    position prefix + depth; after acceptance `PagedKV.compact` moves the kept path to the slots of its positions.
    """
    num_nodes = tree.tokens.shape[1]
    assert (info.query_lens_cpu == num_nodes).all(), (info.query_lens_cpu, num_nodes)
    roots = info.positions.view(-1, num_nodes)[:, :1]
    return dataclasses.replace(info, positions=(roots + tree.depths).flatten(), tree=tree)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """N candidate tokens per row, parents first; node 0 is the root (parent -1, depth 0)."""

    tokens: torch.Tensor  # i64[B, N]
    parents: torch.Tensor  # i64[B, N]
    depths: torch.Tensor  # i64[B, N]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DraftTokens:
    """What was proposed. `probs` is None for argmax drafts and proposals: their proposal is a point mass.

    For sampled drafts it is the distribution they were really drawn from, so that no rule can use another one.
    """

    tokens: torch.Tensor  # i64[B, K], -1 where nothing was drafted
    probs: torch.Tensor | None = None  # f32[B, K, V]
    tree: TokenTree | None = None
    confidence: torch.Tensor | None = None  # f32[B, K] raw probability under the drafter: for people, no rule reads it


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BestTokens:
    """All that greedy rows need of their logits. A row with a NaN has the value NaN."""

    values: torch.Tensor  # f32[R] the largest logit
    tokens: torch.Tensor  # i64[R] its token, the lowest id among equals


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The k largest logits of each row, (logit descending, token ascending), and the sum over all of them.

    A token's log-probability is `logprobs` of its logit, wherever that was read: a row's sum is a function of the row.
    A row with a NaN has NaN in every value.
    """

    values: torch.Tensor  # f32[R, k]
    tokens: torch.Tensor  # i64[R, k]
    lse: torch.Tensor  # f64[R] log(sum of e^logit); not finite where values[:, 0] is not

    @property
    def best(self) -> BestTokens:
        return BestTokens(self.values[:, 0], self.tokens[:, 0])

    def rows(self, index: torch.Tensor) -> TopTokens:
        """index i64[...] of rows -> those rows."""
        return TopTokens(self.values[index], self.tokens[index], self.lse[index])

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits f32[R, N] of the rows -> their log-probabilities, f32[R, N]."""
        return (logits.double() - self.lse[:, None]).float()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """Which of a batch's T positions give log-probabilities of prompt tokens: M of them, N alternatives each."""

    positions: torch.Tensor  # i64[M] packed query rows
    targets: torch.Tensor  # i64[M] the prompt's next token after each
    num_top: int  # N


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Raw log-probabilities of `PromptRows.targets`."""

    logprobs: torch.Tensor  # f32[M]
    top_ids: torch.Tensor  # i64[M, N]
    top_logprobs: torch.Tensor  # f32[M, N]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TargetOutput:
    """The target's forward. Logits rows: K_b + 1 for each row that emits, none for the others, in row order."""

    logits: torch.Tensor | None  # [R, V], model dtype; None where `best` (and `top`) is all that the batch needs
    features: torch.Tensor | None = None  # [T, F]
    best: BestTokens | None = None
    tokens: torch.Tensor | None = None  # i64[T] what was computed, drafts included
    top: TopTokens | None = None  # where log-probabilities are asked for too
    prompt: PromptLogprobs | None = None

    def all_logits(self) -> torch.Tensor:
        """Raises ValueError when only the best ones were computed."""
        if self.logits is None:
            raise ValueError("this batch's logits were not computed: it was taken for a plain greedy one")
        return self.logits


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """What was kept, on the device."""

    tokens: torch.Tensor  # i64[B, K + 1] emitted tokens, padded -1
    num_accepted: torch.Tensor  # i64[B]
    next_token: torch.Tensor  # i64[B] newest token of the row (undefined where it does not emit)
    last_row: torch.Tensor  # i64[B] packed query row (of T) whose logits gave next_token
    failed: torch.Tensor  # bool[B] logits were not finite
    logprobs: torch.Tensor | None = None  # f32[B, K + 1]
    top_ids: torch.Tensor | None = None  # i64[B, K + 1, N]
    top_logprobs: torch.Tensor | None = None  # f32[B, K + 1, N]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DraftState:
    """What a drafter's forward gives and the next draft starts from. Its copy by slot is the carry."""

    best: torch.Tensor  # i64[B] the most likely token; [S] in the carry
    logits: torch.Tensor | None = None  # f32[B, V]; [S, V] in the carry. None: no row draws from a distribution
    hidden: torch.Tensor | None = None  # [B, H]; [S, H] in the carry

    @classmethod
    def of(cls, logits: torch.Tensor, hidden: torch.Tensor | None = None) -> DraftState:
        return cls(logits.argmax(-1), logits, hidden)

    def rows(self, index: torch.Tensor) -> DraftState:
        """index i64[B]"""
        logits, hidden = (None if part is None else part[index] for part in (self.logits, self.hidden))
        return DraftState(self.best[index], logits, hidden)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LogitMasks:
    """Allowed tokens per logits row, packed: bit t % 32 of word t // 32 is 1 when token t is allowed."""

    words: torch.Tensor  # i32[R, ceil(V / 32)] (bits of a u32)
