"""A configuration that is read again while the daemon runs: taken whole or refused whole.

Settings that are not reloadable keep their values until a restart; the report names them. Everything that could fail
(a keys file, a group that does not exist) is tried before anything is changed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

from specd.config import Config
from specd.config_loader import check_together, options
from specd.errors import SpecdError
from specd.log import get_logger

Prepare = Callable[[Config], Callable[[], None]]  # checks (raises ConfigError) and gives what cannot fail any more

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ReloadReport:
    """What a reload did, or would do. Values are (running, read)."""

    applied: Mapping[str, tuple[object, object]]
    needs_restart: Mapping[str, tuple[object, object]]
    dry_run: bool


class Reloader:
    """`config` is what is in force."""

    def __init__(self, config: Config, reread: Callable[[], Config]) -> None:
        self.config = config
        self.read_at = time.time()  # when it was read, unix seconds
        self.successes = self.failures = 0
        self._reread = reread
        self._prepares: list[Prepare] = []

    def add(self, prepare: Prepare) -> None:
        """One more who acts on a new configuration."""
        self._prepares.append(prepare)

    def reload(self, *, dry_run: bool = False) -> ReloadReport:
        """Raises ConfigError, and then nothing has changed."""
        try:
            report, merged = self._compare(self._reread())
            commits = [prepare(merged) for prepare in self._prepares]
        except SpecdError as error:
            self.failures += 1
            log.error("reload_refused", error=str(error))
            raise
        if not dry_run:
            for commit in commits:
                commit()
            self.config = merged
            self.read_at = time.time()
            self.successes += 1
            log.info("reloaded", applied=dict(report.applied), needs_restart=sorted(report.needs_restart))
        return dataclasses.replace(report, dry_run=dry_run)

    def _compare(self, read: Config) -> tuple[ReloadReport, Config]:
        """The difference, and the running configuration with the reloadable part of it."""
        applied, restart = {}, {}
        sections: dict[str, dict[str, object]] = {}
        for option in options():
            name = option.field.name
            old, new = getattr(getattr(self.config, option.section), name), getattr(getattr(read, option.section), name)
            if old == new:
                continue
            if option.field.metadata["reloadable"]:
                applied[option.key] = (old, new)
                sections.setdefault(option.section, {})[name] = new
            else:
                restart[option.key] = (old, new)
        merged = {name: dataclasses.replace(getattr(self.config, name), **new) for name, new in sections.items()}
        config = dataclasses.replace(self.config, **merged)
        check_together(config)
        return ReloadReport(applied, restart, False), config
