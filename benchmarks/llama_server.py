"""llama.cpp in a process of its own: what `benchmarks.llama_cpp` starts. No torch, nothing of specd.

    python -m benchmarks.llama_server     # started by benchmarks.llama_cpp; JSON lines in, JSON lines out

The first line is the settings (`LlamaSettings` as JSON); the answer says what was built. Each further line is
{"concurrency": n, "questions": [[prompt ids, new tokens], ...]} and is answered by {"answers": [...]}, in order. The
end of the input ends the process. Answers come through the in-process callback of xllamacpp's server, not over HTTP.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import xllamacpp


def start(settings: dict[str, Any]) -> Any:
    """A server with the settings; everything else is what llama.cpp's users get."""
    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["slots"] * settings["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.cache_prompt = False  # prompts repeat from round to round
    params.cache_ram_mib = 0
    params.ui = False
    params.verbosity = -1
    speculative = params.speculative
    speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{settings['mode']}")]
    for path, value in settings["options"].items():
        section, name = path.split(".")
        record = getattr(speculative, section)
        getattr(record, name)  # an unknown name would be set without a word
        setattr(record, name, value)
    return xllamacpp.Server(params)


def ask(server: Any, question: Sequence[Any]) -> dict[str, Any]:
    """One streamed greedy answer: perf_counter times of the start and of each piece, the text, what was counted.

    RuntimeError when llama.cpp refuses, when a prompt's prefix was cached, or when an answer ends early.
    """
    prompt, num_tokens = question
    # top_k 1 as the only sampler: greedy, and the least work that llama.cpp can do for it.
    request = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "samplers": ["top_k"],
        "top_k": 1,
        "stream": True,
        "cache_prompt": False,
    }
    pieces: list[tuple[float, str]] = []

    def collect(piece: str) -> bool:
        pieces.append((time.perf_counter(), piece))
        return False  # go on

    start_s = time.perf_counter()
    server.handle_completions(json.dumps(request), collect)
    return _answer(start_s, pieces, len(prompt), num_tokens)


def _answer(start_s: float, pieces: list[tuple[float, str]], num_prompt: int, num_tokens: int) -> dict[str, Any]:
    chunks = [(at, json.loads(piece)) for at, piece in pieces]
    errors = [chunk for _, chunk in chunks if "error" in chunk]
    if errors or not chunks:
        raise RuntimeError(f"llama.cpp refused a prompt of {num_prompt} tokens: {errors[:1]}")
    last = chunks[-1][1]
    usage, timings = last["usage"], last["timings"]
    if usage["prompt_tokens"] != num_prompt or usage["prompt_tokens_details"]["cached_tokens"]:
        raise RuntimeError(f"llama.cpp did not compute exactly the {num_prompt} tokens of the prompt: {usage}")
    if usage["completion_tokens"] != num_tokens:
        raise RuntimeError(f"llama.cpp gave {usage['completion_tokens']} tokens where {num_tokens} were asked for")
    # The closing chunk has no token.
    return {
        "start_s": start_s,
        "times_s": [at for at, chunk in chunks[:-1]],
        "text": "".join(chunk["choices"][0]["text"] for _, chunk in chunks),
        "num_tokens": num_tokens,
        "num_drafted": timings.get("draft_n", 0),
        "num_accepted": timings.get("draft_n_accepted", 0),
    }


def answer(server: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers in the order of the questions, `concurrency` at a time."""
    with concurrent.futures.ThreadPoolExecutor(request["concurrency"]) as pool:
        return list(pool.map(lambda question: ask(server, question), request["questions"]))


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what llama.cpp prints must not end up among the replies
    server = start(json.loads(sys.stdin.readline()))
    print(json.dumps({"system": xllamacpp.get_system_info().strip()}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps({"answers": answer(server, json.loads(line))}), file=replies, flush=True)


if __name__ == "__main__":
    main()
