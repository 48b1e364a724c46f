"""A training run on disk: one safetensors file that is replaced whole.

Tensors `weight.NAME`, `first.NAME` and `second.NAME` (AdamW's moments); the metadata's `state` is JSON: the step, the
best figures so far, and what the run was started with. Order and noise are functions of the step, so this is all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from specd.errors import ConfigError
from specd.models.saving import save_tensors
from specd.train.parallel import ParallelModel

_STATE: Mapping[str, tuple[type, ...]] = {
    "step": (int,), "tokens": (int,), "best": (int, float), "best_figures": (dict,), "identity": (dict,)
}  # fmt: skip


def checkpoint_tensors(model: ParallelModel, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Whole, whatever each rank holds of them. All ranks take part."""
    tensors = {}
    for name, parameter in model.parameters.items():
        tensors[f"weight.{name}"] = model.gather(parameter)
        moments = optimizer.state[parameter]
        if moments:
            tensors[f"first.{name}"] = model.gather(moments["exp_avg"])
            tensors[f"second.{name}"] = model.gather(moments["exp_avg_sq"])
    return tensors


def save_checkpoint(path: Path, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    save_tensors(partial, tensors, {"state": orjson.dumps(state).decode()})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def read_state(path: Path) -> dict[str, Any]:
    """Raises ConfigError for a file that is not a checkpoint."""
    try:
        with safe_open(path, framework="pt") as file:
            state = orjson.loads((file.metadata() or {})["state"])
        found = {name: type(state[name]) for name in _STATE}
    except (OSError, SafetensorError, KeyError, TypeError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not a checkpoint of a training run: {error!r}") from error
    wrong = [name for name, kinds in _STATE.items() if found[name] not in kinds]
    if wrong or state["step"] < 0:
        raise ConfigError(f"{path}: not a checkpoint of a training run: {(wrong or ['step'])[0]} is damaged")
    return dict(state)


def load_checkpoint(path: Path, model: ParallelModel, optimizer: torch.optim.AdamW, steps_done: int) -> None:
    """Into the weights, in place, and the optimizer. Every rank reads the file.

    Raises ConfigError for tensors that are not those of this model.
    """
    tensors = load_file(path)
    _check_tensors(path, tensors, model)
    with torch.no_grad():
        for name, parameter in model.parameters.items():
            parameter.copy_(model.place(name, tensors[f"weight.{name}"]))
            if f"first.{name}" in tensors:
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(steps_done)),
                    "exp_avg": model.place(name, tensors[f"first.{name}"]),
                    "exp_avg_sq": model.place(name, tensors[f"second.{name}"]),
                }


def _check_tensors(path: Path, tensors: Mapping[str, torch.Tensor], model: ParallelModel) -> None:
    moments = any(name.startswith("first.") for name in tensors)  # none yet where no step was taken
    kinds = ("weight", "first", "second") if moments else ("weight",)
    wanted = {f"{kind}.{name}": weight.shape for name, weight in model.parameters.items() for kind in kinds}
    for name in sorted(wanted.keys() | tensors.keys()):
        found = tensors[name].shape if name in tensors else None
        if found != wanted.get(name):
            raise ConfigError(f"{path}: {name} is {found}, this run's is {wanted.get(name)}")
        if not bool(tensors[name].isfinite().all()):
            raise ConfigError(f"{path}: {name} has values that are not finite")
