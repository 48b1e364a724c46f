"""A row's result is a function of its own inputs, bit for bit: any batch, chunks, threads, level, history of its KV."""

from __future__ import annotations

import math
import os
import signal
import time
import warnings
from collections.abc import Iterator

import pytest
import torch

from specd.kv import PagedKV
from specd.models.native import NativeLlama
from specd.tensors import TokenTree, with_tree
from tests.native import KINDS, LEVELS, Kind, Projection, native_llama, needs_kernels, random_rows
from tests.test_kernels_formats import inputs
from tests.tiny import CPU, LLAMA3_ROPE, make_batch

pytestmark = needs_kernels
MODES = pytest.mark.parametrize("activations", ["fast", "exact"])
LONG = 150  # tokens: three segments of attention


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@MODES
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_projections_are_the_same_bits_everywhere(kind: Kind, activations: str) -> None:
    rows, x = random_rows(kind, 75, 256), inputs(17, 256)
    expected = Projection(rows, level="portable")(x, activations=activations)
    for level in LEVELS:
        projection = Projection(rows, level=level)
        for count in range(1, 18):
            assert torch.equal(projection(x[:count], activations=activations), expected[:count]), (level, count)
        assert torch.equal(projection(x.flip(0), activations=activations), expected.flip(0)), level
        for threads in (2, 3, 7):
            assert torch.equal(projection(x, activations=activations, threads=threads), expected), (level, threads)


def tokens_of(length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed))


def poisoned_kv(model: NativeLlama, num_pages: int, page_size: int, dtype: torch.dtype = torch.float32) -> PagedKV:
    """Pages full of NaN: what was never written must not be read."""
    kv = PagedKV(
        num_layers=model.shape.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=model.shape.num_kv_heads,
        head_dim=model.shape.head_dim,
        dtype=dtype,
        device=CPU,
    )
    for layer in kv.layers:
        layer.fill_(math.nan)
    return kv


def run(
    model: NativeLlama,
    tokens: torch.Tensor,
    chunks: list[int],
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits of every token, fed in chunks."""
    num_pages = -(-len(tokens) // page_size)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
    kv, parts, done = poisoned_kv(model, num_pages, page_size, dtype), [], 0
    for length in chunks:
        batch = make_batch([(length, done + length, pages)], page_size=page_size)
        hidden, _ = model.forward(tokens[done : done + length], batch, kv)
        parts.append(model.logits(hidden))
        done += length
    return torch.cat(parts)


@MODES
@pytest.mark.parametrize("level", LEVELS)
def test_chunks_pages_threads_and_levels(level: str, activations: str) -> None:
    tokens = tokens_of(LONG)
    expected = run(native_llama(level="portable", activations=activations), tokens, [LONG])
    assert expected.isfinite().all()
    model = native_llama(level=level, activations=activations)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for chunks, page_size in (([LONG], 16), ([1] * LONG, 16), ([63, 2, 16, 5, 64], 1), ([17] * 8 + [14], 5)):
            got = run(model, tokens, chunks, page_size=page_size)
            assert torch.equal(got, expected), (threads, chunks, page_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_kv(dtype: torch.dtype) -> None:
    tokens = tokens_of(LONG)
    wide = run(native_llama(), tokens, [LONG])
    narrow = run(native_llama(level="portable"), tokens, [LONG], dtype=dtype)
    assert 0 < (narrow - wide).abs().max() < 0.1 * wide.abs().max()
    for level in LEVELS:
        assert torch.equal(run(native_llama(level=level), tokens, [100, 1, 2, 47], dtype=dtype), narrow), level


@MODES
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (6, 1)], ids=str)
def test_batch_mates_do_not_matter(heads: tuple[int, int], activations: str) -> None:
    """Prefill, verify and decode rows in one batch, in two orders, against each alone."""
    model = native_llama(
        activations=activations, num_heads=heads[0], num_kv_heads=heads[1], hidden_size=96, rope=LLAMA3_ROPE
    )
    texts = [tokens_of(n, seed) for seed, n in enumerate((70, 9, 130))]
    fresh = (40, 1, 5)  # tokens of each text that the shared batch computes
    alone = [run(model, text, [len(text)])[-new:] for text, new in zip(texts, fresh, strict=True)]
    for order in ([0, 1, 2], [2, 0, 1]):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            kv = poisoned_kv(model, 27, 16)
            pages = [list(range(9 * i, 9 * i + 9)) for i in range(3)]
            for i, (text, new) in enumerate(zip(texts, fresh, strict=True)):
                old = len(text) - new
                model.forward(text[:old], make_batch([(old, old, pages[i])]), kv)
            batch = make_batch([(fresh[i], len(texts[i]), pages[i]) for i in order])
            hidden, _ = model.forward(torch.cat([texts[i][-fresh[i] :] for i in order]), batch, kv)
            assert torch.equal(model.logits(hidden), torch.cat([alone[i] for i in order])), (order, threads)


@MODES
@pytest.mark.parametrize("prefix", [3, 61, 128])
def test_a_tree_gives_what_its_chains_would(prefix: int, activations: str) -> None:
    """Every node against the chain of the prefix and its ancestors; the prefixes put the tree across segments."""
    parents = [[-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 2, 3, 0, 5]]
    depths = [[0, 1, 1, 2, 2, 2, 3], [0, 1, 2, 3, 4, 1, 2]]
    model, page_size = native_llama(activations=activations), 8
    texts = [tokens_of(prefix, seed) for seed in (1, 2)]
    drafted = torch.stack([tokens_of(7, seed) for seed in (3, 4)])
    num_pages = -(-(prefix + 7) // page_size)
    kv = poisoned_kv(model, 2 * num_pages, page_size)
    pages = [list(range(num_pages)), list(range(num_pages, 2 * num_pages))]
    first = make_batch([(prefix, prefix, p) for p in pages], page_size=page_size)
    model.forward(torch.cat(texts), first, kv)
    tree = TokenTree(drafted, torch.tensor(parents), torch.tensor(depths))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        batch = with_tree(make_batch([(7, prefix + 7, p) for p in pages], page_size=page_size), tree)
        hidden, _ = model.forward(drafted.flatten(), batch, kv)
        logits = model.logits(hidden).view(2, 7, -1)
        for row in range(2):
            for node in range(7):
                path, at = [], node
                while at >= 0:
                    path.insert(0, int(drafted[row, at]))
                    at = parents[row][at]
                chain = run(model, torch.cat([texts[row], torch.tensor(path)]), [prefix, len(path)])
                assert torch.equal(logits[row, node], chain[-1]), (threads, row, node)


@MODES
@pytest.mark.parametrize("level", LEVELS)
def test_argmax_is_that_of_the_logits(level: str, activations: str) -> None:
    model = native_llama(level=level, activations=activations, vocab_size=203, tied=True)
    hidden = torch.randn(21, 64, generator=torch.Generator().manual_seed(2))
    hidden[4] = 0.0  # all logits equal: the lowest token
    hidden[9, 3] = math.nan
    logits = model.logits(hidden)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        best = model.best(hidden)
        values, places = best.values, best.tokens
        assert torch.equal(values.isnan(), torch.arange(21) == 9)
        good = torch.arange(21) != 9
        assert torch.equal(values[good], logits.amax(-1)[good])
        assert torch.equal(places[good], logits.argmax(-1)[good])
        assert places[4] == 0


def test_the_float_environment_of_a_thread_does_not_matter() -> None:
    """A library may have told a thread to flush denormals: a row's bits would depend on who computes it."""
    projection, x = Projection(random_rows(Kind.F32, 75, 64), level=""), 1e-38 * torch.randn(17, 64)
    expected = projection(x, activations="exact")
    assert ((expected != 0) & (expected.abs() < 1e-38)).any()
    torch.set_flush_denormal(True)
    try:
        for threads in (1, 3):
            got = projection(x, activations="exact", threads=threads)
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), threads
        assert torch.tensor([1e-38]).mul(0.1).item() == 0.0  # and the caller has what it asked for
    finally:
        torch.set_flush_denormal(False)


def test_a_child_of_fork_computes_too() -> None:
    """Its parent's threads are not there, and whoever computed in the parent does not return."""
    torch.set_num_threads(2)
    model, tokens = native_llama(), tokens_of(LONG)
    expected = run(model, tokens, [LONG])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads, which is the point
        child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(run(model, tokens, [LONG]), expected) else 1)
    status, deadline = None, time.monotonic() + 30
    while status is None and time.monotonic() < deadline:
        pid, found = os.waitpid(child, os.WNOHANG)
        status = found if pid else None
        time.sleep(0.01)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status == 0
    assert torch.equal(run(model, tokens, [LONG]), expected)
