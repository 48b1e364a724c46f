"""Request fields: which class each known name belongs to, and its check (`checks.py`).

Three classes, one table per endpoint (`ENDPOINT_FIELDS`):
- honoured: checked here, then used exactly;
- inert: cannot change the tokens; accepted whatever the value;
- unbuilt: known from OpenAI or a peer and not built here: refused unless the value says "nothing asked".
A name in no class is ignored and reported. `null` means absent everywhere.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Any

from specd.errors import RequestError
from specd.server.checks import (
    MAX_SHOWN,
    MOST_TIMEOUT_S,
    Check,
    Schema,
    anything,
    asks_nothing,
    bad_words,
    boolean,
    cache_salt,
    choice,
    documented,
    integer,
    invalid_type,
    logit_bias,
    number,
    request_id,
    schema_of,
    stop_strings,
    string,
    sub_object,
    token_ids,
    unsupported,
)
from specd.server.message_schemas import MESSAGES_SCHEMA
from specd.server.predictions import prediction
from specd.server.structured import response_format, structured_outputs
from specd.server.tools import tool_choice, tools
from specd.server.unread import unread

_MAX_REPORTED = 20  # ignored names that are reported
_MAX_PATH = 96  # characters of each


class Endpoint(enum.StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat_completions"


@documented({"type": "object"})
def template_kwargs(value: Any, param: str) -> dict[str, Any]:
    """Variables for the chat template; which of them it reads is known where the template is."""
    if not isinstance(value, dict):
        raise invalid_type(param, "an object", value)
    return value


_IDS_SCHEMA: Schema = {**schema_of(token_ids), "minItems": 1}
PROMPT_SCHEMA: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _IDS_SCHEMA,
        {"type": "array", "minItems": 1, "items": _IDS_SCHEMA},
    ]
}
STREAM_OPTIONS = sub_object(
    {"include_usage": boolean, "continuous_usage_stats": boolean, "include_obfuscation": boolean}
)
SPECULATION = sub_object(
    {
        "mode": choice("auto", "off"),
        "max_draft": integer(0),
        "detail": choice("none", "summary", "detailed", "tokens"),
    }
)

_HONOURED: dict[str, Check] = {
    "model": string,
    "max_tokens": integer(1),
    "max_completion_tokens": integer(1),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": integer(-1, 2**31 - 1),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(1e-3, 1e3),  # beyond, logits overflow fp32
    "n": integer(1),
    "stop": stop_strings,
    "stop_token_ids": token_ids,
    "include_stop_str_in_output": boolean,
    "seed": integer(-(2**63)),
    "logit_bias": logit_bias,
    "allowed_token_ids": token_ids,
    "bad_words": bad_words,
    "min_tokens": integer(0),
    "ignore_eos": boolean,
    "skip_special_tokens": boolean,
    "stream": boolean,
    "stream_options": STREAM_OPTIONS,
    "return_token_ids": boolean,
    "return_tokens_as_token_ids": boolean,
    "timings_per_token": boolean,
    "return_spec_tokens_details": boolean,
    "speculation": SPECULATION,
    "prediction": prediction,
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    "priority": integer(-100, 100),
    "service_tier": choice("auto", "default", "flex", "scale", "priority"),
    "request_id": request_id,
    "cache_salt": cache_salt,
    "timeout": number(0.001, MOST_TIMEOUT_S),
}
_COMPLETIONS_HONOURED: dict[str, Check] = {
    "prompt": anything(PROMPT_SCHEMA),
    "logprobs": integer(0),
    "max_tokens": integer(0),  # 0: only with echo
    "echo": boolean,
}
CHAT_PROMPT_FIELDS: dict[str, Check] = {  # what a chat's prompt follows from
    "messages": anything(MESSAGES_SCHEMA),
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
    "chat_template_kwargs": template_kwargs,
    "tools": tools,
    "tool_choice": tool_choice,
}
_CHAT_HONOURED: dict[str, Check] = {
    **CHAT_PROMPT_FIELDS,
    "logprobs": boolean,
    "top_logprobs": integer(0),
    "parallel_tool_calls": boolean,  # without tools there is nothing that it acts on
}

_INERT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})

# Fields that would change the answer, with the values that ask for nothing (besides null, false, "", [] and {}).
_UNBUILT: dict[str, tuple[Any, ...]] = {
    "functions": (), "function_call": ("none", "auto"),
    "structural_tag": (), "grammar": (), "regex": (),
    "ebnf": (), "json_schema": (), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "reasoning_effort": (), "reasoning": (),
    "include_reasoning": (True,), "thinking_token_budget": (), "verbosity": ("medium",), "store": (), "audio": (),
    "modalities": (["text"],), "web_search_options": (), "prompt_logprobs": (),
    "lora_path": (), "prompt_embeds": (), "truncate_prompt_tokens": (), "use_beam_search": (),
    "length_penalty": (1,), "spaces_between_special_tokens": (True,), "logits_processors": (),
    "custom_logit_processor": (), "logits_processor_args": (), "vllm_xargs": (), "kv_transfer_params": (),
    "repetition_detection": (), "return_hidden_states": (), "typical_p": (1,),
    "mirostat": (0,), "repeat_penalty": (1,), "n_predict": (),
    "best_of": (),
}  # fmt: skip
_COMPLETIONS_UNBUILT: dict[str, tuple[Any, ...]] = {
    "suffix": (), "messages": (), "top_logprobs": (), "add_special_tokens": (True,), "tools": (),
    "tool_choice": ("none", "auto"),
}  # fmt: skip
_CHAT_UNBUILT: dict[str, tuple[Any, ...]] = {
    "prompt": (), "suffix": (), "add_special_tokens": (), "echo": (), "chat_template": (), "documents": (),
    "mm_processor_kwargs": (), "media_io_kwargs": (),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class FieldTable:
    """Every name that one endpoint knows."""

    honoured: Mapping[str, Check]
    inert: frozenset[str]
    unbuilt: Mapping[str, tuple[Any, ...]]  # values that ask for nothing


ENDPOINT_FIELDS: Mapping[Endpoint, FieldTable] = {
    Endpoint.COMPLETIONS: FieldTable(
        {**_HONOURED, **_COMPLETIONS_HONOURED}, _INERT | {"parallel_tool_calls"}, {**_UNBUILT, **_COMPLETIONS_UNBUILT}
    ),
    Endpoint.CHAT: FieldTable({**_HONOURED, **_CHAT_HONOURED}, _INERT, {**_UNBUILT, **_CHAT_UNBUILT}),
}


_TEXT_FIELDS: dict[str, Check] = {
    "model": string,
    "prompt": string,
    "content": string,  # llama.cpp's name for it
    "add_special_tokens": boolean,
    "return_token_strs": boolean,
}
TOKENIZE_FIELDS = FieldTable({**_TEXT_FIELDS, **CHAT_PROMPT_FIELDS}, frozenset(), {})
DETOKENIZE_FIELDS = FieldTable({"model": string, "tokens": token_ids}, frozenset(), {})


def read_fields(body: Mapping[str, Any], endpoint: Endpoint) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`read_table` of an endpoint's table."""
    return read_table(body, ENDPOINT_FIELDS[endpoint])


def read_table(body: Mapping[str, Any], table: FieldTable) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Checks a request body: (honoured values, dotted names that are not known, at any depth). Raises RequestError.

    Fields of the unbuilt class are judged before honoured ones are checked, so that their error is the one seen.
    """
    unknown: list[str] = []
    for name, value in body.items():
        if name in table.unbuilt:
            harmless = (body.get("n") or 1,) if name == "best_of" else table.unbuilt[name]
            if not asks_nothing(value, harmless):
                raise unsupported(name, value)
        elif name in table.honoured:
            unknown += unread(value, schema_of(table.honoured[name]), name)
        elif name not in table.inert and value is not None:
            unknown.append(name[:MAX_SHOWN])
    values = {name: check(body[name], name) for name, check in table.honoured.items() if body.get(name) is not None}
    return {name: value for name, value in values.items() if value is not None}, tuple(unknown)


def refuse_unread(names: tuple[str, ...]) -> None:
    """For clients that want no name ignored. Raises RequestError."""
    if names:
        shown = report_names(names)
        raise RequestError(f"unknown fields: {shown}", code="unknown_parameter", param=shown.partition(",")[0])


def report_names(names: tuple[str, ...]) -> str:
    """Ignored names as a header value: printable, bounded."""
    shown = [re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", name[:_MAX_PATH]) for name in names[:_MAX_REPORTED]]
    return ",".join(shown)
