"""`specd serve`."""

from __future__ import annotations

import argparse
import asyncio

import uvloop

from specd import log
from specd.commands.settings import load_settings
from specd.daemon import serve


def run(args: argparse.Namespace) -> int:
    config = load_settings(args)
    log.configure(config.log.level, config.log.format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config))
