"""Trains an MTP head on what `collect` wrote.

features -> passes (unrolled) -> divergence from the target in each; the rest is `trainer.py`
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specd.errors import ConfigError
from specd.models.heads import HeadConfig, read_head, write_head
from specd.train.batches import Batch, draft_vocabulary, follows, make_batch, sequences
from specd.train.head import HeadInputs, TrainableHead, balance, initial_weights
from specd.train.plan import Plan
from specd.train.run import LossSettings, Vocabulary, batch_loss, run_passes
from specd.train.shards import Collected
from specd.train.target import FrozenTarget
from specd.train.trainer import run_training

OPTIONAL_PARTS = ("embedding_norm", "hidden_norm", "input_norm", "output_norm")


@dataclasses.dataclass(frozen=True, slots=True)
class MtpSettings:
    """What is trained and how."""

    model: Path
    shards: tuple[Path, ...]  # folders
    plan: Plan
    draft_vocab: int = 0  # tokens; 0: all of the target's
    steps: int = 1  # unrolled passes
    step_decay: float = 0.8
    loss: str = "kl"
    feature_weight: float = 0.0
    noise: float = 0.0  # on the features: standard deviation in units of their root mean square
    concat: str = "embedding_first"
    feedback: str = "post_norm"
    without: tuple[str, ...] = ()  # of OPTIONAL_PARTS
    init: Path | None = None  # a head's folder: where the weights begin


def train(settings: MtpSettings) -> dict[str, Any]:
    """See `run_training`."""
    return run_training(settings, functools.partial(_task, settings))


def _task(settings: MtpSettings, data: Collected, target: FrozenTarget) -> HeadTask:
    if settings.draft_vocab > target.vocab_size:
        raise ConfigError(f"--draft-vocab {settings.draft_vocab}: {target.name} has {target.vocab_size} tokens")
    return HeadTask(settings, data, target)


def head_config(settings: MtpSettings, target: FrozenTarget, features: str) -> HeadConfig:
    """A head of the target's own sizes. Raises ConfigError for choices that do not exist."""
    model = target.config
    data = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "rope": dataclasses.asdict(model.rope),
        "max_position": model.max_position,
        "vocab_size": target.vocab_size,
        "features": features,
        "concat": settings.concat,
        "feedback": settings.feedback,
        "attention_bias": model.qkv_bias,
        "draft_vocab_size": settings.draft_vocab or None,
    }
    return HeadConfig.from_json(data | dict.fromkeys(settings.without, False), settings.plan.output)


class HeadTask:
    """`specd.train.trainer.Task`: drafts in a row, after the first from what the head fed itself."""

    name = "head"

    def __init__(self, settings: MtpSettings, data: Collected, target: FrozenTarget) -> None:
        config = head_config(settings, target, data.origin.features)
        token_ids, coverage = None, 1.0
        if settings.draft_vocab:
            token_ids, coverage = draft_vocabulary(data, settings.draft_vocab, target.vocab_size)
        self.target, self.coverage, self.noise, self.passes = target, coverage, settings.noise, settings.steps
        self.vocabulary = Vocabulary.of(target.lm_head, token_ids)
        self.settings = LossSettings(settings.loss, settings.step_decay, settings.feature_weight)
        self.learned = follows(data) & (self.vocabulary.places[data.best] >= 0)
        if settings.init is None:
            weights = self._initial(config, data, settings.plan.seed)
        else:
            weights = _first_weights(settings.init, config)
        self.model = TrainableHead(config, weights, target.embedding)
        self.summary = f"draft vocabulary of {len(self.vocabulary.rows)} tokens covers {coverage:.4f}"

    def _initial(self, config: HeadConfig, data: Collected, seed: int) -> dict[str, torch.Tensor]:
        first = make_batch(data, sequences(data, held_out=False)[:1], passes=1, learned=self.learned)
        sample = HeadInputs(first.tokens[:, 1:], first.features, self.target.embedding)
        return balance(config, initial_weights(config, self.target, seed), sample)

    def loss(self, model: TrainableHead, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        noise = _noise(batch.features, self.noise, generator)
        out = run_passes(model, batch, passes=self.passes, noise=noise)
        return batch_loss(out, batch, self.vocabulary, self.settings)

    def outputs(self, model: TrainableHead, batch: Batch, passes: int) -> torch.Tensor:
        return run_passes(model, batch, passes=passes)

    def write(self, path: Path, weights: Mapping[str, torch.Tensor]) -> None:
        target = self.target
        names = {
            "name": target.name,
            "hidden_size": target.config.hidden_size,
            "vocab_size": target.vocab_size,
            "num_layers": target.config.num_layers,
        }
        write_head(path, self.model.config, weights, token_ids=self.vocabulary.token_ids, target=names)

    def provenance(self) -> dict[str, Any]:
        return {"draft_vocabulary_coverage": round(self.coverage, 5)}


def _first_weights(path: Path, config: HeadConfig) -> dict[str, torch.Tensor]:
    """Of a head that may draft from other tokens. Raises ConfigError for one that differs in more, ModelError for none.

    No weight belongs to a token: the vocabulary is the target's.
    """
    file = read_head(path)
    wanted, found = dataclasses.asdict(config), dataclasses.asdict(file.config)
    for name, value in wanted.items():
        if found[name] != value and name != "draft_vocab_size":
            raise ConfigError(f"--init {path}: its {name} is {found[name]!r}, this run's would be {value!r}")
    return dict(file.weights)


def _noise(features: torch.Tensor, strength: float, generator: torch.Generator) -> torch.Tensor | None:
    if not strength:
        return None
    size = features.square().mean(-1, keepdim=True).sqrt()
    return strength * size * torch.randn(features.shape, generator=generator)
