"""The default model for proofs of identity: the committed reference, engines over one copy of the weights, splits.

A split is the first place where two token sequences differ. Text after it is another text, so nothing behind it is
compared. It is allowed only where two tokens are closer than GAP: rounding differs between batch shapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specd.attention.torch_attention import TorchAttention
from specd.config import Config, KVConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from specd.engine import Engine
from specd.models.gguf import GgufFile
from specd.models.registry import KernelChoice, LoadedModel, load_target
from specd.pretokenizer import build_backend
from specd.request import Request, SamplingParams, SequenceStats, SpeculationParams
from tests.tiny import CPU, hf_config

GAP = 1e-4  # of logits
PAGE_SIZE = 16
THREADS = min(2, len(os.sched_getaffinity(0)))
# The forwards that are compared with fp32 references: torch, or specd's own kernels in their exact mode.
KERNELS: Any = os.environ.get("SPECD_TEST_KERNELS", "torch")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A prompt and what transformers makes of it: greedy tokens, and the gap of the two best logits at each."""

    name: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Where a sequence leaves what was expected, and how close the two tokens were there (logits)."""

    name: str
    position: int
    gap: float


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    token_ids: tuple[int, ...]
    stats: SequenceStats


@functools.cache
def reference() -> dict[str, Case]:
    """The committed file, by prompt name."""
    content = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text(encoding="utf-8"))
    cases = [
        Case(p["name"], tuple(p["prompt_ids"]), tuple(p["output_ids"]), tuple(p["gaps"])) for p in content["prompts"]
    ]
    return {case.name: case for case in cases}


# ---------------------------------------------------------------- engines

_loaded: dict[Path, LoadedModel] = {}


def load(path: Path) -> LoadedModel:
    """The checkpoint in fp32; inside `shared_weights` it is read once."""
    kernels = KernelChoice(KERNELS, "exact", "none")
    return _loaded.get(path) or _load_once(
        path, dtype="float32", device=CPU, attention=TorchAttention(), kernels=kernels
    )


def _load_once(path: Path, *, dtype: str, **options: Any) -> LoadedModel:
    """`load_target` for engines that may share weights: a model keeps no state."""
    assert dtype == "float32", "what is shared here is fp32"
    if path not in _loaded:
        _loaded[path] = load_target(path, dtype=dtype, **options)
    return _loaded[path]


@contextlib.contextmanager
def shared_weights() -> Iterator[None]:
    """Engines made inside load each checkpoint once; it is freed at the end, and torch's threads are set back."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specd.assembly.load_target", _load_once)
        try:
            yield
        finally:
            _loaded.clear()
            torch.set_num_threads(threads)


@contextlib.asynccontextmanager
async def engine_of(
    path: Path,
    draft: str,
    *,
    draft_len: int | str,
    max_running: int = 8,
    max_tokens: int = 2048,
    max_len: int = 512,
    num_pages: int | None = None,
) -> AsyncIterator[Engine]:
    """An engine on the real model in fp32. num_pages: of the pool, for as many preemptions as it takes."""
    config = Config(
        model=ModelConfig(
            path=str(path), max_len=max_len, dtype="float32", threads=THREADS, kernels=KERNELS, activations="exact"
        ),
        speculation=SpeculationConfig(draft=draft, draft_len=draft_len, self_check=False),
        scheduler=SchedulerConfig(max_running=max_running, max_tokens=max_tokens),
        kv=KVConfig(memory="auto" if num_pages is None else num_pages * _page_bytes(path, draft), page_size=PAGE_SIZE),
    )
    engine = await Engine.create(config)
    try:
        if num_pages is not None:
            assert engine.stats().pages_total == num_pages
        yield engine
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.pages_free) == (0, 0, stats.pages_total), "something leaked"
    finally:
        await engine.close()


def _page_bytes(path: Path, draft: str) -> int:
    config = load(path).config
    kind, _, argument = draft.partition(":")
    more = {"layers": int(argument or 1), "lm": config.num_layers if argument else 1, "mtp": 1, "mtp+ngram": 1}
    layers = config.num_layers + more.get(kind, 0)
    features = config.hidden_size if kind in ("mtp", "mtp+ngram") else 0
    return (2 * layers * config.num_kv_heads * config.head_dim + features) * PAGE_SIZE * torch.float32.itemsize


async def run(engine: Engine, requests: Iterable[Request]) -> dict[str, Output]:
    """Submits all of them at once, so that the first ones make one batch; the outputs by request id."""
    streams = [engine.submit(request) for request in requests]
    outputs = await asyncio.gather(*(_read(stream) for stream in streams))
    return {stream.request.request_id: output for stream, output in zip(streams, outputs, strict=True)}


async def _read(stream: AsyncIterator[Any]) -> Output:
    deltas = [delta async for delta in stream]
    last = deltas[-1]
    assert last.error is None, last.error
    return Output(tuple(token for delta in deltas for token in delta.token_ids), last.stats)


def greedy(case: Case, num_tokens: int, *, max_draft: int | None = None) -> Request:
    """The reference's own question: greedy, past the end of sequence."""
    params = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)
    return Request(case.name, case.prompt_ids, params, SpeculationParams(max_draft=max_draft))


# ---------------------------------------------------------------- comparing


def first_difference(ours: Sequence[int], expected: Sequence[int]) -> int | None:
    """Where they first differ; a sequence that stops early differs there."""
    if len(ours) == len(expected) and tuple(ours) == tuple(expected):
        return None
    pairs = zip(ours, expected, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(expected)))


def splits(outputs: dict[str, Output], num_tokens: int) -> list[Split]:
    """Greedy outputs against the reference."""
    found = []
    for name, output in outputs.items():
        case = reference()[name]
        position = first_difference(output.token_ids, case.output_ids[:num_tokens])
        if position is not None:
            gap = case.gaps[position] if len(output.token_ids) == num_tokens else float("inf")
            found.append(Split(name, position, gap))
    return found


def check(found: list[Split], *, what: str, report: Callable[[str], None]) -> None:
    """Reports splits between near-equal tokens, and fails on any other."""
    for split in found:
        report(f"{what}: {split.name} splits at token {split.position}, where the gap is {split.gap:.2e}")
    wrong = [split for split in found if split.gap >= GAP]
    assert not wrong, f"{what}: {wrong}"


# ---------------------------------------------------------------- a draft model that is nearly the target


def write_noisy_copy(path: Path, folder: Path, *, strength: float, seed: int = 0) -> Path:
    """A safetensors folder of the GGUF's weights with seeded noise on the layers' matrices, and the same tokenizer.

    strength: the noise's standard deviation, relative to each matrix's own.
    """
    file = GgufFile(path)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in file.items():
        if ".layers." in name and tensor.ndim == 2:
            tensor += torch.randn(tensor.shape, generator=generator) * (strength * tensor.std())
        weights[name] = tensor.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(file.config)))
    backend = build_backend(file.metadata)
    backend.save(str(folder / "tokenizer.json"))
    names = {key: backend.id_to_token(file.metadata[f"tokenizer.ggml.{key}_token_id"]) for key in ("bos", "eos")}
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", **{f"{key}_token": name for key, name in names.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder
