"""Distils a shallow draft model: the target's first layers and final norm, trained to say what the whole target says.

    tokens -> embedding (frozen) -> N layers -> final norm -> lm_head (frozen);  the target's states x lm_head = teacher

A draft token at any position is the same function of the text before it, so one forward is all that training and
figures need; the folder that is written borrows embedding, output head and tokenizer (`specd.models.borrowed`).

Legend: B sequences, L positions, R predicted tokens, H hidden, N query heads, M key/value heads, D head size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from specd.errors import ConfigError
from specd.models.borrowed import own_shapes, write_borrowing
from specd.models.config import LlamaConfig
from specd.models.layers import inverse_frequencies, rms_norm, rope_angles, rotate
from specd.train.batches import Batch, follows
from specd.train.loss import divergence
from specd.train.plan import Plan
from specd.train.run import Vocabulary
from specd.train.shards import Collected
from specd.train.target import FrozenTarget, read_layers
from specd.train.trainer import run_training


@dataclasses.dataclass(frozen=True, slots=True)
class DraftSettings:
    """What is trained and how."""

    model: Path
    shards: tuple[Path, ...]  # folders
    plan: Plan
    layers: int


def train(settings: DraftSettings) -> dict[str, Any]:
    """See `run_training`."""
    return run_training(settings, functools.partial(_task, settings))


def _task(settings: DraftSettings, data: Collected, target: FrozenTarget) -> DraftTask:
    if settings.layers >= target.config.num_layers:
        raise ConfigError(f"--layers {settings.layers}: {target.name} has {target.config.num_layers}; give fewer")
    return DraftTask(settings, data, target)


class TrainableDraft:
    """The first layers of a Llama as a differentiable function of their weights; embedding and lm_head stay outside.

    weights: by the names on disk, f32 leaves with requires_grad.
    """

    def __init__(self, config: LlamaConfig, weights: Mapping[str, torch.Tensor], embedding: torch.Tensor) -> None:
        """config: the draft's own number of layers. embedding: the target's table [V, H], never changed."""
        self.config = config
        self.embedding = embedding
        self.weights: Mapping[str, torch.Tensor] = {
            name: weights[name].detach().to(torch.float32, copy=True).requires_grad_() for name in own_shapes(config)
        }
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens i64[B, L] -> [B, L, H] after the final norm: position i says token i + 1."""
        x = F.embedding(tokens, self.embedding)
        angles = rope_angles(self._inv_freq, torch.arange(tokens.shape[1]), x.dtype)
        for index in range(self.config.num_layers):
            prefix = f"model.layers.{index}."
            x = x + self._attend(prefix, x, *angles)
            inner = self._norm(f"{prefix}post_attention_layernorm", x)
            gate, up = (self._linear(f"{prefix}mlp.{name}_proj", inner) for name in ("gate", "up"))
            x = x + self._linear(f"{prefix}mlp.down_proj", F.silu(gate) * up)
        return self._norm("model.norm", x)

    def _attend(self, prefix: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        config = self.config
        inner = self._norm(f"{prefix}input_layernorm", x)
        query, key, value = (self._heads(f"{prefix}self_attn.{name}_proj", inner) for name in "qkv")
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)  # [B, L, heads, D]
        group = config.num_heads // config.num_kv_heads
        key, value = key.repeat_interleave(group, dim=2), value.repeat_interleave(group, dim=2)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self._linear(f"{prefix}self_attn.o_proj", attended.transpose(1, 2).flatten(2))

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """[B, L, H] -> [B, L, heads, D]"""
        return self._linear(name, x).view(*x.shape[:2], -1, self.config.head_dim)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)


class DraftTask:
    """`specd.train.trainer.Task`: the divergence from the target at every token of an answer."""

    name = "model"
    passes = 1

    def __init__(self, settings: DraftSettings, data: Collected, target: FrozenTarget) -> None:
        config = dataclasses.replace(target.config, num_layers=settings.layers)
        self.target = target
        self.vocabulary = Vocabulary.of(target.lm_head, None)
        self.learned = follows(data)
        self.model = TrainableDraft(config, read_layers(settings.model, settings.layers), target.embedding)
        self.summary = f"{settings.layers} of {target.config.num_layers} layers"

    def loss(self, model: TrainableDraft, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        out = self.outputs(model, batch, 1)
        return divergence(out, batch.teacher, self.vocabulary.rows, torch.ones(out.shape[:2]))

    def outputs(self, model: TrainableDraft, batch: Batch, passes: int) -> torch.Tensor:
        out = model.forward(batch.tokens[:, : batch.features.shape[1]])
        return out[batch.row, batch.at].expand(passes, -1, -1)

    def write(self, path: Path, weights: Mapping[str, torch.Tensor]) -> None:
        config, target = self.target.config, self.target
        names = {
            "name": target.name,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "vocab_size": target.vocab_size,
            "num_layers": config.num_layers,
        }
        write_borrowing(path, weights, self.model.config, target=names)

    def provenance(self) -> dict[str, Any]:
        return {}
