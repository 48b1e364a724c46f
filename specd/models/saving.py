"""Safetensors files with the mode that any other new file has."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from specd.errors import OutputError


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Replaces the file. `save_file` alone leaves it readable by its owner only, whatever the umask.

    Raises OutputError where the disk is full.
    """
    path.unlink(missing_ok=True)
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # 0666 less the umask, which cannot be read without being set
    try:
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OutputError(f"{path}: cannot be written: {error}") from error
    path.chmod(mode)
