"""Stage 4, on the target's stream: which drafts are kept, and the copy of the outcome to the host.

Logits are processed once, for plain and speculative rows alike (K = 0 is plain sampling), so speculation cannot change
what a parameter means. Finishing requests is not decided here: commit walks the tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from specd.device import Device, Handle
from specd.pipeline.verify import VerifyBatch
from specd.sampling.chain import AcceptanceSettings, accept
from specd.step import F32, I32, AcceptanceReport, PromptReport, StepPlan
from specd.tensors import Acceptance, DraftTokens, LogitMasks, PromptLogprobs, TargetOutput


def accept_rows(
    rule: str,
    settings: AcceptanceSettings,
    plan: StepPlan,
    batch: VerifyBatch,
    drafts: DraftTokens,
    output: TargetOutput,
    masks: LogitMasks | None,
) -> Acceptance:
    return accept(output, drafts, plan, batch.info, batch.sampling, rule=rule, settings=settings, masks=masks)


def to_host(accepted: Acceptance, drafts: DraftTokens, prompt: PromptLogprobs | None = None) -> AcceptanceReport:
    """The one copy to the host of a step. On CUDA it goes to a pinned ring and an event tells when it is there."""
    return AcceptanceReport(
        tokens=_i32(accepted.tokens),
        num_accepted=_i32(accepted.num_accepted),
        failed=_i32(accepted.failed),
        drafts=_i32(drafts.tokens),
        logprobs=None if accepted.logprobs is None else _f32(accepted.logprobs),
        top_ids=None if accepted.top_ids is None else _i32(accepted.top_ids),
        top_logprobs=None if accepted.top_logprobs is None else _f32(accepted.top_logprobs),
        prompt=None
        if prompt is None
        else PromptReport(_f32(prompt.logprobs), _i32(prompt.top_ids), _f32(prompt.top_logprobs)),
        draft_probs=None if drafts.confidence is None else _f32(drafts.confidence),
    )


def _report(accepted: Acceptance, drafts: DraftTokens, output: TargetOutput) -> AcceptanceReport:
    return to_host(accepted, drafts, output.prompt)


def _i32(tensor: torch.Tensor) -> I32:
    return np.asarray(tensor.to(torch.int32).numpy(force=True))


def _f32(tensor: torch.Tensor) -> F32:
    return np.asarray(tensor.to(torch.float32).numpy(force=True))


class AcceptStage:
    """Launches acceptance and the report on the target's stream."""

    def __init__(self, device: Device, *, rule: str, settings: AcceptanceSettings) -> None:
        self._stream = device.stream("accept")
        self._rule = rule
        self._settings = settings

    def launch(
        self,
        plan: StepPlan,
        batch: Handle[VerifyBatch],
        drafts: Handle[DraftTokens],
        output: Handle[TargetOutput],
        masks: Handle[LogitMasks] | None = None,
    ) -> tuple[Handle[Acceptance], Handle[AcceptanceReport]]:
        accepted = self._stream.launch(
            accept_rows, self._rule, self._settings, plan, batch, drafts, output, masks, stage="accept", step=plan.step
        )
        report = self._stream.launch(_report, accepted, drafts, output, stage="report", step=plan.step)
        return accepted, report
