"""How near the CPU kernels come to the memory: measured time / (bytes read / measured bandwidth).

    python -m benchmarks.roofline             # some minutes
    python -m benchmarks.roofline --quick     # to see that it works

Three parts, all with m = 1, 2, 4, 8 and 16 rows: one projection of 64 MB in each format, fast and exact; the default
model's whole step (forward and logits) with 256 tokens of context; its parts. The bandwidth is that of a plain read of
as many bytes by the same threads, and is measured again in each round, since neighbours on the machine change it.
Medians over rounds. Bytes of a step: every weight once, and the keys and values of the context once. Writes
benchmarks/results/roofline.json.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from benchmarks.measure import arguments, write_result
from specd.bench.report import machine
from specd.kernels.library import Library, Workspace, load_library
from specd.kernels.pack import PackedMatrix, Rows, WeightMemory, linear_record
from specd.kv import PagedKV
from specd.models.fetch import resolve
from specd.models.gguf import GgufFile
from specd.models.native import Activations, NativeLlama
from specd.step import indptr
from specd.tensors import BatchInfo, batch_info

ROWS = (1, 2, 4, 8, 16)
CONTEXT = 256
PAGE_SIZE = 16
_COLUMNS = 1536
_MODES: tuple[Activations, ...] = ("fast", "exact")
# Format -> where a block holds its f16 scales: random bytes there could be NaN.
FORMATS = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.Q4_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.BF16: (0,),
    Kind.F16: (0,),
    Kind.F32: (0, 2),
}


def random_rows(kind: Kind, num_bytes: int) -> Rows:
    """About num_bytes of weights: random, but for scales (and float weights) that are all small and alike."""
    block, size = GGML_QUANT_SIZES[kind]
    blocks = _COLUMNS // block
    data = np.random.default_rng(0).integers(0, 256, (num_bytes // (blocks * size), blocks, size), dtype=np.uint8)
    for at in FORMATS[kind]:
        data[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return Rows(int(kind), data.reshape(len(data), -1), _COLUMNS)


class Bandwidth:
    """Seconds to read a byte, as these threads do it now."""

    def __init__(self, library: Library, threads: int, num_bytes: int) -> None:
        self._library, self._threads = library, threads
        self._data = WeightMemory().take(num_bytes)
        self._data[:] = 1

    def __call__(self) -> float:
        best = 1e9
        for _ in range(5):
            start = time.perf_counter()
            self._library.c.specd_read(
                self._library.functions, self._data.ctypes.data, self._data.nbytes // 4, self._threads
            )
            best = min(best, time.perf_counter() - start)
        return best / self._data.nbytes


def timed(call: Callable[[], object]) -> float:
    """The median of five, after one that may find the threads asleep."""
    call()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def rotated(items: list[int], turn: int) -> list[int]:
    """Each round begins with another one: what comes first may find a slow core."""
    at = turn % len(items)
    return items[at:] + items[:at]


def measure(
    calls: dict[int, Callable[[], object]], num_bytes: dict[int, int], bandwidth: Bandwidth, rounds: int
) -> list[dict[str, Any]]:
    """One entry for each m: medians of the time and of its ratio to the bytes' time in the same round."""
    times: dict[int, list[float]] = {m: [] for m in calls}
    ratios: dict[int, list[float]] = {m: [] for m in calls}
    for call in calls.values():
        call()
    for turn in range(rounds):
        seconds_a_byte = bandwidth()
        for m in rotated(list(calls), turn):
            times[m].append(timed(calls[m]))
            ratios[m].append(times[m][-1] / (num_bytes[m] * seconds_a_byte))
    first = times[next(iter(calls))]
    return [
        {
            "m": m,
            "ms": 1e3 * statistics.median(times[m]),
            "bytes": num_bytes[m],
            "over_roofline": statistics.median(ratios[m]),
            "over_m1": statistics.median([t / one for t, one in zip(times[m], first, strict=True)]),
        }
        for m in calls
    ]


def projection(
    library: Library, kind: Kind, mode: Activations, threads: int, num_bytes: int
) -> tuple[dict[int, Callable[[], object]], int]:
    """m -> a call of one projection, and the bytes of its weights."""
    matrix = PackedMatrix(library, WeightMemory(), random_rows(kind, num_bytes), name="test")
    record, workspace = linear_record(matrix), Workspace(library)

    def call(x: torch.Tensor, out: torch.Tensor) -> None:
        assert matrix.data.nbytes  # the record points into the matrix: it must live as long as the call
        status = library.c.specd_linear_rows(
            library.functions, ctypes.byref(record), int(mode == "fast"), x.data_ptr(), len(x), out.data_ptr(),
            workspace.pointer, threads,
        )  # fmt: skip
        library.check(status)

    shapes = {m: (torch.randn(m, matrix.cols), torch.empty(m, matrix.num_rows)) for m in ROWS}
    return {m: functools.partial(call, *tensors) for m, tensors in shapes.items()}, matrix.nbytes


def one_sequence(num_tokens: int, *, after: int) -> BatchInfo:
    """A sequence's num_tokens new tokens, with so many before them."""
    pages = np.arange(-(-(after + num_tokens) // PAGE_SIZE), dtype=np.int32)
    return batch_info(
        query_lens=np.asarray([num_tokens], np.int32),
        kv_lens=np.asarray([after + num_tokens], np.int32),
        page_indptr=indptr(np.asarray([len(pages)], np.int32)),
        page_indices=pages,
        slots=np.zeros(1, np.int32),
        page_size=PAGE_SIZE,
        device=torch.device("cpu"),
    )


def whole_step(model: NativeLlama, forward: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]) -> torch.Tensor:
    return model.logits(forward()[0])


def step_parts(model: NativeLlama) -> tuple[dict[str, dict[int, Callable[[], object]]], dict[str, dict[int, int]]]:
    """Calls and bytes of the whole step and of its two parts, by m."""
    shape = model.shape
    kv = PagedKV(
        num_layers=shape.num_layers, num_pages=-(-(CONTEXT + max(ROWS)) // PAGE_SIZE), page_size=PAGE_SIZE,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    tokens = torch.randint(0, shape.vocab_size, (CONTEXT + max(ROWS),))
    model.forward(tokens, one_sequence(len(tokens), after=0), kv)
    head = model.head.nbytes
    layers = model.weight_bytes() - head - (0 if model.embedding is model.head else model.embedding.nbytes)
    slot = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    calls: dict[str, dict[int, Callable[[], object]]] = {"forward": {}, "logits": {}, "step": {}}
    sizes: dict[str, dict[int, int]] = {"forward": {}, "logits": {}, "step": {}}
    for m in ROWS:
        forward = functools.partial(model.forward, tokens[:m], one_sequence(m, after=CONTEXT), kv)
        calls["forward"][m] = forward
        calls["logits"][m] = functools.partial(model.logits, forward()[0])
        calls["step"][m] = functools.partial(whole_step, model, forward)
        sizes["forward"][m] = layers + slot * (CONTEXT + m)
        sizes["logits"][m] = head
        sizes["step"][m] = sizes["forward"][m] + head
    return calls, sizes


def run(args: argparse.Namespace) -> None:
    before, library = machine(), load_library()
    threads, num_bytes = args.threads or os.cpu_count() or 1, (8 if args.quick else 64) << 20
    torch.set_num_threads(threads)
    bandwidth = Bandwidth(library, threads, num_bytes)
    speed = 1e-9 / bandwidth()
    print(f"{library.level}, {threads} threads, {speed:.1f} GB/s")
    entries: list[dict[str, Any]] = []

    def add(what: str, mode: str, found: list[dict[str, Any]]) -> None:
        entries.extend({"what": what, "activations": mode, **entry} for entry in found)
        cells = "".join(f"{e['ms']:9.2f} ({e['over_roofline']:4.2f}, {e['over_m1']:4.2f})" for e in found)
        print(f"{what:<10}{mode:<7}{cells}", flush=True)

    print(f"{'':<17}" + "".join(f"{f'm={m} ms (/roof, /m1)':>23}" for m in ROWS))
    for mode in _MODES:
        file = GgufFile(resolve(args.model))
        calls, sizes = step_parts(NativeLlama(file.config, file, activations=mode))
        for part in calls:
            own = Bandwidth(library, threads, sizes[part][1])  # caches hold more of a smaller part
            add(part, mode, measure(calls[part], sizes[part], own, args.rounds))
        for kind in FORMATS:
            some, size = projection(library, kind, mode, threads, num_bytes)
            add(str(kind.name), mode, measure(some, dict.fromkeys(ROWS, size), bandwidth, args.rounds))
    more = {"level": library.level, "threads": threads, "bandwidth_gb_per_s": speed, "context": CONTEXT}
    print(write_result("roofline", args, before, entries, more=more).name)


def main() -> None:
    parser = arguments("benchmarks.roofline", "The CPU kernels against the memory's bandwidth.", cells=False)
    parser.set_defaults(rounds=15)
    args = parser.parse_args()
    if args.quick:
        args.rounds = 2
    with torch.inference_mode():
        run(args)


if __name__ == "__main__":
    main()
