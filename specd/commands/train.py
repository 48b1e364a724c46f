"""`specd train`: mtp here, the other verbs in files of their own. Torch is imported when a verb runs."""

from __future__ import annotations

import argparse
import importlib
import math
from pathlib import Path

from specd import log
from specd.commands import train_collect, train_draft, train_validate
from specd.commands.train_options import add_numbers, add_training, given
from specd.errors import OutputError, UsageError
from specd.models import fetch
from specd.train.plan import values_of
from specd.train.recipe import RecipeParser

_LOWEST = {
    "join": 0, "batch_tokens": 1, "shard_tokens": 1, "threads": 1, "draft_vocab": 0, "steps": 1, "epochs": 1,
    "accumulate": 1, "warmup": 0, "eval_every": 1, "eval_tokens": 1, "eval_steps": 1, "stop_after": 0, "noise": 0,
    "feature_weight": 0, "weight_decay": 0, "tokens": 1, "depth": 1, "chunk_tokens": 1, "layers": 1,
    "train_tokens": 0, "chats": 1, "self_prompt": 1, "given_tokens": 3, "top_k": 0, "turns": 1, "chat_tokens": 3,
    "concurrency": 1,
}  # fmt: skip
_ABOVE_ZERO = ("lr", "clip", "step_decay", "rank_timeout")
_MOST = {"seed": 2**43, "rank_timeout": 1e9}  # what is made of them is counted in 64 bits


def add_verbs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=RecipeParser)
    collect = verbs.add_parser("collect", help="run the target over a corpus and keep its hidden states")
    train_collect.add_collect_options(collect)
    _add_common(collect)
    converse = verbs.add_parser("converse", help="let the model write chats, users' turns too: a corpus for collect")
    train_collect.add_converse_options(converse)
    _add_common(converse)
    mtp = verbs.add_parser("mtp", help="train an MTP head on what collect wrote")
    _add_mtp(mtp)
    draft = verbs.add_parser("draft", help="train a shallow draft model out of the target's first layers")
    train_draft.add_options(draft)
    _add_common(draft)
    for recipe in (collect, converse, mtp, draft):
        recipe.add_recipe()
    validate = verbs.add_parser("validate", help="replay held-out text through the parts that serve a head")
    train_validate.add_options(validate)
    _add_common(validate)
    for verb in verbs.choices.values():
        verb.set_defaults(parser=verb)  # of whose usage an error tells


def run(args: argparse.Namespace) -> int:
    """Raises UsageError for a number out of range, naming the option and the value; OutputError for a full disk."""
    log.configure("info", "auto")
    for name, low in _LOWEST.items():
        value = getattr(args, name, None)
        if value is not None and not low <= value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least {low}, and finite")
    for name in _ABOVE_ZERO:
        if hasattr(args, name) and not 0 < getattr(args, name) < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0, and finite")
    for name, most in _MOST.items():
        if abs(getattr(args, name, 0)) > most:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at most {most:.0f}")
    path = fetch.resolve(args.model)
    if args.threads is not None:
        importlib.import_module("torch").set_num_threads(args.threads)
    verbs = {
        "collect": train_collect.run_collect,
        "converse": train_collect.run_converse,
        "mtp": _mtp,
        "draft": train_draft.run,
        "validate": train_validate.run,
    }
    try:
        return verbs[args.verb](args, path)
    except BrokenPipeError:
        raise  # of what is printed
    except OSError as error:
        raise OutputError(f"train {args.verb}: {error}") from error


def _add_mtp(parser: argparse.ArgumentParser) -> None:
    add_training(parser, best="head")
    own = (
        ("draft-vocab", 0, "draft from the N most frequent tokens; 0: from all"),
        ("steps", 1, "unrolled passes: the head is trained on what it feeds itself"),
        ("step-decay", 0.8, "weight of each further pass"),
        ("feature-weight", 0.0, "weight of the smooth L1 to the target's states"),
        ("noise", 0.0, "on the features, in units of their root mean square"),
    )
    add_numbers(parser, own)
    parser.add_argument(
        "--init",
        type=Path,
        metavar="DIR",
        help="begin with the weights of this head, which is like this one but for its draft vocabulary",
    )
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


def _mtp(args: argparse.Namespace, path: Path) -> int:
    module = importlib.import_module("specd.train.mtp")
    trainer, parallel = (importlib.import_module(f"specd.train.{name}") for name in ("trainer", "parallel"))
    wanted = given(args, path) | {"without": tuple(sorted(args.without))}
    figures = module.train(module.MtpSettings(**values_of(module.MtpSettings, wanted)))
    if parallel.world()[0] == 0:
        print(trainer.render(figures))
    return 0
