"""Tiny targets and corpora for the tests of training."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from specd.models.registry import KernelChoice
from specd.train.collect import CollectSettings, Features, collect
from specd.train.corpus import Text
from tests.tiny import tiny_config, tiny_weights, write_hf_folder

TORCH = KernelChoice("torch")


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


def run_ranks(words: Sequence[Sequence[str]], *, patch: str = "", timeout_s: float = 120.0) -> list[tuple[int, str]]:
    """`specd` with words[r] as rank r of len(words), all at a time: exit code and standard error of each.

    patch: Python that every rank runs before, with `rank` set. TimeoutExpired when one has not ended in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = f"import os, sys\nrank = int(os.environ['RANK'])\n{patch}\nfrom specd.cli import main\nsys.exit(main())"
    processes = []
    for rank, line in enumerate(words):
        where = {"RANK": str(rank), "WORLD_SIZE": str(len(words)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env = os.environ | where | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script, *line]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=timeout_s)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]
