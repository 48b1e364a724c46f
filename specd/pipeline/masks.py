"""Masks of grammars, on a stream of their own while verify runs: host work over a copy of the drafts.

    draft   [d_1 .. d_K]
    target               [verify ...............][accept]
    masks                [copy of the drafts, a mask a logits row] -> accept

The one wait that a step with grammar rows has more than others. The masks of a block hold for its root and for each
draft as long as the grammar follows them; rows without a grammar are all ones.
"""

from __future__ import annotations

import numpy as np

from specd.device import Device, Handle
from specd.errors import EngineError
from specd.frames import Upload
from specd.log import get_logger
from specd.step import StepPlan
from specd.tensors import DraftTokens, LogitMasks

log = get_logger(__name__)


def fill_masks(plan: StepPlan, vocab_size: int, drafts: DraftTokens, put: Upload) -> LogitMasks:
    """Masks of every logits row of a chain step. Moves no matcher: each stands where it was afterwards."""
    blocks = np.where(plan.emits != 0, plan.num_drafts + 1, 0)
    starts = np.cumsum(blocks) - blocks
    words = np.full((int(blocks.sum()), -(-vocab_size // 32)), -1, np.int32)
    proposed = drafts.tokens.numpy(force=True)  # the copy to the host
    for row, state in enumerate(plan.sampling):
        if state is not None and state.grammar is not None:
            block = words[starts[row] : starts[row] + blocks[row]]
            try:
                state.grammar.fill(proposed[row, : plan.num_drafts[row]].tolist(), block)
            except Exception as error:  # noqa: BLE001 - it must end this row alone, not the step
                log.error("masks_failed", step=plan.step, error=repr(error))
                state.grammar.fail(block, EngineError("the engine failed while it computed this request"))
    return LogitMasks(put("masks", words))


class MaskStage:
    """Launches the masks of steps that have a grammar row."""

    def __init__(self, device: Device, *, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._stream = device.stream("masks")

    def launch(self, plan: StepPlan, drafts: Handle[DraftTokens]) -> Handle[LogitMasks] | None:
        """None where no row has a grammar."""
        if not any(state is not None and state.grammar is not None for state in plan.sampling):
            return None
        put = self._device.upload(plan.step)
        return self._stream.launch(fill_masks, plan, self._vocab_size, drafts, put, stage="masks", step=plan.step)
