"""Runs the target over a corpus by batched prefill and keeps its hidden states as shards.

Whole sequences are packed until a call has `batch_tokens` tokens; what is longer than that is a call of its own. The
target is loaded as the daemon loads it, so a head learns from the very numbers it will be given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from specd.attention.torch_attention import TorchAttention
from specd.errors import ConfigError
from specd.kv import PagedKV
from specd.models.base import Model
from specd.models.registry import KernelChoice, LoadedModel, load_target
from specd.step import indptr
from specd.tensors import BatchInfo, batch_info
from specd.train.corpus import GIVEN, Text, join, read_corpus
from specd.train.shards import Origin, read_origin, shard_path, write_shard
from specd.train.target import weights_fingerprint

Features = Literal["last", "pre", "aux"]
_PAGE = 16  # tokens of a KV page
_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class CollectSettings:
    model: Path  # a .gguf file or a folder
    corpus: Path  # the file that the sequences are from
    output: Path
    features: Features = "last"
    join: int = 0  # tokens of a joined sequence; 0: none are joined
    batch_tokens: int = 2048
    shard_tokens: int = 65536
    kernels: KernelChoice = dataclasses.field(default_factory=lambda: KernelChoice("auto"))


def collect(settings: CollectSettings, texts: Sequence[Text] | None = None) -> Origin:
    """Writes every shard that is not there yet. Raises ConfigError and ModelError before anything is computed.

    texts: what settings.corpus holds, where that is not a corpus file.
    """
    target = load_target(
        settings.model, dtype="auto", device=_CPU, attention=TorchAttention(), kernels=settings.kernels
    )
    texts = read_corpus(settings.corpus) if texts is None else texts
    if settings.join:
        texts = join(list(texts), settings.join, target.eos_ids)
    _check(texts, target, settings)
    groups = list(grouped(texts, settings.shard_tokens))
    origin = Origin(
        target=target.name,
        fingerprint=weights_fingerprint(settings.model),
        features=settings.features,
        kernels=target.kernels,
        corpus=_digest(texts),
        num_shards=len(groups),
    )
    missing = _missing(settings.output, origin)
    tokens = [sum(len(t.ids) for t in group) for group in groups]
    _check_space(settings, target.model, sum(tokens[i] for i in missing))
    progress = _Progress(sum(tokens[i] for i in missing))
    for index in missing:
        tensors = run_target(target.model, groups[index], settings.features, settings.batch_tokens, progress)
        write_shard(shard_path(settings.output, index), tensors, origin)
    progress.close(f"{len(missing)} of {len(groups)} shards written to {settings.output}")
    return origin


def grouped(texts: Sequence[Text], num_tokens: int) -> Iterator[list[Text]]:
    """Consecutive sequences, as many as fit into num_tokens; at least one."""
    group: list[Text] = []
    size = 0
    for text in texts:
        if group and size + len(text.ids) > num_tokens:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text.ids)
    if group:
        yield group


@torch.inference_mode()
def run_target(
    model: Model, texts: Sequence[Text], features: Features, batch_tokens: int, progress: _Progress
) -> dict[str, torch.Tensor]:
    """A shard's tensors."""
    hidden, aux, best = [], [], []
    for group in grouped(texts, batch_tokens):
        batch, kv = _prefill(model, [len(text.ids) for text in group])
        tokens = torch.from_numpy(np.concatenate([text.ids for text in group])).long()
        out, read = model.forward(tokens, batch, kv, features=features)
        hidden.append(out.to(torch.bfloat16))
        best.append(model.best(out).tokens.to(torch.int32))
        if features != "last":
            assert read is not None
            aux.append(read.to(torch.bfloat16))
        progress.add(len(tokens))
    role = np.concatenate([text.role for text in texts])
    tensors = {
        "input_ids": torch.from_numpy(np.concatenate([text.ids for text in texts])),
        "loss_mask": torch.from_numpy((role != GIVEN).astype(np.uint8)),
        "lens": torch.tensor([len(text.ids) for text in texts], dtype=torch.int32),
        "held_out": torch.tensor([text.held_out for text in texts], dtype=torch.uint8),
        "hidden": torch.cat(hidden),
        "best": torch.cat(best),
    }
    return tensors | ({"features": torch.cat(aux)} if aux else {})


def _prefill(model: Model, lens: list[int]) -> tuple[BatchInfo, PagedKV]:
    """Every sequence from its first token, with pages of its own."""
    lengths = np.asarray(lens, np.int32)
    pages = indptr((lengths + _PAGE - 1) // _PAGE)
    batch = batch_info(
        query_lens=lengths,
        kv_lens=lengths,
        page_indptr=pages,
        page_indices=np.arange(pages[-1], dtype=np.int32),
        slots=np.arange(len(lens), dtype=np.int32),
        page_size=_PAGE,
        device=model.device,
    )
    kv = PagedKV(
        num_layers=model.shape.num_layers,
        num_pages=int(pages[-1]),
        page_size=_PAGE,
        num_kv_heads=model.shape.num_kv_heads,
        head_dim=model.shape.head_dim,
        dtype=model.dtype,
        device=model.device,
    )
    return batch, kv


def _check(texts: Sequence[Text], target: LoadedModel, settings: CollectSettings) -> None:
    shape = target.model.shape
    highest, longest = max(int(text.ids.max()) for text in texts), max(len(text.ids) for text in texts)
    if highest >= shape.vocab_size or min(int(text.ids.min()) for text in texts) < 0:
        raise ConfigError(f"{settings.corpus}: holds token {highest}; {target.name} has {shape.vocab_size} tokens")
    if longest > shape.max_position:
        raise ConfigError(
            f"{settings.corpus}: a sequence has {longest} tokens; {target.name} was made for {shape.max_position}"
        )


def _digest(texts: Sequence[Text]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text.ids).to_bytes(4, "little") + bytes([text.held_out]))
        digest.update(text.ids.tobytes() + text.role.tobytes())
    return digest.hexdigest()


def _missing(folder: Path, origin: Origin) -> list[int]:
    """Shards that are still to be computed. Raises ConfigError when the folder holds those of another run."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("shard-*.safetensors"):
        found = read_origin(path)
        if found != origin:
            raise ConfigError(f"{path}: is of another run ({found}); give an empty folder for {origin}")
    return [i for i in range(origin.num_shards) if not shard_path(folder, i).exists()]


def _check_space(settings: CollectSettings, model: Model, tokens: int) -> None:
    states = 1 + {"last": 0, "pre": 1, "aux": 3}[settings.features]
    need = tokens * (states * model.shape.hidden_size * 2 + 9)
    free = shutil.disk_usage(settings.output).free
    print(f"{tokens} tokens to compute, {need / 1e6:.0f} MB of shards", file=sys.stderr, flush=True)
    if need > free:
        raise ConfigError(f"{settings.output}: {need} bytes are needed, {free} are free")


class _Progress:
    """Tokens done, rate and time left on standard error; silent where that is not a terminal."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._shown = sys.stderr.isatty()

    def add(self, tokens: int) -> None:
        self._done += tokens
        if self._shown:
            rate = self._done / max(time.monotonic() - self._start, 1e-6)
            left = (self._total - self._done) / rate
            line = f"\r{self._done}/{self._total} tokens, {rate:.0f} a second, {left:.0f} s left   "
            print(line, end="", file=sys.stderr, flush=True)

    def close(self, message: str) -> None:
        seconds = time.monotonic() - self._start
        start = "\n" if self._shown else ""
        print(f"{start}{message}: {self._done} tokens in {seconds:.1f} s", file=sys.stderr, flush=True)
