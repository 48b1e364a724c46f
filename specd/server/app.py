"""The HTTP application: routes, keys, error bodies, health. No torch; the engine is what `protocol.py` says."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from specd.config import Config
from specd.errors import AbortedError, DrainingError, RequestError, SpecdError
from specd.log import get_logger
from specd.server.auth import ApiKeys
from specd.server.chat import ChatTemplate
from specd.server.errors import describe, error_response, from_http, json_response
from specd.server.fields import Endpoint
from specd.server.generation import (
    HEADERS_KEY,
    RECORD_KEY,
    REQUEST_ID_KEY,
    SALT_KEY,
    Generation,
    valid_request_id,
)
from specd.server.metrics import CONTENT_TYPE, ServerMetrics, version
from specd.server.prompts import Render
from specd.server.protocol import EngineProtocol
from specd.server.responses import error_body, model_card
from specd.status import EngineState
from specd.text import Tokenizer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

METRICS_KEY: web.AppKey[ServerMetrics] = web.AppKey("metrics", ServerMetrics)

_STALL_S = 120.0  # a step that takes longer is a hang: /health/live says so
_NOT_READY = {
    EngineState.LOADING: ("loading", "The model is being loaded."),
    EngineState.DRAINING: ("draining", "The server is shutting down."),
    EngineState.FAILED: ("engine_failed", "The engine has failed."),
    EngineState.STOPPED: ("draining", "The server is shutting down."),
}
_PATHS = {"/v1/completions": Endpoint.COMPLETIONS, "/v1/chat/completions": Endpoint.CHAT}

log = get_logger("server")


def create_app(engine: EngineProtocol, config: Config) -> web.Application:
    """The application around a loaded engine. Raises ConfigError (keys file) and ModelError (chat template).

    Run it with `create_runner`: a client that leaves must cancel its handler.
    """
    keys = ApiKeys.from_file(config.server.api_keys_file) if config.server.api_keys_file else ApiKeys()
    metrics = ServerMetrics(engine)
    generation = Generation(engine, config, metrics=metrics, render=chat_render(engine.tokenizer))
    pages = _Pages(engine, metrics)
    guard = _Guard(engine, generation, keys, metrics, open_handlers=pages.open_handlers)
    app = web.Application(client_max_size=config.server.max_body_bytes, middlewares=[guard.middleware])
    app[METRICS_KEY] = metrics
    app.on_response_prepare.append(_add_headers)
    app.router.add_post("/v1/completions", generation.completions)
    app.router.add_post("/v1/chat/completions", generation.chat)
    app.router.add_get("/v1/models", pages.models)
    app.router.add_get("/v1/models/{name:.+}", pages.model)
    app.router.add_get("/health", pages.ready)
    app.router.add_get("/health/ready", pages.ready)
    app.router.add_get("/health/live", pages.live)
    app.router.add_get("/ping", pages.ready)
    app.router.add_get("/version", pages.version)
    app.router.add_get("/metrics", pages.metrics)
    return app


def create_runner(app: web.Application, *, shutdown_timeout_s: float = 60.0) -> web.AppRunner:
    """The runner that the application is made for: handlers are cancelled when their client leaves."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        logger=_protocol_logger(),
        max_headers=64,
        shutdown_timeout=shutdown_timeout_s,
    )


class _ProtocolLog(logging.Handler):
    """aiohttp's own complaints as events: anybody can send garbage, and a traceback for each would fill the disk."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            log.info("malformed_request_refused", error=type(error).__name__)
        else:
            log.error("http_failed", message=record.getMessage(), exc_info=error)


def _protocol_logger() -> logging.Logger:
    logger = logging.Logger("specd.http", level=logging.WARNING)  # outside the tree: no handler but ours
    logger.addHandler(_ProtocolLog())
    return logger


def chat_render(tokenizer: Tokenizer) -> Render | None:
    """The model's chat template, compiled once; None when it has none. Raises ModelError when it does not compile."""
    if tokenizer.chat_template is None:
        return None
    template = ChatTemplate(
        tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.special_tokens,
    )
    return template.render


class _Guard:
    """What surrounds every handler: request id, key, state of the engine, error bodies, the log line."""

    def __init__(
        self,
        engine: EngineProtocol,
        generation: Generation,
        keys: ApiKeys,
        metrics: ServerMetrics,
        *,
        open_handlers: frozenset[Handler],
    ) -> None:
        self._engine = engine
        self._generation = generation
        self._keys = keys
        self._metrics = metrics
        self._open_handlers = open_handlers

    @property
    def middleware(self) -> Any:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        return guard

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID_KEY] = valid_request_id(request.headers.get("X-Request-Id"))
        request[HEADERS_KEY] = {}
        endpoint = _PATHS.get(_route(request)) if request.method == "POST" else None
        if endpoint is not None:
            request[RECORD_KEY] = self._generation.record(endpoint)
        status: int | None = None
        try:
            response = await self._respond(request, handler)
            status = response.status
        finally:
            self._close(request, endpoint, status)
        return response

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.match_info.handler not in self._open_handlers:
                request[SALT_KEY] = self._keys.check(request.headers.get("Authorization"))
            if RECORD_KEY in request and self._engine.state is not EngineState.READY:
                return _not_ready(self._engine.state)
            return await handler(request)
        except web.HTTPException as error:
            self._note(request, f"http_{error.status}")
            return from_http(error, request.path)
        except ConnectionError:
            raise  # the client is gone: nobody to answer
        except SpecdError as error:
            self._note(request, error.code)
            if describe(error)[0] >= 500 and not isinstance(error, DrainingError | AbortedError):
                log.error("request_failed", request_id=request[REQUEST_ID_KEY], exc_info=error)
            return error_response(error)
        except Exception as error:
            self._note(request, "internal_error")
            log.error("request_failed", request_id=request[REQUEST_ID_KEY], exc_info=error)
            return error_response(error)

    def _note(self, request: web.Request, code: str) -> None:
        if RECORD_KEY in request:
            request[RECORD_KEY].error_code = code

    def _close(self, request: web.Request, endpoint: Endpoint | None, status: int | None) -> None:
        if status is None and RECORD_KEY in request and request[RECORD_KEY].delivered:
            status = 200
        label = _route(request)
        self._metrics.responses.labels(label, "499" if status is None else str(status)).inc()
        if endpoint is None:
            return
        record = request[RECORD_KEY]
        if status is None and record.aborted_by is None:
            record.aborted_by = "client"
        if record.aborted_by == "client":
            self._metrics.client_disconnects.inc()
        record.close(request[REQUEST_ID_KEY], status)


def _route(request: web.Request) -> str:
    """The path as the router knows it (a closed set), "other" for what it does not know."""
    resource = request.match_info.route.resource
    return "other" if resource is None else resource.canonical


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "specd"
    response.headers["x-request-id"] = request.get(REQUEST_ID_KEY, "")
    response.headers.update(request.get(HEADERS_KEY, {}))
    if RECORD_KEY in request:
        elapsed_ms = (time.monotonic() - request[RECORD_KEY].arrival_s) * 1000
        response.headers["openai-processing-ms"] = str(round(elapsed_ms))


def _not_ready(state: EngineState) -> web.Response:
    code, message = _NOT_READY[state]
    return json_response(error_body(message, kind="server_error", code=code), status=503, headers={"Retry-After": "2"})


class _Pages:
    """Everything but generation."""

    def __init__(self, engine: EngineProtocol, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self.open_handlers: frozenset[Handler] = frozenset({self.ready, self.live})

    async def models(self, request: web.Request) -> web.Response:
        info = self._engine.info
        return json_response({"object": "list", "data": [model_card(name, info) for name in info.served_names]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._engine.info.served_names:
            raise RequestError(f"the model '{name[:128]}' does not exist", code="model_not_found", param="model")
        return json_response(model_card(name, self._engine.info))

    async def ready(self, request: web.Request) -> web.Response:
        state = self._engine.state
        return json_response({"status": "ok"}) if state is EngineState.READY else _not_ready(state)

    async def live(self, request: web.Request) -> web.Response:
        """Alive means that tokens are made, or that there are none to make."""
        stats = self._engine.stats()
        if stats.state in (EngineState.FAILED, EngineState.STOPPED):
            return _not_ready(stats.state)
        if stats.running and stats.last_progress_s > _STALL_S:
            text = f"No step has finished for {stats.last_progress_s:.0f} s."
            return json_response(error_body(text, kind="server_error", code="stalled"), status=503)
        return json_response({"status": "ok", "state": stats.state, "last_progress_s": stats.last_progress_s})

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": version()})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.expose(), headers={"Content-Type": CONTENT_TYPE})
