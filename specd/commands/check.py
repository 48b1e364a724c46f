"""`specd check`: loads everything as `serve` would, prints what would be served, listens nowhere.

What it cannot tell is whether the port, the control socket and the journal will be free.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

import uvloop

from specd import log
from specd.commands.settings import load_settings
from specd.config import Config, admin_socket_path
from specd.daemon import EXIT_CONFIG, load_engine, plan_text
from specd.errors import SpecdError
from specd.journal import check_file, journal_path
from specd.listeners import check_address
from specd.server.app import chat_template
from specd.server.auth import ApiKeys
from specd.server.spans import check_telemetry
from specd.status import EngineInfo


def run(args: argparse.Namespace) -> int:
    config = load_settings(args)
    log.configure(config.log.level, config.log.format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            check_address(config.server.host, config.server.port)
            check_telemetry(config.telemetry)
            if config.server.api_keys_file:
                ApiKeys.from_file(config.server.api_keys_file)
            journal = journal_path(config.server.journal, os.environ)
            if journal is not None:
                check_file(journal)
            info = runner.run(_check(config))
        except SpecdError as error:
            print(f"specd: {error}", file=sys.stderr)
            return EXIT_CONFIG
    address = f"{config.server.host} port {config.server.port} (a check: nothing listens)"
    control = [str(admin_socket_path(config.admin.socket, os.environ))] if config.admin.enabled else []
    print(plan_text(info, [address], control=control))
    return 0


async def _check(config: Config) -> EngineInfo:
    engine = await load_engine(config)
    try:
        chat_template(engine.tokenizer)
        return engine.info
    finally:
        await engine.close()
