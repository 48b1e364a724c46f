"""Loading the CPU kernels, and their C interface (src/specd_kernels.h) as ctypes records.

The library has one set of functions for each instruction set; the best that the machine can run is taken, or the one
that SPECD_KERNELS names (avx512, avx2, portable): all of them give the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import threading
from collections.abc import Mapping

import torch  # noqa: F401 - first: its libgomp must be the one that the library finds already loaded

from specd.errors import ConfigError, ModelError

_ABI = 5
_MODULE = "specd.kernels._native"  # not a Python module: a plain library that is found like one
MAX_PARTS = 3
MAX_AUX = 8

# One team of threads computes at a time: two would spin against each other on the same cores.
compute_lock = threading.Lock()
# A child of fork gets it open, whoever was computing: that thread does not exist there.
os.register_at_fork(
    before=compute_lock.acquire, after_in_parent=compute_lock.release, after_in_child=compute_lock.release
)

_POINTER, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class CMatrix(ctypes.Structure):
    _fields_ = [
        ("data", _POINTER),
        ("bias", _POINTER),
        ("rows", _I64),
        ("cols", _I64),
        ("strip_bytes", _I64),
        ("kind", _I32),
        ("reserved", _I32),
    ]


class CLinear(ctypes.Structure):
    _fields_ = [("parts", CMatrix * MAX_PARTS), ("num_parts", _I64)]


class CLayer(ctypes.Structure):
    _fields_ = [
        ("input_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("qkv", CLinear),
        ("output", CLinear),
        ("gate", CMatrix),
        ("up", CMatrix),
        ("down", CLinear),
    ]


class CFusion(ctypes.Structure):
    _fields_ = [
        ("embedding_norm", _POINTER),
        ("state_norm", _POINTER),
        ("proj", CLinear),
        ("features", CLinear),
        ("hidden_first", _I64),
    ]


class CModel(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(CLayer)),
        ("norm", _POINTER),
        ("embedding", CMatrix),
        ("head", CMatrix),
        ("num_layers", _I64),
        ("hidden", _I64),
        ("inner", _I64),
        ("heads", _I64),
        ("kv_heads", _I64),
        ("head_dim", _I64),
        ("eps", _F32),
        ("activations", _I32),
        ("fusion", ctypes.POINTER(CFusion)),
    ]


class CBatch(ctypes.Structure):
    _fields_ = [
        ("tokens", _POINTER),
        ("positions", _POINTER),
        ("write_slots", _POINTER),
        ("query_lens", _POINTER),
        ("kv_lens", _POINTER),
        ("kv_indptr", _POINTER),
        ("kv_indices", _POINTER),
        ("parents", _POINTER),
        ("kv", _POINTER),
        ("cosines", _POINTER),
        ("sines", _POINTER),
        ("num_tokens", _I64),
        ("num_sequences", _I64),
        ("tree_nodes", _I64),
        ("page_size", _I64),
        ("num_pages", _I64),
        ("num_positions", _I64),
        ("kv_kind", _I32),
        ("num_aux", _I32),
        ("aux_layers", _I64 * MAX_AUX),
        ("hidden", _POINTER),
        ("aux", _POINTER),
        ("states", _POINTER),
        ("state_width", _I64),
    ]


class CDraws(ctypes.Structure):
    _fields_ = [
        ("logits", _POINTER),
        ("rows", _POINTER),
        ("temperature", _POINTER),
        ("top_k", _POINTER),
        ("top_p", _POINTER),
        ("min_p", _POINTER),
        ("keys", _POINTER),
        ("tokens", _POINTER),
        ("usable", _POINTER),
        ("num_rows", _I64),
        ("vocabulary", _I64),
        ("stride", _I64),
    ]


class CLogitsRows(ctypes.Structure):
    _fields_ = [
        ("logits", _POINTER),
        ("rows", _POINTER),
        ("num_rows", _I64),
        ("vocabulary", _I64),
        ("stride", _I64),
    ]


class CTops(ctypes.Structure):
    _fields_ = [("values", _POINTER), ("places", _POINTER), ("lse", _POINTER), ("k", _I64)]


class CAcceptance(ctypes.Structure):
    _fields_ = [
        ("values", _POINTER),
        ("best", _POINTER),
        ("drafts", _POINTER),
        ("row_index", _POINTER),
        ("num_drafts", _POINTER),
        ("emits", _POINTER),
        ("root_offset", _POINTER),
        ("offsets", _POINTER),
        ("num_sequences", _I64),
        ("num_rows", _I64),
        ("max_drafts", _I64),
        ("tokens", _POINTER),
        ("num_accepted", _POINTER),
        ("next_token", _POINTER),
        ("last_row", _POINTER),
        ("failed", _POINTER),
    ]


class CShifts(ctypes.Structure):
    _fields_ = [
        ("tokens", _POINTER),
        ("offsets", _POINTER),
        ("emits", _POINTER),
        ("last_row", _POINTER),
        ("next_token", _POINTER),
        ("next_prompt", _POINTER),
        ("num_sequences", _I64),
        ("num_tokens", _I64),
        ("shifted", _POINTER),
        ("last_rows", _POINTER),
    ]


_SIGNATURES: Mapping[str, tuple[object, list[object]]] = {
    "specd_abi": (_I32, []),
    "specd_levels": (ctypes.c_char_p, []),
    "specd_level": (_POINTER, [ctypes.c_char_p]),
    "specd_threaded": (_I32, []),
    "specd_strip_bytes": (_I64, [_I32, _I64]),
    "specd_pack": (_I32, [_I32, _POINTER, _I64, _I64, _POINTER]),
    "specd_pick": (_I32, [ctypes.POINTER(CMatrix), _POINTER, _I64, _POINTER]),
    "specd_unpack_row": (None, [ctypes.POINTER(CMatrix), _I64, _POINTER]),
    "specd_workspace_new": (_POINTER, []),
    "specd_workspace_free": (None, [_POINTER]),
    "specd_forward": (_I32, [_POINTER, ctypes.POINTER(CModel), ctypes.POINTER(CBatch), _POINTER, _I32]),
    "specd_forward_top": (
        _I32,
        [
            _POINTER, ctypes.POINTER(CModel), ctypes.POINTER(CBatch), _POINTER, _I64, ctypes.POINTER(CTops), _POINTER,
            _I32,
        ],
    ),
    "specd_logits": (_I32, [_POINTER, ctypes.POINTER(CModel), _POINTER, _I64, _POINTER, _POINTER, _I32]),
    "specd_argmax": (_I32, [_POINTER, ctypes.POINTER(CModel), _POINTER, _I64, _POINTER, _POINTER, _POINTER, _I32]),
    "specd_top": (
        _I32,
        [_POINTER, ctypes.POINTER(CModel), _POINTER, _I64, ctypes.POINTER(CTops), _POINTER, _I32],
    ),
    "specd_top_rows": (_I32, [_POINTER, ctypes.POINTER(CLogitsRows), ctypes.POINTER(CTops), _POINTER, _I32]),
    "specd_draw": (_I32, [_POINTER, ctypes.POINTER(CDraws), _POINTER, _I32]),
    "specd_accept": (_I32, [ctypes.POINTER(CAcceptance)]),
    "specd_shift": (_I32, [ctypes.POINTER(CShifts)]),
    "specd_linear_rows": (
        _I32,
        [_POINTER, ctypes.POINTER(CLinear), _I32, _POINTER, _I64, _POINTER, _POINTER, _I32],
    ),
    "specd_exp": (None, [_POINTER, _POINTER, _I64, _POINTER, _POINTER]),
    "specd_read": (_F32, [_POINTER, _POINTER, _I64, _I32]),
}  # fmt: skip
_FAILURES = {1: "out of memory", 2: "an index of the batch is out of its range"}


class Library:
    """The library's functions with one level chosen. `c` is the raw ctypes library; every call drops the GIL."""

    def __init__(self, c: ctypes.CDLL, level: str) -> None:
        """Raises ConfigError when the machine cannot run the level."""
        self.c = c
        self.levels = tuple(c.specd_levels().decode().split())
        self.level = level or self.levels[0]
        self.functions = c.specd_level(self.level.encode())
        self.threaded = bool(c.specd_threaded())
        if self.functions is None:
            raise ConfigError(f"SPECD_KERNELS: {level!r} cannot run here; {', '.join(self.levels)} can")

    def check(self, status: int) -> None:
        """Raises ModelError for a status other than success."""
        if status:
            raise ModelError(f"CPU kernels: {_FAILURES.get(status, f'status {status}')}")


class Workspace:
    """Scratch memory of one model: grows, is freed with its owner, and serves one call at a time."""

    def __init__(self, library: Library) -> None:
        self._free = library.c.specd_workspace_free
        self.pointer = library.c.specd_workspace_new()
        if not self.pointer:
            raise MemoryError("CPU kernels: no memory for a workspace")

    def __del__(self) -> None:
        pointer, self.pointer = getattr(self, "pointer", None), None
        if pointer:
            self._free(pointer)


def load_library(level: str | None = None) -> Library:
    """The kernels. level: None = SPECD_KERNELS, else the best. Raises ModelError when they were not built."""
    return _load(os.environ.get("SPECD_KERNELS", "") if level is None else level)


@functools.cache
def _load(level: str) -> Library:
    return Library(_open(), level)


@functools.cache
def _open() -> ctypes.CDLL:
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise ModelError(
            "the CPU kernels were not built (no C compiler when specd was installed?); install one and specd again, "
            'or set model.kernels = "torch"'
        )
    try:
        library = ctypes.CDLL(spec.origin)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ModelError(f"the CPU kernels cannot be loaded, install specd again: {error}") from error
    found = library.specd_abi()
    if found != _ABI:
        raise ModelError(f"the CPU kernels are of another version ({found}, not {_ABI}); install specd again")
    return library
