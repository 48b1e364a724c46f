"""Everything that the API answers besides generation: models, health, limits, and texts as token ids. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from specd.config import Config
from specd.errors import RequestError
from specd.http_refusals import error_body
from specd.server.context import check_chars
from specd.server.errors import json_response
from specd.server.fields import (
    CHAT_PROMPT_FIELDS,
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
    Endpoint,
    FieldTable,
    read_table,
)
from specd.server.generation import Generation, Handler, long_work, read_raw
from specd.server.json_body import parse_json
from specd.server.limits import limits
from specd.server.metrics import CONTENT_TYPE, ServerMetrics, version
from specd.server.openai import check_ids, check_model
from specd.server.openapi import document
from specd.server.protocol import EngineProtocol
from specd.server.request_headers import strict_header
from specd.server.responses import model_card, token_name
from specd.status import EngineState
from specd.text import Tokenizer

_NOT_READY = {
    EngineState.LOADING: ("loading", "The model is being loaded."),
    EngineState.DRAINING: ("draining", "The server is draining: it accepts no new requests."),
    EngineState.FAILED: ("engine_failed", "The engine has failed."),
    EngineState.STOPPED: ("draining", "The server is shutting down."),
}


def not_ready(state: EngineState) -> web.Response:
    """The 503 of an engine that takes no requests."""
    code, message = _NOT_READY[state]
    return json_response(error_body(message, kind="server_error", code=code), status=503, headers={"Retry-After": "2"})


class Pages:
    """Handlers of every route but those of generation."""

    def __init__(self, engine: EngineProtocol, config: Config, metrics: ServerMetrics, generation: Generation) -> None:
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._generation = generation
        self.open_handlers: frozenset[Handler] = frozenset({self.ready, self.live})

    def reconfigure(self, config: Config) -> None:
        self._config = config

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/v1/models", self.models)
        router.add_get("/v1/models/{name:.+}", self.model)
        router.add_get("/v1/limits", self.limits)
        router.add_post("/v1/completions/render", self.render_completion)
        router.add_post("/v1/chat/completions/render", self.render_chat)
        router.add_post("/tokenize", self.tokenize)
        router.add_post("/detokenize", self.detokenize)
        router.add_get("/tokenizer_info", self.tokenizer_info)
        router.add_get("/load", self.load)
        router.add_get("/health", self.ready)
        router.add_get("/health/ready", self.ready)
        router.add_get("/health/live", self.live)
        router.add_get("/ping", self.ready)
        router.add_get("/version", self.version)
        router.add_get("/metrics", self.metrics)
        router.add_get("/openapi.json", self.openapi)

    # ---------------------------------------------------------------- models and limits

    async def models(self, request: web.Request) -> web.Response:
        info = self._engine.info
        return json_response({"object": "list", "data": [model_card(name, info) for name in info.served_names]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._engine.info.served_names:
            raise RequestError(f"the model '{name[:128]}' does not exist", code="model_not_found", param="model")
        return json_response(model_card(name, self._engine.info))

    async def limits(self, request: web.Request) -> web.Response:
        """What a request may ask, as configured."""
        return json_response(limits(self._config, self._engine.info))

    # ---------------------------------------------------------------- texts and tokens

    async def tokenize(self, request: web.Request) -> web.Response:
        """Token ids of a text or of a chat, in vLLM's shape."""
        raw = await read_raw(request)
        values = await self._read(request, raw, TOKENIZE_FIELDS)
        response, unread = await long_work(len(raw), self._tokenized, values)
        self._note_ignored(request, unread)
        return response

    def _tokenized(self, values: Mapping[str, Any]) -> tuple[web.Response, tuple[str, ...]]:
        """The answer, and names that nobody reads. Raises RequestError."""
        ids, unread = self._encode(values)
        body: dict[str, Any] = {"count": len(ids), "max_model_len": self._engine.info.max_len, "tokens": ids}
        if values.get("return_token_strs"):
            body["token_strs"] = [token_name(self._engine.tokenizer, token_id) for token_id in ids]
        return json_response(body), unread

    def _encode(self, values: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """(ids, names that nobody reads) of one text or chat. Raises RequestError when it is neither or both."""
        texts = [name for name in ("prompt", "content", "messages") if name in values]
        if len(texts) != 1:
            given = " and ".join(f"'{name}'" for name in texts) or "none of them"
            code = "invalid_value" if texts else "missing_parameter"
            text = f"one of 'prompt', 'content' and 'messages' is required, and only one; got {given}"
            raise RequestError(text, code=code, param="prompt")
        if texts[0] == "messages":
            if "add_special_tokens" in values:
                text = "'add_special_tokens' is for 'prompt' and 'content': a chat template writes its own"
                raise RequestError(text, code="invalid_value", param="add_special_tokens")
            prompts = self._generation.prompts(values, Endpoint.CHAT)
            return prompts.ids[0], prompts.unread
        for name in CHAT_PROMPT_FIELDS:
            if name in values:
                raise RequestError(f"'{name}' needs 'messages'", code="invalid_value", param=name)
        add_special = values.get("add_special_tokens", True)
        text = check_chars(values[texts[0]], texts[0])
        return tuple(self._engine.tokenizer.encode(text, add_special=add_special)), ()

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of token ids, special tokens written out."""
        raw = await read_raw(request)
        values = await self._read(request, raw, DETOKENIZE_FIELDS)
        if "tokens" not in values:
            raise RequestError("'tokens' is required", code="missing_parameter", param="tokens")

        def detokenized() -> web.Response:
            check_ids(values["tokens"], "tokens", self._engine.info.vocab_size)
            return json_response({"prompt": self._decode(values["tokens"])})

        return await long_work(len(raw), detokenized)

    async def _read(self, request: web.Request, raw: bytes, table: FieldTable) -> dict[str, Any]:
        values, ignored = await long_work(len(raw), lambda: read_table(parse_json(raw), table))
        self._note_ignored(request, ignored)
        check_model(values, self._engine.info)
        return values

    def _note_ignored(self, request: web.Request, names: tuple[str, ...]) -> None:
        strict = strict_header(request.headers.get("x-specd-strict"))
        self._generation.note_ignored(request, names, strict=strict)

    def _decode(self, ids: tuple[int, ...]) -> str:
        """Ids in the padding of the logits have no text."""
        tokenizer = self._engine.tokenizer
        return tokenizer.decode([i for i in ids if i < tokenizer.vocab_size], skip_special=False)

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        """What lm-eval's remote tokenizer asks for, in the names of a tokenizer_config.json."""
        return json_response(_tokenizer_info(self._engine.tokenizer, self._engine.info.max_len))

    async def render_completion(self, request: web.Request) -> web.Response:
        return await self._render(request, Endpoint.COMPLETIONS)

    async def render_chat(self, request: web.Request) -> web.Response:
        return await self._render(request, Endpoint.CHAT)

    async def _render(self, request: web.Request, endpoint: Endpoint) -> web.Response:
        """The prompts that the same body would be answered for at the endpoint itself."""
        values, prompts, *_ = await self._generation.read(request, endpoint)

        def rendered() -> web.Response:
            found = [{"prompt": self._decode(ids), "prompt_token_ids": ids, "count": len(ids)} for ids in prompts.ids]
            size = self._engine.info.max_len
            return json_response({"model": values["model"], "max_model_len": size, "prompts": found})

        return await long_work(sum(len(ids) for ids in prompts.ids), rendered)

    # ---------------------------------------------------------------- state

    async def load(self, request: web.Request) -> web.Response:
        """For routers: how much there is to do. `server_load` is vLLM's name for the sum."""
        stats = self._engine.stats()
        used = stats.pages_total - stats.pages_free
        return json_response(
            {
                "server_load": stats.running + stats.waiting,
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_pages_total": stats.pages_total,
                "kv_pages_used": used,
                "kv_used": used / stats.pages_total if stats.pages_total else 0.0,
                "state": stats.shown_state,
            }
        )

    async def ready(self, request: web.Request) -> web.Response:
        state = self._engine.state
        return json_response({"status": "ok"}) if state is EngineState.READY else not_ready(state)

    async def live(self, request: web.Request) -> web.Response:
        """Alive means that tokens are made, or that there are none to make."""
        stats = self._engine.stats()
        if stats.state in (EngineState.FAILED, EngineState.STOPPED):
            return not_ready(stats.state)
        if stats.running + stats.waiting and stats.last_progress_s > self._config.scheduler.stall_timeout_s:
            text = f"No step has finished for {stats.last_progress_s:.0f} s."
            return json_response(error_body(text, kind="server_error", code="stalled"), status=503)
        return json_response({"status": "ok", "state": stats.state, "last_progress_s": stats.last_progress_s})

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": version()})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.expose(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, request: web.Request) -> web.Response:
        return json_response(document(self._config, self._engine.info, version=version()))


def _tokenizer_info(tokenizer: Tokenizer, max_len: int) -> dict[str, Any]:
    return {
        "bos_token": tokenizer.bos_token or None,
        "eos_token": tokenizer.eos_token or None,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_ids": tokenizer.eos_ids,
        "add_bos_token": tokenizer.add_bos,
        "chat_template": tokenizer.chat_template,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": max_len,
        "special_tokens": tokenizer.special_tokens,
    }
