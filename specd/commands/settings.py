"""Command line options that stand for settings. Names, help and defaults come from `config.py`: one source."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from specd.config import Config
from specd.config_loader import Option, load_config, options, parse_value


def add_settings(parser: argparse.ArgumentParser, *, model: bool = True, server: bool = True) -> None:
    """Adds --config, --set and each setting that has an option of its own; and MODEL.

    server: with the options of the HTTP server, for commands that listen or check for one.
    """
    if model:
        parser.add_argument("model", nargs="?", metavar="MODEL", help="alias, folder, .gguf file or hub id")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any setting")
    for option in options():
        if option.field.metadata["flag"] and (server or option.section != "server"):
            _add_option(parser, option)


def _add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    meta = option.field.metadata
    text = meta["doc"].replace("%", "%%")
    if option.type is bool:
        parser.add_argument(meta["flag"], dest=option.key, action="store_const", const=True, help=text)
    elif option.kinds == (tuple[str, ...],):
        parser.add_argument(meta["flag"], dest=option.key, action="append", metavar="NAME", help=text)
    else:
        name = option.field.name.rpartition("_")[2].upper()
        default = f" (default {meta['default']})" if meta["default"] not in ("", None) else ""
        allowed = f" {option.describe().capitalize()}." if option.choices else ""
        parser.add_argument(meta["flag"], dest=option.key, metavar=name, help=text + allowed + default)


def load_settings(args: argparse.Namespace) -> Config:
    """The effective configuration of a parsed command line and the environment. Raises ConfigError."""
    flags: dict[str, object] = {"model.path": args.model}
    for option in options():
        value = getattr(args, option.key, None)
        if option.field.metadata["flag"] and value is not None:
            # Text stays text; a number is read as it would be with --set, so that errors read the same.
            flags[option.key] = parse_value(value) if isinstance(value, str) and str not in option.kinds else value
    return load_config(args.config, env=os.environ, sets=args.set, flags=flags)
