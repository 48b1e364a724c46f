"""The loss over the draft vocabulary, in chunks of rows: logits of a chunk exist once and are gone after it.

Several passes predict the same token, so the teacher's distribution of a row is computed once for all of them. The
gradient is computed together with the loss: in the backward pass nothing is left to do but to scale it.

Legend: P passes, R rows (predicted tokens), H hidden, W draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx

_ROWS = 256  # of a chunk: at 16k tokens each f32 matrix of it is 16 MB


class _Divergence(torch.autograd.Function):
    """Sum over passes and rows of weight * KL(teacher || student), and the gradient in `out`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        out: torch.Tensor,
        teacher: torch.Tensor,
        lm_head: torch.Tensor,
        weights: torch.Tensor,
        labels: torch.Tensor | None,
    ) -> torch.Tensor:
        gradient = torch.zeros_like(out)
        total = out.new_zeros(())
        for begin in range(0, out.shape[1], _ROWS):
            rows = slice(begin, begin + _ROWS)
            goal, entropy = _goal(teacher[rows], lm_head, None if labels is None else labels[rows])
            for index in range(len(out)):
                weight = weights[index, rows]
                logq = F.linear(out[index, rows], lm_head).log_softmax(-1)
                cross = -(goal * logq).sum(-1)
                total += (weight * (cross - entropy)).sum()
                gradient[index, rows] = (logq.exp_().sub_(goal).mul_(weight[:, None])) @ lm_head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None


def _goal(
    teacher: torch.Tensor, lm_head: torch.Tensor, labels: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the student should say [rows, W], and its entropy [rows]."""
    if labels is not None:
        return F.one_hot(labels, len(lm_head)).to(teacher.dtype), teacher.new_zeros(len(labels))
    logp = F.linear(teacher, lm_head).log_softmax(-1)
    goal = logp.exp()
    return goal, -(goal * logp).sum(-1)


def divergence(
    out: torch.Tensor,
    teacher: torch.Tensor,
    lm_head: torch.Tensor,
    weights: torch.Tensor,
    labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """f32 scalar: sum of weights [P, R] * KL(softmax(teacher lm_head^T) || softmax(out lm_head^T)).

    out [P, R, H] is differentiated; teacher [R, H] and lm_head [W, H] are not. With labels i64[R] (places in the draft
    vocabulary) the cross-entropy of those tokens takes the place of the divergence.
    """
    total: torch.Tensor = _Divergence.apply(out, teacher, lm_head, weights, labels)  # type: ignore[no-untyped-call]
    return total


def regression(out: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of weights [P, R] * smooth L1 between out [P, R, H] and the target's hidden states [R, H], mean over H."""
    wanted = teacher.expand_as(out)
    return (weights * F.smooth_l1_loss(out, wanted, reduction="none").mean(-1)).sum()
