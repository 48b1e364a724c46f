"""The sequences that are never trained on, from shards or from a corpus, chosen by the trainer's rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from specd.errors import ConfigError
from specd.train.batches import evenly, follows, sequences
from specd.train.corpus import GIVEN, read_corpus
from specd.train.shards import read_shards


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """One sequence of three tokens or more."""

    ids: torch.Tensor  # i64[n]
    learned: torch.Tensor  # bool[n] the model wrote what follows this token
    labels: dict[str, str]  # what the corpus says of it: "temperature", "task"


def read_held_out(*, shards: tuple[Path, ...], corpus: Path | None, num_tokens: int) -> list[HeldOut]:
    """As many as num_tokens allow, evenly spread. Raises ConfigError when there are none."""
    if bool(shards) == (corpus is not None):
        raise ConfigError("give one of --shards and --corpus")
    place = " ".join(map(str, shards or (corpus,)))
    found = _of_shards(*shards) if shards else _of_corpus(corpus)
    if not found:
        raise ConfigError(f"{place}: no sequence is held out")
    lens = torch.tensor([len(text.ids) for text in found])
    return [found[i] for i in evenly(list(range(len(found))), lens, num_tokens)]


def _of_shards(*folders: Path) -> list[HeldOut]:
    data = read_shards(*folders)
    answers = follows(data)
    spans = [slice(int(data.starts[s]), int(data.starts[s] + data.lens[s])) for s in sequences(data, held_out=True)]
    return [HeldOut(data.ids[span].clone(), answers[span].clone(), {}) for span in spans]


def _of_corpus(path: Path | None) -> list[HeldOut]:
    assert path is not None
    texts = read_corpus(path)
    labels = _labels(path, len(texts))
    found = []
    for text, label in zip(texts, labels, strict=True):
        if text.held_out and len(text.ids) >= 3:
            written = np.append(text.role[1:] != GIVEN, False)
            found.append(HeldOut(torch.from_numpy(text.ids).long(), torch.from_numpy(written), label))
    return found


def _labels(path: Path, count: int) -> list[dict[str, str]]:
    """What the corpus records of each sequence. Raises ConfigError when that is not one value a sequence."""
    labels: list[dict[str, str]] = [{} for _ in range(count)]
    with safe_open(path, framework="pt") as file:
        for name in ("temperature", "task"):
            if name not in file.keys():  # noqa: SIM118 (a file, not a mapping)
                continue
            values = file.get_tensor(name)
            if values.shape != (count,):
                raise ConfigError(f"{path}: {name} is {list(values.shape)}, for {count} sequences")
            for label, value in zip(labels, values.tolist(), strict=True):
                label[name] = f"{value:.3g}"
    return labels
