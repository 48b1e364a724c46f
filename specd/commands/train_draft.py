"""`specd train draft`. The trainer, and torch with it, is imported when the command runs."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from specd.commands.train_options import add_training, given
from specd.train.plan import values_of


def add_options(parser: argparse.ArgumentParser) -> None:
    add_training(parser, best="model")
    parser.add_argument(
        "--layers", type=int, required=True, metavar="N", help="of the target, its first: what the draft begins as"
    )


def run(args: argparse.Namespace, path: Path) -> int:
    module = importlib.import_module("specd.train.distil")
    trainer, parallel = (importlib.import_module(f"specd.train.{name}") for name in ("trainer", "parallel"))
    figures = module.train(module.DraftSettings(**values_of(module.DraftSettings, given(args, path))))
    if parallel.world()[0] == 0:
        print(trainer.render(figures))
    return 0
