"""specd against transformers' own `generate`: the same weights in fp32, the same prompts, alternating in one run.

    python -m benchmarks.compare_transformers          # about 30 minutes on two cores
    python -m benchmarks.compare_transformers --quick  # a minute, to see that it works

Greedy, the same number of new tokens on both sides. Sides: transformers plain and with `prompt_lookup_num_tokens` (one
sequence at a time: it takes no batches), specd without drafts, with the n-gram proposer (adaptive, and 4 drafts in
each step), and with the target's first four layers as drafter. Writes benchmarks/results/compare_transformers.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import (
    KINDS,
    Load,
    Question,
    Sample,
    Side,
    SpecdSide,
    alternate,
    arguments,
    run,
    show,
    table,
    write_result,
)
from benchmarks.reference_tokens import chat_ids, load_transformers
from specd.bench.report import machine
from specd.models.fetch import resolve
from specd.text import Tokenizer

BASELINE = "transformers"
LOOKUP_TOKENS = 3
SPECD = {
    "specd none": ["speculation.draft=none"],
    "specd ngram adaptive": ["speculation.draft=ngram"],
    "specd ngram K=4": ["speculation.draft=ngram", "speculation.draft_len=4"],
    "specd layers:4 adaptive": ["speculation.draft=layers:4"],
}


class _FirstToken:
    """A stopping criterion that never stops and notes when the first token of a batch was there."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.time_s = self.time_s or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class TransformersSide:
    """`generate` on left-padded batches of exactly the load's concurrency. Blocks the loop: nothing else runs then."""

    def __init__(
        self, name: str, model: Any, threads: int, *, decode: Callable[[list[int]], str] | None = None, **options: Any
    ) -> None:
        """decode: for samples with a text, where another side tells no token ids. options are `generate`'s."""
        self.name = name
        self._model = model
        self._threads = threads
        self._decode = decode
        self._options = options

    def takes(self, load: Load) -> bool:
        return load.concurrency == 1 or "prompt_lookup_num_tokens" not in self._options

    async def answer(self, load: Load) -> list[Sample]:
        torch.set_num_threads(self._threads)
        size = load.concurrency
        groups = [load.questions[i : i + size] for i in range(0, len(load.questions), size)]
        return [sample for group in groups for sample in self._generate(group)]

    def _generate(self, questions: tuple[Question, ...]) -> list[Sample]:
        longest = max(len(question.prompt_ids) for question in questions)
        pads = [longest - len(question.prompt_ids) for question in questions]
        ids = torch.tensor([[0] * pad + list(q.prompt_ids) for q, pad in zip(questions, pads, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        first = _FirstToken()
        start = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=questions[0].num_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[first],
            **self._options,
        )
        end = time.perf_counter()
        answers = [row[longest:].tolist() for row in output]
        texts = [self._decode(ids) if self._decode else None for ids in answers]
        return [
            Sample(start, first.time_s, end, tuple(ids), text=text) for ids, text in zip(answers, texts, strict=True)
        ]

    async def close(self) -> None:
        self._model = None


def make_loads(tokenizer: Tokenizer, args: argparse.Namespace) -> list[Load]:
    """One by one: the first prompts of each kind. At once: as many prompts as fit, each batch full."""
    loads = []
    for concurrency in args.concurrency:
        for kind in args.kinds:
            texts = [KINDS[kind][i % len(KINDS[kind])] for i in range(max(args.prompts, concurrency))]
            texts = texts[: len(texts) // concurrency * concurrency]
            questions = tuple(Question(chat_ids(tokenizer, text), args.tokens) for text in texts)
            loads.append(Load(kind, concurrency, questions))
    return loads


async def make_sides(args: argparse.Namespace) -> list[Side]:
    threads = args.threads or os.cpu_count() or 1
    model = load_transformers(resolve(args.model))
    model.generation_config.eos_token_id = None
    sides: list[Side] = [
        TransformersSide(BASELINE, model, threads),
        TransformersSide("transformers lookup", model, threads, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    ]
    common = [
        f"model.path={args.model}",
        f"model.threads={threads}",
        "model.dtype=float32",
        "model.max_len=1024",
        "model.kernels=torch",
    ]
    for name, settings in SPECD.items():
        sides.append(await SpecdSide.create(name, [*common, *settings]))
    return sides


async def measure(args: argparse.Namespace) -> None:
    before = machine()
    sides = await make_sides(args)
    try:
        tokenizer = next(side for side in sides if isinstance(side, SpecdSide)).engine.tokenizer
        cells = await alternate(sides, make_loads(tokenizer, args), args.rounds)
    finally:
        for side in sides:
            await side.close()
    entries = table(cells, against=BASELINE)
    print(show(entries, against=BASELINE))
    print(write_result("compare_transformers", args, before, entries).name)


def main() -> None:
    parser = arguments("benchmarks.compare_transformers", "specd against transformers' own generate.")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each kind when they are asked one by one")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tokens, args.prompts, args.concurrency = 1, 8, 1, [1, 2]
    run(measure(args))


if __name__ == "__main__":
    main()
