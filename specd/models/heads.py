"""MTP heads: one decoder layer that reads the target's hidden states and predicts the token after the next one.

    pair i = (h_i, t_{i+1}) at position and KV slot i, its output predicts t_{i+2}      (spec: methods 3.1, 5)

    e = embed(t_{i+1})                       the target's table
    g = h_i, or feature_proj(h_i)            what the target left; feature_proj for three layers' states
    x = eh_proj([enorm(e) ; hnorm(g)])
    z = decoder layer(x);  m = norm(z)       logits = lm_head(m), the target's rows or some of them
    next step's g = m or z

Every norm, the order of the concatenation, what is read of the target and what is fed back are values of HeadConfig:
DeepSeek, GLM, Qwen3-Next and MiMo style heads, and EAGLE-1's without norms, are configurations of this one module.

Legend: T packed tokens, H hidden, F features (H or 3H), V the target's vocabulary, R logits rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import orjson
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from specd.attention.base import AttentionBackend
from specd.errors import ModelError
from specd.kv import PagedKV
from specd.models.base import ModelShape
from specd.models.config import RopeConfig
from specd.models.layers import Linear, inverse_frequencies, rms_norm, rope_angles, rotate, swiglu
from specd.models.saving import save_tensors
from specd.models.weights import check_values
from specd.tensors import BatchInfo

FORMAT = 1  # of config.json: "specd_head"
_LARGEST_HEAD = 1 << 16  # numbers of an attention head; positions turn them in pairs
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "features": ("last", "pre", "aux"),
    "concat": ("embedding_first", "hidden_first"),
    "feedback": ("post_norm", "pre_norm"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class HeadConfig:
    """How a head is built. features: "last" (after the target's final norm), "pre" (before it) or "aux" (3 layers)."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    vocab_size: int  # the target's
    features: Literal["last", "pre", "aux"] = "last"
    concat: Literal["embedding_first", "hidden_first"] = "embedding_first"
    embedding_norm: bool = True  # enorm
    hidden_norm: bool = True  # hnorm
    input_norm: bool = True  # of the layer; EAGLE-1 has none
    output_norm: bool = True
    fusion_bias: bool = False
    attention_bias: bool = False  # of q, k and v
    feedback: Literal["post_norm", "pre_norm"] = "post_norm"
    draft_vocab_size: int | None = None  # None: the target's whole vocabulary

    @property
    def feature_size(self) -> int:
        return self.hidden_size * (3 if self.features == "aux" else 1)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], path: Path) -> HeadConfig:
        """Raises ModelError for fields that are missing, unknown or mean nothing."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - set(known))
        missing = sorted(n for n, f in known.items() if n not in data and f.default is dataclasses.MISSING)
        if unknown or missing:
            raise ModelError(f"{path}: a head's config has no {', '.join(unknown or missing)}")
        for name, choices in _CHOICES.items():
            if data.get(name, choices[0]) not in choices:
                raise ModelError(f"{path}: {name} is {data[name]!r}; {', '.join(choices)} exist")
        for name, value in data.items():
            kind = known[name].type
            if kind == "int" or (kind == "int | None" and value is not None):
                if type(value) is not int or value < 1:
                    raise ModelError(f"{path}: {name} is {value!r}, it must be a whole number above 0")
            elif kind == "float" and (type(value) not in (int, float) or not 0 < value < math.inf):
                raise ModelError(f"{path}: {name} is {value!r}, it must be a number above 0")
            elif kind == "bool" and not isinstance(value, bool):
                raise ModelError(f"{path}: {name} is {value!r}, it must be true or false")
        if data["num_heads"] % data["num_kv_heads"]:
            heads = f"{data['num_heads']} query heads cannot share {data['num_kv_heads']} key/value heads evenly"
            raise ModelError(f"{path}: {heads}")
        if data["head_dim"] % 2 or data["head_dim"] > _LARGEST_HEAD:
            raise ModelError(f"{path}: head_dim is {data['head_dim']}; it must be even, at most {_LARGEST_HEAD}")
        return cls(**{**data, "rope": _rope(data["rope"], data["head_dim"], path)})


def _rope(data: Any, head_dim: int, path: Path) -> RopeConfig:
    """Raises ModelError for anything that gives no frequencies."""
    try:
        factors = data.get("freq_factors")
        rope = RopeConfig(**{**data, "freq_factors": None if factors is None else tuple(factors)})
        inverse_frequencies(rope, head_dim)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError, OverflowError, RuntimeError) as error:
        raise ModelError(f"{path}: rope is {data!r}, which cannot be computed: {error}") from error
    return rope


def head_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a head of this config has, by its name on disk (d2t aside)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "eh_proj.weight": (hidden, 2 * hidden),
        "layer.self_attn.q_proj.weight": (query, hidden),
        "layer.self_attn.k_proj.weight": (kv, hidden),
        "layer.self_attn.v_proj.weight": (kv, hidden),
        "layer.self_attn.o_proj.weight": (hidden, query),
        "layer.post_attention_layernorm.weight": (hidden,),
        "layer.mlp.gate_proj.weight": (inner, hidden),
        "layer.mlp.up_proj.weight": (inner, hidden),
        "layer.mlp.down_proj.weight": (hidden, inner),
    }
    optional: tuple[tuple[bool, str, tuple[int, ...]], ...] = (
        (config.embedding_norm, "enorm.weight", (hidden,)),
        (config.hidden_norm, "hnorm.weight", (hidden,)),
        (config.input_norm, "layer.input_layernorm.weight", (hidden,)),
        (config.output_norm, "norm.weight", (hidden,)),
        (config.fusion_bias, "eh_proj.bias", (hidden,)),
        (config.features == "aux", "feature_proj.weight", (hidden, 3 * hidden)),
        (config.attention_bias, "layer.self_attn.q_proj.bias", (query,)),
        (config.attention_bias, "layer.self_attn.k_proj.bias", (kv,)),
        (config.attention_bias, "layer.self_attn.v_proj.bias", (kv,)),
    )
    return shapes | {name: shape for there, name, shape in optional if there}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeadFile:
    """A head as it lies on disk."""

    config: HeadConfig
    weights: Mapping[str, torch.Tensor]
    token_ids: torch.Tensor | None  # i64[draft vocabulary] ascending target ids; None: all of them
    target: Mapping[str, Any]  # what it was trained for: name, hidden_size, vocab_size, num_layers


def read_head(path: Path) -> HeadFile:
    """A head's folder: config.json and model.safetensors. Raises ModelError naming the file and what is wrong."""
    try:
        data = orjson.loads((path / "config.json").read_bytes())
        # Copied: what is mapped follows the file, and a file cut short would end the process.
        tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    except (OSError, orjson.JSONDecodeError, SafetensorError) as error:
        raise ModelError(f"{path}: not a head's folder: {error}") from error
    if not isinstance(data, dict) or data.get("specd_head") != FORMAT:
        raise ModelError(f'{path}: config.json has no "specd_head": {FORMAT}')
    config = HeadConfig.from_json({k: v for k, v in data.items() if k not in ("specd_head", "target")}, path)
    offsets = tensors.pop("d2t", None)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted = head_shapes(config)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ModelError(f"{path}: tensor {name} is {found.get(name)}, its config wants {wanted.get(name)}")
    check_values(path, tensors)
    target = data.get("target", {})
    if not isinstance(target, dict):
        raise ModelError(f"{path}: target is {target!r}, it must be an object")
    return HeadFile(config, tensors, _token_ids(config, offsets, path), target)


def _token_ids(config: HeadConfig, offsets: torch.Tensor | None, path: Path) -> torch.Tensor | None:
    if (offsets is None) != (config.draft_vocab_size is None):
        raise ModelError(f"{path}: draft_vocab_size and the tensor d2t come together or not at all")
    if offsets is None:
        return None
    if offsets.ndim != 1 or offsets.dtype not in (torch.int64, torch.int32):
        raise ModelError(
            f"{path}: d2t is {list(offsets.shape)} of {offsets.dtype}, it must be one row of whole numbers"
        )
    ids = torch.arange(len(offsets)) + offsets.long()
    ascending = bool((ids.diff() > 0).all()) and len(ids) == config.draft_vocab_size
    if not ascending or not len(ids) or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise ModelError(f"{path}: d2t does not name {config.draft_vocab_size} ascending ids below {config.vocab_size}")
    return ids


def write_head(
    path: Path,
    config: HeadConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    token_ids: torch.Tensor | None,
    target: Mapping[str, Any],
) -> None:
    """Writes the folder that `read_head` reads; weights become bf16."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: weights[name].detach().to(torch.bfloat16).contiguous() for name in head_shapes(config)}
    if token_ids is not None:
        tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    save_tensors(path / "model.safetensors", tensors)
    content = {"specd_head": FORMAT, **config.to_json(), "target": dict(target)}
    (path / "config.json").write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")


class Head:
    """A head in torch, over packed tokens and paged KV of one layer.

    Norms that the config leaves out are the identity. embedding [V, H] and lm_head [V, H] are the target's; the caller
    sets `torch.inference_mode`.
    """

    def __init__(
        self,
        file: HeadFile,
        *,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        attention: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        config = file.config
        self.token_ids = None if file.token_ids is None else file.token_ids.to(device)
        weights = {name: tensor.to(device=device, dtype=dtype) for name, tensor in file.weights.items()}
        self.config = config
        self.dtype, self.device = dtype, device
        self.attention = attention
        self.embedding = embedding.to(device=device, dtype=dtype)
        rows = lm_head if self.token_ids is None else lm_head[self.token_ids]
        self.lm_head = rows.to(device=device, dtype=dtype)
        self.norms = {name.removesuffix(".weight"): w for name, w in weights.items() if w.ndim == 1 and "norm" in name}
        self.fusion = Linear(weights["eh_proj.weight"], weights.get("eh_proj.bias"))
        self.feature_proj = weights.get("feature_proj.weight")
        attn = [f"layer.self_attn.{name}_proj" for name in "qkv"]
        bias = torch.cat([weights[f"{name}.bias"] for name in attn]) if config.attention_bias else None
        self.qkv = Linear(torch.cat([weights[f"{name}.weight"] for name in attn]), bias)
        self.output = Linear(weights["layer.self_attn.o_proj.weight"])
        mlp = [weights[f"layer.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        self.gate_up, self.down = Linear(torch.cat(mlp)), Linear(weights["layer.mlp.down_proj.weight"])
        self.inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
        self.shape = ModelShape(
            num_layers=1,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_position=config.max_position,
        )

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, batch: BatchInfo, kv: PagedKV, *, own: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens i64[T]; states: the target's features [T, F], or with `own` what this head fed back [T, H].

        Gives m [T, H] for `logits`, and what the next step gets [T, H]. Writes the pairs' keys and values.
        """
        config = self.config
        states = states.to(self.dtype)
        if self.feature_proj is not None and not own:
            states = F.linear(states, self.feature_proj)
        parts = [self._norm("enorm", F.embedding(tokens, self.embedding)), self._norm("hnorm", states)]
        x = self.fusion(torch.cat(parts if config.concat == "embedding_first" else parts[::-1], dim=-1))
        x = x + self._attend(x, batch, kv)
        x = x + swiglu(self._norm("layer.post_attention_layernorm", x), self.gate_up, self.down)
        out = self._norm("norm", x)
        return out, out if config.feedback == "post_norm" else x

    def forward_best(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        batch: BatchInfo,
        kv: PagedKV,
        rows: torch.Tensor,
        *,
        own: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, then of its rows i64[R]: `best` i64[R], and what the next step gets [R, H]."""
        out, fed_back = self.forward(tokens, states, batch, kv, own=own)
        return self.best(out[rows]), fed_back[rows]

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """m [R, H] -> f32[R, V], -inf outside the draft vocabulary."""
        return spread(F.linear(out, self.lm_head).float(), self.token_ids, self.config.vocab_size)

    def best(self, out: torch.Tensor) -> torch.Tensor:
        """m [R, H] -> i64[R]: the most likely tokens."""
        places = F.linear(out, self.lm_head).argmax(-1)
        return places if self.token_ids is None else self.token_ids[places]

    def weight_bytes(self) -> int:
        """Of its own weights: the embedding is the target's."""
        linears = (self.fusion, self.qkv, self.output, self.gate_up, self.down)
        own = [*self.norms.values(), *(linear.weight for linear in linears)]
        own += [t for t in (self.feature_proj, None if self.token_ids is None else self.lm_head) if t is not None]
        return sum(tensor.nbytes for tensor in own)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.norms.get(name)
        return x if weight is None else rms_norm(x, weight, self.config.rms_norm_eps)

    def _attend(self, x: torch.Tensor, batch: BatchInfo, kv: PagedKV) -> torch.Tensor:
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        cos, sin = rope_angles(self.inv_freq, batch.positions, x.dtype)
        qkv = self.qkv(self._norm("layer.input_layernorm", x)).view(len(x), -1, config.head_dim)
        rotated = rotate(qkv[:, :num_rotated], cos, sin)
        kv.append(0, batch, rotated[:, config.num_heads :], qkv[:, num_rotated:])
        query, scale = rotated[:, : config.num_heads], config.head_dim**-0.5
        # Not the target's plan: a batch may be its own, but the head's KV has other shapes.
        attended = self.attention.run(query, kv.layers[0], self.attention.plan(batch), scale)
        return self.output(attended.reshape(len(x), -1))


def spread(logits: torch.Tensor, token_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """f32[R, draft vocabulary] -> f32[R, V]."""
    if token_ids is None:
        return logits
    out = logits.new_full((len(logits), vocab_size), float("-inf"))
    return out.index_copy_(1, token_ids, logits)
