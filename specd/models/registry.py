"""From a file or folder to a model that can serve: architectures by name, and what a checkpoint says about itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import orjson
import torch

from specd.attention.base import AttentionBackend
from specd.errors import ModelError
from specd.kernels import draw
from specd.log import get_logger
from specd.models.config import LlamaConfig, config_from_hf, token_ids
from specd.models.gguf import GgufFile
from specd.models.llama import Llama
from specd.models.native import Activations, NativeLlama, TensorSource, WeightSource, unsupported
from specd.models.weights import SafetensorsFolder, check_dtypes, check_weights


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """How one `architectures` entry of config.json is read and built."""

    read_config: Callable[..., LlamaConfig]  # (config.json, architecture=name)
    build: Callable[..., Llama]  # (config, weights, attention=, dtype=, device=)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelChoice:
    """Who computes on the CPU (`model.kernels`, `model.activations`, `model.quantize`)."""

    kernels: Literal["auto", "native", "torch"] = "torch"
    activations: Activations = "fast"
    quantize: Literal["none", "q8_0"] = "none"


TORCH = KernelChoice()
_log = get_logger(__name__)

ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(config_from_hf, Llama),
    "MistralForCausalLM": Architecture(config_from_hf, Llama),
    "Qwen2ForCausalLM": Architecture(config_from_hf, Llama),
}

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
_SAMPLING_KEYS = {"temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "top_k": (0, 1 << 31)}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A target ready to serve, and what its files say about serving it."""

    model: Llama | NativeLlama
    config: LlamaConfig
    path: Path
    name: str  # file or folder name, for people
    generation_defaults: Mapping[str, float | int]  # sampling defaults of generation_config.json
    eos_ids: tuple[int, ...]  # generation_config.json's list first, then config.json's, or GGUF's eos and eot
    bos_id: int | None
    weight_bytes: int

    @property
    def kernels(self) -> str:
        """Which arithmetic computes it: "torch", "native fast" or "native exact"."""
        return f"native {self.model.activations}" if isinstance(self.model, NativeLlama) else "torch"


def load_target(
    path: Path, *, dtype: str, device: torch.device, attention: AttentionBackend, kernels: KernelChoice = TORCH
) -> LoadedModel:
    """Loads a .gguf file or a Hugging Face folder. dtype: "auto", "float32" or "bfloat16".

    "auto" is float32 on the CPU and the checkpoint's own dtype elsewhere. Raises ModelError.
    """
    if path.is_dir():
        return _load_folder(path, dtype, device, attention, kernels)
    if path.suffix == ".gguf":
        return _load_gguf(path, dtype, device, attention, kernels)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    raise ModelError(f"{path}: only .gguf files and folders with .safetensors are read; pickled checkpoints never are")


def _load_gguf(
    path: Path, dtype: str, device: torch.device, attention: AttentionBackend, kernels: KernelChoice
) -> LoadedModel:
    file = GgufFile(path)
    config = file.config
    check_weights(path, file.shapes, config.weight_shapes(), tied=config.tied)
    precision = _resolve_dtype(dtype, config, device)
    model = _native(config, file, kernels, precision, device) or Llama(
        config, file, attention=attention, dtype=precision, device=device
    )
    return LoadedModel(
        model=model,
        config=config,
        path=path,
        name=path.stem,
        generation_defaults={},
        eos_ids=config.eos_ids,
        bos_id=config.bos_id,
        weight_bytes=model.weight_bytes(),
    )


def _load_folder(
    path: Path, dtype: str, device: torch.device, attention: AttentionBackend, kernels: KernelChoice
) -> LoadedModel:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: not a model folder: it holds no config.json")
    data = _read_json(path / "config.json", required=True)
    name = _architecture(path, data)
    architecture = ARCHITECTURES[name]
    try:
        config = architecture.read_config(data, architecture=name)
    except ModelError as error:  # it knows the file's name, not where it is
        raise ModelError(f"{path}: {error}") from error
    weights = SafetensorsFolder(path)
    config = _untied_if_different(path, config, weights)
    check_weights(path, weights.shapes, config.weight_shapes(), tied=config.tied)
    dtypes, wanted = weights.dtypes, config.weight_shapes()
    check_dtypes(path, {name: dtypes[name] for name in wanted})
    generation_file = path / "generation_config.json"
    generation = _read_json(generation_file, required=False)
    bos = token_ids(generation, "bos_token_id", str(generation_file))
    precision = _resolve_dtype(dtype, config, device)
    model = _native(config, TensorSource(weights), kernels, precision, device) or architecture.build(
        config, weights, attention=attention, dtype=precision, device=device
    )
    return LoadedModel(
        model=model,
        config=config,
        path=path,
        name=path.name,
        generation_defaults=generation_defaults(generation),
        eos_ids=token_ids(generation, "eos_token_id", str(generation_file)) or config.eos_ids,
        bos_id=bos[0] if bos else config.bos_id,
        weight_bytes=model.weight_bytes(),
    )


def _native(
    config: LlamaConfig, source: WeightSource, choice: KernelChoice, dtype: torch.dtype, device: torch.device
) -> NativeLlama | None:
    """The model in the CPU kernels; None when torch is to compute it.

    Raises ModelError when it cannot be as asked, and ConfigError when SPECD_KERNELS names a level that cannot run here.
    """
    draw.loaded()  # they draw the tokens of any model: a wrong level is told now, and not by the first request
    if choice.kernels == "torch":
        if choice.quantize != "none":
            raise ModelError(f'model.quantize = "{choice.quantize}" needs the native kernels; set model.kernels too')
        return None
    reason = unsupported(config)
    if device.type != "cpu" or dtype != torch.float32:
        reason = f"they compute in float32 on the CPU, not in {dtype} on {device}"
    if reason is None:
        try:
            model = NativeLlama(config, source, activations=choice.activations, quantize=choice.quantize)
        except ModelError as error:  # not built, or a format without a kernel
            reason = str(error)
        else:
            if not model.library.threaded and torch.get_num_threads() > 1:
                _log.warning("native_kernels_single_threaded", reason="they were built by a compiler without OpenMP")
            return model
    if choice.kernels == "native" or choice.quantize != "none":
        raise ModelError(f"the native kernels cannot run this model: {reason}")
    _log.warning("native_kernels_not_used", reason=reason, using="torch")
    return None


def generation_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """Sampling defaults that a generation_config.json states; keys it does not have are not in the result.

    As in transformers, temperature and its kin do not apply when `do_sample` is false; a missing `do_sample` does not
    silence what the file spells out. The repetition penalty applies either way. Raises ModelError for bad values.
    """
    defaults: dict[str, float | int] = {}
    ranges = {} if generation.get("do_sample") is False else dict(_SAMPLING_KEYS)
    for key, (low, high) in (ranges | {"repetition_penalty": (1e-3, 1e3)}).items():
        value = generation.get(key)
        if value is None:
            continue
        kind = int if key == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            raise ModelError(f"generation_config.json: {key} is {value!r}, it must be a number in [{low}, {high}]")
        defaults[key] = value
    return defaults


def _untied_if_different(path: Path, config: LlamaConfig, weights: SafetensorsFolder) -> LlamaConfig:
    """A head that is stored and differs from the embedding wins over `tie_word_embeddings`, as in transformers."""
    names = ("lm_head.weight", "model.embed_tokens.weight")
    if not config.tied or any(name not in weights for name in names) or torch.equal(*(weights[n] for n in names)):
        return config
    _log.warning("tie_word_embeddings_ignored", path=str(path), reason="lm_head.weight differs from the embedding")
    return dataclasses.replace(config, tied=False)


def _architecture(path: Path, data: Mapping[str, Any]) -> str:
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name not in ARCHITECTURES:
        raise ModelError(f"{path}: architectures {names!r} are not supported; {', '.join(ARCHITECTURES)} are")
    return str(name)


def _resolve_dtype(dtype: str, config: LlamaConfig, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        # CPUs without bf16 units are slower in it; anything a GPU checkpoint is not stored in falls back to bf16.
        dtype = "float32" if device.type == "cpu" else config.dtype if config.dtype in _DTYPES else "bfloat16"
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; auto, float32 and bfloat16 are")
    return _DTYPES[dtype]


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        data = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return data
