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
    """Sum over passes and rows of weight * KL(teacher || student), and the gradient in `out`.

    With E_p[W] the mean of lm_head's rows under the goal p, the cross-entropy of q = softmax(out W^T) is
    logsumexp(out W^T) - out . E_p[W], and its gradient E_q[W] - E_p[W]: no [rows, W] product of p and q is needed.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        out: torch.Tensor,
        teacher: torch.Tensor,
        lm_head: torch.Tensor,
        weights: torch.Tensor,
        labels: torch.Tensor | None,
    ) -> torch.Tensor:
        gradient = torch.empty_like(out)
        total = out.new_zeros(())
        for begin in range(0, out.shape[1], _ROWS):
            rows = slice(begin, begin + _ROWS)
            if labels is None:
                goal, size = _mean_row(teacher[rows], lm_head)
                entropy = size - (teacher[rows] * goal).sum(-1)
            else:
                goal, entropy = lm_head[labels[rows]], out.new_zeros(())
            for index in range(len(out)):
                student, weight = out[index, rows], weights[index, rows]
                mean, size = _mean_row(student, lm_head)
                total += (weight * (size - (student * goal).sum(-1) - entropy)).sum()
                gradient[index, rows] = (mean - goal) * weight[:, None]
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None


def _mean_row(states: torch.Tensor, lm_head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """states [rows, H] -> the mean of lm_head's rows under softmax(states lm_head^T) [rows, H], and the logsumexp."""
    logits = F.linear(states, lm_head)
    logp = logits.log_softmax(-1)
    size = logits[:, 0] - logp[:, 0]
    return logp.exp_() @ lm_head, size


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
