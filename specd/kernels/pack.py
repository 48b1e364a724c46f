"""Weights as the kernels read them: the file's own blocks, sixteen rows interleaved, in huge pages where there are any.

Nothing is requantised: a packed matrix holds the numbers of the file. Only `quantise_rows` makes new ones, on request.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import mmap
from typing import Any

import gguf.quants
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specd.errors import ModelError
from specd.kernels.library import CLinear, CMatrix, Library

U8 = npt.NDArray[np.uint8]
STRIP = 16  # rows
_CHUNK_BYTES = 32 << 20
_HUGE_PAGE = 2 << 20
_KINDS = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A weight matrix as files hold it, row after row."""

    kind: int  # ggml's number of the format
    data: U8  # [rows, bytes of a row]
    cols: int

    @property
    def num_rows(self) -> int:
        return len(self.data)


def rows_of_tensor(tensor: torch.Tensor) -> Rows:
    """A two-dimensional tensor in its own precision; dtypes without kernels become fp32."""
    if tensor.dtype not in _KINDS:
        tensor = tensor.float()
    plain = tensor.detach().cpu().contiguous()
    return Rows(int(_KINDS[plain.dtype]), plain.view(torch.uint8).numpy().reshape(len(plain), -1), plain.shape[1])


def quantise_rows(rows: Rows, name: str) -> Rows:
    """The same weights as Q8_0; `name` is for the error. Raises ModelError when a row is not made of whole blocks."""
    if rows.kind not in map(int, _KINDS.values()):
        return rows
    if rows.cols % 32:
        raise ModelError(f'model.quantize = "q8_0": {name} has {rows.cols} columns, not a multiple of 32')
    values = gguf.quants.dequantize(rows.data, GGMLQuantizationType(rows.kind)).reshape(rows.num_rows, rows.cols)
    kind = GGMLQuantizationType.Q8_0
    return Rows(int(kind), np.ascontiguousarray(gguf.quants.quantize(values, kind)), rows.cols)


class WeightMemory:
    """Memory for packed weights, handed out in 64-byte steps and never given back piecewise."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = self._size = 0

    def take(self, size: int) -> U8:
        """A zeroed array that keeps its chunk alive."""
        if self._chunk is None or self._used + size > self._size:
            self._size = -(-max(size, _CHUNK_BYTES) // _HUGE_PAGE) * _HUGE_PAGE
            self._chunk = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._chunk.madvise(mmap.MADV_HUGEPAGE)
            self._used = 0
        array = np.frombuffer(self._chunk, np.uint8, size, self._used)
        self._used += -(-size // 64) * 64
        return array


class PackedMatrix:
    """Interleaved rows that C reads; `bias` f32[rows] or None."""

    def __init__(
        self, library: Library, memory: WeightMemory, rows: Rows, *, name: str, bias: torch.Tensor | None = None
    ) -> None:
        """Raises ModelError for a format that has no kernel."""
        self.num_rows, self.cols, self.kind = rows.num_rows, rows.cols, rows.kind
        self.strip_bytes = int(library.c.specd_strip_bytes(rows.kind, rows.cols))
        if self.strip_bytes == 0:
            kind = GGMLQuantizationType(rows.kind)
            raise ModelError(f"{name}: no CPU kernel for {kind.name} with {rows.cols} columns")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(rows.kind)]
        assert rows.data.shape[1] == rows.cols // block * block_bytes, (name, rows.data.shape, rows.cols)
        self.data = memory.take(-(-rows.num_rows // STRIP) * self.strip_bytes)
        source = np.ascontiguousarray(rows.data)
        library.check(
            library.c.specd_pack(rows.kind, source.ctypes.data, rows.num_rows, rows.cols, self.data.ctypes.data)
        )
        self.bias = None if bias is None else bias.detach().float().cpu().contiguous().clone()

    def picked(self, library: Library, memory: WeightMemory, rows: torch.Tensor) -> PackedMatrix:
        """Some of its rows, i64[count], as a matrix of their own; their numbers stay as they are packed.

        Raises ModelError for a row that it does not have.
        """
        other = copy.copy(self)
        other.num_rows = len(rows)
        other.data = memory.take(-(-len(rows) // STRIP) * self.strip_bytes)
        record, rows = self.record(), rows.contiguous()
        library.check(library.c.specd_pick(ctypes.byref(record), address(rows), len(rows), other.data.ctypes.data))
        other.bias = None if self.bias is None else self.bias[rows]
        return other

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def record(self) -> CMatrix:
        """What C reads; valid as long as this object lives."""
        return CMatrix(
            data=self.data.ctypes.data,
            bias=None if self.bias is None else self.bias.data_ptr(),
            rows=self.num_rows,
            cols=self.cols,
            strip_bytes=self.strip_bytes,
            kind=self.kind,
        )

    def unpack(self, library: Library) -> torch.Tensor:
        """f32[rows, cols], dequantised. For tests."""
        out = torch.empty(self.num_rows, self.cols)
        record = self.record()
        for row in range(self.num_rows):
            library.c.specd_unpack_row(ctypes.byref(record), row, out[row].data_ptr())
        return out


def linear_record(*parts: PackedMatrix) -> CLinear:
    """One projection whose outputs are those of the parts, one behind the other."""
    record = CLinear(num_parts=len(parts))
    for i, part in enumerate(parts):
        record.parts[i] = part.record()
    return record


def address(value: torch.Tensor | np.ndarray[Any, Any]) -> int:
    """Where a contiguous tensor or array begins."""
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        return value.data_ptr()
    assert value.flags.c_contiguous
    return int(value.__array_interface__["data"][0])
