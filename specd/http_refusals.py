"""What aiohttp answers by itself, before any handler or beside it, as JSON: malformed HTTP, headers that are too large,
a wrong `Expect`, an exception that nobody caught. Its own texts would be plain text without a request id.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import _ErrInfo

from specd.log import get_logger

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_MESSAGE = 200
_TEXTS = {
    417: ("expectation_failed", "this server knows no other Expect than 100-continue"),
    500: ("internal_error", "The server could not answer this request."),
    504: ("internal_error", "The server took too long to answer this request."),
}

log = get_logger("server")


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that has to be written without a handler."""

    status: int
    code: str
    message: str

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return error_body(self.message, kind=kind, code=self.code)


Write = Callable[[web.BaseRequest, Refusal], web.Response]


def error_body(message: str, *, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def valid_request_id(header: str | None) -> str:
    """The client's X-Request-Id when it is usable (proxies write all sorts of things there), else a new one."""
    return header if header is not None and REQUEST_ID.fullmatch(header) else uuid.uuid4().hex


def json_refusal(request: web.BaseRequest, refusal: Refusal, headers: Mapping[str, str] | None = None) -> web.Response:
    """A refusal in OpenAI's shape, with the request's name."""
    request_id = valid_request_id(request.headers.get("X-Request-Id"))
    names = {"Server": "specd", "x-request-id": request_id, **(headers or {})}
    return web.Response(
        body=orjson.dumps(refusal.body()), status=refusal.status, content_type="application/json", headers=names
    )


class JsonServer(web.Server):
    """aiohttp's server, whose own refusals are written by `write`. kwargs: aiohttp's."""

    def __init__(self, handler: Any, *, write: Write, **kwargs: Any) -> None:
        super().__init__(handler, logger=_protocol_logger(), **kwargs)
        self.write = write

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._kwargs)


class JsonRunner(web.AppRunner):
    """Runs an application behind a `JsonServer`."""

    __slots__ = ("_write",)

    def __init__(self, app: web.Application, *, write: Write, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self._write = write

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return JsonServer(
            made.request_handler,
            write=self._write,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )


class _Connection(web.RequestHandler):
    """One connection."""

    __slots__ = ("_write",)

    def __init__(self, server: JsonServer, **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self._write = server.write

    def data_received(self, data: bytes) -> None:
        """Aiohttp leaves a handler waiting for a body that broke off in the middle of its chunks: it is told here, and
        the answer that it gives is the connection's last."""
        super().data_received(data)
        request = self._current_request
        if request is None or not self._messages or request.content.is_eof():
            return
        broken = self._messages[-1][0]
        if isinstance(broken, _ErrInfo):
            self._messages.pop()
            request.content.set_exception(web.RequestPayloadError(refusal_of(400, broken.exc).message))
            request.content.feed_eof()
            self.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs; raises where an answer has begun
        response = self._write(request, refusal_of(status, exc))
        response.force_close()  # where the next request begins is not known
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised outside the application's middlewares
            resp = self._write(request, Refusal(resp.status, *_TEXTS.get(resp.status, ("http_error", resp.reason))))
        return await super().finish_response(request, resp, start_time)


def refusal_of(status: int, error: BaseException | None) -> Refusal:
    """What there is to say about a request that aiohttp could not read, or a handler that broke."""
    if not isinstance(error, HttpProcessingError):
        return Refusal(status, *_TEXTS.get(status, _TEXTS[500]))
    text = error.message
    if isinstance(error, LineTooLong) or text.startswith("Too many headers"):
        return Refusal(431, "headers_too_large", "the request line or the headers are larger than this server accepts")
    first = text.splitlines()[0] if text else type(error).__name__
    shown = first[:_MAX_MESSAGE].rstrip(": ").encode(errors="backslashreplace").decode()
    return Refusal(400, "malformed_request", f"the request is not valid HTTP: {shown}")


class _ProtocolLog(logging.Handler):
    """aiohttp's own complaints as events: anybody can send garbage, and a traceback for each would fill the disk."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            log.info("malformed_request_refused", error=type(error).__name__)
        elif isinstance(error, ConnectionError):  # it left while its answer began
            log.debug("client_gone", error=type(error).__name__)
        else:
            log.error("http_failed", message=record.getMessage(), exc_info=error)


def _protocol_logger() -> logging.Logger:
    logger = logging.Logger("specd.http", level=logging.WARNING)  # outside the tree: no handler but ours
    logger.addHandler(_ProtocolLog())
    return logger
