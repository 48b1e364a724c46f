"""`specd serve`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

import uvloop

from specd import log
from specd.commands.settings import load_settings
from specd.daemon import EXIT_OK, LoadAbandoned, serve


def run(args: argparse.Namespace) -> int:
    config = load_settings(args)
    log.configure(config.log.level, config.log.format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(serve(config, reread=lambda: load_settings(args)))
        except LoadAbandoned:
            # An ordinary exit would wait for the loading thread, which may take minutes. Nothing is left to clean up.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_OK)
