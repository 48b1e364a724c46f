"""What every trainer is asked: `specd train mtp` and `specd train draft` have these options beside their own."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from specd.train.plan import Plan, values_of

_NUMBERS: tuple[tuple[str, str], ...] = (
    ("epochs", "times over the corpus"),
    ("train-tokens", "of the corpus, evenly chosen sequences of so many tokens; 0: all"),
    ("batch-tokens", "tokens of one forward, padding included"),
    ("accumulate", "forwards of one optimizer step, shared by the ranks"),
    ("lr", "highest learning rate"),
    ("warmup", "optimizer steps"),
    ("weight-decay", "of AdamW"),
    ("clip", "largest norm of the gradient"),
    ("seed", "of the order, the start and the noise"),
    ("eval-every", "optimizer steps between looks at held-out sequences; each saves"),
    ("eval-tokens", "held-out tokens that are looked at"),
    ("eval-steps", "positions of a draft that are looked at"),
    ("stop-after", "stop after so many optimizer steps with a checkpoint; 0: at the end"),
    ("rank-timeout", "seconds that a rank waits for the others"),
)


def add_training(parser: argparse.ArgumentParser, *, best: str) -> None:
    """best: what the output folder calls the best model so far."""
    parser.add_argument("model", metavar="MODEL", help="the target that the shards were collected from")
    parser.add_argument(
        "--shards", type=Path, nargs="+", required=True, metavar="DIR", help="folders that collect wrote"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help=f"gets log.jsonl, checkpoint.safetensors (gone on from when it is there) and {best}/, the best so far",
    )
    defaults = {field.name: field.default for field in dataclasses.fields(Plan)}
    add_numbers(parser, tuple((name, defaults[name.replace("-", "_")], text) for name, text in _NUMBERS))
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default=defaults["precision"],
        help="of matrix products; bf16 is several times as fast where the CPU has AMX (default fp32)",
    )
    parser.add_argument(
        "--shard",
        choices=("ddp", "fsdp"),
        default=defaults["shard"],
        help="of several ranks (torchrun --nproc-per-node N -m specd train ...) each holds the whole model (ddp, the "
        "default) or a slice of it (fsdp)",
    )


def add_numbers(parser: argparse.ArgumentParser, options: tuple[tuple[str, Any, str], ...]) -> None:
    """options: name, default and what it means."""
    for name, default, text in options:
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default {default})")


def make_plan(args: argparse.Namespace) -> Plan:
    return Plan(**values_of(Plan, vars(args)))


def given(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """What the settings of a trainer are made of. model: where the target is."""
    return vars(args) | {"model": model, "shards": tuple(args.shards), "plan": make_plan(args)}
