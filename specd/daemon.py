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
import functools
import importlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator

import aiohttp.web

from specd.config import LOSSY_ACCEPTANCE, Config, admin_socket_path
from specd.journal import RequestJournal, journal_path
from specd.listeners import address_of, bind, is_loopback, loading_site, local_only, notice_lost_peers
from specd.log import get_logger
from specd.models import fetch
from specd.operation import Operation
from specd.preflight import check_before_load
from specd.reload import Reloader
from specd.sdnotify import Notifier, listen_sockets
from specd.server.admin.app import create_admin_app
from specd.server.admin.peers import Levels
from specd.server.admin.sockets import bind_admin_socket
from specd.server.app import METRICS_KEY, RECONFIGURE_KEY, create_app, create_runner
from specd.server.auth import ApiKeys
from specd.server.load_metrics import JournalCollector, ReloadCollector
from specd.server.spans import check_telemetry
from specd.signals import Signals, StopSignal
from specd.status import EngineInfo, EngineState, EngineStats
from specd.supervision import PERIOD_S, DaemonEngine, notify

EXIT_OK, EXIT_FAULT, EXIT_CUT_OFF, EXIT_CONFIG = 0, 1, 75, 78

_LAST_BYTES_S = 5.0  # for replies whose last token is made but not yet written
_ABANDON_S = 1.0  # for a load that was asked to stop: a download removes what it has

log = get_logger("daemon")


class LoadAbandoned(Exception):
    """Asked to stop while it loaded, and the loading thread goes on: it can only be ended with its process."""


EngineFactory = Callable[[Config], Awaitable[DaemonEngine]]


async def load_engine(config: Config, *, grammars: bool = False) -> DaemonEngine:
    """The real engine. Imported in a thread: importing torch takes seconds and would block the loop.

    grammars: see `specd.engine.Engine.create`.
    """
    await asyncio.to_thread(check_before_load, config)
    log.info("model_loading", path=config.model.path)
    module = await asyncio.to_thread(importlib.import_module, "specd.engine")
    engine: DaemonEngine = await module.Engine.create(config, grammars=grammars)
    return engine


load_serving_engine: EngineFactory = functools.partial(load_engine, grammars=True)


async def serve(
    config: Config, *, create_engine: EngineFactory = load_serving_engine, reread: Callable[[], Config] | None = None
) -> int:
    """Runs the daemon until a signal, `specd ctl shutdown` or a fault; gives the exit code.

    reread: gives the configuration anew for a reload; None: a reload finds what is in force.
    Raises ConfigError, AddressInUseError, JournalInUseError, OutputError, ModelError, DraftError or FetchError when it
    cannot start, LoadAbandoned when it was stopped before it had. Whatever it raises, nothing listens any more and the
    control socket is gone.
    """
    notifier = Notifier.from_env(os.environ)
    activated = listen_sockets(os.environ)
    keys = ApiKeys.configured(config.server.api_keys_file)  # a bad file is reported now, not after the model is loaded
    levels = Levels.configured(config.admin)
    check_telemetry(config.telemetry)
    signals = Signals(config.server.drain_timeout_s)
    with signals.handled() as stop, contextlib.ExitStack() as stack:
        listeners = activated.get("http") or [bind(config.server.host, config.server.port)]
        for listener in listeners:
            stack.enter_context(listener)
        _tune(listeners, config)
        _warn_of_strangers(listeners, config)
        admin = activated.get("admin", []) if config.admin.enabled else []
        if config.admin.enabled and not admin:
            admin = [stack.enter_context(_admin_listener(config, levels))]
        journal = stack.enter_context(_journal(config))
        async with loading_site(listeners):
            engine = await _load(config, create_engine, notifier, stop)
        if engine is None:
            return EXIT_OK
        if journal is not None:
            journal.start()
            engine.account.journal = journal
        reloader = Reloader(config, reread or (lambda: reloader.config))
        operation = Operation(engine, reloader, signals, notifier, keys=keys, levels=levels)
        return await _run(operation, listeners, admin)


def _tune(listeners: list[socket.socket], config: Config) -> None:
    for listener in listeners:
        notice_lost_peers(listener, slow_client_s=config.server.slow_client_timeout_s)


def _warn_of_strangers(listeners: list[socket.socket], config: Config) -> None:
    """What is bound counts, not `server.host`: activated sockets have addresses of their own."""
    if config.server.api_keys_file:
        return
    inet = [listener for listener in listeners if listener.family != socket.AF_UNIX]
    addresses = [address_of(listener) for listener in inet if not is_loopback(listener.getsockname()[0])]
    if addresses:
        log.warning("listening_without_keys", addresses=addresses, advice="set server.api_keys_file")


@contextlib.contextmanager
def _admin_listener(config: Config, levels: Levels) -> Iterator[socket.socket]:
    """The control socket, and its file for as long as the context lasts. Raises ConfigError or AddressInUseError."""
    path = admin_socket_path(config.admin.socket, os.environ)
    with bind_admin_socket(path, group=levels.operators) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _journal(config: Config) -> Iterator[RequestJournal | None]:
    """Open for as long as the context lasts. Raises JournalInUseError, ConfigError or OutputError."""
    path = journal_path(config.server.journal, os.environ)
    if path is None:
        yield None
        return
    with contextlib.closing(RequestJournal(path)) as journal:
        yield journal


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
            notify(notifier, "STATUS=loading the model", f"EXTEND_TIMEOUT_USEC={int(6 * PERIOD_S * 1e6)}")
            await asyncio.wait((loading, stopping), timeout=PERIOD_S, return_when=asyncio.FIRST_COMPLETED)
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


async def _run(operation: Operation, listeners: list[socket.socket], admin: list[socket.socket]) -> int:
    """Serves until asked to stop, drains, and gives the exit code."""
    engine, supervisor = operation.engine, operation.supervisor
    async with contextlib.AsyncExitStack() as engine_stack, contextlib.AsyncExitStack() as stack:
        engine_stack.push_async_callback(engine.close)
        await stack.enter_async_context(operation.lag.measured())
        app = create_app(engine, operation.reloader.config, keys=operation.keys, local=local_only(listeners))
        app[METRICS_KEY].registry.register(ReloadCollector(operation.reloader))
        app[METRICS_KEY].registry.register(JournalCollector(engine.account))
        operation.lag.observers.append(app[METRICS_KEY].loop_lag.observe)
        await _start(create_runner(app, shutdown_timeout_s=_LAST_BYTES_S), listeners, stack)
        control = create_admin_app(operation.console)
        await _start(create_runner(control, shutdown_timeout_s=_LAST_BYTES_S), admin, stack)
        # Left in reverse: the engine ends its streams, then the runners wait until the last bytes are written.
        stack.push_async_callback(engine_stack.aclose)
        addresses = [address_of(listener) for listener in listeners]
        print(plan_text(engine.info, addresses, control=[address_of(listener) for listener in admin]), flush=True)
        if engine.info.acceptance in LOSSY_ACCEPTANCE:
            log.warning("lossy_acceptance", acceptance=engine.info.acceptance, advice="exact and ratio are lossless")
        log.info("became_ready", model=engine.info.model, drafter=engine.info.drafter, addresses=addresses)
        notify(operation.notifier, "READY=1")
        heed = (functools.partial(take, listeners) for take in (_tune, _warn_of_strangers))
        operation.begin((*app[RECONFIGURE_KEY], *heed))
        failed = await supervisor.watch()
        finished = not failed and await supervisor.drain()
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
