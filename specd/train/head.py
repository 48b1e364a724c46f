"""The MTP head as a differentiable function of its weights; `specd.models.heads.Head` is the same one for serving.

Here sequences are padded to one length and every position is computed at once, pass after pass:

    pass 0   pair i = (h_i, t_{i+1}) at position i, attends to pairs 0..i                         predicts t_{i+2}
    pass j   pair (fed back by pass j-1 at i, t_{i+1+j}) at position i + j                        predicts t_{i+2+j}
             attends to pass 0's pairs 0..i and to its own chain: passes 1..j at i

which is what drafting does after verification has refilled the slots up to i: the keys of a chain are its own.

Legend: B sequences, L positions, H hidden, F features, N query heads, M key/value heads, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from specd.models.heads import HeadConfig, head_shapes
from specd.models.layers import inverse_frequencies, rms_norm, rope_angles
from specd.train.target import FrozenTarget

_QUERY_CHUNK = 256  # query rows of an unrolled pass whose scores exist at once
_LAYER_SHARE = 0.7  # root mean square of what the layer adds at the start, where its input has 1
_EMBEDDING_STD = 0.01  # of eh_proj's columns for the embedding, at the start


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """One pass's rotated keys, and values: [B, N, L, D], repeated for the query heads that share them."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PassOutput:
    """One pass: what the output head reads, and what the next pass is fed."""

    out: torch.Tensor  # [B, L, H]
    feedback: torch.Tensor  # [B, L, H]
    keys: Keys


class TrainableHead:
    """weights: by the names on disk, f32 leaves with requires_grad."""

    def __init__(self, config: HeadConfig, weights: Mapping[str, torch.Tensor], embedding: torch.Tensor) -> None:
        """embedding: the target's table [V, H], never changed."""
        self.config = config
        self.embedding = embedding
        self.weights = {
            name: weights[name].detach().to(torch.float32, copy=True).requires_grad_() for name in head_shapes(config)
        }
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim)

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, before: list[PassOutput]) -> PassOutput:
        """One pass. tokens i64[B, L]: t_{i+1+j} at i; states: features [B, L, F], or what pass j - 1 fed back.

        before: passes 0..j-1, none for pass 0.
        """
        config, weights = self.config, self.weights
        if not before and config.features == "aux":
            states = F.linear(states, weights["feature_proj.weight"])
        parts = [self._norm("enorm", F.embedding(tokens, self.embedding)), self._norm("hnorm", states)]
        joined = torch.cat(parts if config.concat == "embedding_first" else parts[::-1], dim=-1)
        x = F.linear(joined, weights["eh_proj.weight"], weights.get("eh_proj.bias"))
        attended, keys = self._attend(self._norm("layer.input_layernorm", x), before)
        x = x + attended
        inner = self._norm("layer.post_attention_layernorm", x)
        gate, up = (F.linear(inner, weights[f"layer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, weights["layer.mlp.down_proj.weight"])
        out = self._norm("norm", x)
        return PassOutput(out, out if config.feedback == "post_norm" else x, keys)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights.get(f"{name}.weight")
        return x if weight is None else rms_norm(x, weight, self.config.rms_norm_eps)

    def _attend(self, x: torch.Tensor, before: list[PassOutput]) -> tuple[torch.Tensor, Keys]:
        config = self.config
        query, key, value = (self._heads(name, x) for name in "qkv")
        cos, sin = rope_angles(self._inv_freq, torch.arange(x.shape[1]) + len(before), x.dtype)
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)  # [1, L, D]
        group = config.num_heads // config.num_kv_heads
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        keys = Keys(key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1))
        chain = [*(p.keys for p in before), keys]
        if before:
            attended = chain_attention(query, chain[0], chain[1:])
        else:
            attended = F.scaled_dot_product_attention(query, keys.keys, keys.values, is_causal=True)
        merged = attended.transpose(1, 2).flatten(2)
        return F.linear(merged, self.weights["layer.self_attn.o_proj.weight"]), keys

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """[B, L, H] -> [B, heads, L, D]"""
        prefix = f"layer.self_attn.{name}_proj"
        out = F.linear(x, self.weights[f"{prefix}.weight"], self.weights.get(f"{prefix}.bias"))
        return out.view(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)


def chain_attention(query: torch.Tensor, first: Keys, chain: list[Keys]) -> torch.Tensor:
    """Query i attends to `first` at 0..i and to every pass of `chain` at i alone. All [B, N, L, D]."""
    length, scale = query.shape[2], query.shape[3] ** -0.5
    outputs = []
    for begin in range(0, length, _QUERY_CHUNK):
        end = min(begin + _QUERY_CHUNK, length)
        rows = query[:, :, begin:end] * scale
        scores = rows @ first.keys[:, :, :end].transpose(2, 3)
        hidden = torch.ones(end - begin, end, dtype=torch.bool).triu(begin + 1)
        own = [(rows * keys.keys[:, :, begin:end]).sum(-1, keepdim=True) for keys in chain]
        weights = torch.cat([scores.masked_fill(hidden, float("-inf")), *own], dim=-1).softmax(-1)
        out = weights[..., :end] @ first.values[:, :, :end]
        for index, keys in enumerate(chain):
            out = out + weights[..., end + index, None] * keys.values[:, :, begin:end]
        outputs.append(out)
    return torch.cat(outputs, dim=2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def initial_weights(config: HeadConfig, target: FrozenTarget, seed: int) -> dict[str, torch.Tensor]:
    """A head that starts as the target's last layer over the target's own states, the embedding almost unread."""
    hidden = config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layer.{name}": tensor for name, tensor in target.last_layer.items()}
    parts = [_EMBEDDING_STD * torch.randn(hidden, hidden, generator=generator), torch.eye(hidden)]
    weights["eh_proj.weight"] = torch.cat(parts if config.concat == "embedding_first" else parts[::-1], dim=1)
    weights["eh_proj.bias"] = torch.zeros(hidden)
    weights["feature_proj.weight"] = torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1)
    weights["enorm.weight"] = weights["hnorm.weight"] = torch.ones(hidden)
    weights["norm.weight"] = target.norm
    return {name: weights[name] for name in head_shapes(config)}


@torch.no_grad()
def balance(config: HeadConfig, weights: dict[str, torch.Tensor], sample: HeadInputs) -> dict[str, torch.Tensor]:
    """Scales what the layer adds to the size of its normed input.

    In the target the residual stream has grown large by the last layer, and so has what the layer adds to it; beside an
    input of size 1 it would drown the state. The norms that follow do not see the common scale.
    """
    bare = dataclasses.replace(config, output_norm=False)
    out = TrainableHead(bare, weights, sample.embedding).forward(sample.tokens, sample.states, []).out
    scale = _LAYER_SHARE / max(float(out.square().mean().sqrt()), _LAYER_SHARE)
    names = ("layer.self_attn.o_proj.weight", "layer.mlp.down_proj.weight")
    return weights | {name: weights[name] * scale for name in names}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """What one pass 0 reads."""

    tokens: torch.Tensor  # i64[B, L]
    states: torch.Tensor  # f32[B, L, F]
    embedding: torch.Tensor  # f32[V, H]
