"""The daemon's life: bind, load, ready, serve, drain, stop.

    bind ---- load (a thread) ---- READY ------------------ SIGTERM ---- drain ---- close -> exit code
    |- /health 503 "loading" ----|- the real application ---|- 503 "draining" -|

The listener is bound before anything is loaded: a port in use is reported at once, probes are answered while the
weights load, and with socket activation no connection is refused. A second signal stops at once, as the first one does
while the model loads.

Exit codes: 0 drained, 1 fault, 75 requests were cut off by the drain limit or by a second signal, 78 configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

import aiohttp.web

from specd.config import LOSSY_ACCEPTANCE, Config, admin_socket_path
from specd.listeners import address_of, bind, is_loopback, loading_site
from specd.log import get_logger
from specd.models import fetch
from specd.sdnotify import Notifier, listen_sockets
from specd.server.admin import Shutdown, bind_admin_socket, create_admin_app
from specd.server.app import create_app, create_runner
from specd.server.auth import ApiKeys
from specd.server.protocol import EngineProtocol
from specd.status import EngineInfo, EngineState, EngineStats

EXIT_OK, EXIT_FAULT, EXIT_CUT_OFF, EXIT_CONFIG = 0, 1, 75, 78

_PERIOD_S = 5.0  # between STATUS lines
_STALL_S = 60.0  # a step that takes longer than this is a stall: the watchdog is not fed
_LAST_BYTES_S = 5.0  # for replies whose last token is made but not yet written
_ABANDON_S = 1.0  # for a load that was asked to stop: a download removes what it has

log = get_logger("daemon")


class DaemonEngine(EngineProtocol, Protocol):
    """What the daemon needs beyond the server's view: `specd.engine.Engine`, or a fake in tests."""

    async def drain(self, timeout_s: float) -> bool:
        """Accepts nothing more and waits for what was accepted; False when the time ran out."""
        ...

    async def close(self) -> None:
        """Ends what still runs (each stream gets its last delta) and frees everything."""
        ...


class LoadAbandoned(Exception):
    """Asked to stop while it loaded, and the loading thread goes on: it can only be ended with its process."""


EngineFactory = Callable[[Config], Awaitable[DaemonEngine]]


class StopSignal:
    """Requests to stop: the first drains, the second stops at once."""

    def __init__(self, drain_timeout_s: float) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        self.drain_timeout_s = drain_timeout_s

    def ask(self, reason: str) -> None:
        """One more request to stop."""
        log.info("stop_requested", reason=reason, again=self.drain.is_set())
        if self.drain.is_set():
            self.now.set()
        self.drain.set()

    def ask_shutdown(self, wish: Shutdown) -> None:
        """`specd ctl shutdown`: a signal with a choice."""
        if wish.timeout_s is not None and not self.drain.is_set():
            self.drain_timeout_s = wish.timeout_s
        self.ask("ctl shutdown")
        if not wish.drain:
            self.now.set()


async def load_engine(config: Config) -> DaemonEngine:
    """The real engine. Imported in a thread: importing torch takes seconds and would block the loop."""
    log.info("model_loading", path=config.model.path)
    module = await asyncio.to_thread(importlib.import_module, "specd.engine")
    engine: DaemonEngine = await module.Engine.create(config)
    return engine


async def serve(config: Config, *, create_engine: EngineFactory = load_engine) -> int:
    """Runs the daemon until a signal, `specd ctl shutdown` or a fault; gives the exit code.

    Raises ConfigError, AddressInUseError, ModelError, DraftError or FetchError when it cannot start, LoadAbandoned
    when it was stopped before it had. Whatever it raises, nothing listens any more and the control socket is gone.
    """
    notifier = Notifier.from_env(os.environ)
    activated = listen_sockets(os.environ)
    if config.server.api_keys_file:
        ApiKeys.from_file(config.server.api_keys_file)  # a bad file is reported now, not after the model is loaded
    with _signals(config.server.drain_timeout_s) as stop, contextlib.ExitStack() as stack:
        listeners = activated.get("http") or [bind(config.server.host, config.server.port)]
        for listener in listeners:
            stack.enter_context(listener)
        if not config.server.api_keys_file:
            _warn_of_strangers(listeners)
        admin = activated.get("admin", []) if config.admin.enabled else []
        if config.admin.enabled and not admin:
            admin = [stack.enter_context(_admin_listener(config))]
        async with loading_site(listeners):
            engine = await _load(config, create_engine, notifier, stop)
        if engine is None:
            return EXIT_OK
        return await _run(config, engine, listeners, admin, notifier, stop)


def _warn_of_strangers(listeners: list[socket.socket]) -> None:
    """What is bound counts, not `server.host`: activated sockets have addresses of their own."""
    inet = [listener for listener in listeners if listener.family != socket.AF_UNIX]
    addresses = [address_of(listener) for listener in inet if not is_loopback(listener.getsockname()[0])]
    if addresses:
        log.warning("listening_without_keys", addresses=addresses, advice="set server.api_keys_file")


@contextlib.contextmanager
def _admin_listener(config: Config) -> Iterator[socket.socket]:
    """The control socket, and its file for as long as the context lasts. Raises ConfigError or AddressInUseError."""
    path = admin_socket_path(config.admin.socket, os.environ)
    with bind_admin_socket(path) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _signals(drain_timeout_s: float) -> Iterator[StopSignal]:
    """SIGTERM and SIGINT as a StopSignal, for as long as the context lasts."""
    loop, stop = asyncio.get_running_loop(), StopSignal(drain_timeout_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.ask, number.name)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _load(
    config: Config, create_engine: EngineFactory, notifier: Notifier, stop: StopSignal
) -> DaemonEngine | None:
    """The engine, or None when a signal came first. Extends systemd's start limit while it loads.

    Raises what the load raises, and LoadAbandoned when it does not end after a signal.
    """
    with fetch.cancellable() as cancel:
        loading = asyncio.ensure_future(create_engine(config))
    stopping = asyncio.ensure_future(stop.drain.wait())
    try:
        while True:
            _notify(notifier, "STATUS=loading the model", f"EXTEND_TIMEOUT_USEC={int(6 * _PERIOD_S * 1e6)}")
            await asyncio.wait((loading, stopping), timeout=_PERIOD_S, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                return loading.result()
            if stopping.done():
                cancel.set()
                await _stop_loading(loading)
                return None
    finally:
        stopping.cancel()
        loading.cancel()
        await asyncio.wait((loading, stopping), timeout=_ABANDON_S)


async def _stop_loading(loading: asyncio.Future[DaemonEngine]) -> None:
    """Waits a moment for a load that was asked to stop. Raises LoadAbandoned when it goes on."""
    await asyncio.wait((loading,), timeout=_ABANDON_S)
    if not loading.done():
        log.info("load_abandoned")
        raise LoadAbandoned
    error = loading.exception()
    if error is None:
        await loading.result().close()
    else:
        log.info("load_stopped", error=str(error))


async def _run(
    config: Config,
    engine: DaemonEngine,
    listeners: list[socket.socket],
    admin: list[socket.socket],
    notifier: Notifier,
    stop: StopSignal,
) -> int:
    """Serves until asked to stop, drains, and gives the exit code."""
    async with contextlib.AsyncExitStack() as engine_stack, contextlib.AsyncExitStack() as stack:
        engine_stack.push_async_callback(engine.close)
        runner = create_runner(create_app(engine, config), shutdown_timeout_s=_LAST_BYTES_S)
        await _start(runner, listeners, stack)
        control = aiohttp.web.AppRunner(create_admin_app(engine, stop.ask_shutdown), access_log=None)
        await _start(control, admin, stack)
        # Left in reverse: the engine ends its streams, then the runners wait until the last bytes are written.
        stack.push_async_callback(engine_stack.aclose)
        addresses = [address_of(listener) for listener in listeners]
        print(plan_text(engine.info, addresses, control=[address_of(listener) for listener in admin]), flush=True)
        if engine.info.acceptance in LOSSY_ACCEPTANCE:
            log.warning("lossy_acceptance", acceptance=engine.info.acceptance, advice="exact and ratio are lossless")
        log.info("became_ready", model=engine.info.model, drafter=engine.info.drafter, addresses=addresses)
        _notify(notifier, "READY=1")
        failed = await _watch(engine, notifier, stop)
        finished = not failed and await _drain(engine, notifier, stop)
        failed = failed or engine.stats().state is EngineState.FAILED  # while it drained
    return _report(engine.stats(), failed=failed, finished=finished)


async def _start(
    runner: aiohttp.web.AppRunner, listeners: list[socket.socket], stack: contextlib.AsyncExitStack
) -> None:
    """Serves on copies of the listeners: aiohttp closes what it is given, the originals belong to `serve`."""
    stack.push_async_callback(runner.cleanup)
    await runner.setup()
    for listener in listeners:
        await aiohttp.web.SockSite(runner, listener.dup()).start()


async def _watch(engine: DaemonEngine, notifier: Notifier, stop: StopSignal) -> bool:
    """Reports until asked to stop; True when the engine failed. The watchdog is fed by token progress, not by time."""
    period = min(_PERIOD_S, (notifier.watchdog_s or 2 * _PERIOD_S) / 2)
    before = engine.stats()
    while not await _set_within(stop.drain, period):
        stats = engine.stats()
        if stats.state is EngineState.FAILED:
            log.error("engine_failed", running=stats.running, waiting=stats.waiting)
            _notify(notifier, "STATUS=the engine failed", "WATCHDOG=trigger")
            return True
        fed = ["WATCHDOG=1"] if notifier.watchdog_s and stats.last_progress_s < _STALL_S else []
        _notify(notifier, status_line(before, stats), *fed)
        before = stats
    return False


async def _drain(engine: DaemonEngine, notifier: Notifier, stop: StopSignal) -> bool:
    """True when everything accepted has ended; False when the time ran out or a second signal came."""
    draining = asyncio.ensure_future(engine.drain(stop.drain_timeout_s))
    stopping = asyncio.ensure_future(stop.now.wait())
    try:
        while not draining.done() and not stopping.done():
            stats = engine.stats()
            left = stats.running + stats.waiting
            extend = f"EXTEND_TIMEOUT_USEC={int(4 * _PERIOD_S * 1e6)}"
            _notify(notifier, "STOPPING=1", f"STATUS=draining {left}", extend)
            await asyncio.wait((draining, stopping), timeout=_PERIOD_S, return_when=asyncio.FIRST_COMPLETED)
        return draining.result() if draining.done() else False
    finally:
        draining.cancel()
        stopping.cancel()
        await asyncio.wait((draining, stopping))


def _report(stats: EngineStats, *, failed: bool, finished: bool) -> int:
    """Prints the account of requests and gives the exit code. A lost request is a fault."""
    accounted = stats.requests_finished + stats.requests_failed + stats.requests_aborted
    lost = stats.accepted_requests - accounted
    print(
        f"accepted {stats.accepted_requests} == finished {stats.requests_finished} + failed {stats.requests_failed}"
        f" + aborted {stats.requests_aborted}" + (f" + LOST {lost}" if lost else ""),
        flush=True,
    )
    log.info("stopped", accepted=stats.accepted_requests, lost=lost, drained=finished)
    if failed or lost:
        return EXIT_FAULT
    return EXIT_OK if finished else EXIT_CUT_OFF


def plan_text(info: EngineInfo, addresses: list[str], *, control: list[str]) -> str:
    """What is served, for people: printed once at start and by `specd check`."""
    drafter = "none" if info.drafter == "none" else f"{info.drafter}, at most {info.max_draft} drafts a step"
    acceptance = info.acceptance + (" (lossy)" if info.acceptance in LOSSY_ACCEPTANCE else "")
    rows = {
        "model": f"{info.model}, {info.weight_bytes / 1e6:,.1f} MB of weights, {info.dtype}",
        "served as": ", ".join(info.served_names),
        "kernels": _kernels(info),
        "context": f"{info.max_len:,} tokens",
        "kv cache": f"{info.kv_tokens:,} tokens in pages of {info.page_size}, {info.max_running} requests at once, "
        f"at most {info.kv_bytes / 1e6:,.1f} MB, taken as pages are used",
        "drafter": f"{drafter}, acceptance {acceptance}",
        "address": ", ".join(addresses) or "none: nothing listens",
        "control": ", ".join(control) or "none",
    }
    return "\n".join(f"{name:>10}  {value}" for name, value in rows.items())


def _kernels(info: EngineInfo) -> str:
    """Whose arithmetic it is, and what that means for the text."""
    meaning = {
        "native fast": "int8 activations",
        "native exact": "float32 activations",
        "torch": f"PyTorch in {info.dtype}",
    }
    return f"{info.kernels}: {meaning[info.kernels]}" if info.kernels in meaning else info.kernels


def status_line(before: EngineStats, now: EngineStats) -> str:
    """`STATUS=3 running, 0 waiting, 41.0 tokens/s, 2.90 tokens a draft step`: what happened between two snapshots."""
    seconds = max(now.uptime_s - before.uptime_s, 1e-3)
    rate = (now.generation_tokens - before.generation_tokens) / seconds
    drafts = sum(now.drafts.values()) - sum(before.drafts.values())
    accepted = sum(now.accepted_tokens.values()) - sum(before.accepted_tokens.values())
    length = f", {1 + accepted / drafts:.2f} tokens a draft step" if drafts else ""
    return f"STATUS={now.running} running, {now.waiting} waiting, {rate:.1f} tokens/s{length}"


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def _notify(notifier: Notifier, *assignments: str) -> None:
    """A service manager that went away must not take the daemon along."""
    try:
        notifier.send(*assignments)
    except OSError as error:
        log.warning("notify_failed", error=str(error))
