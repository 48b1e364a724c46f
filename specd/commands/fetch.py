"""`specd fetch`."""

from __future__ import annotations

import argparse

from specd import log
from specd.models import fetch


def run(args: argparse.Namespace) -> int:
    log.configure("info", "auto")
    path = fetch.resolve(args.alias, revision=args.revision)
    print(path)
    return 0
