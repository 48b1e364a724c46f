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

from specd.server.checks import (
    MAX_SHOWN,
    Check,
    Schema,
    anything,
    bad_words,
    boolean,
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
from specd.server.predictions import prediction
from specd.server.structured import response_format, structured_outputs
from specd.server.tools import tool_choice, tools

_MAX_REPORTED = 20  # ignored names that are reported


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
_CONTENT_SCHEMA: Schema = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
            },
        },
    ]
}
_TOOL_CALL_SCHEMA: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "string", "description": "the JSON text of an object"},
            },
        },
    },
}
MESSAGES_SCHEMA: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
                    "content": _CONTENT_SCHEMA,
                    "name": {"type": "string"},
                    "tool_call_id": {"type": "string"},
                },
            },
            {
                "type": "object",
                "required": ["role", "tool_calls"],
                "properties": {
                    "role": {"type": "string", "enum": ["assistant"]},
                    "content": _CONTENT_SCHEMA,
                    "name": {"type": "string"},
                    "tool_calls": {"type": "array", "minItems": 1, "items": _TOOL_CALL_SCHEMA},
                    "reasoning_content": {"type": "string", "description": "for templates that read it"},
                },
            },
        ]
    },
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
    "speculation": SPECULATION,
    "prediction": prediction,
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    "priority": integer(-100, 100),
    "service_tier": choice("auto", "default", "flex", "scale", "priority"),
    "request_id": request_id,
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
    "include_reasoning": (True,), "thinking_token_budget": (), "verbosity": (), "store": (), "audio": (),
    "modalities": (["text"],), "web_search_options": (), "prompt_logprobs": (),
    "cache_salt": (), "lora_path": (), "prompt_embeds": (), "truncate_prompt_tokens": (), "use_beam_search": (),
    "length_penalty": (1,), "spaces_between_special_tokens": (True,), "logits_processors": (),
    "custom_logit_processor": (), "logits_processor_args": (), "vllm_xargs": (), "kv_transfer_params": (),
    "repetition_detection": (), "return_spec_tokens_details": (), "return_hidden_states": (), "typical_p": (1,),
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


def asks_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Whether an unbuilt field's value is one of its empty forms. Types count: 0 is not false."""
    if value is None or any(type(value) is type(item) and value == item for item in harmless):
        return True
    if type(value) in (int, float) and any(type(item) in (int, float) and value == item for item in harmless):
        return True
    if value is False:
        return not any(
            item is True for item in harmless
        )  # a flag that is on by default asks for something when it is off
    return isinstance(value, str | list | dict) and not value


def read_fields(body: Mapping[str, Any], endpoint: Endpoint) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`read_table` of an endpoint's table."""
    return read_table(body, ENDPOINT_FIELDS[endpoint])


def read_table(body: Mapping[str, Any], table: FieldTable) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Checks a request body: (honoured values, names that are not known here). Raises RequestError.

    Fields of the unbuilt class are judged before honoured ones are checked, so that their error is the one seen.
    """
    unknown = []
    for name, value in body.items():
        if name in table.unbuilt:
            harmless = (body.get("n") or 1,) if name == "best_of" else table.unbuilt[name]
            if not asks_nothing(value, harmless):
                raise unsupported(name, value)
        elif name not in table.honoured and name not in table.inert:
            unknown.append(name)
    values = {name: check(body[name], name) for name, check in table.honoured.items() if body.get(name) is not None}
    return {name: value for name, value in values.items() if value is not None}, tuple(unknown)


def report_names(names: tuple[str, ...]) -> str:
    """Ignored names as a header value: printable, bounded."""
    shown = [re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", name[:MAX_SHOWN]) for name in names[:_MAX_REPORTED]]
    return ",".join(shown)
