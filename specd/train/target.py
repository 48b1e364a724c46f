"""The parts of a target that training reads: embedding, output head, final norm and last layer, in fp32."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

import orjson
import torch

from specd.errors import ModelError
from specd.models.config import LlamaConfig
from specd.models.gguf import GgufFile
from specd.models.registry import ARCHITECTURES
from specd.models.weights import SafetensorsFolder

_LAYER = (
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
    "self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "mlp.down_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FrozenTarget:
    """Weights f32 that never change while a head is trained."""

    name: str
    config: LlamaConfig
    vocab_size: int  # rows of the output head
    embedding: torch.Tensor  # [V, H]
    lm_head: torch.Tensor  # [V, H]
    norm: torch.Tensor  # [H]
    last_layer: Mapping[str, torch.Tensor]  # by the names within the layer


def read_frozen(path: Path) -> FrozenTarget:
    """From a .gguf file or a Hugging Face folder. Raises ModelError."""
    config, weights = _open(path)
    embedding = _f32(weights, "model.embed_tokens.weight")
    lm_head = embedding if config.tied else _f32(weights, "lm_head.weight")
    prefix = f"model.layers.{config.num_layers - 1}."
    return FrozenTarget(
        name=path.name if path.is_dir() else path.stem,
        config=config,
        vocab_size=len(lm_head),
        embedding=embedding,
        lm_head=lm_head,
        norm=_f32(weights, "model.norm.weight"),
        last_layer={name: _f32(weights, prefix + name) for name in _LAYER if prefix + name in weights},
    )


def read_layers(path: Path, num_layers: int) -> dict[str, torch.Tensor]:
    """The first layers and the final norm by their Hugging Face names, f32. Raises ModelError."""
    config, weights = _open(path)
    names = dataclasses.replace(config, num_layers=num_layers).weight_shapes()
    return {name: _f32(weights, name) for name in names if name.startswith(("model.layers.", "model.norm."))}


def weights_fingerprint(path: Path) -> str:
    """SHA-256 over the bytes of the weight files."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _open(path: Path) -> tuple[LlamaConfig, Mapping[str, torch.Tensor]]:
    if not path.is_dir():
        file = GgufFile(path)
        return file.config, file
    try:
        data = orjson.loads((path / "config.json").read_bytes())
        name = data["architectures"][0]
        architecture = ARCHITECTURES[name]
    except (OSError, orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{path}: not a model folder that specd serves: {error!r}") from error
    return architecture.read_config(data, architecture=name), SafetensorsFolder(path)


def _f32(weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    return weights[name].to(torch.float32, copy=True)
