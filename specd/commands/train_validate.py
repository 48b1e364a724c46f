"""`specd train validate`. What it runs, and torch with it, is imported when the command runs."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import orjson


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the target, as it will be served")
    parser.add_argument("--head", type=Path, required=True, metavar="FOLDER", help="of the head")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--shards", type=Path, nargs="+", default=(), metavar="DIR", help="replay what collect held out"
    )
    source.add_argument(
        "--corpus", type=Path, metavar="FILE", help="replay what a corpus holds out, as collect names it"
    )
    parser.add_argument("--tokens", type=int, default=16384, help="held-out tokens that are replayed (default 16384)")
    parser.add_argument("--depth", type=int, default=3, help="drafts of a chain (default 3)")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="tokens of one forward (default 256)")
    parser.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto", help="as model.kernels")
    parser.add_argument("--activations", choices=("fast", "exact"), default="fast", help="as model.activations")
    parser.add_argument("--quantize", choices=("none", "q8_0"), default="none", help="as model.quantize")
    parser.add_argument(
        "--kv-dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="as kv.dtype"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace, path: Path) -> int:
    module = importlib.import_module("specd.train.validate")
    if args.corpus is not None:
        args.corpus = importlib.import_module("specd.train.corpus").corpus_file(args.corpus)
    choice = importlib.import_module("specd.models.registry").KernelChoice
    names = ("head", "corpus", "tokens", "depth", "chunk_tokens", "kv_dtype")
    report = module.validate(
        module.ValidateSettings(
            model=path,
            shards=tuple(args.shards),
            kernels=choice(args.kernels, args.activations, args.quantize),
            **{name: getattr(args, name) for name in names},
        )
    )
    print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() if args.json else module.render(report))
    return 0
