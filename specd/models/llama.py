"""The Llama family's forward over packed tokens and paged KV.

Legend: T packed tokens, H hidden, V logits width, N query heads, M key/value heads, D head size, L layers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from specd.attention.base import AttentionBackend
from specd.errors import ModelError
from specd.kv import PagedKV
from specd.models.base import ModelShape, feature_layers
from specd.models.config import LlamaConfig
from specd.models.layers import Linear, inverse_frequencies, rms_norm, rope_angles, rotate, swiglu
from specd.sampling.logprobs import top_tokens
from specd.tensors import BatchInfo, BestTokens, TopTokens


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LlamaLayer:
    """One decoder layer's weights, fused: q, k, v rows in one matrix, gate and up rows in another."""

    input_norm: torch.Tensor  # [H]
    qkv: Linear  # [(N + 2M) * D, H]
    output: Linear  # [H, N * D]
    mlp_norm: torch.Tensor  # [H]
    gate_up: Linear  # [2I, H]
    down: Linear  # [H, I]


class Llama:
    """`specd.models.base.Model` for Llama, Mistral without a sliding window, and Qwen2.

    `weights` maps Hugging Face names to tensors (`LlamaConfig.weight_shapes`); it is read once, layer by layer, and may
    load lazily. The caller sets `torch.inference_mode`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Mapping[str, torch.Tensor],
        *,
        attention: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        reader = _Reader(weights, dtype, device)
        self.config = config
        self.dtype = dtype
        self.device = device
        self.attention = attention
        self.embedding = reader.tensor("model.embed_tokens.weight")
        self.layers = [reader.layer(i) for i in range(config.num_layers)]
        self.norm = reader.tensor("model.norm.weight")
        self.head = self.embedding if config.tied else reader.tensor("lm_head.weight")
        self.inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
        self.shape = ModelShape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=self.head.shape[0],
            max_position=config.max_position,
        )

    def truncated(self, num_layers: int) -> Llama:
        """The first `num_layers` layers with the same norm and head, sharing every weight. Needs its own KV."""
        if not 1 <= num_layers <= len(self.layers):
            raise ModelError(
                f"a model of {len(self.layers)} layers has no first {num_layers}; ask for 1 or more of them"
            )
        model = copy.copy(self)
        model.layers = self.layers[:num_layers]
        model.config = dataclasses.replace(self.config, num_layers=num_layers)
        model.shape = dataclasses.replace(self.shape, num_layers=num_layers)
        return model

    def with_layers(self, config: LlamaConfig, weights: Mapping[str, torch.Tensor]) -> Llama:
        """Other layers and another final norm between the same embedding and head. Needs its own KV."""
        reader = _Reader(weights, self.dtype, self.device)
        model = copy.copy(self)
        model.layers = [reader.layer(index) for index in range(config.num_layers)]
        model.norm = reader.tensor("model.norm.weight")
        model.config = config
        model.shape = dataclasses.replace(self.shape, num_layers=config.num_layers)
        return model

    def prepare(self, batch: BatchInfo) -> BatchInfo:
        return dataclasses.replace(batch, attention=self.attention.plan(batch))

    def forward(
        self, tokens: torch.Tensor, batch: BatchInfo, kv: PagedKV, *, features: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Model.forward`."""
        taken_after = feature_layers(features, len(self.layers))
        x = F.embedding(tokens, self.embedding)
        cos, sin = rope_angles(self.inv_freq, batch.positions, x.dtype)
        plan = self.attention.plan(batch) if batch.attention is None else batch.attention
        states = {0: x}
        for index, layer in enumerate(self.layers):
            x = x + self._attend(index, layer, x, cos, sin, batch, kv, plan)
            x = x + swiglu(rms_norm(x, layer.mlp_norm, self.config.rms_norm_eps), layer.gate_up, layer.down)
            if index + 1 in taken_after:
                states[index + 1] = x
        hidden = rms_norm(x, self.norm, self.config.rms_norm_eps)
        if features is None:
            return hidden, None
        if features == "last":
            return hidden, hidden
        return hidden, torch.cat([states[i] for i in taken_after], dim=-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] after the final norm -> [R, V]; V counts padding rows of the head."""
        return F.linear(hidden, self.head)

    def best(self, hidden: torch.Tensor) -> BestTokens:
        values, tokens = self.logits(hidden).max(-1)
        return BestTokens(values.float(), tokens)

    def top(self, hidden: torch.Tensor, k: int) -> TopTokens:
        return top_tokens(self.logits(hidden), k)

    def weight_bytes(self) -> int:
        """Bytes of distinct weights; a tied head counts once."""
        tensors = [self.embedding, self.norm, self.head]
        for layer in self.layers:
            tensors += [layer.input_norm, layer.mlp_norm]
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                tensors += [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())

    def _attend(
        self,
        index: int,
        layer: LlamaLayer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: BatchInfo,
        kv: PagedKV,
        plan: Any,
    ) -> torch.Tensor:
        """One layer's attention block on the residual stream x [T, H]; writes the layer's keys and values."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(rms_norm(x, layer.input_norm, config.rms_norm_eps)).view(len(x), -1, config.head_dim)
        rotated = rotate(qkv[:, :num_rotated], cos, sin)  # queries and keys in one go
        query = rotated[:, : config.num_heads]
        kv.append(index, batch, rotated[:, config.num_heads :], qkv[:, num_rotated:])
        attended = self.attention.run(query, kv.layers[index], plan, config.head_dim**-0.5)
        return layer.output(attended.reshape(len(x), -1))


class _Reader:
    """Takes weights by name, converts them, and fuses what the forward reads together."""

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.weights = weights
        self.dtype = dtype
        self.device = device

    def tensor(self, name: str) -> torch.Tensor:
        # A copy even when nothing is converted: the source may be a file mapping that must be free to go away.
        return self.weights[name].to(device=self.device, dtype=self.dtype, copy=True)

    def linear(self, prefix: str, *names: str) -> Linear:
        """Rows of all the named projections, in order."""
        return Linear(self._rows(prefix, names, "weight"), self._bias(prefix, names))

    def layer(self, index: int) -> LlamaLayer:
        prefix = f"model.layers.{index}."
        return LlamaLayer(
            input_norm=self.tensor(prefix + "input_layernorm.weight"),
            qkv=self.linear(prefix + "self_attn.", "q_proj", "k_proj", "v_proj"),
            output=self.linear(prefix + "self_attn.", "o_proj"),
            mlp_norm=self.tensor(prefix + "post_attention_layernorm.weight"),
            gate_up=self.linear(prefix + "mlp.", "gate_proj", "up_proj"),
            down=self.linear(prefix + "mlp.", "down_proj"),
        )

    def _bias(self, prefix: str, names: tuple[str, ...]) -> torch.Tensor | None:
        return self._rows(prefix, names, "bias") if f"{prefix}{names[0]}.bias" in self.weights else None

    def _rows(self, prefix: str, names: tuple[str, ...], kind: str) -> torch.Tensor:
        if len(names) == 1:
            return self.tensor(f"{prefix}{names[0]}.{kind}")
        parts = [self.weights[f"{prefix}{name}.{kind}"].to(device=self.device, dtype=self.dtype) for name in names]
        return torch.cat(parts)
