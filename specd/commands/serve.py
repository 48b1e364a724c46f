"""`specd serve`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys

import uvloop

from specd import log
from specd.commands.settings import load_settings
from specd.config import Config
from specd.config_loader import check_rereadable
from specd.daemon import EXIT_OK, LoadAbandoned, load_serving_engine, serve
from specd.supervision import DaemonEngine

_SWITCH_S = 0.0005  # of Python's 0.005: a step's few lines on a stream must not wait for 200 streams' JSON


def run(args: argparse.Namespace) -> int:
    config = load_settings(args)
    log.configure(config.log.level, config.log.format)
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(serve(config, create_engine=_load, reread=lambda: _reread(args)))
        except LoadAbandoned:
            # An ordinary exit would wait for the loading thread, which may take minutes. Nothing is left to clean up.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_OK)


def _reread(args: argparse.Namespace) -> Config:
    """On the event loop, for a reload. Raises ConfigError."""
    if args.config is not None:
        check_rereadable(args.config)
    return load_settings(args)


async def _load(config: Config) -> DaemonEngine:
    """The engine, and nothing of what is loaded is looked through by the garbage collector any more.

    That is some 200,000 containers, of PyTorch and the tokenizer: each full collection would take tenths of a second
    of the event loop, and those at the end of the process would keep it alive for seconds.
    """
    engine = await load_serving_engine(config)
    gc.collect()
    gc.freeze()
    return engine
