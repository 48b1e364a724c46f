"""Tiny targets and corpora for the tests of training."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore

from specd.models.registry import KernelChoice
from specd.train.collect import CollectSettings, Features, collect
from specd.train.corpus import Text
from specd.train.distil import DraftSettings
from specd.train.mtp import MtpSettings
from specd.train.plan import Plan
from tests.tiny import tiny_config, tiny_weights, write_hf_folder

TORCH = KernelChoice("torch")
_Settings = TypeVar("_Settings", MtpSettings, DraftSettings)


def random_texts(count: int, *, vocab_size: int, shortest: int = 8, longest: int = 24, seed: int = 0) -> list[Text]:
    """Given for the first three tokens, then an answer; every fourth held out."""
    generator = np.random.default_rng(seed)
    texts = []
    for index in range(count):
        size = int(generator.integers(shortest, longest + 1))
        ids = generator.integers(0, vocab_size, size).astype(np.int32)
        texts.append(Text(ids, np.where(np.arange(size) < 3, 0, 2).astype(np.uint8), index % 4 == 0))
    return texts


def write_corpus(path: Path, texts: list[Text], *, held_out: bool = True) -> Path:
    tensors = {
        "ids": torch.from_numpy(np.concatenate([text.ids for text in texts])),
        "role": torch.from_numpy(np.concatenate([text.role for text in texts])),
        "lens": torch.tensor([len(text.ids) for text in texts], dtype=torch.int32),
    }
    if held_out:
        tensors["held_out"] = torch.tensor([text.held_out for text in texts], dtype=torch.uint8)
    save_file(tensors, path)
    return path


def nearly_bigram(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Large embeddings, small layers: the next token is almost a function of the last, and so easily learned."""
    scales = {"embed_tokens": 20.0, "lm_head": 4.0, "o_proj": 0.2, "down_proj": 0.2}
    return {name: weight * scales.get(name.split(".")[-2], 1.0) for name, weight in weights.items()}


def tiny_shards(
    folder: Path, texts: list[Text], *, features: Features = "last", shard_tokens: int = 512
) -> tuple[Path, Path]:
    """A tiny target's folder and its shards of these texts."""
    config = tiny_config(num_layers=6)
    model = write_hf_folder(folder / "model", config=config, weights=nearly_bigram(tiny_weights(config)))
    corpus = write_corpus(folder / "corpus.safetensors", texts)
    settings = CollectSettings(
        model,
        corpus,
        folder / "shards",
        features=features,
        shard_tokens=shard_tokens,
        batch_tokens=100,
        kernels=TORCH,
    )
    collect(settings)
    return model, folder / "shards"


def run_ranks(
    words: Sequence[Sequence[str]], *, patch: str = "", hangs: int | None = None, timeout_s: float = 120.0
) -> list[tuple[int, str]]:
    """`specd` with words[r] as rank r of len(words), all at a time: exit code and standard error of each.

    patch: Python that every rank runs before, with `rank` set. hangs: a rank that is killed once the others have ended.
    TimeoutExpired when one has not ended in time.
    """
    # As under torchrun, the store that they meet at is not theirs: a port that is bound already cannot be taken.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    script = f"import os, sys\nrank = int(os.environ['RANK'])\n{patch}\nfrom specd.cli import main\nsys.exit(main())"
    processes = []
    for rank, line in enumerate(words):
        env = os.environ | meeting | {"RANK": str(rank), "WORLD_SIZE": str(len(words)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script, *line]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        errors = {}
        for rank in sorted(range(len(words)), key=lambda rank: rank == hangs):
            if rank == hangs:
                processes[rank].kill()
            errors[rank] = processes[rank].communicate(timeout=timeout_s)[1]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, errors[rank]) for rank, process in enumerate(processes)]


def changed(settings: _Settings, **values: Any) -> _Settings:
    """The settings of a training run with other values, of its plan too."""
    names = {field.name for field in dataclasses.fields(Plan)}
    plan = dataclasses.replace(settings.plan, **{name: value for name, value in values.items() if name in names})
    own = {name: value for name, value in values.items() if name not in names}
    return dataclasses.replace(settings, plan=plan, **own)
