"""What changes while the daemon runs, and who is told: reload, log level, the console of the control socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from specd import log as logs
from specd.config import Config
from specd.config_loader import check_rereadable
from specd.errors import ConfigError, SpecdError
from specd.log import get_logger
from specd.reload import Reloader, ReloadReport
from specd.sdnotify import Notifier
from specd.server.admin.console import Console, Daemon, Shutdown
from specd.server.admin.keyfile import KeyFile
from specd.server.admin.peers import Levels
from specd.server.auth import ApiKeys
from specd.signals import Signals
from specd.supervision import DaemonEngine, LoopLag, Supervisor, notify

log = get_logger("daemon")


class Operation:
    """One engine while it is served. `begin` when it is ready: from then on it reloads."""

    def __init__(
        self,
        engine: DaemonEngine,
        reloader: Reloader,
        signals: Signals,
        notifier: Notifier,
        *,
        keys: ApiKeys,
        levels: Levels,
    ) -> None:
        self.engine = engine
        self.reloader = reloader
        self.notifier = notifier
        self.keys = keys
        self.lag = LoopLag()
        self._signals = signals
        self._levels = levels
        self._key_file = KeyFile(keys, reloader.config.server.api_keys_file)
        self.supervisor = Supervisor(
            engine, notifier, signals.stop, self.lag, stall_s=lambda: reloader.config.scheduler.stall_timeout_s
        )
        daemon = Daemon(
            reload=self.reload,
            shutdown=self._shutdown,
            stopping=signals.stop.drain.is_set,
            loop_lag_s=lambda: self.lag.worst_s,
            set_log_level=self._set_log_level,
        )
        self.console = Console(engine, daemon, reloader=reloader, keys=self._key_file, levels=levels)

    def begin(self, reconfigure: Iterable[Callable[[Config], None]]) -> None:
        """Each of reconfigure takes a new configuration."""
        reconfigure = tuple(reconfigure)

        def prepare(config: Config) -> Callable[[], None]:
            self._check_keys_file(config.server.api_keys_file)
            keys = ApiKeys.configured(config.server.api_keys_file)
            levels = Levels.configured(config.admin)

            def commit() -> None:
                self.keys.replace(keys)
                self._key_file.path = config.server.api_keys_file
                self._levels.replace(levels)
                self.engine.set_limits(config.scheduler)
                for take in reconfigure:
                    take(config)
                if not self._signals.stop.drain.is_set():
                    self._signals.stop.drain_timeout_s = config.server.drain_timeout_s
                if config.log.level != self.reloader.config.log.level and self.console.log_level.value is None:
                    logs.configure(config.log.level, config.log.format)

            return commit

        self.reloader.add(prepare)
        self._signals.serve(reload=self._reload_by_signal, toggle_debug=self._toggle_debug)

    def reload(self, dry_run: bool = False) -> ReloadReport:
        """Raises ConfigError, and then nothing has changed. The service manager sees a beginning and an end."""
        if dry_run:
            return self.reloader.reload(dry_run=True)
        notify(self.notifier, "RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        status = "STATUS=the configuration was refused; the old one stays"
        try:
            report = self.reloader.reload()
            names = ", ".join(report.needs_restart)
            status = "STATUS=configuration reloaded" + (f"; a restart is needed for {names}" if names else "")
            return report
        finally:
            notify(self.notifier, "READY=1", status)

    def _check_keys_file(self, path: str) -> None:
        """Raises ConfigError for one that a reload does not take.

        A configuration that is being written is empty for a moment: it must not open the server to everybody.
        """
        if self.reloader.config.server.api_keys_file and not path:
            text = "server.api_keys_file: is not set any more; a reload keeps asking for keys, a restart does not"
            raise ConfigError(text)
        if path:
            check_rereadable(Path(path), "server.api_keys_file")

    def _reload_by_signal(self) -> None:
        if self._signals.stop.drain.is_set():
            log.info("reload_refused", error="the daemon is stopping")
            return
        try:
            self.reload()
        except SpecdError:
            return  # the reloader has told the log why
        self.console.changed("reload", signal="SIGHUP")

    def _toggle_debug(self) -> None:
        debug = self.console.log_level.value == "debug"
        self.console.log_level.set(None if debug else "debug")
        self.console.changed("loglevel", signal="SIGUSR2")
        log.info("log_level_set", level=self.console.log_level.value or self.reloader.config.log.level)

    def _set_log_level(self, level: str | None) -> None:
        config = self.reloader.config.log
        logs.configure(level or config.level, config.format)

    def _shutdown(self, wish: Shutdown) -> None:
        self._signals.stop.ask("ctl shutdown", drain=wish.drain, timeout_s=wish.timeout_s)
