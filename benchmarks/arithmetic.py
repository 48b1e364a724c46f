"""What the CPU kernels' two modes do to the model's output, on real text, against torch in float32.

    python -m benchmarks.arithmetic             # some minutes
    python -m benchmarks.arithmetic --quick     # to see that it works

The text: the project's licence and README, in windows of --tokens tokens (teacher-forced), and the built-in chat
prompts. `clear` are the positions at which the reference's two best logits are 1e-4 apart or more. Perplexity is that
of the text under each mode; KL is of the next-token distributions. Also whether logits are the same bits in chunks of
1 to 16 tokens, by one thread and by all. Writes benchmarks/results/arithmetic.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import arguments, write_result
from specd.attention.torch_attention import TorchAttention
from specd.bench.prompts import CHAT
from specd.bench.report import machine
from specd.kv import PagedKV
from specd.models.fetch import resolve
from specd.models.gguf import GgufFile, read_metadata
from specd.models.llama import Llama
from specd.models.native import NativeLlama
from specd.step import indptr
from specd.tensors import batch_info
from specd.text import Tokenizer

CLEAR_GAP = 1e-4
CHUNKS = (*range(1, 17),)
_PAGE_SIZE = 16
_ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(slots=True)
class Sums:
    """Sums over positions."""

    positions: int = 0
    clear: int = 0
    equal: int = 0
    clear_equal: int = 0
    difference: float = 0.0  # squared, of logits
    reference: float = 0.0
    kl: float = 0.0
    loss: float = 0.0
    num_next: int = 0

    def add(self, logits: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor) -> None:
        best = reference.topk(2, dim=-1)
        equal = logits.argmax(-1) == best.indices[:, 0]
        clear = best.values[:, 0] - best.values[:, 1] >= CLEAR_GAP
        ours, theirs = logits.double().log_softmax(-1), reference.double().log_softmax(-1)
        self.positions += len(tokens)
        self.clear += int(clear.sum())
        self.equal += int(equal.sum())
        self.clear_equal += int((equal & clear).sum())
        self.difference += float((logits - reference).double().square().sum())
        self.reference += float(reference.double().square().sum())
        self.kl += float((theirs.exp() * (theirs - ours)).sum())
        self.loss -= float(ours[:-1].gather(1, tokens[1:, None]).sum())
        self.num_next += len(tokens) - 1

    def figures(self) -> dict[str, float | int]:
        return {
            "positions": self.positions,
            "clear": self.clear,
            "argmax_agreement": self.equal / self.positions,
            "clear_argmax_agreement": self.clear_equal / self.clear,
            "relative_error": (self.difference / self.reference) ** 0.5,
            "kl": self.kl / self.positions,
            "perplexity": float(np.exp(self.loss / self.num_next)),
        }


def logits_of(model: Llama | NativeLlama, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """[T, V], the tokens computed in chunks of the given sizes."""
    shape = model.shape
    pages = np.arange(-(-len(tokens) // _PAGE_SIZE), dtype=np.int32)
    kv = PagedKV(
        num_layers=shape.num_layers, num_pages=len(pages), page_size=_PAGE_SIZE, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, dtype=torch.float32, device=model.device,
    )  # fmt: skip
    parts, done = [], 0
    with torch.inference_mode():
        for length in chunks:
            batch = batch_info(
                query_lens=np.asarray([length], np.int32),
                kv_lens=np.asarray([done + length], np.int32),
                page_indptr=indptr(np.asarray([len(pages)], np.int32)),
                page_indices=pages,
                slots=np.zeros(1, np.int32),
                page_size=_PAGE_SIZE,
            )
            hidden, _ = model.forward(tokens[done : done + length], batch, kv)
            parts.append(model.logits(hidden))
            done += length
    return torch.cat(parts)


def windows(tokenizer: Tokenizer, length: int) -> list[torch.Tensor]:
    """The text in windows of `length` tokens, shorter ones left out, then the prompts as they are."""
    texts = [(_ROOT / name).read_text(encoding="utf-8") for name in ("LICENSE", "README.md")]
    ids = [tokenizer.encode(text) for text in texts]
    cut = [part[at : at + length] for part in ids for at in range(0, len(part) - length + 1, length)]
    return [torch.tensor(part) for part in (*cut, *(tokenizer.encode(prompt) for prompt in CHAT))]


def same_bits(model: NativeLlama, tokens: torch.Tensor, threads: int) -> bool:
    """Whether chunks of 1 .. 16 tokens by one thread and by all give the logits of one forward."""
    whole = logits_of(model, tokens, [len(tokens)])
    sizes: list[int] = []
    for size in itertools.cycle(CHUNKS):
        sizes.append(min(size, len(tokens) - sum(sizes)))
        if sum(sizes) == len(tokens):
            break
    equal = True
    for count in (1, threads):
        torch.set_num_threads(count)
        equal &= torch.equal(logits_of(model, tokens, sizes), whole)
    torch.set_num_threads(threads)
    return equal


def run(args: argparse.Namespace) -> None:
    before, path = machine(), resolve(args.model)
    threads = args.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    file = GgufFile(path)
    texts = windows(Tokenizer.load(path, read_metadata=read_metadata), args.tokens)[: 2 if args.quick else None]
    torch_model = Llama(file.config, file, attention=TorchAttention(), dtype=torch.float32, device=torch.device("cpu"))
    exact, fast = (NativeLlama(file.config, file, activations=mode) for mode in ("exact", "fast"))
    sums = {name: Sums() for name in ("torch", "exact / torch", "fast / torch", "fast / exact")}
    for tokens in texts:
        reference, ours, quick = (logits_of(model, tokens, [len(tokens)]) for model in (torch_model, exact, fast))
        sums["torch"].add(reference, reference, tokens)
        sums["exact / torch"].add(ours, reference, tokens)
        sums["fast / torch"].add(quick, reference, tokens)
        sums["fast / exact"].add(quick, ours, tokens)
    entries: list[dict[str, Any]] = [{"what": name, **total.figures()} for name, total in sums.items()]
    for entry in entries:
        print(", ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in entry.items()))
    bits = {name: same_bits(model, texts[0], threads) for name, model in (("exact", exact), ("fast", fast))}
    print("the same bits in chunks of 1 to 16 tokens, by one thread and by all:", bits)
    print(write_result("arithmetic", args, before, entries, more={"same_bits": bits, "level": fast.library.level}).name)


def main() -> None:
    parser = arguments("benchmarks.arithmetic", "The CPU kernels' modes against torch in float32.", cells=False)
    parser.set_defaults(tokens=512)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
