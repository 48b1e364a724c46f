"""What the target computed over a corpus, on disk: its hidden states and its best next token, sequence by sequence.

A shard is one safetensors file of whole sequences: `input_ids` i32[N], `loss_mask` u8[N] (1: the model wrote this
token), `lens` i32[sequences], `held_out` u8[sequences], `hidden` bf16[N, H] after the final norm, `best` i32[N] (the
argmax after each token); with features "pre" or "aux" also `features` bf16[N, H or 3H]. Its metadata say which target,
and how.
A file appears under its name only when it is complete, so an interrupted run is taken up where it stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from specd.errors import ConfigError
from specd.models.saving import save_tensors

_FORMAT = "1"
_PATTERN = "shard-*.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Whose hidden states these are; the same for every shard of a folder."""

    target: str  # the file's or folder's name
    fingerprint: str  # of its weights
    features: str  # "last", "pre" or "aux"
    kernels: str  # "torch", "native fast" or "native exact"
    corpus: str  # SHA-256 of the sequences
    num_shards: int

    def metadata(self) -> dict[str, str]:
        return {"specd_shard": _FORMAT} | {name: str(value) for name, value in dataclasses.asdict(self).items()}


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], origin: Origin) -> None:
    """All or nothing: a crash leaves no file under this name."""
    partial = path.with_suffix(".partial")
    save_tensors(partial, tensors, origin.metadata())
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_origin(path: Path) -> Origin:
    """Raises ConfigError for a file that is not a shard."""
    try:
        with safe_open(path, framework="pt") as file:
            data = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a shard: {error}") from error
    names = [field.name for field in dataclasses.fields(Origin)]
    if data.get("specd_shard") != _FORMAT or any(name not in data for name in names):
        raise ConfigError(f'{path}: not a shard: its metadata have no "specd_shard": {_FORMAT} with {", ".join(names)}')
    if not data["num_shards"].isdecimal():
        raise ConfigError(f"{path}: not a shard: num_shards is {data['num_shards']!r}")
    values = {name: data[name] for name in names[:-1]}
    return Origin(**values, num_shards=int(data["num_shards"]))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """Folders of shards in memory, one behind the other; token i of sequence s lies at row starts[s] + i."""

    origin: Origin  # of the first folder; they differ in corpus and num_shards alone
    fingerprint: str  # of all shards' ids and lengths, for checkpoints and provenance
    ids: torch.Tensor  # i64[N]
    written: torch.Tensor  # bool[N] by the model: learned from
    best: torch.Tensor  # i64[N] argmax of the target after each token
    hidden: torch.Tensor  # bf16[N, H] after the final norm
    features: torch.Tensor  # bf16[N, F] what the head reads; `hidden` itself for "last"
    lens: torch.Tensor  # i64[S]
    starts: torch.Tensor  # i64[S]
    held_out: torch.Tensor  # bool[S]


def read_shards(*folders: Path) -> Collected:
    """Raises ConfigError for a folder that has none, lacks some or has those of several runs, for folders of different
    targets, features or kernels, or of the same corpus, and for a shard that does not hold what it must."""
    found = {folder: _folder_shards(folder) for folder in folders}
    origins = [origin for _, origin in found.values()]
    for folder, (_, origin) in found.items():
        if dataclasses.replace(origins[0], corpus=origin.corpus, num_shards=origin.num_shards) != origin:
            raise ConfigError(f"{folder}: was not collected like {folders[0]}: {origin} and {origins[0]}")
    if len({origin.corpus for origin in origins}) < len(folders):
        raise ConfigError(f"{', '.join(map(str, folders))}: the same text would be learned twice; give other folders")
    whole = _load([path for paths, _ in found.values() for path in paths], origins[0].features)
    lens = whole["lens"].long()
    digest = hashlib.sha256(whole["input_ids"].numpy().tobytes() + whole["lens"].numpy().tobytes())
    for origin in origins:
        digest.update(orjson.dumps(dataclasses.asdict(origin)))
    return Collected(
        origin=origins[0],
        fingerprint=digest.hexdigest(),
        ids=whole["input_ids"].long(),
        written=whole["loss_mask"].bool(),
        best=whole["best"].long(),
        hidden=whole["hidden"],
        features=whole.get("features", whole["hidden"]),
        lens=lens,
        starts=lens.cumsum(0) - lens,
        held_out=whole["held_out"].bool(),
    )


def _folder_shards(folder: Path) -> tuple[list[Path], Origin]:
    paths = sorted(folder.glob(_PATTERN))
    if not paths:
        raise ConfigError(f"{folder}: holds no shards; `specd train collect` writes them")
    origins = {path: read_origin(path) for path in paths}
    origin = origins[paths[0]]
    for path, other in origins.items():
        if other != origin:
            raise ConfigError(f"{path}: is of another run than {paths[0].name}: {other} and {origin}")
    if len(paths) != origin.num_shards:
        raise ConfigError(f"{folder}: has {len(paths)} of {origin.num_shards} shards; run `specd train collect` again")
    return paths, origin


def _load(paths: list[Path], features: str) -> dict[str, torch.Tensor]:
    """All shards' tensors end to end, with no more than one shard in memory twice."""
    sizes: dict[str, int] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (a file)
        _check_shapes(path, shapes, features)
        for name, shape in shapes.items():
            sizes[name] = sizes.get(name, 0) + shape[0]
    whole: dict[str, torch.Tensor] = {}
    filled = dict.fromkeys(sizes, 0)
    for path in paths:
        tensors = load_file(path)
        _check_values(path, tensors)
        for name, tensor in tensors.items():
            target = whole.setdefault(name, tensor.new_empty((sizes[name], *tensor.shape[1:])))
            if target.shape[1:] != tensor.shape[1:] or target.dtype != tensor.dtype:
                words = f"{list(tensor.shape[1:])} of {tensor.dtype}"
                raise ConfigError(f"{path}: {name} has rows of {words}, those of {paths[0]} are others")
            target[filled[name] : filled[name] + len(tensor)] = tensor
            filled[name] += len(tensor)
    return whole


def _check_shapes(path: Path, shapes: Mapping[str, list[int]], features: str) -> None:
    """Raises ConfigError for a shard whose tensors do not belong together."""
    wanted = {"input_ids": 1, "loss_mask": 1, "lens": 1, "held_out": 1, "hidden": 2, "best": 1}
    wanted |= {} if features == "last" else {"features": 2}
    if shapes.keys() != wanted.keys():
        raise ConfigError(f"{path}: holds {', '.join(sorted(shapes))}; a shard has {', '.join(sorted(wanted))}")
    for name, ndim in wanted.items():
        like = "lens" if name == "held_out" else name if name == "lens" else "input_ids"
        if len(shapes[name]) != ndim or shapes[name][0] != shapes[like][0]:
            raise ConfigError(f"{path}: {name} is {shapes[name]} beside {like} {shapes[like]}")


def _check_values(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ConfigError for lengths, tokens or states that cannot be."""
    lens, count = tensors["lens"].long(), len(tensors["input_ids"])
    if int(lens.sum()) != count or bool((lens < 1).any()):
        raise ConfigError(f"{path}: holds {count} tokens, and lens that sum to {int(lens.sum())} or are below 1")
    for name in ("input_ids", "best", "hidden", "features"):
        if name not in tensors:
            continue
        states = name in ("hidden", "features")
        if tensors[name].is_floating_point() != states:
            raise ConfigError(f"{path}: {name} is of {tensors[name].dtype}")
        if states and not bool(tensors[name].isfinite().all()):
            raise ConfigError(f"{path}: {name} has values that are not finite")
        if not states and bool((tensors[name] < 0).any()):
            raise ConfigError(f"{path}: {name} has tokens below 0")
