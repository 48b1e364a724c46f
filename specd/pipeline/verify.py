"""Stage 3, on the target's stream: one forward over every row's known tokens and drafts.

    row:     [prompt chunk]            a prefill row: K = 0
             [root, d_1, .. d_K]       a decode row: logits row i is the target's distribution after d_i

Its batch information does not depend on the drafts, only on how many there are, so it is made while they are drafted.
Draft positions whose draft failed (-1) are computed for token 0: junk KV that later steps overwrite before reading.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from specd.device import Device, Handle
from specd.frames import Upload
from specd.kv import PagedFeatures, PagedKV
from specd.models.base import Model
from specd.sampling.batch import SamplingBatch, sampling_batch
from specd.sampling.logprobs import prompt_logprobs
from specd.step import I32, StepPlan, indptr
from specd.tensors import BatchInfo, DraftTokens, PromptRows, TargetOutput, batch_info


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class VerifyBatch:
    """A plan on the device. T query tokens, R logits rows, D drafted positions."""

    info: BatchInfo
    tokens: torch.Tensor  # i64[T], draft positions 0
    draft_positions: torch.Tensor  # i64[D] packed position of each draft ...
    draft_index: torch.Tensor  # i64[D] ... and its place in DraftTokens.tokens, flattened
    logit_rows: torch.Tensor  # i64[R]
    next_prompt: torch.Tensor  # i64[B] `StepPlan.next_prompt_tokens`
    sampling: SamplingBatch
    prompt_rows: PromptRows | None = None


def upload(plan: StepPlan, put: Upload, vocab_size: int) -> VerifyBatch:
    """What the target's forward and acceptance need of a plan, where `put` puts it."""
    offsets = indptr(plan.query_lens)
    info = batch_info(
        query_lens=plan.query_lens,
        kv_lens=plan.kv_lens,
        page_indptr=plan.page_indptr,
        page_indices=plan.page_indices,
        slots=plan.slots,
        page_size=plan.page_size,
        upload=put,
    )
    known = plan.num_known
    token_rows = np.repeat(np.arange(plan.num_rows), plan.query_lens)
    column = np.arange(int(offsets[-1])) - offsets[token_rows]
    drafted = column >= known[token_rows]
    tokens = np.zeros(int(offsets[-1]), np.int64)
    tokens[~drafted] = plan.tokens
    draft_positions = np.flatnonzero(drafted)
    width = plan.host_drafts.shape[1]
    draft_index = token_rows[drafted] * width + (column - known[token_rows])[drafted]
    # An emitting row has logits for its last known token and for each draft.
    logit_rows = np.flatnonzero((column >= known[token_rows] - 1) & (plan.emits[token_rows] > 0))

    return VerifyBatch(
        info,
        tokens=put("tokens", tokens),
        draft_positions=put("draft_positions", draft_positions),
        draft_index=put("draft_index", draft_index.astype(np.int64)),
        logit_rows=put("logit_rows", logit_rows),
        next_prompt=put("next_prompt", plan.next_prompt_tokens.astype(np.int64)),
        sampling=sampling_batch(plan, vocab_size, info.positions.device),
        prompt_rows=_prompt_rows(plan, offsets, put),
    )


def _prompt_rows(plan: StepPlan, offsets: I32, put: Upload) -> PromptRows | None:
    """Where the rows' prompt tokens are scored. offsets i32[B + 1] of the rows' query tokens."""
    wanted = [(offsets[i] + scores.first, scores) for i, scores in enumerate(plan.prompt_scores) if scores is not None]
    if not wanted:
        return None
    positions = np.concatenate([np.arange(start, start + len(scores.targets)) for start, scores in wanted])
    targets = np.concatenate([scores.targets for _, scores in wanted])
    return PromptRows(
        put("prompt_positions", positions.astype(np.int64)),
        put("prompt_targets", targets.astype(np.int64)),
        max(scores.num_top for _, scores in wanted),
    )


def forward(
    model: Model,
    kv: PagedKV,
    features: PagedFeatures | None,
    wanted: str | None,
    batch: VerifyBatch,
    drafts: DraftTokens,
) -> TargetOutput:
    """The target's forward; writes target KV and, for a head, its features."""
    tokens = batch.tokens.clone()
    proposed = drafts.tokens.reshape(-1)[batch.draft_index].clamp(min=0)
    tokens[batch.draft_positions] = proposed
    hidden, read = model.forward(tokens, batch.info, kv, features=wanted)
    if features is not None and read is not None:
        features.write(batch.info, read)
    output = TargetOutput(tokens=tokens, logits=None, features=read)
    if batch.prompt_rows is not None:
        output = dataclasses.replace(output, prompt=prompt_logprobs(model.logits, hidden, batch.prompt_rows))
    emitting = hidden[batch.logit_rows]
    if batch.sampling.needs_logits:
        return dataclasses.replace(output, logits=model.logits(emitting))
    if batch.sampling.logprobs is None:
        return dataclasses.replace(output, best=model.best(emitting))
    top = model.top(emitting, batch.sampling.logprobs.width(model.shape.vocab_size))
    return dataclasses.replace(output, best=top.best, top=top)


def prepare(model: Model, plan: StepPlan, put: Upload) -> VerifyBatch:
    """`upload`, with the model's attention planned."""
    batch = upload(plan, put, model.shape.vocab_size)
    return dataclasses.replace(batch, info=model.prepare(batch.info))


class VerifyStage:
    """Launches the target's forward on the target's stream."""

    def __init__(
        self, model: Model, kv: PagedKV, device: Device, *, features: PagedFeatures | None, wanted: str | None
    ) -> None:
        self._model = model
        self._kv = kv
        self._features = features
        self._wanted = wanted
        self._device = device
        self._stream = device.stream("verify")

    def prepare(self, plan: StepPlan) -> Handle[VerifyBatch]:
        put = self._device.upload(plan.step)
        return self._stream.launch(prepare, self._model, plan, put, stage="upload", step=plan.step)

    def launch(self, plan: StepPlan, batch: Handle[VerifyBatch], drafts: Handle[DraftTokens]) -> Handle[TargetOutput]:
        return self._stream.launch(
            forward, self._model, self._kv, self._features, self._wanted, batch, drafts, stage="verify", step=plan.step
        )
