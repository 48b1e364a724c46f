"""What a Llama-family checkpoint says about itself, as one record from config.json or GGUF metadata. No torch.

Old and new Hugging Face keys are both read (`rope_scaling` + `rope_theta` or `rope_parameters`, `type` or `rope_type`,
`torch_dtype` or `dtype`). Whatever the forward would compute wrongly is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from specd.errors import ModelError

# What transformers takes for a key that is absent from config.json; a key that is there and null is another matter.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "MistralForCausalLM": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "use_sliding_window": False},
}  # fmt: skip
_MAX_LAYERS = 4096  # a bound for untrusted files: a record of every tensor's shape is made


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. kind: "default", "linear" (inv_freq / factor) or "llama3" (by wavelength).

    freq_factors: [head_dim // 2] divisors of inv_freq that a GGUF file stores ready-made (its form of llama3 scaling).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    freq_factors: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and switches of one Llama, Mistral (without a sliding window) or Qwen2."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tied: bool = False  # the output head is the embedding
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    dtype: str | None = None  # of the checkpoint, "bfloat16"; None when it does not say
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_position",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ModelError(f"model config: {name} is {getattr(self, name)}, it must be at least 1")
        if self.num_layers > _MAX_LAYERS:
            raise ModelError(f"model config: num_layers is {self.num_layers}, at most {_MAX_LAYERS} are supported")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model config: {self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"model config: head_dim is {self.head_dim}, rotary positions need an even one")

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the forward needs, by its Hugging Face name. Row counts of the vocabulary are minima."""
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        query, kv = self.num_heads * dim, self.num_kv_heads * dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        linears = {
            "self_attn.q_proj": (query, hidden, self.qkv_bias),
            "self_attn.k_proj": (kv, hidden, self.qkv_bias),
            "self_attn.v_proj": (kv, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, query, self.output_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            for name, (rows, columns, bias) in linears.items():
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
        return shapes


class _Keys:
    """Typed reads from untrusted key/value data; every error names the key and the value."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.where}: {key} must be an integer, it is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.where}: {key} must be a number, it is {value!r}")
        if not 0 < value < float("inf"):
            raise ModelError(f"{self.where}: {key} must be positive and finite, it is {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} must be true or false, it is {value!r}")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.where}: {key} must be an object, it is {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self.data.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise ModelError(f"{self.where}: {key} must be a token id or a list of them, it is {value!r}")
        return tuple(i for i in ids if i >= 0)


def token_ids(data: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    """The token ids at a key that holds one, a list, or nothing. Raises ModelError for anything else."""
    return _Keys(data, where).token_ids(key)


def config_from_hf(data: Mapping[str, Any], *, architecture: str) -> LlamaConfig:
    """The record for a config.json. Raises ModelError that names the key that is missing, malformed or unsupported."""
    keys = _Keys(_DEFAULTS.get(architecture, {}) | dict(data), "config.json")
    _refuse_unsupported(keys)
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    qwen2 = architecture == "Qwen2ForCausalLM"
    max_position = keys.integer("max_position_embeddings")
    _refuse_sliding_window(keys, max_position)
    bos = keys.token_ids("bos_token_id")
    dtype = data.get("dtype") or data.get("torch_dtype")
    attention_bias = keys.flag("attention_bias")
    return LlamaConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=keys.integer("head_dim", hidden // max(heads, 1)),
        max_position=max_position,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=_rope_from_hf(keys),
        tied=keys.flag("tie_word_embeddings"),
        qkv_bias=qwen2 or attention_bias,
        output_bias=attention_bias and not qwen2,
        mlp_bias=keys.flag("mlp_bias"),
        dtype=dtype if isinstance(dtype, str) else None,
        eos_ids=keys.token_ids("eos_token_id"),
        bos_id=bos[0] if bos else None,
    )


def _refuse_unsupported(keys: _Keys) -> None:
    quantization = keys.mapping("quantization_config") or keys.mapping("compression_config")
    if quantization:
        method = quantization.get("quant_method") or "unnamed"
        raise ModelError(
            f"config.json: checkpoints quantised with {method} are not supported; use the unquantised one or a .gguf"
        )
    activation = keys.data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported, only silu is")
    if keys.flag("rope_interleaved"):
        raise ModelError("config.json: rope_interleaved is not supported")


def _refuse_sliding_window(keys: _Keys, max_position: int) -> None:
    layer_types = keys.data.get("layer_types")
    if layer_types and (not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)):
        raise ModelError(f"config.json: layer_types {layer_types!r} are not supported, only full_attention is")
    window = keys.data.get("sliding_window")
    if window is None or not keys.flag("use_sliding_window", True):
        return
    if keys.integer("sliding_window") < max_position:
        raise ModelError(f"config.json: a sliding window of {window} tokens is not supported")


def _rope_from_hf(keys: _Keys) -> RopeConfig:
    params = keys.mapping("rope_parameters") or keys.mapping("rope_scaling")
    theta = keys.number("rope_theta", 10000.0)
    rope = _Keys(params, "config.json: rope parameters")
    theta = rope.number("rope_theta", theta)
    kind = params.get("rope_type") or params.get("type") or "default"
    if rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("config.json: a partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        if rope.number("high_freq_factor") <= rope.number("low_freq_factor"):
            raise ModelError("config.json: rope parameters: high_freq_factor must be above low_freq_factor")
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=rope.integer("original_max_position_embeddings"),
        )
    raise ModelError(f"config.json: rope type {kind!r} is not supported; default, linear and llama3 are")


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    tensor_names: Collection[str],
    vocab_rows: int,
    freq_factors: tuple[float, ...] | None = None,
) -> LlamaConfig:
    """The record for GGUF metadata. `vocab_rows`: rows of token_embd; `freq_factors`: rope_freqs.weight, if stored.

    Raises ModelError for an architecture other than `llama` and for what the forward does not compute.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"GGUF architecture {architecture!r} is not supported, only 'llama' is")
    keys = _Keys(metadata, "GGUF metadata")
    if keys.integer("llama.expert_count", 0) > 0:
        raise ModelError("GGUF metadata: llama.expert_count > 0, mixture-of-experts files are not supported")
    if keys.integer("split.count", 1) > 1:
        raise ModelError(
            "GGUF metadata: the model is split over several files; merge them with llama-gguf-split --merge"
        )
    hidden, heads = keys.integer("llama.embedding_length"), keys.integer("llama.attention.head_count")
    head_dim = keys.integer("llama.attention.key_length", hidden // max(heads, 1))
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise ModelError(f"GGUF metadata: {key} is {metadata[key]}, only the head size {head_dim} is supported")
    if keys.integer("llama.attention.sliding_window", 0) > 0:
        raise ModelError("GGUF metadata: a sliding window is not supported")
    bos = keys.token_ids("tokenizer.ggml.bos_token_id")
    eos = tuple(i for name in ("eos", "eot") for i in keys.token_ids(f"tokenizer.ggml.{name}_token_id"))
    return LlamaConfig(
        vocab_size=vocab_rows,
        hidden_size=hidden,
        intermediate_size=keys.integer("llama.feed_forward_length"),
        num_layers=keys.integer("llama.block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=keys.integer("llama.context_length"),
        rms_norm_eps=keys.number("llama.attention.layer_norm_rms_epsilon"),
        rope=_rope_from_gguf(keys, freq_factors),
        tied="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        eos_ids=tuple(dict.fromkeys(eos)),
        bos_id=bos[0] if bos else None,
    )


def _rope_from_gguf(keys: _Keys, freq_factors: tuple[float, ...] | None) -> RopeConfig:
    theta = keys.number("llama.rope.freq_base", 10000.0)
    kind = keys.data.get("llama.rope.scaling.type", "none")
    factor = keys.number("llama.rope.scaling.factor", keys.number("llama.rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise ModelError(f"GGUF metadata: llama.rope.scaling.type {kind!r} is not supported; none and linear are")
    scaled = kind == "linear" or ("llama.rope.scaling.type" not in keys.data and factor != 1.0)
    return RopeConfig(
        theta=theta,
        kind="linear" if scaled else "default",
        factor=factor if scaled else 1.0,
        freq_factors=freq_factors,
    )
