"""Which defaults are best: variants of one setting, alternating in one run, in a closed loop.

    python -m benchmarks.speculation_on_off length    # off, fixed and adaptive draft lengths
    python -m benchmarks.speculation_on_off mixed     # whether decode rows speculate beside prompt rows
    python -m benchmarks.speculation_on_off streams   # one stream, or draft and target on two

Answers have different lengths and each that ends is followed by a new prompt, so prompts and decoding mix in the
steps. The first variant of a set is what the others are compared with. Each set takes about 20 minutes on two cores;
`--quick` shows in a minute that it works. Writes benchmarks/results/speculation_on_off-SET.json.
"""

from __future__ import annotations

import argparse

from benchmarks.measure import KINDS, Load, Question, SpecdSide, alternate, arguments, run, show, table, write_result
from benchmarks.reference_tokens import chat_ids
from specd.bench.report import machine
from specd.text import Tokenizer

# set -> (default drafter, variant -> settings); "{draft}" is what --draft says
SETS: dict[str, tuple[str, dict[str, list[str]]]] = {
    "length": (
        "ngram",
        {
            "off": ["speculation.draft=none"],
            "fixed 2": ["speculation.draft={draft}", "speculation.draft_len=2"],
            "fixed 4": ["speculation.draft={draft}", "speculation.draft_len=4"],
            "adaptive": ["speculation.draft={draft}", "speculation.draft_len=adaptive"],
        },
    ),
    "mixed": (
        "ngram",
        {
            "plain": ["speculation.draft={draft}", "scheduler.mixed=plain"],
            "speculate": ["speculation.draft={draft}", "scheduler.mixed=speculate"],
            "plain fixed 4": ["speculation.draft={draft}", "speculation.draft_len=4", "scheduler.mixed=plain"],
            "speculate fixed 4": ["speculation.draft={draft}", "speculation.draft_len=4", "scheduler.mixed=speculate"],
        },
    ),
    "streams": (
        "layers:4",
        {
            "single": ["speculation.draft={draft}", "speculation.draft_len=4", "scheduler.streams=single"],
            "paired": ["speculation.draft={draft}", "speculation.draft_len=4", "scheduler.streams=paired"],
            "stages": ["speculation.draft={draft}", "speculation.draft_len=4", "scheduler.streams=stages"],
        },
    ),
}


def make_loads(tokenizer: Tokenizer, args: argparse.Namespace) -> list[Load]:
    """Twice as many questions as are asked at once, of 2/3, 1 and 4/3 of the length, in turn."""
    loads = []
    for concurrency in args.concurrency:
        for kind in args.kinds:
            texts = [KINDS[kind][i % len(KINDS[kind])] for i in range(2 * concurrency)]
            questions = tuple(
                Question(chat_ids(tokenizer, text), max(1, args.tokens * (2 + i % 3) // 3))
                for i, text in enumerate(texts)
            )
            loads.append(Load(kind, concurrency, questions))
    return loads


async def measure(args: argparse.Namespace) -> None:
    before = machine()
    drafter, variants = SETS[args.set]
    common = [
        f"model.path={args.model}",
        f"model.threads={args.threads}",
        f"model.dtype={args.dtype}",
        "model.max_len=1024",
        f"scheduler.max_running={max(args.concurrency)}",
    ]
    sides: list[SpecdSide] = []
    try:
        for name, settings in variants.items():
            chosen = [setting.format(draft=args.draft or drafter) for setting in settings]
            sides.append(await SpecdSide.create(name, [*common, *chosen]))
        cells = await alternate(sides, make_loads(sides[0].engine.tokenizer, args), args.rounds)
    finally:
        for side in sides:
            await side.close()
    against = next(iter(variants))
    entries = table(cells, against=against)
    print(show(entries, against=against))
    print(write_result("speculation_on_off", args, before, entries, variant=args.set).name)


def main() -> None:
    parser = arguments("benchmarks.speculation_on_off", "Variants of one setting, alternating in a closed loop.")
    parser.add_argument("set", choices=list(SETS))
    parser.add_argument("--draft", help="the drafter of all variants that have one (default: the set's own)")
    parser.add_argument("--dtype", default="auto")
    parser.set_defaults(tokens=64)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tokens, args.concurrency = 1, 9, [2]
    run(measure(args))


if __name__ == "__main__":
    main()
