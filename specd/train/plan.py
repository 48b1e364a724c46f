"""The settings of any training run, and what of all its settings a checkpoint must agree with. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

# Settings that a run may go on with changed.
_FREE = ("model", "shards", "output", "eval_every", "stop_after", "shard", "rank_timeout")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How it is trained, whatever is trained."""

    output: Path
    epochs: int = 6
    train_tokens: int = 0  # of the corpus, evenly chosen; 0: all
    batch_tokens: int = 2048  # padded tokens of a forward
    accumulate: int = 1  # forwards of an optimizer step, shared by the ranks
    lr: float = 5e-4
    warmup: int = 50  # optimizer steps
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    precision: str = "fp32"  # of matrix products; "bf16": their factors rounded, sums and all else in f32
    eval_every: int = 100  # optimizer steps
    eval_tokens: int = 16384  # held-out tokens that are looked at
    eval_steps: int = 3  # positions of a draft that are looked at
    stop_after: int = 0  # optimizer steps, then a checkpoint; 0: train to the end
    shard: str = "ddp"  # "ddp": every rank holds the whole model; "fsdp": a slice of it
    rank_timeout: float = 600.0  # s that a rank waits for the others


class Settings(Protocol):
    """A dataclass: these, and what is the trained model's own."""

    @property
    def model(self) -> Path: ...

    @property
    def shards(self) -> tuple[Path, ...]: ...

    @property
    def plan(self) -> Plan: ...


def identity(settings: Settings) -> dict[str, Any]:
    """What a checkpoint must agree with: all settings but places and looks, in one row, as JSON."""
    values = dataclasses.asdict(settings)  # type: ignore[call-overload]
    return _named(values.pop("plan") | values)


def defaults(settings: Settings) -> dict[str, Any]:
    """What a checkpoint that was written before a setting existed was made with."""
    fields = (*dataclasses.fields(Plan), *dataclasses.fields(settings))  # type: ignore[arg-type]
    return _named({field.name: field.default for field in fields if field.default is not dataclasses.MISSING})


def values_of(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a dataclass has fields for."""
    return {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _as_json(value) for name, value in values.items() if name not in _FREE}


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
