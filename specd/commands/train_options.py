"""What every trainer is asked: `specd train mtp` and `specd train draft` have these options beside their own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_NUMBERS: tuple[tuple[str, Any, str], ...] = (
    ("epochs", 6, "times over the corpus"),
    ("train-tokens", 0, "of the corpus, evenly chosen sequences of so many tokens; 0: all"),
    ("batch-tokens", 2048, "tokens of one forward, padding included"),
    ("accumulate", 1, "forwards of one optimizer step, shared by the ranks"),
    ("lr", 5e-4, "highest learning rate"),
    ("warmup", 50, "optimizer steps"),
    ("weight-decay", 0.01, "of AdamW"),
    ("clip", 1.0, "largest norm of the gradient"),
    ("seed", 0, "of the order, the start and the noise"),
    ("eval-every", 100, "optimizer steps between looks at held-out sequences; each saves"),
    ("eval-tokens", 16384, "held-out tokens that are looked at"),
    ("eval-steps", 3, "positions of a draft that are looked at"),
    ("stop-after", 0, "stop after so many optimizer steps with a checkpoint; 0: at the end"),
    ("rank-timeout", 600.0, "seconds that a rank waits for the others"),
)


def add_training(parser: argparse.ArgumentParser, *, best: str) -> None:
    """best: what the output folder calls the best model so far."""
    parser.add_argument("model", metavar="MODEL", help="the target that the shards were collected from")
    parser.add_argument("--shards", type=Path, required=True, metavar="DIR", help="folder that collect wrote")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help=f"gets log.jsonl, checkpoint.safetensors (gone on from when it is there) and {best}/, the best so far",
    )
    add_numbers(parser, _NUMBERS)
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of matrix products; bf16 is several times as fast where the CPU has AMX (default fp32)",
    )
    parser.add_argument(
        "--shard",
        choices=("ddp", "fsdp"),
        default="ddp",
        help="of several ranks (torchrun --nproc-per-node N -m specd train ...) each holds the whole model (ddp, the "
        "default) or a slice of it (fsdp)",
    )


def add_numbers(parser: argparse.ArgumentParser, options: tuple[tuple[str, Any, str], ...]) -> None:
    """options: name, default and what it means."""
    for name, default, text in options:
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default {default})")
