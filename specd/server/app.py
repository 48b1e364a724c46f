"""The HTTP application: routes, keys, error bodies, health. No torch; the engine is what `protocol.py` says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from specd.config import Config
from specd.errors import AbortedError, DrainingError, SpecdError
from specd.http_refusals import JsonRunner, Refusal, json_refusal, valid_request_id
from specd.listeners import is_loopback
from specd.log import get_logger
from specd.server import messages_api, responses_api, ui
from specd.server.auth import ApiKeys
from specd.server.chat import ChatTemplate
from specd.server.cors import Cors
from specd.server.errors import describe, error_response, from_http
from specd.server.fields import Endpoint
from specd.server.generation import (
    HEADERS_KEY,
    RECORD_KEY,
    REQUEST_ID_KEY,
    SALT_KEY,
    WEIGHT_KEY,
    Generation,
    Handler,
)
from specd.server.limits import MAX_HEADER_LINE_BYTES, MAX_HEADERS
from specd.server.metrics import ServerMetrics
from specd.server.pages import Pages, not_ready
from specd.server.protocol import EngineProtocol
from specd.server.record import client_name
from specd.server.spans import configured_telemetry
from specd.server.trace_context import trace_context
from specd.server.ui import Ui
from specd.status import EngineState
from specd.text import Tokenizer

if TYPE_CHECKING:
    from specd.server.telemetry import Telemetry

RECONFIGURE_KEY: web.AppKey[Iterable[Callable[[Config], None]]] = web.AppKey("reconfigure", tuple)
ARRIVAL_KEY: web.RequestKey[float] = web.RequestKey("arrival_s", float)
METRICS_KEY: web.AppKey[ServerMetrics] = web.AppKey("metrics", ServerMetrics)

_PATHS = {
    "/v1/completions": str(Endpoint.COMPLETIONS),
    "/v1/chat/completions": str(Endpoint.CHAT),
    responses_api.PATH: "responses",
    messages_api.PATH: "messages",
}

log = get_logger("server")


def create_app(
    engine: EngineProtocol, config: Config, *, keys: ApiKeys | None = None, local: bool | None = None
) -> web.Application:
    """The application around a loaded engine. Raises ConfigError (keys file) and ModelError (chat template).

    local: whether only this machine can connect; None: as `server.host` says.
    Run it with `create_runner`: a client that leaves must cancel its handler.
    """
    keys = ApiKeys.configured(config.server.api_keys_file) if keys is None else keys
    template = chat_template(engine.tokenizer)
    telemetry = configured_telemetry(config.telemetry)
    metrics = ServerMetrics(engine, compat=config.server.metrics_compat == "vllm")
    generation = Generation(engine, config, metrics=metrics, template=template, telemetry=telemetry)
    pages = Pages(engine, config, metrics, generation)
    cors = Cors(config.server.cors_origins)
    page = Ui(engine, config)
    open_handlers = pages.open_handlers | page.open_handlers
    guard = _Guard(engine, generation, keys, metrics, cors=cors, open_handlers=open_handlers)
    messages = messages_api.MessagesApi(generation)
    middlewares = [messages.middleware, guard.middleware]
    app = web.Application(client_max_size=config.server.max_body_bytes, middlewares=middlewares)
    if telemetry is not None:
        metrics.registry.register(telemetry.counts)
        app.on_cleanup.append(_closing(telemetry))
    app[METRICS_KEY] = metrics
    app[RECONFIGURE_KEY] = (generation.reconfigure, pages.reconfigure, page.reconfigure)
    app.on_response_prepare.append(_add_headers)
    app.on_response_prepare.append(messages.on_prepare)
    app.on_response_prepare.append(cors.on_prepare)
    app.router.add_post("/v1/completions", generation.completions)
    app.router.add_post("/v1/chat/completions", generation.chat)
    app.router.add_post(responses_api.PATH, responses_api.ResponsesApi(generation).create)
    app.router.add_post(messages_api.PATH, messages.create)
    app.router.add_post(messages_api.COUNT_PATH, messages.count_tokens)
    pages.add_routes(app.router)
    if ui.enabled(config.server, local=is_loopback(config.server.host) if local is None else local):
        page.add_to(app)
    return app


def _closing(telemetry: Telemetry) -> Callable[[web.Application], Awaitable[None]]:
    async def close(app: web.Application) -> None:
        await asyncio.to_thread(telemetry.close)

    return close


def create_runner(app: web.Application, *, shutdown_timeout_s: float = 60.0) -> web.AppRunner:
    """The runner that the application is made for: handlers are cancelled when their client leaves."""
    return JsonRunner(
        app,
        write=_refuse,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        max_headers=MAX_HEADERS,
        max_line_size=MAX_HEADER_LINE_BYTES,
        max_field_size=MAX_HEADER_LINE_BYTES,
        shutdown_timeout=shutdown_timeout_s,
    )


def _refuse(request: web.BaseRequest, refusal: Refusal) -> web.Response:
    """What no handler had a chance to say, in the shape of the API that was asked."""
    response = json_refusal(request, refusal)
    request[REQUEST_ID_KEY] = response.headers["x-request-id"]
    return messages_api.own_shape(request, response) if request.path in messages_api.PATHS else response


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The model's chat template, compiled once; None when it has none. Raises ModelError when it does not compile."""
    if tokenizer.chat_template is None:
        return None
    return ChatTemplate(
        tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.special_tokens,
    )


class _Guard:
    """What surrounds every handler: request id, key, state of the engine, error bodies, the log line."""

    def __init__(
        self,
        engine: EngineProtocol,
        generation: Generation,
        keys: ApiKeys,
        metrics: ServerMetrics,
        *,
        cors: Cors,
        open_handlers: frozenset[Handler],
    ) -> None:
        self._cors = cors
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
        request[ARRIVAL_KEY] = time.monotonic()
        endpoint = _PATHS.get(_route(request)) if request.method == "POST" else None
        if endpoint is not None:
            request[RECORD_KEY] = self._generation.record(endpoint)
            request[RECORD_KEY].trace = trace_context(request.headers)
        status: int | None = None
        try:
            response = await self._respond(request, handler)
            status = response.status
        finally:
            self._close(request, endpoint, status)
        return response

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        preflight = self._cors.preflight(request)
        if preflight is not None:
            return preflight  # browsers send no key with it
        try:
            if request.match_info.handler not in self._open_handlers:
                request[SALT_KEY] = self._keys.check(_authorization(request))
                request[WEIGHT_KEY] = self._keys.weight(request[SALT_KEY])
            if RECORD_KEY in request and self._engine.state is not EngineState.READY:
                return not_ready(self._engine.state)
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

    def _close(self, request: web.Request, endpoint: str | None, status: int | None) -> None:
        if status is None and RECORD_KEY in request and request[RECORD_KEY].answered:
            status = 200
        label = _route(request)
        self._metrics.responses.labels(label, "499" if status is None else str(status)).inc()
        if endpoint is None:
            return
        record = request[RECORD_KEY]
        record.client = client_name(request.remote, request.get(SALT_KEY, b""))
        if status is None and record.aborted_by is None:
            record.aborted_by = "client"
        if record.aborted_by == "client":
            self._metrics.client_disconnects.inc()
        record.close(request[REQUEST_ID_KEY], status)


def _authorization(request: web.Request) -> str | None:
    """OpenAI's clients send `Authorization: Bearer KEY`, Anthropic's `x-api-key: KEY`."""
    key = request.headers.get("x-api-key")
    return request.headers.get("Authorization", None if key is None else f"Bearer {key}")


def _route(request: web.Request) -> str:
    """The path as the router knows it (a closed set), "other" for what it does not know."""
    resource = request.match_info.route.resource
    return "other" if resource is None else resource.canonical


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "specd"
    response.headers["x-request-id"] = request.get(REQUEST_ID_KEY, "")
    response.headers.update(request.get(HEADERS_KEY, {}))
    if ARRIVAL_KEY in request:
        response.headers["openai-processing-ms"] = str(round((time.monotonic() - request[ARRIVAL_KEY]) * 1000))
