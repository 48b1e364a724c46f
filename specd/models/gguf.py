"""Reading .gguf files. The header is parsed here with every bound checked; the `gguf` package dequantises.

A file is: magic, version, two counts, key/value metadata, tensor infos, padding, tensor data. All numbers come from
whoever made the file: a count or length that the file cannot hold is refused before anything is allocated for it.
No torch at import: the tokenizer reads metadata without it.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specd.errors import ModelError
from specd.models.config import LlamaConfig, config_from_gguf

if TYPE_CHECKING:
    import torch

    from specd.kernels.pack import Rows

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}  # struct's letters
_MAX_NESTING = 4
_MAX_ELEMENTS = 1 << 22  # of all arrays together: the largest vocabularies take a third, Python tens of bytes for each
_MAX_DIMS = 4
_MIN_ENTRY_BYTES = 13  # of a key/value pair: key length, type, one byte of value
_MIN_INFO_BYTES = 24  # of a tensor info: name length, dimension count, type, offset


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: `num_bytes` at byte `begin` of the file. shape: torch's order, rows first."""

    shape: tuple[int, ...]
    ggml_type: int
    begin: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, Any]  # plain Python values, arrays as lists
    tensors: dict[str, GgufTensor]


def read_metadata(path: Path) -> dict[str, Any]:
    """The key/value metadata as plain Python values. Reads no tensor. Raises ModelError."""
    with _Cursor(path) as cursor:
        return _read_metadata(cursor, _read_counts(cursor)[1])


def read_header(path: Path) -> GgufHeader:
    """Metadata and the checked places of all tensors. Raises ModelError."""
    with _Cursor(path) as cursor:
        num_tensors, num_entries = _read_counts(cursor)
        metadata = _read_metadata(cursor, num_entries)
        return GgufHeader(metadata, _read_infos(cursor, num_tensors, metadata))


class _Cursor:
    """A read position in a mapped file that cannot leave it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._elements = 0
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelError(f"{path}: is an empty file, not a GGUF one") from error

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.data.close()

    @property
    def remaining(self) -> int:
        return len(self.data) - self.position

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what} (at byte {self.position} of {len(self.data)}); the file is damaged")

    def take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self.remaining:
            raise self.fail(f"{what} needs {num_bytes} bytes, {self.remaining} are left")
        start = self.position
        self.position += num_bytes
        return self.data[start : self.position]

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def count(self, min_bytes: int, what: str) -> int:
        """A u64 count of things that take at least min_bytes each."""
        count = self.u64(what)
        if count * min_bytes > self.remaining:
            raise self.fail(f"{what} {count} does not fit into the {self.remaining} bytes left")
        return count

    def string(self, what: str) -> str:
        raw = self.take(self.count(1, f"length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def scalars(self, kind: int, count: int, what: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        return layout.unpack(self.take(layout.size, what))

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind in _SCALARS:
            return self.scalars(kind, 1, what)[0]
        if kind != _ARRAY or depth >= _MAX_NESTING:
            raise self.fail(f"{what} has the unknown value type {kind}" if kind != _ARRAY else f"{what} nests too deep")
        return self._array(what, depth)

    def _array(self, what: str, depth: int) -> list[Any]:
        kind = self.u32(what)
        # Strings and arrays start with a u64.
        count = self.count(struct.calcsize("<" + _SCALARS.get(kind, "Q")), f"length of {what}")
        self._elements += count
        if self._elements > _MAX_ELEMENTS:
            raise ModelError(f"{self.path}: more than {_MAX_ELEMENTS} array elements of metadata, up to {what}")
        if kind in _SCALARS:
            return list(self.scalars(kind, count, what))
        if kind == _STRING:
            return [self.string(what) for _ in range(count)]
        return [self.value(kind, what, depth + 1) for _ in range(count)]


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """(tensors, metadata entries), after magic and version."""
    if cursor.take(4, "magic") != _MAGIC:
        raise ModelError(f"{cursor.path}: is not a GGUF file")
    version = cursor.u32("version")
    if version not in _VERSIONS:
        raise ModelError(f"{cursor.path}: GGUF version {version} (or byte order) is not supported; 2 and 3 are")
    num_tensors = cursor.count(_MIN_INFO_BYTES, "tensor count")
    return num_tensors, cursor.count(_MIN_ENTRY_BYTES, "metadata count")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string("metadata key")
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.u32(f"type of {key!r}"), repr(key))
    return metadata


def _read_infos(cursor: _Cursor, count: int, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.string("tensor name")
        if name in infos:
            raise cursor.fail(f"tensor {name!r} appears twice")
        num_dims = cursor.u32(f"dimensions of {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions")
        dims = tuple(cursor.u64(f"shape of {name!r}") for _ in range(num_dims))
        infos[name] = (dims[::-1], cursor.u32(f"type of {name!r}"), cursor.u64(f"offset of {name!r}"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: _place(cursor, name, info, start, alignment) for name, info in infos.items()}
    previous, previous_end = "", 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < previous_end:
            raise cursor.fail(f"tensors {previous!r} and {name!r} overlap")
        previous, previous_end = name, tensor.begin + tensor.num_bytes
    return tensors


def _place(
    cursor: _Cursor, name: str, info: tuple[tuple[int, ...], int, int], start: int, alignment: int
) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    shape, ggml_type, offset = info
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    except (ValueError, KeyError) as error:
        raise ModelError(f"{cursor.path}: tensor {name!r} has the unknown type {ggml_type}") from error
    if min(shape) < 1 or shape[-1] % block:
        raise cursor.fail(f"tensor {name!r} of shape {list(shape)} is not made of whole blocks of {block}")
    num_bytes = math.prod(shape) // block * block_bytes
    if offset % alignment or start + offset + num_bytes > len(cursor.data):
        raise cursor.fail(f"tensor {name!r} claims {num_bytes} bytes at offset {offset}, which the file does not have")
    return GgufTensor(shape, ggml_type, start + offset, num_bytes)


_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)$")
_ROPE_FREQS = "rope_freqs.weight"


def _hf_name(name: str) -> str:
    """A tensor's Hugging Face name; names that have none are given back as they are (and refused later)."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _NAMES.get(name, name)


class GgufFile(Mapping[str, "torch.Tensor"]):
    """A `llama` file: config, metadata, and tensors by Hugging Face name, dequantised to f32 when asked for."""

    def __init__(self, path: Path) -> None:
        """Reads and checks the header. Raises ModelError."""
        header = read_header(path)
        self.path = path
        self.metadata = header.metadata
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        factors = header.tensors.pop(_ROPE_FREQS, None)
        embedding = header.tensors.get("token_embd.weight")
        self.config: LlamaConfig = config_from_gguf(
            header.metadata,
            tensor_names=header.tensors.keys(),
            vocab_rows=embedding.shape[0] if embedding else 1,  # a missing embedding is named by check_weights
            freq_factors=None if factors is None else tuple(map(float, self._dequantised(_ROPE_FREQS, factors))),
        )
        self._tensors: dict[str, GgufTensor] = {}
        for name, tensor in header.tensors.items():
            if _hf_name(name) in self._tensors:
                raise ModelError(f"{path}: tensor {name!r} and another one are both {_hf_name(name)}")
            self._tensors[_hf_name(name)] = tensor

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        """f32 on the CPU. Raises ModelError for a quantisation that cannot be read."""
        import torch

        values = self._ordered(name, self._dequantised(name, self._tensors[name]))
        return torch.from_numpy(np.array(values, dtype=np.float32))  # copied: a private, writable array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def rows(self, name: str) -> Rows:
        """A matrix as the file holds it, in its own quantisation; Q and K rows in half-split order like `[name]`."""
        from specd.kernels.pack import Rows

        tensor = self._tensors[name]
        data = self._data[tensor.begin : tensor.begin + tensor.num_bytes].reshape(tensor.shape[0], -1)
        return Rows(tensor.ggml_type, self._ordered(name, data), tensor.shape[1])

    def _ordered(self, name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        for part, heads in (("q_proj", self.config.num_heads), ("k_proj", self.config.num_kv_heads)):
            if name.rpartition(".")[0].endswith(part):
                return _half_split(values, heads)
        return values

    def _dequantised(self, name: str, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(tensor.ggml_type)
        rows = self._data[tensor.begin : tensor.begin + tensor.num_bytes].reshape(*tensor.shape[:-1], -1)
        try:
            return np.asarray(dequantize(rows, kind), np.float32).reshape(tensor.shape)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name!r} is quantised as {kind.name}, which is not supported"
            ) from error


def _half_split(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undoes the interleaving of Q and K rows that `llama` files store for rotated neighbours (2i, 2i + 1)."""
    rows = values.shape[0]
    return values.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
