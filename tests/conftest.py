"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported: tests never reach for the hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def _torch_threads() -> Iterator[None]:
    """Tiny tensors gain nothing from more threads; real-model tests that do set their own."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """The default model's GGUF file, fetched once into the user's cache. No network: skips, or fails when CI is set."""
    from specd.errors import FetchError
    from specd.models import fetch

    try:
        return fetch.resolve("smollm2-135m", progress=False)
    except FetchError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the default model is not in the cache and cannot be fetched: {error}")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tiny random Llama, its tokenizer and a chat template."""
    from tests.tiny import write_hf_folder

    return write_hf_folder(tmp_path_factory.mktemp("tiny"))
