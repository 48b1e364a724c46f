"""Reading safetensors, after checking every number of the header ourselves. Pickled checkpoints are never opened.

A file is 8 bytes of header length (little endian), a JSON header, then the tensors' bytes. The header comes from
whoever made the file, so nothing in it is used before it is checked: length, spans against dtype and shape, the file's
end, overlaps.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from specd.errors import ModelError

_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_INDEX = "model.safetensors.index.json"
# Buffers that old exporters saved and that the forward computes by itself.
_IGNORED = re.compile(r"(.*\.rotary_emb\.inv_freq|.*\.self_attn\.masked_bias)$")
_NAMES_SHOWN = 5


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where one tensor lies: bytes [begin, end) of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorSpan]:
    """The tensors of one safetensors file. Raises ModelError for a header that does not describe the file it is in."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(
                    f"{path}: the header claims {length} bytes, the file has {size}; headers end at {_MAX_HEADER_BYTES}"
                )
            header = orjson.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    start = 8 + length
    spans = {name: _span(path, name, entry, start, size) for name, entry in header.items() if name != "__metadata__"}
    _refuse_overlaps(path, spans)
    return spans


def _span(path: Path, name: str, entry: Any, start: int, size: int) -> TensorSpan:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ModelError(f"{where}: has no dtype, shape and data_offsets")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ModelError(f"{where}: dtype {entry['dtype']!r} is not supported")
    shape, offsets = _sizes(where, "shape", entry["shape"]), _sizes(where, "data_offsets", entry["data_offsets"])
    if len(offsets) != 2:
        raise ModelError(f"{where}: data_offsets must be two numbers, they are {list(offsets)}")
    begin, end = offsets
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        raise ModelError(f"{where}: {list(shape)} of {entry['dtype']} is {num_bytes} bytes, its span is {end - begin}")
    if start + end > size:
        raise ModelError(f"{where}: ends at byte {start + end}, the file has {size}")
    return TensorSpan(dtype, shape, start + begin, start + end)


def _sizes(where: str, key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in value):
        raise ModelError(f"{where}: {key} must be a list of sizes, it is {value!r}")
    return tuple(value)


def _refuse_overlaps(path: Path, spans: Mapping[str, TensorSpan]) -> None:
    previous, previous_end = "", 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
        if span.begin < previous_end:
            raise ModelError(f"{path}: tensors {previous!r} and {name!r} overlap")
        previous, previous_end = name, span.end


class SafetensorsFolder(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint folder by name, mapped from disk when they are asked for.

    Values are views of a private file mapping, on the CPU, in the dtype of the checkpoint; copy what is kept.
    """

    def __init__(self, folder: Path) -> None:
        """Reads and checks every header. Raises ModelError."""
        self._spans: dict[str, tuple[Path, TensorSpan]] = {}
        self._maps: dict[Path, np.memmap[Any, np.dtype[np.uint8]]] = {}
        wanted = _index(folder)
        for path in sorted(set(wanted.values())) if wanted else [_single_file(folder)]:
            for name, span in read_header(path).items():
                if wanted and wanted.get(name) != path:
                    raise ModelError(f"{path}: holds tensor {name!r}, which {_INDEX} does not place there")
                self._spans[name] = (path, span)
        absent = [name for name in wanted if name not in self._spans]
        if absent:
            raise ModelError(f"{folder}: {_INDEX} names tensors that no file holds: {_listed(absent)}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: span.shape for name, (_, span) in self._spans.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: span.dtype for name, (_, span) in self._spans.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        path, span = self._spans[name]
        if span.end == span.begin:
            return torch.empty(span.shape, dtype=span.dtype)
        if path not in self._maps:
            # Mode "c": pages are private, so torch sees writable memory and the file is never written.
            self._maps[path] = np.memmap(path, dtype=np.uint8, mode="c")
        data = torch.from_numpy(self._maps[path][span.begin : span.end])
        if span.begin % span.dtype.itemsize:
            data = data.clone()  # the format does not promise alignment
        return data.view(span.dtype).view(span.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


def _index(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the sharded checkpoint's index; empty when there is none."""
    path = folder / _INDEX
    if not path.is_file():
        return {}
    try:
        weight_map = orjson.loads(path.read_bytes())["weight_map"]
        files = dict(weight_map)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: is not an index with a weight_map: {error!r}") from error
    for name in files.values():
        # Symbolic links are followed (the hub's cache is made of them), names that leave the folder are not.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{path}: file name {name!r} is not a .safetensors file of this folder")
        if not (folder / name).is_file():
            raise ModelError(f"{path}: names {name!r}, which is not there; the download may be incomplete")
    if not files:
        raise ModelError(f"{path}: its weight_map is empty")
    return {tensor: folder / name for tensor, name in files.items()}


def _single_file(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if folder / "model.safetensors" in found:
        return folder / "model.safetensors"
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(f"{folder}: has {len(found)} .safetensors files and no {_INDEX} that says what they hold")
    pickled = sorted(p.name for ext in ("bin", "pt", "pth", "pkl", "ckpt") for p in folder.glob(f"*.{ext}"))
    if pickled:
        raise ModelError(
            f"{folder}: {pickled[0]} is a pickled checkpoint, which can run code when it is opened; "
            "only .safetensors and .gguf are read"
        )
    raise ModelError(f"{folder}: holds no .safetensors file")


def check_weights(
    where: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, tied: bool
) -> None:
    """Raises ModelError that names missing, unexpected and mis-shaped tensors.

    The embedding and the head may have more rows than the config's vocabulary (padding). With tied embeddings a stored
    `lm_head.weight` is a copy and is not read.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [
        name
        for name in found
        if name not in expected and not _IGNORED.match(name) and not (tied and name == "lm_head.weight")
    ]
    wrong = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and not _fits(name, found[name], shape)
    ]
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", wrong))
        if names
    ]
    if problems:
        raise ModelError(f"{where}: the tensors do not match the config; " + "; ".join(problems))


def check_dtypes(where: Path, dtypes: Mapping[str, torch.dtype]) -> None:
    """Raises ModelError for weights that are not numbers of 16 bits or more: scales of quantised ones are not read."""
    for name, dtype in dtypes.items():
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ModelError(f"{where}: tensor {name} is of {dtype}; only float weights of 16 bits or more are read")


def check_values(where: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """`check_dtypes`, and raises ModelError for what is not finite: drafts of NaN would be wrong without an error."""
    check_dtypes(where, {name: tensor.dtype for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"{where}: tensor {name} has values that are not finite")


def _fits(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return len(found) == 2 and found[0] >= expected[0] and found[1] == expected[1]
    return found == expected


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
