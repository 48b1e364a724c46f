"""GET /v1/limits: what a request may ask and how long it may take, as configured. null: no limit."""

from __future__ import annotations

from collections.abc import Mapping

from specd import corpora, deltas
from specd.config import Config
from specd.server import checks, context, json_body, sending, structured, tool_grammar
from specd.status import EngineInfo

MAX_HEADERS = 64
MAX_HEADER_LINE_BYTES = 8190  # aiohttp's own limits on a line of the head and on one header
BODY_TIMEOUT_S = 30.0


def limits(config: Config, info: EngineInfo) -> Mapping[str, float | None]:
    """Names end in their units, where they are not counts."""
    from specd.grammar_worker import CPU_LIMIT_S, DEADLINE_S  # with llguidance, which nobody else here needs

    server, scheduler = config.server, config.scheduler
    return {
        "max_model_len": info.max_len,
        "max_running": info.max_running,
        "max_waiting": scheduler.max_waiting,
        "max_waiting_tokens": scheduler.max_waiting_tokens or None,
        "max_requests_per_key": scheduler.max_requests_per_key or None,
        "max_waiting_tokens_per_key": scheduler.max_waiting_tokens_per_key or None,
        "max_choices": server.max_choices,
        "max_prompts": server.max_prompts,
        "max_stop": server.max_stop,
        "max_logprobs": server.max_logprobs,
        "max_draft": info.max_draft,
        "max_corpora": corpora.MAX_CORPORA if info.max_draft else 0,
        "max_corpora_tokens": config.speculation.corpora_tokens if info.max_draft else 0,
        "max_schema_bytes": structured.MAX_TEXT_BYTES,
        "max_schema_depth": structured.MAX_DEPTH,
        "max_tools_bytes": tool_grammar.MAX_BYTES,
        "grammar_compile_cpu_s": CPU_LIMIT_S,
        "grammar_compile_timeout_s": DEADLINE_S,
        "max_body_bytes": server.max_body_bytes,
        "max_text_chars": context.MAX_TEXT_CHARS,
        "max_body_values": json_body.MAX_VALUES,
        "max_body_nodes": json_body.MAX_NODES,
        "max_headers": MAX_HEADERS,
        "max_header_line_bytes": MAX_HEADER_LINE_BYTES,
        "body_timeout_s": BODY_TIMEOUT_S,
        "queue_timeout_s": scheduler.queue_timeout_s or None,
        "request_timeout_s": scheduler.request_timeout_s or None,
        "max_request_timeout_s": checks.MOST_TIMEOUT_S,
        "slow_client_timeout_s": server.slow_client_timeout_s,
        "stream_socket_bytes": sending.KERNEL_BYTES,
        "stream_buffer_bytes": sending.TRANSPORT_BYTES,
        "stream_queue_deltas": deltas.MOST,
    }
