"""Request fields: checks of single values, and which class each known name belongs to.

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
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from specd.errors import RequestError

Check = Callable[[Any, str], Any]  # (value, dotted path) -> the value to use; raises RequestError

INT64_MAX = 2**63 - 1
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_SHOWN = 64  # characters of a client's value that an error message repeats
# Stop strings are walked character by character and bad words are matched at every draft: both cost every step.
_MAX_STOP_CHARS = 1024
_MAX_BAD_WORDS, _MAX_BAD_WORD_CHARS = 128, 128
_MAX_REPORTED = 20  # ignored names that are reported


class Endpoint(enum.StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat_completions"


def show(value: Any) -> str:
    """A value as JSON for a message, clipped; containers by kind and size alone (they may be huge or deep)."""
    if isinstance(value, list):
        return "[]" if not value else f"a list of {len(value)}"
    if isinstance(value, dict):
        return "{}" if not value else "an object with " + ", ".join(show(key) for key in list(value)[:3])
    text = orjson.dumps(value).decode()
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def invalid_type(param: str, wanted: str, value: Any) -> RequestError:
    return RequestError(f"'{param}' must be {wanted}; got {show(value)}", code="invalid_type", param=param)


def out_of_range(param: str, wanted: str, value: Any) -> RequestError:
    return RequestError(f"'{param}' must be {wanted}; got {show(value)}", code="out_of_range", param=param)


def unsupported(param: str, value: Any) -> RequestError:
    return RequestError(
        f"'{param}' is not supported by this server (got {show(value)}); leave it out",
        code="unsupported_parameter",
        param=param,
    )


def boolean(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise invalid_type(param, "true or false", value)
    return value


def integer(low: int, high: int = INT64_MAX) -> Check:
    """A whole number in low..high. `4.0` is one; `true` and `4.5` are not. JSON numbers past u64 arrive as floats."""

    def check(value: Any, param: str) -> int:
        whole = type(value) is int or (type(value) is float and value.is_integer())
        if not whole:
            raise invalid_type(param, "a whole number", value)
        if not low <= value <= high:
            raise out_of_range(param, f"between {low} and {high}", value)
        return int(value)

    return check


def number(low: float, high: float) -> Check:
    """A number in low..high."""

    def check(value: Any, param: str) -> float:
        if type(value) not in (int, float):
            raise invalid_type(param, "a number", value)
        if not low <= value <= high:
            raise out_of_range(param, f"at least {low} and at most {high}", value)
        return float(value)

    return check


def string(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise invalid_type(param, "a string", value)
    return value


def choice(*allowed: str) -> Check:
    def check(value: Any, param: str) -> str:
        if value not in allowed or not isinstance(value, str):
            raise out_of_range(param, "one of " + ", ".join(allowed), value)
        return value

    return check


def request_id(value: Any, param: str) -> str:
    if REQUEST_ID.fullmatch(string(value, param)) is None:
        raise out_of_range(param, "1 to 128 characters of A-Z a-z 0-9 . _ -", value)
    return str(value)


def strings(value: Any, param: str) -> tuple[str, ...]:
    """A list of non-empty strings."""
    if not isinstance(value, list):
        raise invalid_type(param, "a list of strings", value)
    for i, item in enumerate(value):
        if not string(item, f"{param}[{i}]"):
            raise out_of_range(f"{param}[{i}]", "a non-empty string", item)
    return tuple(value)


def stop_strings(value: Any, param: str) -> tuple[str, ...]:
    stops = strings([value] if isinstance(value, str) else value, param)
    _check_lengths(stops, param, _MAX_STOP_CHARS)
    return stops


def _check_lengths(texts: tuple[str, ...], param: str, longest: int) -> None:
    for i, text in enumerate(texts):
        if len(text) > longest:
            raise out_of_range(f"{param}[{i}]", f"at most {longest} characters long", text)


def bad_words(value: Any, param: str) -> tuple[str, ...]:
    words = strings(value, param)
    if len(words) > _MAX_BAD_WORDS:
        raise out_of_range(param, f"a list of at most {_MAX_BAD_WORDS} words", value)
    _check_lengths(words, param, _MAX_BAD_WORD_CHARS)
    for i, word in enumerate(words):
        if not word.strip():
            raise out_of_range(f"{param}[{i}]", "a word with a character that is not white space", word)
    return words


def token_ids(value: Any, param: str) -> tuple[int, ...]:
    """A list of token ids; whether the model has them is checked where the vocabulary is known."""
    if not isinstance(value, list):
        raise invalid_type(param, "a list of token ids", value)
    one = integer(0)  # its message names the place; plain ids take the short way
    return tuple(v if type(v) is int and v >= 0 else one(v, f"{param}[{i}]") for i, v in enumerate(value))


def logit_bias(value: Any, param: str) -> tuple[tuple[int, float], ...]:
    """{"token id": -100..100}, at most 300 entries, sorted by id."""
    if not isinstance(value, dict):
        raise invalid_type(param, "an object of token ids and numbers", value)
    if len(value) > 300:
        raise out_of_range(param, "an object of at most 300 entries", value)
    bias = number(-100, 100)
    found: dict[int, float] = {}
    for key, item in value.items():
        if not re.fullmatch(r"[0-9]{1,12}", key) or int(key) in found:
            raise out_of_range(param, "an object whose keys are distinct token ids", key)
        found[int(key)] = bias(item, f"{param}.{key[:12]}")
    return tuple(sorted(found.items()))


def sub_object(checks: Mapping[str, Check]) -> Check:
    """An object of which every key is known; null values are absent."""

    def check(value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid_type(param, "an object", value)
        for key in value:
            if key not in checks:
                known = ", ".join(checks)
                path = f"{param}.{key[:_MAX_SHOWN]}"
                raise RequestError(f"'{path}' is not known; known are {known}", code="unknown_parameter", param=path)
        return {key: checks[key](item, f"{param}.{key}") for key, item in value.items() if item is not None}

    return check


def _refused_flag(value: Any, param: str) -> bool:
    if boolean(value, param):
        raise unsupported(param, value)
    return False


def anything(value: Any, param: str) -> Any:
    return value


STREAM_OPTIONS = sub_object(
    {"include_usage": boolean, "continuous_usage_stats": boolean, "include_obfuscation": _refused_flag}
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
    "speculation": SPECULATION,
    "request_id": request_id,
}
_COMPLETIONS_HONOURED: dict[str, Check] = {"prompt": anything, "logprobs": integer(0)}
_CHAT_HONOURED: dict[str, Check] = {"messages": anything, "logprobs": boolean, "top_logprobs": integer(0)}

# Without tools, parallel_tool_calls has nothing to act on.
_INERT = frozenset(
    {
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "parallel_tool_calls",
    }
)  # fmt: skip

# Fields that would change the answer, with the values that ask for nothing (besides null, false, "", [] and {}).
_UNBUILT: dict[str, tuple[Any, ...]] = {
    "tools": (), "tool_choice": ("none", "auto"), "functions": (), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "structured_outputs": (), "structural_tag": (), "grammar": (), "regex": (),
    "ebnf": (), "json_schema": (), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "reasoning_effort": (), "reasoning": (),
    "include_reasoning": (True,), "thinking_token_budget": (), "verbosity": (), "store": (), "audio": (),
    "modalities": (["text"],), "web_search_options": (), "prediction": (), "prompt_logprobs": (), "priority": (0,),
    "cache_salt": (), "lora_path": (), "prompt_embeds": (), "truncate_prompt_tokens": (), "use_beam_search": (),
    "length_penalty": (1,), "spaces_between_special_tokens": (True,), "logits_processors": (),
    "custom_logit_processor": (), "logits_processor_args": (), "vllm_xargs": (), "kv_transfer_params": (),
    "repetition_detection": (), "return_spec_tokens_details": (), "return_hidden_states": (), "typical_p": (1,),
    "mirostat": (0,), "repeat_penalty": (1,), "n_predict": (), "timings_per_token": (), "echo": (),
    "best_of": (),
}  # fmt: skip
_COMPLETIONS_UNBUILT: dict[str, tuple[Any, ...]] = {
    "suffix": (), "messages": (), "top_logprobs": (), "add_special_tokens": (True,),
}  # fmt: skip
_CHAT_UNBUILT: dict[str, tuple[Any, ...]] = {
    "prompt": (), "suffix": (), "add_special_tokens": (), "add_generation_prompt": (True,),
    "continue_final_message": (), "chat_template": (), "chat_template_kwargs": (), "documents": (),
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
        {**_HONOURED, **_COMPLETIONS_HONOURED}, _INERT, {**_UNBUILT, **_COMPLETIONS_UNBUILT}
    ),
    Endpoint.CHAT: FieldTable({**_HONOURED, **_CHAT_HONOURED}, _INERT, {**_UNBUILT, **_CHAT_UNBUILT}),
}


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
    """Checks a request body: (honoured values, names that are not known here). Raises RequestError.

    Fields of the unbuilt class are judged before honoured ones are checked, so that their error is the one seen.
    """
    table = ENDPOINT_FIELDS[endpoint]
    unknown = []
    for name, value in body.items():
        if name in table.unbuilt:
            harmless = (body.get("n") or 1,) if name == "best_of" else table.unbuilt[name]
            if not asks_nothing(value, harmless):
                raise unsupported(name, value)
        elif name not in table.honoured and name not in table.inert:
            unknown.append(name)
    values = {name: check(body[name], name) for name, check in table.honoured.items() if body.get(name) is not None}
    return values, tuple(unknown)


def report_names(names: tuple[str, ...]) -> str:
    """Ignored names as a header value: printable, bounded."""
    shown = [re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", name[:_MAX_SHOWN]) for name in names[:_MAX_REPORTED]]
    return ",".join(shown)
