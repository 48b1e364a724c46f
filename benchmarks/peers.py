"""specd beside llama.cpp and transformers: one GGUF file, one machine, alternating in one run.

    python -m benchmarks.peers --loads chat-1 copy-1 --piece one    # in pieces; all at once takes hours
    python -m benchmarks.peers --list                               # the names of sides and loads
    python -m benchmarks.peers --quick                              # a few minutes, to see that it works

Greedy, the same number of new tokens everywhere, no prefix cache anywhere. A load is KIND-CONCURRENCY (chat-1,
copy-8), or ttft-LENGTH: one new token after a prompt of that many tokens. Shorter prompts are filled up with sentences
that no other prompt has. Answers are compared, and only counted: not all sides compute in the same precision. Writes
benchmarks/results/peers-PIECE.json and the same as tables in peers-PIECE.md. benchmarks/README.md has all the pieces.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import random
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare_transformers import LOOKUP_TOKENS, TransformersSide
from benchmarks.llama_cpp import MODES, PLAIN, LlamaSide
from benchmarks.measure import (
    KINDS,
    PACKAGES,
    Load,
    Question,
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
from benchmarks.targets import markdown, targets
from specd.bench.report import machine
from specd.errors import ModelError
from specd.kernels.library import load_library
from specd.models.fetch import resolve
from specd.models.gguf import read_metadata
from specd.text import Tokenizer

KERNELS = {
    "native fast": ["model.kernels=native", "model.activations=fast"],
    "native exact": ["model.kernels=native", "model.activations=exact"],
    "torch": ["model.kernels=torch", "model.dtype=float32"],
}
SPECULATION = {
    "none": ["speculation.draft=none"],
    "mtp+ngram": ["speculation.draft=mtp+ngram"],  # the head that comes with specd, overridden by n-grams
    "mtp adaptive": ["speculation.draft=mtp"],
    "mtp K=1": ["speculation.draft=mtp", "speculation.draft_len=1"],
    "mtp K=2": ["speculation.draft=mtp", "speculation.draft_len=2"],
    "ngram adaptive": ["speculation.draft=ngram"],
    "ngram K=3": ["speculation.draft=ngram", "speculation.draft_len=3"],  # steps of four tokens
}
SPECD = {f"specd {k} {s}": [*KERNELS[k], *SPECULATION[s]] for k in KERNELS for s in SPECULATION}
OWN_PLAIN = {f"specd {k} {s}": f"specd {k} none" for k in KERNELS for s in SPECULATION if s != "none"}
OWN_PLAIN |= {name: PLAIN for name in MODES if name != PLAIN}
TRANSFORMERS: Mapping[str, Mapping[str, int]] = {
    "transformers": {},
    "transformers lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
}
OWN_PLAIN["transformers lookup"] = "transformers"
SIDES = (*SPECD, *MODES, *TRANSFORMERS)

LOADS = ("chat-1", "copy-1", "chat-8", "copy-8", "chat-32", "copy-32", "ttft-200", "ttft-1000", "ttft-4000")
PEERS_MOST = 8  # more sequences at a time are specd's alone: the question there is what its own speculation does
_LOAD = re.compile(r"(?:(chat|copy)-([1-9]\d*)|ttft-([1-9]\d*))")
_PAGE = 16
_SPARE = 80  # context for drafts beyond an answer's end; llama.cpp drafts up to 64

# ---------------------------------------------------------------- prompts

_WORDS = {
    "when": ("spring", "summer", "autumn", "winter", "January", "March", "June", "October"),
    "who": ("the baker", "a teacher", "the mayor", "an engineer", "a farmer", "the librarian", "a sailor", "the cook"),
    "where": ("Alder Bay", "Brookfield", "Castleford", "Dunmore", "Elmhurst", "Fairwater", "Glenrock", "Highmoor"),
    "did": ("counted", "ordered", "repaired", "painted", "delivered", "collected", "sold", "measured"),
    "what": ("wooden chairs", "clay bricks", "wool coats", "iron gates", "letters", "apples", "lamps", "boats"),
}


def sentences(seed: str, count: int) -> str:
    """`count` plain sentences; other seeds give others from the first one on."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        when, who, where, did, what = (draw.choice(words) for words in _WORDS.values())
        lines.append(f"In {when} of {draw.randint(1800, 1999)}, {who} of {where} {did} {draw.randint(2, 9999)} {what}.")
    return " ".join(lines)


def filled(tokenizer: Tokenizer, text: str, num_tokens: int, seed: str) -> tuple[int, ...]:
    """The chat with `text` and as many words of notes before it as make at most num_tokens (none if it is longer)."""
    words = sentences(seed, num_tokens // 8).split()

    def ids(count: int) -> tuple[int, ...]:
        return chat_ids(tokenizer, f"Notes: {' '.join(words[:count])}\n\n{text}" if count else text)

    low, high = 0, len(words)  # ids(low) fits, or nothing does
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(ids(middle)) <= num_tokens else (low, middle - 1)
    return ids(low)


def make_load(tokenizer: Tokenizer, name: str, args: argparse.Namespace) -> Load:
    """name: see `load_name`."""
    match = _LOAD.fullmatch(name)
    assert match is not None
    if match[3]:
        asked, length = "Which of the places in these notes is named most often?", int(match[3])
        prompts = [filled(tokenizer, asked, length, f"{name} {i}") for i in range(args.prompts)]
        return Load(name, 1, tuple(Question(ids, 1) for ids in prompts))
    kind, concurrency = match[1], int(match[2])
    count = -(-args.prompts // concurrency) * concurrency  # batches that are full
    known = KINDS[kind]
    texts = [known[i * len(known) // count if count < len(known) else i % len(known)] for i in range(count)]
    prompts = [filled(tokenizer, text, args.prompt_tokens, f"{kind} {i}") for i, text in enumerate(texts)]
    return Load(kind, concurrency, tuple(Question(ids, args.tokens) for ids in prompts))


# ---------------------------------------------------------------- sides


class _Capped:
    """Any side, for loads of at most so many sequences at a time."""

    def __init__(self, side: Side, most: int) -> None:
        self.name = side.name
        self._side = side
        self._most = most
        self.answer = side.answer
        self.close = side.close

    def takes(self, load: Load) -> bool:
        return load.concurrency <= self._most and self._side.takes(load)


def chosen(patterns: Sequence[str], loads: Sequence[Load]) -> list[str]:
    """Names of sides that fit a pattern and can do anything here. Raises ModelError when there are none."""
    names = [name for name in SIDES if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if all(load.concurrency > PEERS_MOST for load in loads):
        names = [name for name in names if name in SPECD]
    try:
        load_library()
    except ModelError as error:
        print(f"without specd's native kernels: {error}", file=sys.stderr)
        names = [name for name in names if "native" not in name]
    if not names:
        raise ModelError("none of these sides can be measured here with these loads")
    return names


async def make_sides(names: Sequence[str], loads: Sequence[Load], args: argparse.Namespace) -> list[Side]:
    """The sides, loaded. What was loaded is closed again when another one fails."""
    threads = args.threads or os.cpu_count() or 1
    path = resolve(args.model)
    most = max(load.concurrency for load in loads)
    longest = max(len(question.prompt_ids) + question.num_tokens for load in loads for question in load.questions)
    context = -(-(longest + _SPARE) // _PAGE) * _PAGE
    common = [f"model.path={args.model}", f"model.threads={threads}", f"model.max_len={context}"]
    common.append(f"scheduler.max_running={most}")
    sides: list[Side] = []
    try:
        for name in names:
            if name in SPECD:
                sides.append(await SpecdSide.create(name, [*common, *SPECD[name]]))
            elif name in MODES:
                slots = min(most, PEERS_MOST)
                sides.append(await LlamaSide.create(name, model=path, threads=threads, slots=slots, context=context))
        sides += transformers_sides([name for name in names if name in TRANSFORMERS], path, threads)
    except BaseException:
        await close(sides)
        raise
    return sides


def transformers_sides(names: Sequence[str], path: Path, threads: int) -> list[Side]:
    """One model, in fp32, for all of them."""
    if not names:
        return []
    model = load_transformers(path)
    model.generation_config.eos_token_id = None
    decode = Tokenizer.load(path, read_metadata=read_metadata).decode
    sides = [TransformersSide(name, model, threads, decode=decode, **TRANSFORMERS[name]) for name in names]
    return [_Capped(side, PEERS_MOST) for side in sides]


async def close(sides: Sequence[Side]) -> None:
    for side in sides:
        await side.close()


def _built(sides: Sequence[Side], names: Sequence[str]) -> dict[str, Any]:
    """What instructions each engine computes with: a wheel may know fewer than the machine has."""
    system = next((side.system_info for side in sides if isinstance(side, LlamaSide)), None)
    level = load_library().level if any("native" in name for name in names) else None
    return {"llama.cpp": system, "specd kernels": level}


# ---------------------------------------------------------------- the command


async def measure(args: argparse.Namespace) -> None:
    before = machine()
    tokenizer = Tokenizer.load(resolve(args.model), read_metadata=read_metadata)
    loads = [make_load(tokenizer, name, args) for name in args.loads]
    names = chosen(args.sides, loads)
    sides = await make_sides(names, loads, args)
    try:
        built = _built(sides, names)
        wanted = [load for load in loads if any(side.takes(load) for side in sides)]
        cells = await alternate(sides, wanted, args.rounds)
    finally:
        await close(sides)
    entries = table(cells, against=PLAIN, own=OWN_PLAIN)
    rows = targets(cells)
    packages = (*PACKAGES, "xllamacpp") if any(name in MODES for name in names) else PACKAGES
    more = {"built for": built, "targets": rows}
    file = write_result("peers", args, before, entries, variant=args.piece, packages=packages, more=more)
    title = f"python -m benchmarks.peers {shlex.join(sys.argv[1:])}".strip()
    file.with_suffix(".md").write_text(markdown(title, before, built, entries, rows, against=PLAIN), encoding="utf-8")
    print(show(entries, against=PLAIN))
    for row in rows:
        print(f"{row['row']}: {row['ratio']['median']:.2f} ({row['target'] or 'no target'})")
    print(file.name)


def load_name(text: str) -> str:
    if _LOAD.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is none; chat-N and copy-N (N at a time), ttft-N (N tokens) are")
    return text


def side_pattern(text: str) -> str:
    if not fnmatch.filter(SIDES, text):
        raise argparse.ArgumentTypeError(f"no side has the name {text!r}; --list shows their names")
    return text


def main() -> None:
    parser = arguments("benchmarks.peers", "specd beside llama.cpp and transformers.", cells=False)
    parser.add_argument(
        "--sides", nargs="+", type=side_pattern, default=["*"], metavar="PATTERN", help="names, with * and ?"
    )
    parser.add_argument(
        "--loads", nargs="+", type=load_name, default=list(LOADS), metavar="LOAD", help="chat-N, copy-N, ttft-N"
    )
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a load; batches are always full")
    parser.add_argument("--prompt-tokens", type=int, default=202, help="chat and copy prompts are filled up to so many")
    parser.add_argument("--piece", default="", help="becomes part of the result's file name")
    parser.add_argument("--list", action="store_true", help="print the names of sides and loads")
    args = parser.parse_args()
    if args.list:
        print("\n".join([*SIDES, "", *LOADS]))
        return
    if args.quick:
        args.rounds, args.tokens, args.prompts = 1, 8, 1
        if args.loads == list(LOADS):
            args.loads = ["chat-1", "copy-2", "ttft-200"]
    run(measure(args))


if __name__ == "__main__":
    main()
