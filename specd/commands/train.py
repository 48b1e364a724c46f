"""`specd train collect` and `specd train mtp`. The trainer, and torch with it, is imported when the command runs."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from specd import log
from specd.errors import ConfigError
from specd.models import fetch

_LOWEST = {
    "join": 0, "batch_tokens": 1, "shard_tokens": 1, "threads": 1, "draft_vocab": 0, "steps": 1, "epochs": 1,
    "accumulate": 1, "warmup": 0, "eval_every": 1, "eval_tokens": 1, "eval_steps": 1, "stop_after": 0, "noise": 0,
    "feature_weight": 0, "weight_decay": 0,
}  # fmt: skip
_ABOVE_ZERO = ("lr", "clip", "step_decay")


def add_verbs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_collect(verbs.add_parser("collect", help="run the target over a corpus and keep its hidden states"))
    _add_mtp(verbs.add_parser("mtp", help="train an MTP head on what collect wrote"))


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for a number out of range, naming the option and the value."""
    log.configure("info", "auto")
    for name, low in _LOWEST.items():
        value = getattr(args, name, None)
        if value is not None and not value >= low:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {low}")
    for name in _ABOVE_ZERO:
        if hasattr(args, name) and not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    path = fetch.resolve(args.model)
    if args.threads is not None:
        importlib.import_module("torch").set_num_threads(args.threads)
    return _collect(args, path) if args.verb == "collect" else _mtp(args, path)


def _add_collect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the target: an alias, a .gguf file, a folder or a hub id")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder for the shards")
    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="FILE",
        help="safetensors with ids, role and lens; default: the chats of SmolLM2-135M-Instruct that come with specd",
    )
    parser.add_argument(
        "--features",
        choices=("last", "aux"),
        default="last",
        help="last (default): states after the final norm; aux: three layers' states as well",
    )
    parser.add_argument(
        "--join",
        type=int,
        default=0,
        metavar="N",
        help="a fifth of the tokens in sequences of up to N, of several chats",
    )
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of one forward (default 2048)")
    parser.add_argument("--shard-tokens", type=int, default=65536, help="tokens of one file (default 65536)")
    _add_common(parser)


def _add_mtp(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the target that the shards were collected from")
    parser.add_argument("--shards", type=Path, required=True, metavar="DIR", help="folder that collect wrote")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets log.jsonl, checkpoint.safetensors (gone on from when it is there) and head/, the best so far",
    )
    options: tuple[tuple[str, Any, str], ...] = (
        ("draft-vocab", 0, "draft from the N most frequent tokens; 0: from all"),
        ("steps", 1, "unrolled passes: the head is trained on what it feeds itself"),
        ("step-decay", 0.8, "weight of each further pass"),
        ("feature-weight", 0.0, "weight of the smooth L1 to the target's states"),
        ("noise", 0.0, "on the features, in units of their root mean square"),
        ("epochs", 6, "times over the corpus"),
        ("batch-tokens", 2048, "tokens of one forward, padding included"),
        ("accumulate", 1, "forwards of one optimizer step"),
        ("lr", 5e-4, "highest learning rate"),
        ("warmup", 50, "optimizer steps"),
        ("weight-decay", 0.01, "of AdamW"),
        ("clip", 1.0, "largest norm of the gradient"),
        ("seed", 0, "of the order, the start and the noise"),
        ("eval-every", 100, "optimizer steps between looks at held-out sequences; each saves"),
        ("eval-tokens", 16384, "held-out tokens that are looked at"),
        ("eval-steps", 3, "unrolled passes that are looked at"),
        ("stop-after", 0, "stop after so many optimizer steps with a checkpoint; 0: at the end"),
    )
    for name, default, text in options:
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default {default})")
    parser.add_argument("--loss", choices=("kl", "ce"), default="kl", help="kl (default): the target's distribution")
    parser.add_argument("--concat", choices=("embedding_first", "hidden_first"), default="embedding_first")
    parser.add_argument("--feedback", choices=("post_norm", "pre_norm"), default="post_norm")
    parser.add_argument(
        "--without",
        action="append",
        choices=("embedding_norm", "hidden_norm", "input_norm", "output_norm"),
        default=[],
        help="leave a norm out; may be repeated",
    )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, help="default: PyTorch's")


def _collect(args: argparse.Namespace, path: Path) -> int:
    module = importlib.import_module("specd.train.collect")
    corpus = args.corpus or importlib.import_module("specd.train.corpus").SHIPPED
    names = ("features", "join", "batch_tokens", "shard_tokens")
    values = {name: getattr(args, name) for name in names}
    module.collect(module.CollectSettings(model=path, corpus=corpus, output=args.output, **values))
    return 0


def _mtp(args: argparse.Namespace, path: Path) -> int:
    module = importlib.import_module("specd.train.mtp")
    values = {name: value for name, value in vars(args).items() if name in module.MtpSettings.__slots__}
    figures = module.train(module.MtpSettings(**values | {"model": path, "without": tuple(sorted(args.without))}))
    print(module.render(figures))
    return 0
