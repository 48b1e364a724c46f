"""A small draft model that borrows: layers and a final norm of its own, all else is the target's.

A folder with `model.safetensors` (the layers and the norm by their Hugging Face names) and `config.json`:

    {"specd_draft": 1, "borrows": ["embedding", "lm_head", "tokenizer"], "num_layers": 1,
     "target": {"name": .., "hidden_size": .., "intermediate_size": .., "vocab_size": .., "num_layers": ..}}

Its layers have the target's own sizes and rotary positions, so that it needs no further numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import torch

from specd.errors import ModelError
from specd.models.config import LlamaConfig
from specd.models.llama import Llama
from specd.models.native import NativeLlama, TensorSource
from specd.models.saving import save_tensors
from specd.models.weights import SafetensorsFolder, check_values, check_weights

FORMAT = 1  # of config.json: "specd_draft"
BORROWS = ["embedding", "lm_head", "tokenizer"]
_BORROWED = ("model.embed_tokens.weight", "lm_head.weight")


def own_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor such a draft has, by name; config's num_layers are the draft's."""
    return {name: shape for name, shape in config.weight_shapes().items() if name not in _BORROWED}


def is_borrowing(path: Path) -> bool:
    """Whether a folder holds such a draft."""
    try:
        data = orjson.loads((path / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return False  # whoever loads it as something else says what is wrong
    return isinstance(data, dict) and "specd_draft" in data


def write_borrowing(
    path: Path, weights: Mapping[str, torch.Tensor], config: LlamaConfig, *, target: Mapping[str, Any]
) -> None:
    """Weights become bf16. target: name, hidden_size, intermediate_size, vocab_size, num_layers."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: weights[name].detach().to(torch.bfloat16).contiguous() for name in own_shapes(config)}
    save_tensors(path / "model.safetensors", tensors, {"format": "pt"})
    content = {"specd_draft": FORMAT, "borrows": BORROWS, "num_layers": config.num_layers, "target": dict(target)}
    (path / "config.json").write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")


def load_borrowing(path: Path, target: Llama | NativeLlama) -> Llama | NativeLlama:
    """The draft, computed as the target is. Raises ModelError for a damaged folder, or one of another target."""
    try:
        data = orjson.loads((path / "config.json").read_bytes())
        version, borrows, num_layers = data["specd_draft"], data["borrows"], data["num_layers"]
        made_for = dict(data["target"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: not a draft that borrows from its target: {error!r}") from error
    if version != FORMAT or borrows != BORROWS:
        raise ModelError(f"{path}: specd_draft {version!r} that borrows {borrows!r}; only {FORMAT}, {BORROWS} is read")
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ModelError(f"{path}: num_layers is {num_layers!r}, it must be a whole number above 0")
    _check_target(path, made_for, target)
    if num_layers > target.config.num_layers:
        raise ModelError(f"{path}: num_layers is {num_layers}; the target has {target.config.num_layers}")
    config = dataclasses.replace(target.config, num_layers=num_layers)
    weights = SafetensorsFolder(path)
    check_weights(path, weights.shapes, own_shapes(config), tied=False)
    check_values(path, {name: weights[name] for name in own_shapes(config)})
    if isinstance(target, NativeLlama):
        # A draft may be a little wrong: its weights take half the memory's time as int8.
        quantize = "q8_0" if target.activations == "fast" else "none"
        return target.with_layers(config, TensorSource(weights), quantize=quantize)
    return target.with_layers(config, weights)


def _check_target(path: Path, made_for: Mapping[str, Any], target: Llama | NativeLlama) -> None:
    config = target.config
    ours = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": target.shape.vocab_size,
        "num_layers": config.num_layers,
    }
    for name, value in ours.items():
        if made_for.get(name) != value:
            raise ModelError(f"{path}: was made for a target whose {name} is {made_for.get(name)}, not {value}")
