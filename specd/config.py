"""Every setting of specd: frozen records, one per section. No torch, no I/O; `config_loader.py` fills them.

Each field carries metadata: unit, default, range, choices, reloadable, doc, flag (its command line option, if any).
`reloadable` says whether a running daemon could take a new value without loading the model again.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from specd.config_options import (
    check_draft,
    check_draft_len,
    check_home,
    check_host,
    check_host_names,
    check_journal,
    check_memory,
    check_names,
    check_origins,
    check_path,
    option,
)
from specd.config_telemetry import TelemetryConfig

LOSSY_ACCEPTANCE = frozenset({"literal", "threshold", "typical"})  # rules that change what the model would say


@dataclasses.dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP listener and its limits."""

    host: str = option("127.0.0.1", "Address to listen on.", flag="--host", check=check_host)
    port: int = option(8000, "Port to listen on; 0 lets the system choose.", low=0, high=65535, flag="--port")
    served_names: tuple[str, ...] = option(
        (),
        "Model names that clients may ask for, the canonical one first; empty: the model's own.",
        flag="--served-name",
        check=check_names,
    )
    api_keys_file: str = option(
        "",
        "File with one API key a line, read again by a reload, which may name another file and not none; empty: no "
        "keys are asked for.",
        flag="--api-key-file",
        reloadable=True,
    )
    drain_timeout_s: float = option(
        60.0, "How long accepted requests may go on after SIGTERM.", unit="s", low=0, high=86400, reloadable=True
    )
    max_body_bytes: int = option(32 << 20, "Largest request body.", unit="bytes", low=1 << 10, high=1 << 31)
    keep_alive_s: float = option(
        15.0,
        "Silence in a stream before a comment is sent to keep it open.",
        unit="s",
        low=0.1,
        high=3600,
        reloadable=True,
    )
    max_choices: int = option(16, "Largest `n` of a request.", low=1, high=128, reloadable=True)
    max_stop: int = option(4, "Most stop strings of a request.", low=1, high=64, reloadable=True)
    max_logprobs: int = option(20, "Most alternatives in logprobs.", low=0, high=100, reloadable=True)
    max_prompts: int = option(1024, "Most prompts in one completions request.", low=1, high=65536, reloadable=True)
    cors_origins: tuple[str, ...] = option(
        (),
        'Origins whose pages may call the API from a browser, such as "https://chat.example.org", or "*"; empty: none.',
        check=check_origins,
    )
    ui: Literal["auto", "on", "off"] = option(
        "auto", "The page at /ui, for people; auto: where only this machine can connect."
    )
    ui_hosts: tuple[str, ...] = option(
        (),
        "Names of this server in a browser's address bar, for the page at /ui; its addresses, localhost, server.host "
        "and the machine's own name are known.",
        check=check_host_names,
    )
    slow_client_timeout_s: float = option(
        30.0,
        "A stream ends when its client has read nothing for so long.",
        unit="s",
        low=0.1,
        high=3600,
        reloadable=True,
    )
    queued_stream_s: float = option(
        0.0,
        "A stream that waits for its first token so long gets its status 200 and comments, and whatever goes wrong "
        "afterwards is an event in it; 0: never, so that errors have status codes of their own.",
        unit="s",
        low=0,
        high=3600,
        reloadable=True,
    )
    journal: str = option(
        "auto",
        "File for the ids of accepted requests that have not ended, so that the start after a crash says which were "
        "lost: a path, off, or auto (requests.journal in $STATE_DIRECTORY, which systemd sets; off without it).",
        check=check_journal,
    )
    metrics_compat: Literal["vllm", "off"] = option(
        "vllm", "Names in /metrics for what vLLM measures too: its own (vllm:...), or off (specd_... alone)."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """The target model."""

    path: str = option("smollm2-135m", "Alias, Hugging Face folder, .gguf file or hub id (org/name).", check=check_path)
    revision: str = option("", "Branch, tag or commit of a hub id; empty: its main branch.", flag="--revision")
    offline: bool = option(False, "Never download anything; use what is in the cache.", flag="--offline")
    max_len: int = option(
        0,
        "Longest prompt and output together; 0: what the model was made for.",
        unit="tokens",
        low=0,
        high=1 << 24,
        flag="--max-len",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Precision of the forwards; auto: the best that the device computes exactly.", flag="--dtype"
    )
    kernels: Literal["auto", "native", "torch"] = option(
        "auto",
        "Who computes on the CPU: native (specd's own kernels), torch, or auto (native where it can, else torch).",
    )
    activations: Literal["fast", "exact"] = option(
        "fast", "Native kernels' arithmetic: fast (int8 by row and group of 32), exact (float32)."
    )
    quantize: Literal["none", "q8_0"] = option(
        "none", "Native kernels: what weights that are stored unquantised become when they are loaded."
    )
    threads: int = option(0, "CPU threads of the forwards; 0: all cores.", low=0, high=1024, flag="--threads")
    chat_template: str = option("", "File with a Jinja chat template; empty: the model's own.", flag="--chat-template")


@dataclasses.dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Who proposes tokens, how many, and which proposals are kept."""

    draft: str = option(
        "auto",
        "auto (the best one for the model), none, ngram, layers:N (the target's first N layers), lm:MODEL, "
        "mtp (the head that comes with specd for the model), mtp+ngram (overridden by n-grams where those are kept as "
        "often) or mtp:FOLDER (one of `specd train mtp`).",
        flag="--draft",
        check=check_draft,
    )
    draft_len: int | str = option(
        "adaptive",
        "adaptive (from measured acceptance and costs), or exactly this many drafts in each decode step.",
        unit="tokens",
        low=0,
        high=64,
        check=check_draft_len,
    )
    max_draft: int = option(8, "Most drafts in one step.", unit="tokens", low=1, high=64, flag="--max-draft")
    acceptance: Literal["exact", "ratio", "literal", "threshold", "typical"] = option(
        "exact",
        "Rule for keeping drafts. exact and ratio keep the target's distribution; "
        "literal, threshold and typical are lossy.",
    )
    draft_sampling: Literal["sample", "greedy"] = option(
        "sample", "How a drafter draws its tokens for requests with a temperature."
    )
    ngram_min: int = option(2, "Shortest match that the n-gram proposer follows.", unit="tokens", low=1, high=64)
    ngram_max: int = option(5, "Longest match that the n-gram proposer looks for.", unit="tokens", low=1, high=64)
    corpora_tokens: int = option(
        1 << 20,
        "Most tokens of all corpora of `specd ctl corpora` together, 16 bytes each; 0: none are taken.",
        unit="tokens",
        low=0,
        high=1 << 28,
    )
    self_check: bool = option(True, "Generate 32 tokens at start and report the drafter's acceptance.")
    threshold: float = option(
        0.3, "acceptance = threshold: least score of the drafts that are kept.", low=0.0, high=1.0
    )
    threshold_score: Literal["min", "prod"] = option(
        "min", "acceptance = threshold: the score of drafts, least or product of their probabilities under the target."
    )
    typical_threshold: float = option(
        0.09, "acceptance = typical: most probability that is asked of a draft.", low=0.0, high=1.0
    )
    typical_alpha: float = option(
        0.3, "acceptance = typical: factor of exp(-entropy) in what is asked of a draft.", low=0.0, high=1.0
    )


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Defaults for requests that leave a field out. Unset: the model's own default, else OpenAI's."""

    temperature: float | None = option(None, "0 is greedy.", low=0.0, high=2.0, reloadable=True)
    top_p: float | None = option(None, "Nucleus; 1 is off.", low=0.0, high=1.0, reloadable=True)
    top_k: int | None = option(None, "Most likely tokens kept; 0 is off.", low=0, high=1 << 24, reloadable=True)
    min_p: float | None = option(
        None, "Least probability, relative to the most likely token; 0 is off.", low=0.0, high=1.0, reloadable=True
    )
    repetition_penalty: float | None = option(None, "1 is off.", low=0.01, high=10.0, reloadable=True)
    max_tokens: int | None = option(
        None, "Output length of requests that give none.", unit="tokens", low=1, high=1 << 24, reloadable=True
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ChatConfig:
    """How chats are written for the model, and what is read out of its answers."""

    tools: Literal["auto", "template", "hermes", "refuse"] = option(
        "auto",
        "How a prompt tells of `tools`: template (the chat template does), hermes (a block in the system message that "
        "asks for <tool_call>, for templates without tools or of another format), auto (template where it reads tools, "
        "else hermes), or refuse.",
        reloadable=True,
    )
    reasoning: Literal["auto", "think", "off"] = option(
        "auto",
        "Whether <think>...</think> at the beginning of an answer is told apart; auto: where the chat template has it.",
        reloadable=True,
    )
    reasoning_field: Literal["reasoning_content", "reasoning"] = option(
        "reasoning_content", "Name of the thinking in messages and deltas.", reloadable=True
    )


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step holds."""

    max_running: int = option(16, "Most sequences in a batch.", unit="sequences", low=1, high=4096)
    max_tokens: int = option(
        512, "Token budget of a step: decode rows first, the rest goes to prompts.", unit="tokens", low=16, high=1 << 20
    )
    max_waiting: int = option(
        1024,
        "Sequences that may wait, one for each choice of each prompt; one more is answered 429, more in one call 400.",
        unit="sequences",
        low=1,
        high=1 << 20,
        reloadable=True,
    )
    max_waiting_tokens: int = option(
        0,
        "Prompt tokens that may wait, beyond them 429; 0: no limit.",
        unit="tokens",
        low=0,
        high=1 << 31,
        reloadable=True,
    )
    max_requests_per_key: int = option(
        0,
        "Requests of one API key that may wait or run, beyond them 429; 0: no limit. Without keys all clients are one.",
        low=0,
        high=1 << 20,
        reloadable=True,
    )
    max_waiting_tokens_per_key: int = option(
        0,
        "Prompt tokens of one API key that may wait, beyond them 429; 0: no limit.",
        unit="tokens",
        low=0,
        high=1 << 31,
        reloadable=True,
    )
    priority_ageing_s: float = option(
        10.0,
        "Waiting that one level of `priority` is worth: a request overtakes what came that long before it.",
        unit="s",
        low=0.001,
        high=3600,
    )
    queue_timeout_s: float = option(
        0.0,
        "A request without a first token after so long is answered 503; 0: never.",
        unit="s",
        low=0,
        high=86400,
        reloadable=True,
    )
    request_timeout_s: float = option(
        0.0,
        "A request that takes longer is ended; 0: never. The header x-request-timeout may ask for less.",
        unit="s",
        low=0,
        high=86400,
        reloadable=True,
    )
    stall_timeout_s: float = option(
        60.0,
        "A step that takes longer is a hang: /health/live says so and systemd's watchdog is not fed.",
        unit="s",
        low=1,
        high=86400,
        reloadable=True,
    )
    mixed: Literal["speculate", "plain"] = option(
        "speculate", "Whether decode rows speculate in a batch that also holds prompt rows."
    )
    streams: Literal["single", "paired", "stages"] = option(
        "single", "Execution streams: one for all, draft and target, or one per stage."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class KVConfig:
    """The page pool."""

    memory: int | str = option(
        "auto",
        'Memory of the pool: bytes, "4GiB", "25%" of RAM, or auto: what max_running sequences of max_len need, '
        "at most 25% of RAM.",
        unit="bytes",
        low=1,
        check=check_memory,
    )
    page_size: int = option(16, "Tokens in a page.", unit="tokens", low=1, high=256)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision of the target's cached keys and values; auto: that of the forwards.", flag="--kv-dtype"
    )
    prefix_cache: bool = option(True, "Keep finished prefixes for requests that begin alike.")


@dataclasses.dataclass(frozen=True, slots=True)
class AdminConfig:
    """The control socket of `specd ctl`."""

    enabled: bool = option(True, "Whether there is a control socket.")
    socket: str = option(
        "",
        "Path of the control socket; empty: $RUNTIME_DIRECTORY/admin.sock, else $XDG_RUNTIME_DIR/specd/admin.sock, "
        "else specd-UID/admin.sock in the folder for temporary files.",
        check=check_home,
    )
    admins: tuple[str, ...] = option(
        (), "Users (names or uids) who may do everything, besides root and the daemon's own.", reloadable=True
    )
    operator_group: str = option(
        "",
        "Group (name or gid) whose members may do everything but corpora, dump, keys, profile and shutdown; the socket "
        "file is given to it at start. Everybody else who can open the socket may look.",
        reloadable=True,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LogConfig:
    """Logs go to standard error."""

    level: Literal["debug", "info", "warning", "error"] = option("info", "Least level written.", reloadable=True)
    format: Literal["auto", "json", "console"] = option("auto", "auto: console on a terminal, else JSON lines.")


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """All sections. `Config()` is the defaults."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    sampling: SamplingConfig = SamplingConfig()
    chat: ChatConfig = ChatConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv: KVConfig = KVConfig()
    admin: AdminConfig = AdminConfig()
    log: LogConfig = LogConfig()
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)


def admin_socket_path(socket: str, env: Mapping[str, str]) -> Path:
    """Where `specd serve` listens and `specd ctl` connects: `admin.socket`, or a default from the environment."""
    if socket:
        return Path(socket).expanduser()
    if env.get("RUNTIME_DIRECTORY"):  # set by systemd; several folders are joined with ":"
        return Path(env["RUNTIME_DIRECTORY"].split(":")[0], "admin.sock")
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"], "specd", "admin.sock")
    return Path(tempfile.gettempdir(), f"specd-{os.getuid()}", "admin.sock")
