"""Tiny random Llamas for everybody's tests: in memory, or as a Hugging Face folder that the whole server can load.

Weights are scaled so that logits are neither flat nor saturated: greedy decoding does not fall into ties.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specd.attention.base import AttentionBackend
from specd.attention.torch_attention import TorchAttention
from specd.kv import PagedKV
from specd.models.config import LlamaConfig, RopeConfig
from specd.models.llama import Llama
from specd.step import indptr
from specd.tensors import BatchInfo, batch_info

CPU = torch.device("cpu")
LLAMA3_ROPE = RopeConfig(
    theta=10000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2


def tiny_config(**overrides: Any) -> LlamaConfig:
    """GQA 4/2 heads of 16, 3 layers, vocabulary 97, untied, plain rope; any field can be overridden."""
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 512,
        "rms_norm_eps": 1e-5,
    }
    return LlamaConfig(**(fields | overrides))


def tiny_weights(config: LlamaConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """f32 tensors by Hugging Face name; the same for the same config and seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.weight_shapes().items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1.0 + 0.1 * noise if name.endswith("norm.weight") else 0.15 * noise
    return weights


class ReferenceAttention:
    """Causal attention over pages, one row at a time in plain loops: the thing other backends are compared with."""

    def plan(self, batch: BatchInfo) -> BatchInfo:
        return batch

    def run(self, query: torch.Tensor, kv_layer: torch.Tensor, plan: BatchInfo, scale: float) -> torch.Tensor:
        outputs = []
        offsets = indptr(plan.query_lens_cpu)
        for row in range(plan.num_rows):
            pages = torch.from_numpy(
                plan.kv_indices_cpu[plan.kv_indptr_cpu[row] : plan.kv_indptr_cpu[row + 1]].astype(np.int64)
            )
            length, num_queries = int(plan.kv_lens_cpu[row]), int(plan.query_lens_cpu[row])
            keys, values = (kv_layer[pages, side].flatten(0, 1)[:length] for side in (0, 1))  # [S, Hkv, D]
            q = query[int(offsets[row]) : int(offsets[row + 1])]
            group = q.shape[1] // keys.shape[1]
            keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
            scores = torch.einsum("qhd,shd->hqs", q, keys) * scale
            visible = torch.arange(length)[None] <= torch.arange(length - num_queries, length)[:, None]
            scores = scores.masked_fill(~visible, float("-inf"))
            outputs.append(torch.einsum("hqs,shd->qhd", scores.softmax(-1), values))
        return torch.cat(outputs)


def tiny_llama(
    seed: int = 0,
    *,
    config: LlamaConfig | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    attention: AttentionBackend | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Llama:
    """A random Llama on the CPU; `overrides` go to `tiny_config` when no config is given."""
    config = config or tiny_config(**overrides)
    weights = weights or tiny_weights(config, seed)
    return Llama(config, weights, attention=attention or TorchAttention(), dtype=dtype, device=CPU)


def make_kv(model: Llama, *, num_pages: int = 64, page_size: int = 16) -> PagedKV:
    return PagedKV(
        num_layers=model.shape.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=model.shape.num_kv_heads,
        head_dim=model.shape.head_dim,
        dtype=model.dtype,
        device=CPU,
    )


def make_batch(rows: list[tuple[int, int, list[int]]], *, page_size: int = 16) -> BatchInfo:
    """rows: (query_len, kv_len, pages) each."""
    pages = [np.asarray(row[2], np.int32) for row in rows]
    return batch_info(
        query_lens=np.asarray([row[0] for row in rows], np.int32),
        kv_lens=np.asarray([row[1] for row in rows], np.int32),
        page_indptr=indptr(np.asarray([len(p) for p in pages], np.int32)),
        page_indices=np.concatenate(pages),
        slots=np.arange(len(rows), dtype=np.int32),
        page_size=page_size,
        device=CPU,
    )


def greedy(model: Llama, prompt: list[int], num_tokens: int, *, page_size: int = 16) -> list[int]:
    """Plain greedy decoding of one sequence: what every other path must reproduce."""
    num_pages = -(-(len(prompt) + num_tokens) // page_size)
    kv = make_kv(model, num_pages=num_pages, page_size=page_size)
    tokens, done = list(prompt), 0
    with torch.inference_mode():
        for _ in range(num_tokens):
            batch = make_batch([(len(tokens) - done, len(tokens), list(range(num_pages)))], page_size=page_size)
            hidden, _ = model.forward(torch.tensor(tokens[done:]), batch, kv)
            done = len(tokens)
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def hf_config(config: LlamaConfig, *, old_keys: bool = False) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM. old_keys: rope_scaling, rope_theta and torch_dtype, as once written."""
    rope: dict[str, Any] = {"rope_type": config.rope.kind}
    if config.rope.kind != "default":
        rope["factor"] = config.rope.factor
    if config.rope.kind == "llama3":
        rope |= {
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_position,
        }
    data: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if old_keys:
        scaling = (
            None if config.rope.kind == "default" else {"type" if k == "rope_type" else k: v for k, v in rope.items()}
        )
        return data | {"rope_theta": config.rope.theta, "rope_scaling": scaling, "torch_dtype": "float32"}
    return data | {"rope_parameters": {"rope_theta": config.rope.theta, **rope}, "dtype": "float32"}


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE whose ids are all below vocab_size (at least 259: three special tokens and every byte)."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\s?\w+|\s?[^\s\w]+|\s+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = "user assistant system Hello world, how are you? The quick brown fox jumps over the lazy dog. 0123456789"
    tokenizer.train_from_iterator([text, text.lower()], trainer)
    return tokenizer


def write_hf_folder(
    path: Path,
    *,
    seed: int = 0,
    config: LlamaConfig | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    num_shards: int = 1,
    generation: dict[str, Any] | None = None,
    old_keys: bool = False,
) -> Path:
    """A complete model folder: config, safetensors (sharded if asked), tokenizer, ChatML template, generation_config.

    The default vocabulary of 320 fits every byte; a smaller one gets no tokenizer. Returns path.
    """
    config = config or tiny_config(vocab_size=320)
    weights = weights if weights is not None else tiny_weights(config, seed)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_config(config, old_keys=old_keys), indent=1))
    generation = {"bos_token_id": 1, "eos_token_id": [2, 0]} if generation is None else generation
    (path / "generation_config.json").write_text(json.dumps(generation))
    _write_weights(path, weights, num_shards)
    if config.vocab_size >= 259:
        tiny_tokenizer(config.vocab_size).save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "bos_token": "<|im_start|>",
                    "eos_token": "<|im_end|>",
                    "unk_token": "<|endoftext|>",
                    "clean_up_tokenization_spaces": False,
                    "chat_template": CHATML,
                }
            )
        )
    return path


def _write_weights(path: Path, weights: dict[str, torch.Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {key: weights[key] for key in list(weights)[shard::num_shards]}
        save_file(part, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_gguf(
    path: Path,
    *,
    seed: int = 0,
    config: LlamaConfig | None = None,
    quantised: gguf.GGMLQuantizationType | None = None,
    metadata: dict[str, Any] | None = None,
    freq_factors: list[float] | None = None,
) -> Path:
    """A `llama` file of tiny_weights(config, seed): Q and K interleaved, matrices quantised if asked, no tokenizer.

    metadata: further integer or string keys. Returns path.
    """
    config = config or tiny_config(tied=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    if freq_factors:
        writer.add_tensor("rope_freqs.weight", np.asarray(freq_factors, np.float32))
    for name, tensor in tiny_weights(config, seed).items():
        values = _interleaved(name, tensor.numpy(), config)
        if quantised is not None and values.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor, by the gguf package's own table."""
    return str(_name_map().get_name(name, try_suffixes=(".weight", ".bias")))


@functools.cache
def _name_map() -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)


def _interleaved(name: str, values: np.ndarray[Any, Any], config: LlamaConfig) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter permutes the rows of Q and K."""
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads if ".k_proj." in name else 0
    if not heads:
        return values
    half = len(values) // heads // 2
    return np.ascontiguousarray(values.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(values.shape))


def padded(weights: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """The same weights with a vocabulary padded by zero rows to `rows`, as some checkpoints ship."""
    names = [name for name in ("model.embed_tokens.weight", "lm_head.weight") if name in weights]
    return weights | {n: torch.nn.functional.pad(weights[n], (0, 0, 0, rows - len(weights[n]))) for n in names}
