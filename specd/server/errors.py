"""Errors as HTTP: one place that says which status, type and headers each one gets."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from aiohttp import web

from specd.errors import (
    AbortedError,
    DeadlineError,
    DrainingError,
    GrammarError,
    OverloadedError,
    QueueTimeoutError,
    RequestError,
    SpecdError,
)
from specd.http_refusals import error_body

_MAX_MESSAGE = 1000
_REQUEST_STATUS = {
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_too_large": 413,
    "unsupported_media_type": 415,
    "unsupported_encoding": 415,
    "invalid_api_key": 401,
    "host_not_allowed": 403,
}
_KINDS = {404: "not_found_error", 401: "authentication_error"}
ENGINE_FAULT = "The engine could not compute this request."


def json_response(body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")


def describe(error: BaseException) -> tuple[int, dict[str, object], dict[str, str]]:
    """(status, body, headers) of an error. Texts of faults are fixed: no paths, no values, no traceback.

    Clients repeat 408, 409, 429 and 5xx by themselves; a fault that the request itself may cause says not to.
    """
    message = str(error)[:_MAX_MESSAGE].encode(errors="backslashreplace").decode()
    match error:
        case RequestError():
            status = _REQUEST_STATUS.get(error.code, 400)
            kind = _KINDS.get(status, "invalid_request_error")
            headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
            return status, error_body(message, kind=kind, code=error.code, param=error.param), headers
        case GrammarError():
            headers = {"x-should-retry": "false"}
            return 400, error_body(message, kind="invalid_request_error", code=error.code), headers
        case OverloadedError():
            headers = {"Retry-After": str(error.retry_after_s), "x-should-retry": "true"}
            return 429, error_body(message or "The queue is full.", kind="rate_limit_error", code=error.code), headers
        case DrainingError():
            text = "The server is draining: it accepts no new requests."
            return 503, error_body(text, kind="server_error", code=error.code), {"Retry-After": "2"}
        case QueueTimeoutError():
            return 503, error_body(message, kind="server_error", code=error.code), {"x-should-retry": "true"}
        case DeadlineError():
            return 504, error_body(message, kind="server_error", code=error.code), {"x-should-retry": "false"}
        case AbortedError():
            text = "The request was ended by the server."
            return 503, error_body(text, kind="server_error", code=error.code), {"x-should-retry": "false"}
        case _:
            code = error.code if isinstance(error, SpecdError) else "internal_error"
            return 500, error_body(ENGINE_FAULT, kind="server_error", code=code), {"x-should-retry": "false"}


def error_response(error: BaseException) -> web.Response:
    status, body, headers = describe(error)
    return json_response(body, status=status, headers=headers)


def from_http(error: web.HTTPException, path: str) -> web.Response:
    """aiohttp's own refusals (404, 405, 413, ...) in the API's shape."""
    texts = {
        404: ("not_found", f"there is no {path[:128]} here"),
        405: ("method_not_allowed", "this path does not take that method"),
        413: ("request_too_large", "the body is larger than this server accepts"),
    }
    code, message = texts.get(error.status, ("http_error", error.reason))
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return json_response(error_body(message, kind=kind, code=code), status=error.status, headers=headers)
