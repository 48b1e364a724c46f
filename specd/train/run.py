"""What a training run computes on one batch, in training and in evaluation."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from specd.train.batches import Batch
from specd.train.head import PassOutput, TrainableHead
from specd.train.loss import divergence, regression

_EVAL_ROWS = 256  # rows of whole-vocabulary logits that exist at once


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The output head and the part of it that is drafted from."""

    lm_head: torch.Tensor  # f32[V, H]
    token_ids: torch.Tensor | None  # i64[W] ascending; None: all
    rows: torch.Tensor  # f32[W, H] of lm_head
    places: torch.Tensor  # i64[V] the place of a token among the W, or -1

    @classmethod
    def of(cls, lm_head: torch.Tensor, token_ids: torch.Tensor | None) -> Vocabulary:
        if token_ids is None:
            return cls(lm_head, None, lm_head, torch.arange(len(lm_head)))
        places = torch.full((len(lm_head),), -1)
        places[token_ids] = torch.arange(len(token_ids))
        return cls(lm_head, token_ids, lm_head[token_ids], places)


@dataclasses.dataclass(frozen=True, slots=True)
class LossSettings:
    kind: str  # "kl": the target's distribution is the goal; "ce": the token that follows
    step_decay: float  # weight of pass j is step_decay ** j
    feature_weight: float  # of the smooth L1 between the head's output and the target's state


def run_passes(head: TrainableHead, batch: Batch, *, passes: int, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Every pass's output at the rows that are predicted: [P, R, H]. Rows that are not valid are of other places."""
    length = batch.features.shape[1]
    states = batch.features if noise is None else batch.features + noise
    before: list[PassOutput] = []
    for index in range(passes):
        tokens = batch.tokens[:, 1 + index : 1 + index + length]
        before.append(head.forward(tokens, states, before))
        states = before[-1].feedback
    origins = [(batch.at - 1 - index).clamp(min=0) for index in range(passes)]
    return torch.stack([p.out[batch.row, origin] for p, origin in zip(before, origins, strict=True)])


def batch_loss(out: torch.Tensor, batch: Batch, vocabulary: Vocabulary, settings: LossSettings) -> torch.Tensor:
    """Summed over rows, weighted over passes: divide by the number of rows of the whole step."""
    decay = torch.tensor([settings.step_decay**index for index in range(len(out))])
    weights = batch.valid * (decay / decay.sum())[:, None]
    labels = None
    if settings.kind == "ce":
        labels = vocabulary.places[batch.following]
        weights = weights * (labels >= 0)
        labels = labels.clamp(min=0)
    loss = divergence(out, batch.teacher, vocabulary.rows, weights, labels)
    if settings.feature_weight:
        loss = loss + settings.feature_weight * regression(out, batch.teacher, weights)
    return loss


@dataclasses.dataclass(slots=True)
class Figures:
    """Sums over held-out rows, by pass. top1: the head's argmax is the target's, given that it was so in every pass
    before and that the text went that way; overlap: sum of min(p, q) over the whole vocabulary."""

    rows: torch.Tensor  # f64[P]
    divergence: torch.Tensor
    overlap: torch.Tensor
    reached: torch.Tensor
    agreed: torch.Tensor

    @classmethod
    def empty(cls, passes: int) -> Figures:
        return cls(*(torch.zeros(passes, dtype=torch.float64) for _ in range(5)))

    def tensors(self) -> list[torch.Tensor]:
        """What several ranks add up."""
        return [self.rows, self.divergence, self.overlap, self.reached, self.agreed]

    def report(self) -> dict[str, list[float]]:
        def ratio(top: torch.Tensor, bottom: torch.Tensor) -> list[float]:
            return [round(float(a / b), 4) if b else 0.0 for a, b in zip(top, bottom, strict=True)]

        return {
            "loss": ratio(self.divergence, self.rows),
            "top1": ratio(self.agreed, self.reached),
            "overlap": ratio(self.overlap, self.rows),
        }


def add_figures(figures: Figures, out: torch.Tensor, batch: Batch, vocabulary: Vocabulary) -> None:
    """Adds a held-out batch. Rows whose best token is not in the draft vocabulary count: they are misses."""
    passes, length = len(out), batch.features.shape[1]
    shape = (passes, len(batch.tokens), length)
    agreed, right = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape[1:], dtype=torch.bool)
    right[batch.row, batch.at] = batch.best == batch.following
    for begin in range(0, len(batch.at), _EVAL_ROWS):
        rows = slice(begin, begin + _EVAL_ROWS)
        logp = F.linear(batch.teacher[rows], vocabulary.lm_head).log_softmax(-1)
        p = logp.exp() if vocabulary.token_ids is None else logp[:, vocabulary.token_ids].exp()
        goal = p / p.sum(-1, keepdim=True)
        for index in range(passes):
            valid = batch.valid[index, rows]
            logq = F.linear(out[index, rows], vocabulary.rows).log_softmax(-1)
            said = logq.argmax(-1)
            said = said if vocabulary.token_ids is None else vocabulary.token_ids[said]
            agreed[index, batch.row[rows], batch.at[rows]] = said == batch.best[rows]
            kl = (goal * (goal.clamp(min=1e-30).log() - logq)).sum(-1)
            overlap = torch.minimum(p, logq.exp()).sum(-1)
            figures.rows[index] += valid.sum()
            figures.divergence[index] += kl[valid].double().sum()
            figures.overlap[index] += overlap[valid].double().sum()
    _add_agreement(figures, agreed, right, batch)


def _add_agreement(figures: Figures, agreed: torch.Tensor, right: torch.Tensor, batch: Batch) -> None:
    """agreed bool[P, B, L] by the place of the target's state, right bool[B, L]: the text took the target's argmax.

    The chain that starts at origin i has pass j at place i + 1 + j; it gets there when every place before it agreed.
    """
    for index in range(len(agreed)):
        reached = batch.valid[index].clone()
        for earlier in range(index):
            place = (batch.at - (index - earlier)).clamp(min=0)
            reached &= agreed[earlier, batch.row, place] & right[batch.row, place]
        figures.reached[index] += reached.sum()
        figures.agreed[index] += (reached & agreed[index, batch.row, batch.at]).sum()
