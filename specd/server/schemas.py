"""JSON Schemas of what the API answers, by name: `components.schemas` of its description. No HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from specd.server.checks import Schema

INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
IDS: Schema = {"type": "array", "items": COUNT}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def const(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def record(properties: Mapping[str, Schema], *, optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of which `properties` are always there."""
    both = {**properties, **(optional or {})}
    return {"type": "object", "required": list(properties), "properties": both}


def _logprob(extra: Mapping[str, Schema]) -> Schema:
    return record({"token": STRING, "logprob": NUMBER, "bytes": nullable(array(INTEGER)), **extra})


def _rates(name: str) -> dict[str, Schema]:
    return {
        f"{name}_n": COUNT,
        f"{name}_ms": NUMBER,
        f"{name}_per_token_ms": NUMBER,
        f"{name}_per_second": NUMBER,
    }


FINISH_REASON: Schema = const("stop", "length", "tool_calls")
_STOP_REASON: Schema = {"anyOf": [STRING, INTEGER, {"type": "null"}]}
_HEAD: dict[str, Schema] = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": STRING}
_EXTRAS: dict[str, Schema] = {
    "metrics": ref("Metrics"),
    "timings": ref("Timings"),
    "specd": ref("Origins"),
    "sglext": record({"spec_tokens_details": {"type": "object"}}),
}
_CHOICE_EXTRAS: dict[str, Schema] = {**_EXTRAS, "token_ids": IDS, "prompt_token_ids": IDS, "stop_reason": _STOP_REASON}
_CHUNK_EXTRAS: dict[str, Schema] = {
    **_EXTRAS,
    "usage": nullable(ref("Usage")),
    "prompt_token_ids": IDS,
    "obfuscation": STRING,
}


def _choice(content: Mapping[str, Schema], logprobs: str, reason: Schema) -> Schema:
    fixed = {"index": COUNT, **content, "logprobs": nullable(ref(logprobs)), "finish_reason": reason}
    return record(fixed, optional=_CHOICE_EXTRAS)


def _body(kind: str, choice: Schema, *, chunk: bool) -> Schema:
    fixed: dict[str, Schema] = {**_HEAD, "object": const(kind), "choices": array(choice)}
    if chunk:
        return record(fixed, optional=_CHUNK_EXTRAS)
    return record({**fixed, "usage": ref("Usage")}, optional={**_EXTRAS, "prompt_token_ids": IDS})


_THOUGHTS: dict[str, Schema] = {"reasoning_content": STRING, "reasoning": STRING}  # one of them, as configured
_FUNCTION: dict[str, Schema] = {"name": STRING, "arguments": STRING}
_MESSAGE = record(
    {"role": const("assistant"), "content": nullable(STRING), "refusal": {"type": "null"}},
    optional={"tool_calls": array(ref("ToolCall")), **_THOUGHTS},
)
_DELTA: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "role": const("assistant"),
        "content": nullable(STRING),
        "refusal": {"type": "null"},
        "tool_calls": {**array(ref("ToolCallDelta")), "minItems": 1, "maxItems": 1},
        **_THOUGHTS,
    },
}

SCHEMAS: dict[str, Schema] = {
    "Error": record(
        {"error": record({"message": STRING, "type": STRING, "param": nullable(STRING), "code": STRING})},
        optional={"usage": ref("Usage")},
    ),
    "Usage": record(
        {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
        optional={
            "prompt_tokens_details": record({"cached_tokens": COUNT}),
            "completion_tokens_details": {"type": "object", "additionalProperties": COUNT},
        },
    ),
    "Metrics": record(
        {
            "speculative_decoding": record(
                {
                    "mean_acceptance_length": NUMBER,
                    "draft_acceptance_rate": NUMBER,
                    "acceptance_histogram": array(COUNT),
                    "num_spec_steps": COUNT,
                    "num_accepted_draft_tokens": COUNT,
                    "num_draft_tokens": COUNT,
                    "num_spec_tokens": COUNT,
                },
                optional={"per_step_accepted": array(COUNT), "per_step_drafted": array(COUNT)},
            )
        }
    ),
    "Timings": record(
        {"cache_n": COUNT, **_rates("prompt"), **_rates("predicted")},
        optional={"draft_n": COUNT, "draft_n_accepted": COUNT},
    ),
    "Origins": {
        **record({"tokens": array({"type": "array", "minItems": 6, "maxItems": 6})}),
        "description": "[token id, origin, step, position in the step's block, the drafter's probability of what it "
        "proposed there or null, the text of that where it was not kept or null] per token; origin: "
        "t(arget), d(raft), n(gram), p(rediction), c(orpus), g(rammar), b(onus)",
    },
    "CompletionLogprobs": record(
        {
            "text_offset": array(COUNT),
            "token_logprobs": array(nullable(NUMBER)),
            "tokens": array(STRING),
            "top_logprobs": array(nullable({"type": "object", "additionalProperties": NUMBER})),
        }
    ),
    "ChatLogprobs": record(
        {"content": array(_logprob({"top_logprobs": array(_logprob({}))})), "refusal": {"type": "null"}}
    ),
    "Completion": _body("text_completion", _choice({"text": STRING}, "CompletionLogprobs", FINISH_REASON), chunk=False),
    "CompletionChunk": _body(
        "text_completion", _choice({"text": STRING}, "CompletionLogprobs", nullable(FINISH_REASON)), chunk=True
    ),
    "ChatCompletion": _body(
        "chat.completion", _choice({"message": _MESSAGE}, "ChatLogprobs", FINISH_REASON), chunk=False
    ),
    "ChatCompletionChunk": _body(
        "chat.completion.chunk",
        _choice({"delta": _DELTA}, "ChatLogprobs", nullable(FINISH_REASON)),
        chunk=True,
    ),
    "ToolCall": record({"id": STRING, "type": const("function"), "function": record(_FUNCTION)}),
    "ToolCallDelta": {
        **record(
            {"index": COUNT, "function": record({"arguments": STRING}, optional={"name": STRING})},
            optional={"id": STRING, "type": const("function")},
        ),
        "description": "id, type and the function's name come first, with empty arguments, then more of the arguments",
    },
    "Response": record(
        {
            "id": STRING,
            "object": const("response"),
            "created_at": INTEGER,
            "model": STRING,
            "status": const("completed", "incomplete"),
            "output": array({"type": "object"}),
            "usage": {"type": "object"},
        }
    ),
    "Message": record(
        {
            "id": STRING,
            "type": const("message"),
            "role": const("assistant"),
            "model": STRING,
            "content": array({"type": "object"}),
            "stop_reason": STRING,
            "usage": {"type": "object"},
        }
    ),
    "MessageTokens": record({"input_tokens": COUNT}),
    "MessageError": record(
        {"type": const("error"), "error": record({"type": STRING, "message": STRING}), "request_id": STRING}
    ),
    "Model": record(
        {
            "id": STRING,
            "object": const("model"),
            "created": INTEGER,
            "owned_by": STRING,
            "root": STRING,
            "parent": nullable(STRING),
            "permission": array({"type": "object"}),
            "max_model_len": COUNT,
            "specd": record({"drafters": array(STRING), "max_draft": COUNT}),
        }
    ),
    "Models": record({"object": const("list"), "data": array(ref("Model"))}),
    "Limits": {"type": "object", "additionalProperties": nullable({"type": "number", "minimum": 0})},
    "Tokens": record({"count": COUNT, "max_model_len": COUNT, "tokens": IDS}, optional={"token_strs": array(STRING)}),
    "Text": record({"prompt": STRING}),
    "TokenizerInfo": record(
        {
            "bos_token": nullable(STRING),
            "eos_token": nullable(STRING),
            "bos_token_id": nullable(COUNT),
            "eos_token_ids": IDS,
            "add_bos_token": BOOLEAN,
            "chat_template": nullable(STRING),
            "vocab_size": COUNT,
            "model_max_length": COUNT,
            "special_tokens": array(STRING),
        }
    ),
    "RenderedPrompts": record(
        {
            "model": STRING,
            "max_model_len": COUNT,
            "prompts": array(record({"prompt": STRING, "prompt_token_ids": IDS, "count": COUNT})),
        }
    ),
    "Load": record(
        {
            "server_load": COUNT,
            "running": COUNT,
            "waiting": COUNT,
            "kv_pages_total": COUNT,
            "kv_pages_used": COUNT,
            "kv_used": NUMBER,
            "state": STRING,
        }
    ),
    "Health": record({"status": const("ok")}, optional={"state": STRING, "last_progress_s": NUMBER}),
    "Version": record({"version": STRING}),
    "Document": {"type": "object", "description": "this document"},
}
