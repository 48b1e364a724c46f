"""`specd train collect` and `specd train converse`: what a head learns from. Torch is imported when a verb runs."""

from __future__ import annotations

import argparse
import functools
import importlib
from pathlib import Path
from typing import Any

from specd.errors import ConfigError, UsageError

_TEMPERATURES = (0.0, 0.7, 1.0)
_CHATS = "chats.safetensors"  # what --self-prompt writes into the folder of the shards


def add_collect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the target: an alias, a .gguf file, a folder or a hub id")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder for the shards")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--corpus",
        type=Path,
        metavar="FILE",
        help="safetensors with ids, role and lens; or one of SmolLM2-135M-Instruct's own that come with specd: chats "
        "(the default) or self-prompted",
    )
    source.add_argument(
        "--given",
        type=Path,
        metavar="FILE",
        help='text of others: .txt, or .jsonl of {"text": ...} (learned from whole) and {"messages": [...]} (from the '
        "assistant's turns)",
    )
    source.add_argument(
        "--self-prompt",
        type=int,
        metavar="N",
        help=f"first let the model write N chats, its users' turns too, into {_CHATS} of the folder",
    )
    parser.add_argument(
        "--given-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="with --given: longest sequence; longer texts are cut up, longer chats are cut off (default 2048)",
    )
    _add_sampling_options(parser)
    parser.add_argument(
        "--features",
        choices=("last", "pre", "aux"),
        default="last",
        help="last (default): states after the final norm; pre: those before it as well; aux: three layers' as well",
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


def add_converse_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="an alias, a .gguf file, a folder or a hub id")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the corpus, .safetensors")
    parser.add_argument("--chats", type=int, required=True, metavar="N", help="how many are written")
    _add_sampling_options(parser)


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Of chats that the model writes."""
    group = parser.add_argument_group("chats that the model writes")
    group.add_argument(
        "--temperature",
        type=float,
        action="append",
        help=f"of answers; may be repeated, chats take turns (default {' '.join(map(str, _TEMPERATURES))})",
    )
    group.add_argument("--user-temperature", type=float, default=1.0, help="of the users' turns (default 1)")
    group.add_argument("--top-p", type=float, default=0.95, help="of both (default 0.95)")
    group.add_argument("--top-k", type=int, default=256, help="of both; 0 is off (default 256)")
    group.add_argument("--turns", type=int, default=3, help="most answers of a chat (default 3)")
    group.add_argument("--chat-tokens", type=int, default=448, help="where a chat is cut off (default 448)")
    group.add_argument("--seed", type=int, default=0, help="same seed, same chats (default 0)")
    group.add_argument("--concurrency", type=int, default=32, help="chats at a time (default 32)")
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja; default: the model's own")


def run_collect(args: argparse.Namespace, path: Path) -> int:
    module = importlib.import_module("specd.train.collect")
    corpus, texts = importlib.import_module("specd.train.corpus").corpus_file(args.corpus), None
    if args.given is not None:
        corpus, texts = args.given, _read_given(args, path)
    elif args.self_prompt is not None:
        corpus = _converse(args, path, args.output / _CHATS, args.self_prompt)
    names = ("features", "join", "batch_tokens", "shard_tokens")
    values = {name: getattr(args, name) for name in names}
    module.collect(module.CollectSettings(model=path, corpus=corpus, output=args.output, **values), texts)
    return 0


def run_converse(args: argparse.Namespace, path: Path) -> int:
    _converse(args, path, args.output, args.chats)
    return 0


def _read_given(args: argparse.Namespace, path: Path) -> Any:
    metadata = importlib.import_module("specd.models.gguf").read_metadata
    tokenizer = importlib.import_module("specd.text").Tokenizer.load(path, read_metadata=metadata)
    reader = importlib.import_module("specd.train.given").GivenReader
    return reader(tokenizer, _renderer(args, tokenizer), longest=args.given_tokens).read(args.given)


def _converse(args: argparse.Namespace, path: Path, output: Path, chats: int) -> Path:
    temperatures = tuple(args.temperature or _TEMPERATURES)
    for name, values in (("temperature", temperatures), ("user-temperature", (args.user_temperature,))):
        for value in values:
            if not 0 <= value <= 2:
                raise UsageError(f"--{name} {value}: must be from 0 to 2")
    if not 0 < args.top_p <= 1:
        raise UsageError(f"--top-p {args.top_p}: must be above 0 and at most 1")
    if output.suffix != ".safetensors":
        raise UsageError(f"--output {output}: must end in .safetensors")
    module = importlib.import_module("specd.train.converse")
    names = ("user_temperature", "top_p", "top_k", "turns", "chat_tokens", "seed", "concurrency")
    settings = module.ConverseSettings(
        model=path,
        output=output,
        chats=chats,
        temperatures=temperatures,
        threads=args.threads or 0,
        **{name: getattr(args, name) for name in names},
    )
    written: Path = module.converse(settings, functools.partial(_renderer, args))
    return written


def _renderer(args: argparse.Namespace, tokenizer: Any) -> Any:
    """The chat template as a function of messages; None for a model that has none."""
    template = tokenizer.chat_template
    if args.chat_template is not None:
        try:
            template = args.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {args.chat_template}: cannot be read: {error}") from error
    if template is None:
        return None
    return functools.partial(
        importlib.import_module("specd.server.chat").render,
        template=template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.special_tokens,
    )
