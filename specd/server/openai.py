"""From a request body to engine requests: JSON, limits, defaults, sampling parameters. Pure; no HTTP and no torch."""

from __future__ import annotations

import dataclasses
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

from specd.config import Config
from specd.errors import RequestError
from specd.request import Grammar, Request, SamplingParams, SpeculationParams
from specd.server.checks import out_of_range, show, unsupported
from specd.server.context import Room
from specd.server.echo import Echo
from specd.server.fields import Endpoint, read_fields
from specd.server.parts import PLAIN, Reading, marker_ids
from specd.status import EngineInfo
from specd.text import Tokenizer

PREFIXES = {Endpoint.COMPLETIONS: "cmpl-", Endpoint.CHAT: "chatcmpl-"}
_DEFAULT_COMPLETION_TOKENS = 16
_TIER_PRIORITIES = {"flex": 6, "priority": -6}  # a minute, where a level is worth 10 s
_DEFAULTS: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationCall:
    """One accepted HTTP request: what the engine is asked and how the answer is written.

    Choice `prompt_index * n + j` of the answer is choice j of `requests[prompt_index]`.
    """

    endpoint: Endpoint
    response_id: str
    model: str  # the name that the client used
    created: int  # unix seconds
    requests: tuple[Request, ...]
    n: int
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None  # None = off, else alternatives per token
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    timings: bool = False
    spec_details: bool = False  # SGLang's names for what speculation did
    obfuscated: bool = False  # events are padded: their sizes tell little about what is in them
    echoes: tuple[Echo, ...] = ()  # one per prompt when the prompts are repeated
    reading: Reading = PLAIN  # what is looked for in the text
    scores_only: bool = False  # max_tokens 0: the one token that the engine draws anyway is not shown

    @property
    def num_choices(self) -> int:
        return self.n * len(self.requests)

    @property
    def seed(self) -> int:
        return self.requests[0].sampling.seed

    @property
    def detail(self) -> str:
        return self.requests[0].speculation.detail


def read_body(
    body: Mapping[str, Any], endpoint: Endpoint, config: Config, info: EngineInfo
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Checks all that can be checked without a tokenizer: (honoured values, ignored names). Raises RequestError.

    Limits on n come before anything is multiplied by it.
    """
    values, ignored = read_fields(body, endpoint)
    required = "messages" if endpoint is Endpoint.CHAT else "prompt"
    if required not in values:
        raise RequestError(f"'{required}' is required", code="missing_parameter", param=required)
    check_model(values, info)
    _check_limits(values, endpoint, config)
    _check_vocabulary(values, info.vocab_size)
    if values.get("tools") and config.chat.tools == "refuse":
        raise unsupported("tools", list(values["tools"]))
    return values, ignored


def check_model(values: dict[str, Any], info: EngineInfo) -> None:
    """Fills in the model's name; RequestError(model_not_found) for one that is not served."""
    name = values.setdefault("model", info.served_names[0])
    if name not in info.served_names:
        served = ", ".join(info.served_names)
        raise RequestError(
            f"the model {show(name)} does not exist; served here: {served}", code="model_not_found", param="model"
        )


def _check_limits(values: Mapping[str, Any], endpoint: Endpoint, config: Config) -> None:
    limits = config.server
    n = values.get("n", 1)
    if n > limits.max_choices:
        raise out_of_range("n", f"at most {limits.max_choices}", n)
    if len(values.get("stop", ())) > limits.max_stop:
        raise out_of_range("stop", f"at most {limits.max_stop} strings", list(values["stop"]))
    name = "top_logprobs" if endpoint is Endpoint.CHAT else "logprobs"
    if values.get(name, 0) > limits.max_logprobs:
        raise out_of_range(name, f"at most {limits.max_logprobs}", values[name])
    if "top_logprobs" in values and not values.get("logprobs"):
        raise RequestError("'top_logprobs' needs 'logprobs': true", code="invalid_value", param="top_logprobs")
    if values.get("max_tokens") == 0 and not values.get("echo"):
        raise out_of_range("max_tokens", "at least 1; 0 only with 'echo': true", 0)
    if "stream_options" in values and not values.get("stream"):
        raise RequestError("'stream_options' needs 'stream': true", code="invalid_value", param="stream_options")
    if values.get("allowed_token_ids") == ():
        raise out_of_range("allowed_token_ids", "a list of at least one token id", [])


def _check_vocabulary(values: Mapping[str, Any], vocab_size: int) -> None:
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_ids(values.get(name, ()), name, vocab_size)
    check_ids([token for token, _ in values.get("logit_bias", ())], "logit_bias", vocab_size)


def check_ids(ids: Any, param: str, vocab_size: int) -> None:
    """Every id must be one of the model's. Raises RequestError."""
    if ids and max(ids) >= vocab_size:
        raise out_of_range(param, f"token ids below the vocabulary's size {vocab_size}", max(ids))


def build_call(
    values: Mapping[str, Any],
    prompts: list[tuple[int, ...]],
    *,
    endpoint: Endpoint,
    config: Config,
    info: EngineInfo,
    tokenizer: Tokenizer,
    request_id: str,
    created: int,
    arrival_s: float,
    serial: int = 0,
    tenant: bytes = b"",
    weight: int = 1,
    timeout_s: float | None = None,
    exposed: bool = False,
    reading: Reading = PLAIN,
    grammar: Grammar | None = None,
) -> GenerationCall:
    """Engine requests of one body that `read_body` has checked. RequestError when it does not fit the context.

    Without `echoes`, which take longer: see `echo.echoes_of`. grammar: `tool_grammar.output_grammar` of the values.
    tenant: what separates the client's caches from others'. timeout_s: of the request's header; the shorter one counts.
    exposed: whether others may see how large the answer's packets are (obfuscation is then on by default).
    request_id is the client's name for the call. `serial` is never repeated and makes the engine's names unique: a
    client may use a name again as soon as it has left, before the engine has ended what it left behind.
    """
    n = values.get("n", 1)
    _check_choices(n * len(prompts), config)
    sampling = _sampling(values, endpoint, config, info, tokenizer)
    sampling = dataclasses.replace(sampling, shown_special_ids=marker_ids(reading, tokenizer), grammar=grammar)
    _check_possible(sampling, info)
    base = Request(
        request_id=PREFIXES[endpoint] + request_id,
        prompt_ids=(),
        sampling=sampling,
        speculation=SpeculationParams(**values.get("speculation", {})),
        n=n,
        prediction=values.get("prediction"),
        cache_salt=_cache_salt(tenant, values.get("cache_salt")),
        tenant=tenant,
        weight=weight,
        priority=values.get("priority", _TIER_PRIORITIES.get(values.get("service_tier", ""), 0)),
        timeout_s=min((t for t in (timeout_s, values.get("timeout")) if t is not None), default=None),
        arrival_s=arrival_s,
        running_stats=values.get("timings_per_token", False),
    )
    caps = [_max_tokens(values, len(prompt), endpoint, config, info) for prompt in prompts]
    return GenerationCall(
        endpoint=endpoint,
        response_id=base.request_id,
        model=values["model"],
        created=created,
        requests=_requests(base, prompts, caps, serial),
        n=n,
        logprobs=sampling.logprobs,
        reading=reading,
        scores_only=caps[0] == 0,
        **_writing(values, exposed=exposed),
    )


def _cache_salt(tenant: bytes, own: str | None) -> bytes:
    """A client's own salt narrows what its key may share; it never reaches another key's caches."""
    return tenant if own is None else hmac.digest(tenant, own.encode(), "sha256")


def _writing(values: Mapping[str, Any], *, exposed: bool) -> dict[str, Any]:
    """How the answer is written: fields of the call."""
    options = values.get("stream_options", {})
    return {
        "stream": values.get("stream", False),
        "include_usage": options.get("include_usage", False),
        "continuous_usage": options.get("continuous_usage_stats", False),
        "return_token_ids": values.get("return_token_ids", False),
        "tokens_as_ids": values.get("return_tokens_as_token_ids", False),
        "timings": values.get("timings_per_token", False),
        "spec_details": values.get("return_spec_tokens_details", False),
        "obfuscated": options.get("include_obfuscation", exposed),
    }


def _check_choices(count: int, config: Config) -> None:
    if count > config.server.max_prompts:
        raise RequestError(
            f"'n' times the number of prompts is {count}; at most {config.server.max_prompts} are allowed",
            code="out_of_range",
            param="n",
        )


def _requests(base: Request, prompts: list[tuple[int, ...]], caps: list[int], serial: int) -> tuple[Request, ...]:
    """`base` once for each prompt, with its own cap."""
    return tuple(
        dataclasses.replace(
            base,
            request_id=f"{base.request_id}#{serial}.{i}",  # no client's name has a "#"
            prompt_ids=prompt,
            sampling=dataclasses.replace(base.sampling, max_tokens=max(cap, 1)),
            prompt_index=i,
        )
        for i, (prompt, cap) in enumerate(zip(prompts, caps, strict=True))
    )


def room_of(values: Mapping[str, Any], endpoint: Endpoint, info: EngineInfo) -> Room:
    """Where a checked request's prompts must fit in."""
    asked = values.get("max_completion_tokens", values.get("max_tokens"))
    return Room(info.max_len, asked, "messages" if endpoint is Endpoint.CHAT else "prompt")


def _max_tokens(
    values: Mapping[str, Any], prompt_len: int, endpoint: Endpoint, config: Config, info: EngineInfo
) -> int:
    """Output cap of one prompt; what the client asked for must fit, a default is cut to what does."""
    space = room_of(values, endpoint, info)
    room = space.check(prompt_len)
    default = config.sampling.max_tokens or (room if endpoint is Endpoint.CHAT else _DEFAULT_COMPLETION_TOKENS)
    cap = min(default, room) if space.asked is None else int(space.asked)
    if values.get("min_tokens", 0) > cap:
        raise out_of_range("min_tokens", f"at most the output's limit of {cap} tokens", values["min_tokens"])
    return cap


def _default(name: str, values: Mapping[str, Any], config: Config, info: EngineInfo) -> float:
    """The request's value, else the operator's, else the model's own, else OpenAI's."""
    if name in values:
        return float(values[name])
    configured = getattr(config.sampling, name)
    if configured is not None:
        return float(configured)
    return float(info.generation_defaults.get(name, _DEFAULTS[name]))


def _sampling(
    values: Mapping[str, Any], endpoint: Endpoint, config: Config, info: EngineInfo, tokenizer: Tokenizer
) -> SamplingParams:
    """Everything but the grammar, and max_tokens, which each prompt sets for itself."""
    top_k = int(_default("top_k", values, config, info))
    allowed = values.get("allowed_token_ids")
    if endpoint is Endpoint.CHAT:
        logprobs = values.get("top_logprobs", 0) if values.get("logprobs") else None
    else:
        logprobs = values.get("logprobs")
    return SamplingParams(
        max_tokens=1,
        seed=values["seed"] if "seed" in values else secrets.randbits(63),
        temperature=_default("temperature", values, config, info),
        top_k=0 if top_k <= 0 or top_k >= info.vocab_size else top_k,
        top_p=_default("top_p", values, config, info),
        min_p=_default("min_p", values, config, info),
        presence_penalty=values.get("presence_penalty", 0.0),
        frequency_penalty=values.get("frequency_penalty", 0.0),
        repetition_penalty=_default("repetition_penalty", values, config, info),
        logit_bias=values.get("logit_bias", ()),
        allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
        bad_words_ids=_bad_words_ids(values.get("bad_words", ()), tokenizer),
        min_tokens=values.get("min_tokens", 0),
        ignore_eos=values.get("ignore_eos", False),
        stop=tuple(dict.fromkeys(values.get("stop", ()))),
        stop_token_ids=tuple(dict.fromkeys(values.get("stop_token_ids", ()))),
        include_stop_str_in_output=values.get("include_stop_str_in_output", False),
        skip_special_tokens=values.get("skip_special_tokens", True),
        logprobs=logprobs,
        prompt_logprobs=logprobs if values.get("echo") else None,
    )


def _check_possible(sampling: SamplingParams, info: EngineInfo) -> None:
    """Refuses parameters that together forbid every token from the start: the engine could only fail the request."""
    forbidden = {word[0] for word in sampling.bad_words_ids if len(word) == 1}
    if sampling.min_tokens > 0:
        forbidden |= {*info.eos_ids, *sampling.stop_token_ids}
    allowed = sampling.allowed_token_ids
    if not forbidden.issuperset(range(info.vocab_size) if allowed is None else allowed):
        return
    raise RequestError(
        "no token may be generated: every allowed one is a bad word, or an end that min_tokens holds back",
        code="invalid_value",
        param="stop_token_ids" if allowed is None else "allowed_token_ids",
    )


def _bad_words_ids(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the start of a text and, where that is another token sequence of the same length,
    after a space (vLLM's rule)."""
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special=False))
        if not bare:
            continue
        found.append(bare)
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special=False))
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(found))
