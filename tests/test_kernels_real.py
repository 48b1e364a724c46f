"""The kernels on the real model and real text: exact against torch's fp32, fast against exact, chunks and threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specd.attention.torch_attention import TorchAttention
from specd.models.gguf import GgufFile, read_metadata
from specd.models.llama import Llama
from specd.models.native import NativeLlama
from specd.text import Tokenizer
from tests.native import needs_kernels
from tests.tiny import CPU, greedy, make_batch, make_kv

pytestmark = [pytest.mark.real, needs_kernels]
ROOT = Path(__file__).parents[1]
LENGTH = 384
GAP = 1e-4  # nearer than this, the two best tokens of the reference may change places


@pytest.fixture(scope="module")
def file(real_model_path: Path) -> GgufFile:
    return GgufFile(real_model_path)


@pytest.fixture(scope="module")
def exact(file: GgufFile) -> NativeLlama:
    return NativeLlama(file.config, file, activations="exact")


@pytest.fixture(scope="module")
def fast(file: GgufFile) -> NativeLlama:
    return NativeLlama(file.config, file)


@pytest.fixture(scope="module")
def tokens(real_model_path: Path) -> torch.Tensor:
    tokenizer = Tokenizer.load(real_model_path, read_metadata=read_metadata)
    return torch.tensor(tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8"))[:LENGTH])


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def logits_of(model: Llama | NativeLlama, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    num_pages = -(-len(tokens) // 16)
    kv, parts, done = make_kv(model, num_pages=num_pages), [], 0
    with torch.inference_mode():
        for length in chunks:
            batch = make_batch([(length, done + length, list(range(num_pages)))])
            hidden, _ = model.forward(tokens[done : done + length], batch, kv)
            parts.append(model.logits(hidden))
            done += length
    return torch.cat(parts)


@pytest.fixture(scope="module")
def exact_logits(exact: NativeLlama, tokens: torch.Tensor) -> torch.Tensor:
    return logits_of(exact, tokens, [LENGTH])


def test_exact_equals_torch_in_fp32(file: GgufFile, tokens: torch.Tensor, exact_logits: torch.Tensor) -> None:
    reference = Llama(file.config, file, attention=TorchAttention(), dtype=torch.float32, device=CPU)
    expected = logits_of(reference, tokens, [LENGTH])
    assert (exact_logits - expected).norm() / expected.norm() < 1e-5
    best = expected.topk(2, dim=-1)
    clear = best.values[:, 0] - best.values[:, 1] >= GAP
    assert clear.sum() > 0.95 * LENGTH
    assert torch.equal(exact_logits.argmax(-1)[clear], best.indices[clear, 0])


def test_fast_is_near_exact(fast: NativeLlama, tokens: torch.Tensor, exact_logits: torch.Tensor) -> None:
    """int8 activations change few tokens, and perplexity by less than a part in a hundred."""
    got = logits_of(fast, tokens, [LENGTH])
    assert not torch.equal(got, exact_logits)
    assert (got.argmax(-1) == exact_logits.argmax(-1)).float().mean() > 0.95
    ours, theirs = got.log_softmax(-1), exact_logits.log_softmax(-1)
    assert (theirs.exp() * (theirs - ours)).sum(-1).mean() < 0.005
    losses = [-logs[:-1].gather(1, tokens[1:, None]).mean() for logs in (ours, theirs)]
    assert abs(losses[0] - losses[1]) < 0.01


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_chunks_and_threads_do_not_matter(mode: str, tokens: torch.Tensor, request: pytest.FixtureRequest) -> None:
    model: NativeLlama = request.getfixturevalue(mode)
    some = tokens[:150]
    expected = logits_of(model, some, [150])
    assert torch.equal(logits_of(model, some, [64, 1, 5, 16, 2, 62]), expected)
    torch.set_num_threads(1)
    assert torch.equal(logits_of(model, some, [100, 4, 46]), expected)


def test_it_knows_a_capital(fast: NativeLlama, exact: NativeLlama) -> None:
    """<|im_start|>user What is the capital of France?<|im_end|> <|im_start|>assistant, greedily."""
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    for model in (fast, exact):
        assert greedy(model, prompt, 8) == [504, 3575, 282, 4649, 314, 7042, 30, 2]


def test_weights_are_kept_as_small_as_the_file(fast: NativeLlama, real_model_path: Path) -> None:
    assert fast.weight_bytes() < real_model_path.stat().st_size
