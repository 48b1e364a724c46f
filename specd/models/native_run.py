"""What every model in the CPU kernels asks of C: a forward over a batch, logits, and the best of them.

Legend: T packed tokens, R logits rows, H hidden, V logits width.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Sequence

import torch

from specd.kernels.library import CBatch, CModel, CTops, Library, Workspace, compute_lock
from specd.kernels.pack import address
from specd.kv import PagedKV
from specd.models.config import RopeConfig
from specd.models.layers import inverse_frequencies, rope_angles
from specd.tensors import BatchInfo, BestTokens

_ROPE_STEP = 1024  # positions that the rotary tables grow by
_KV_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


class RotaryTable:
    """Cosines and sines f32[positions, D / 2], made in steps as contexts grow and shared by a model's copies, which may
    compute on streams of their own."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self._inv_freq = inverse_frequencies(rope, head_dim)
        self.cosines = self.sines = torch.empty((0, head_dim // 2))
        self._growing = threading.Lock()

    def grow(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables, with at least num_positions rows."""
        with self._growing:
            while len(self.cosines) < num_positions:
                first = len(self.cosines)
                positions = torch.arange(first, first + _ROPE_STEP)
                cos, sin = (
                    table[:, 0, : len(self._inv_freq)]
                    for table in rope_angles(self._inv_freq, positions, torch.float32)
                )
                self.cosines, self.sines = torch.cat((self.cosines, cos)), torch.cat((self.sines, sin))
            return self.cosines, self.sines


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A forward's record and what it writes."""

    record: CBatch
    hidden: torch.Tensor
    aux: torch.Tensor | None
    kept: tuple[object, ...]  # what the record points to, beside the batch


class NativeRun:
    """A model's record, and scratch of its own. The owner keeps alive what the record points to.

    A call uses `torch.get_num_threads()` threads; calls of all models of the process take turns.
    """

    def __init__(self, library: Library, model: CModel, rotary: RotaryTable) -> None:
        self.library, self.model, self.rotary = library, model, rotary
        self._workspace = Workspace(library)

    def forward(
        self,
        tokens: torch.Tensor,
        batch: BatchInfo,
        kv: PagedKV,
        *,
        aux_layers: Sequence[int] = (),
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens i64[T] -> hidden [T, H] after the final norm, and the state after each of aux_layers (their number
        counts from 1) side by side, or None. states f32[T, F]: what a head's fusion reads.

        Raises ModelError for a token, position, page or slot that does not exist.
        """
        out = self._record(tokens, batch, kv, aux_layers, states)
        with compute_lock:
            status = self.library.c.specd_forward(
                self.library.functions,
                ctypes.byref(self.model),
                ctypes.byref(out.record),
                self._workspace.pointer,
                torch.get_num_threads(),
            )
        self.library.check(status)
        return out.hidden, out.aux

    def forward_best(
        self,
        tokens: torch.Tensor,
        batch: BatchInfo,
        kv: PagedKV,
        rows: torch.Tensor,
        *,
        aux_layers: Sequence[int] = (),
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, BestTokens]:
        """`forward`, and `best` of the hidden rows i64[R], in one call and one parallel region: the same bits."""
        out = self._record(tokens, batch, kv, aux_layers, states)
        rows = rows.contiguous()
        best = BestTokens(torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int64))
        tops = CTops(values=address(best.values), places=address(best.tokens), lse=None, k=1)
        with compute_lock:
            status = self.library.c.specd_forward_top(
                self.library.functions,
                ctypes.byref(self.model),
                ctypes.byref(out.record),
                address(rows),
                len(rows),
                ctypes.byref(tops),
                self._workspace.pointer,
                torch.get_num_threads(),
            )
        self.library.check(status)
        return out.hidden, out.aux, best

    def _record(
        self,
        tokens: torch.Tensor,
        batch: BatchInfo,
        kv: PagedKV,
        aux_layers: Sequence[int],
        states: torch.Tensor | None,
    ) -> _Call:
        hidden_size = self.model.hidden
        assert kv.layers[0].shape[1:] == (2, batch.page_size, self.model.kv_heads, self.model.head_dim), batch.page_size
        assert len(kv.layers) >= self.model.num_layers, (len(kv.layers), self.model.num_layers)
        hidden = torch.empty((len(tokens), hidden_size))
        aux = torch.empty((len(tokens), len(aux_layers) * hidden_size)) if aux_layers else None
        layers = [address(layer) for layer in kv.layers[: self.model.num_layers]]
        cosines, sines = self.rotary.grow(int(batch.kv_lens_cpu.max(initial=0)))
        parents = None if batch.tree is None else batch.tree.parents.contiguous()
        tokens = tokens.contiguous()
        record = CBatch(
            tokens=address(tokens),
            positions=address(batch.positions),
            write_slots=address(batch.write_slots),
            query_lens=address(batch.query_lens_cpu),
            kv_lens=address(batch.kv_lens_cpu),
            kv_indptr=address(batch.kv_indptr_cpu),
            kv_indices=address(batch.kv_indices_cpu),
            parents=None if parents is None else address(parents),
            kv=ctypes.cast((ctypes.c_void_p * len(layers))(*layers), ctypes.c_void_p),
            cosines=address(cosines),
            sines=address(sines),
            num_tokens=len(tokens),
            num_sequences=batch.num_rows,
            tree_nodes=0 if parents is None else parents.shape[1],
            page_size=batch.page_size,
            num_pages=len(kv.layers[0]),
            num_positions=len(cosines),
            kv_kind=_KV_KINDS[kv.layers[0].dtype],
            num_aux=len(aux_layers),
            hidden=address(hidden),
            aux=None if aux is None else address(aux),
            states=None if states is None else address(states),
            state_width=0 if states is None else states.shape[1],
        )
        record.aux_layers[: len(aux_layers)] = tuple(aux_layers)
        return _Call(record, hidden, aux, (tokens, layers, cosines, sines, parents, states))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] after the final norm -> f32[R, V]; V counts padding rows of the head."""
        hidden = hidden.contiguous()
        logits = torch.empty((len(hidden), self.model.head.rows))
        with compute_lock:
            status = self.library.c.specd_logits(
                self.library.functions,
                ctypes.byref(self.model),
                address(hidden),
                len(hidden),
                address(logits),
                self._workspace.pointer,
                torch.get_num_threads(),
            )
        self.library.check(status)
        return logits

    def best(self, hidden: torch.Tensor) -> BestTokens:
        """hidden [R, H] -> the largest logits; no row of logits is ever written."""
        hidden = hidden.contiguous()
        values, places = torch.empty(len(hidden)), torch.empty(len(hidden), dtype=torch.int64)
        with compute_lock:
            status = self.library.c.specd_argmax(
                self.library.functions,
                ctypes.byref(self.model),
                address(hidden),
                len(hidden),
                address(values),
                address(places),
                self._workspace.pointer,
                torch.get_num_threads(),
            )
        self.library.check(status)
        return BestTokens(values, places)
