"""The API's own description, OpenAPI 3.1, at /openapi.json: made of the tables that check requests.

Request schemas come from `fields.py` (and `pages.py`), with the limits that are configured; answers from `schemas.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specd.config import Config
from specd.server import messages_api, responses_api
from specd.server.checks import Schema, schema_of
from specd.server.fields import DETOKENIZE_FIELDS, ENDPOINT_FIELDS, TOKENIZE_FIELDS, Endpoint, FieldTable
from specd.server.schemas import SCHEMAS, ref
from specd.status import EngineInfo

_ERRORS: Mapping[int, str] = {
    400: "A field has a wrong type, is out of range, contradicts another or is not supported; `param` names it. Or the "
    "body is not a JSON object, or the prompt does not fit into the context.",
    401: "No API key, or a wrong one (Authorization: Bearer KEY).",
    404: "No such model, or no such path.",
    408: "The body took too long to arrive.",
    413: "The body is larger than this server accepts.",
    415: "The body is not plain JSON (Content-Type: application/json, no Content-Encoding).",
    429: "Too many requests wait, of this key or of all; Retry-After says when to come back.",
    500: "The engine could not compute this request, or the server is at fault.",
    503: "The model is being loaded, the server drains, the engine has failed, somebody has ended the request, or it "
    "waited too long.",
    504: "The request's deadline has passed.",
}
_BODY = (400, 404, 408, 413, 415)
_Headers = Mapping[str, tuple[str, Schema]]
_REQUEST_HEADERS: _Headers = {
    "x-request-id": ("Name of the request, repeated in the answer.", {"type": "string"}),
    "x-specd-strict": ("1: fields that nobody reads are refused.", {"type": "string", "enum": ["0", "1"]}),
}
_GENERATION_HEADERS: _Headers = {
    "x-specd-speculation": ("`speculation.mode` as a header.", {"type": "string", "enum": ["auto", "off"]}),
    "x-request-timeout": (
        "Seconds from arrival to the last token.",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 86400},
    ),
}
_REQUIRED = {Endpoint.COMPLETIONS: ("prompt",), Endpoint.CHAT: ("messages",)}


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """One operation: what it takes, the name of the schema it answers with, and how it can fail."""

    method: str
    path: str
    summary: str
    answer: str
    errors: tuple[int, ...] = ()
    body: str = ""  # name of the schema of the request body
    chunk: str = ""  # what each event is when `stream` is true, by the name of its schema or in words
    error: str = "Error"
    media: str = "application/json"
    open: bool = False  # asks for no key
    headers: _Headers = dataclasses.field(default_factory=dict)


_GENERATION_ERRORS = (*_BODY, 429, 500, 503, 504)
_BOTH_HEADERS: _Headers = {**_REQUEST_HEADERS, **_GENERATION_HEADERS}

ROUTES: tuple[Route, ...] = (
    Route(
        "POST", "/v1/completions", "Continues prompts.", "Completion", _GENERATION_ERRORS,
        body="CompletionRequest", chunk="CompletionChunk", headers=_BOTH_HEADERS,
    ),
    Route(
        "POST", "/v1/chat/completions", "Answers a chat.", "ChatCompletion", _GENERATION_ERRORS,
        body="ChatCompletionRequest", chunk="ChatCompletionChunk", headers=_BOTH_HEADERS,
    ),
    Route(
        "POST", responses_api.PATH, "Answers a chat, as OpenAI's Responses API does.", "Response", _GENERATION_ERRORS,
        body="ResponseRequest", chunk="response event", headers=_BOTH_HEADERS,
    ),
    Route(
        "POST", messages_api.PATH, "Answers a chat, as Anthropic's Messages API does.", "Message", _GENERATION_ERRORS,
        body="MessageRequest", chunk="message event", error="MessageError", headers=_BOTH_HEADERS,
    ),
    Route(
        "POST", messages_api.COUNT_PATH, "The number of tokens of such a request's prompt.", "MessageTokens", _BODY,
        body="CountRequest", error="MessageError", headers=_REQUEST_HEADERS,
    ),
    Route(
        "POST", "/v1/completions/render", "The prompts of such a request, as text and ids.", "RenderedPrompts",
        _BODY, body="CompletionRequest", headers=_BOTH_HEADERS,
    ),
    Route(
        "POST", "/v1/chat/completions/render", "The prompt of such a request, as text and ids.", "RenderedPrompts",
        _BODY, body="ChatCompletionRequest", headers=_BOTH_HEADERS,
    ),
    Route(
        "POST", "/tokenize", "Token ids of a text or a chat.", "Tokens", _BODY, body="TokenizeRequest",
        headers=_REQUEST_HEADERS,
    ),
    Route(
        "POST", "/detokenize", "The text of token ids.", "Text", _BODY, body="DetokenizeRequest",
        headers=_REQUEST_HEADERS,
    ),
    Route("GET", "/tokenizer_info", "Special tokens and chat template.", "TokenizerInfo"),
    Route("GET", "/v1/models", "What is served.", "Models"),
    Route("GET", "/v1/models/{name}", "One of them.", "Model", (404,)),
    Route("GET", "/v1/limits", "What a request may ask.", "Limits"),
    Route("GET", "/load", "How much there is to do, for routers.", "Load"),
    Route("GET", "/health", "Whether requests are taken.", "Health", (503,), open=True),
    Route("GET", "/health/ready", "Whether requests are taken.", "Health", (503,), open=True),
    Route("GET", "/health/live", "Whether tokens are made, where there are any to make.", "Health", (503,), open=True),
    Route("GET", "/ping", "Whether requests are taken.", "Health", (503,), open=True),
    Route("GET", "/version", "The server's version.", "Version"),
    Route("GET", "/metrics", "Prometheus metrics.", "", media="text/plain"),
    Route("GET", "/openapi.json", "This document.", "Document"),
)  # fmt: skip


def document(config: Config, info: EngineInfo, *, version: str) -> dict[str, Any]:
    """The whole description, as JSON."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "specd",
            "version": version,
            "description": "OpenAI-compatible generation with speculative decoding. Fields that are in no schema are "
            "ignored and named in x-specd-ignored-fields; `null` means absent everywhere. What is no valid HTTP is a "
            "400 without a route, headers that are too large a 431, an unknown Expect a 417: errors as any other.",
        },
        "paths": paths,
        "components": {
            "schemas": {**_requests(config, info), **SCHEMAS},
            "responses": {
                f"{name}{status}": {"description": text, "content": {"application/json": {"schema": ref(name)}}}
                for name in sorted({route.error for route in ROUTES})
                for status, text in _ERRORS.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {route.media: {"schema": ref(route.answer) if route.answer else {"type": "string"}}}
    if route.chunk:
        text = f"with `stream`: server-sent events of one {route.chunk} each"
        content["text/event-stream"] = {"schema": {"type": "string", "description": text}}
    errors = route.errors if route.open else (*route.errors, 401)
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "parameters": [
            {"name": name, "in": "header", "description": text, "schema": schema}
            for name, (text, schema) in route.headers.items()
        ],
        "responses": {
            "200": {"description": route.summary, "content": content},
            **{str(status): {"$ref": f"#/components/responses/{route.error}{status}"} for status in sorted(errors)},
        },
    }
    if "{name}" in route.path:
        operation["parameters"].append({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}})
    if route.body:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(route.body)}}}
    if not route.open:
        operation["security"] = [{}, {"key": []}]  # keys are asked for where the operator has set some
    return operation


def _requests(config: Config, info: EngineInfo) -> dict[str, Schema]:
    """Request bodies by name."""
    generation = {e: _limited(_body(ENDPOINT_FIELDS[e], _REQUIRED[e], info), e, config) for e in Endpoint}
    return {
        "CompletionRequest": generation[Endpoint.COMPLETIONS],
        "ChatCompletionRequest": generation[Endpoint.CHAT],
        "TokenizeRequest": {
            **_body(TOKENIZE_FIELDS, (), info),
            "oneOf": [{"required": [name]} for name in ("prompt", "content", "messages")],
        },
        "ResponseRequest": _body(responses_api.FIELDS, ("input",), info),
        "MessageRequest": _body(messages_api.FIELDS, ("messages", "max_tokens"), info),
        "CountRequest": _body(messages_api.COUNT_FIELDS, ("messages",), info),
        "DetokenizeRequest": _body(DETOKENIZE_FIELDS, ("tokens",), info),
    }


def _body(table: FieldTable, required: tuple[str, ...], info: EngineInfo) -> dict[str, Any]:
    """A body of one endpoint: what is checked, what is accepted and changes nothing, and what is refused by name."""
    properties: dict[str, Schema] = {name: schema_of(check) for name, check in table.honoured.items()}
    properties["model"] = {"type": "string", "enum": list(info.served_names)}
    properties |= {name: {"description": "accepted; changes nothing"} for name in sorted(table.inert)}
    body: dict[str, Any] = {"type": "object", "required": list(required), "properties": properties}
    if table.unbuilt:
        body["x-unsupported"] = sorted(table.unbuilt)
        body["description"] = "The fields in x-unsupported are refused unless their value asks for nothing."
    return body


def _limited(body: dict[str, Any], endpoint: Endpoint, config: Config) -> dict[str, Any]:
    """With what is configured in place of what any server would take."""
    limits, properties = config.server, body["properties"]
    logprobs = "top_logprobs" if endpoint is Endpoint.CHAT else "logprobs"
    for name, maximum in (("n", limits.max_choices), (logprobs, limits.max_logprobs)):
        properties[name] = {**properties[name], "maximum": maximum}
    one, several = properties["stop"]["anyOf"]
    properties["stop"] = {"anyOf": [one, {**several, "maxItems": limits.max_stop}]}
    return body
