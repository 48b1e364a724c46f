"""What signals ask of the daemon.

SIGTERM, SIGINT: drain, the second one: stop now. SIGHUP: reload. SIGUSR1: stacks into the log, from C first, so that
they are seen even when the event loop hangs. SIGUSR2: log level debug, and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
from collections.abc import Callable, Iterator

from specd.log import get_logger
from specd.stacks import task_stacks

_STDERR = 2
_STOPPING = (signal.SIGTERM, signal.SIGINT)
_HANDLED = (*_STOPPING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

log = get_logger("daemon")


class StopSignal:
    """Requests to stop: the first drains, the second stops at once."""

    def __init__(self, drain_timeout_s: float) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        self.drain_timeout_s = drain_timeout_s

    def ask(self, reason: str, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """One more request to stop; timeout_s counts in the first one."""
        log.info("stop_requested", reason=reason, again=self.drain.is_set())
        if timeout_s is not None and not self.drain.is_set():
            self.drain_timeout_s = timeout_s
        if self.drain.is_set() or not drain:
            self.now.set()
        self.drain.set()


class Signals:
    """`stop`, and who is called at SIGHUP and SIGUSR2; a SIGHUP before there is anybody is kept until there is."""

    def __init__(self, drain_timeout_s: float) -> None:
        self.stop = StopSignal(drain_timeout_s)
        self._reload: Callable[[], None] | None = None
        self._toggle_debug: Callable[[], None] | None = None
        self._reload_asked = False

    def serve(self, *, reload: Callable[[], None], toggle_debug: Callable[[], None]) -> None:
        self._reload, self._toggle_debug = reload, toggle_debug
        if self._reload_asked:
            reload()

    @contextlib.contextmanager
    def handled(self) -> Iterator[StopSignal]:
        """For as long as the context lasts."""
        loop = asyncio.get_running_loop()
        for number in _STOPPING:
            loop.add_signal_handler(number, self.stop.ask, number.name)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        loop.add_signal_handler(signal.SIGUSR1, _log_tasks)
        loop.add_signal_handler(signal.SIGUSR2, self._on_debug)
        faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True, chain=True)
        try:
            yield self.stop
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            for number in _HANDLED:
                loop.remove_signal_handler(number)

    def _on_reload(self) -> None:
        if self._reload is not None:
            self._reload()
        else:
            log.info("reload_postponed", reason="the model is being loaded")
            self._reload_asked = True

    def _on_debug(self) -> None:
        if self._toggle_debug is not None:
            self._toggle_debug()


def _log_tasks() -> None:
    log.warning("stacks_dumped", tasks=task_stacks())
