"""llama.cpp as a side of a comparison: the same file, threads and prompts, greedy, through PyPI's `xllamacpp`.

Each side is a process (see `benchmarks.llama_server`): only one server can live in a process. Its modes of speculation
that need no second model are all here, as they come and with the short matches and drafts that suit a small model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from benchmarks.measure import Load, Sample
from specd.errors import ModelError

PLAIN = "llama.cpp"
_LINE_LIMIT = 1 << 26  # bytes of a reply


@dataclasses.dataclass(frozen=True, slots=True)
class LlamaMode:
    """One of llama.cpp's `--spec-type` values and the settings that differ from its defaults."""

    type: str
    options: Mapping[str, int] = dataclasses.field(default_factory=dict)
    learns: bool = False  # keeps what it saw across requests: asked twice, it would draft its own earlier answer


def _short(section: str) -> dict[str, int]:
    """Matches of 3 tokens and drafts of at most 8; llama.cpp's own are 12 (24) and 48 (64)."""
    return {f"{section}.size_n": 3, f"{section}.size_m": 8}


# Modes that need weights (draft-simple, draft-eagle3, draft-mtp, draft-dflash, draft-dspark) are left out: there are
# none for this model.
MODES: dict[str, LlamaMode] = {
    PLAIN: LlamaMode("NONE"),
    "llama.cpp ngram-simple": LlamaMode("NGRAM_SIMPLE"),
    "llama.cpp ngram-simple 3+8": LlamaMode("NGRAM_SIMPLE", _short("ngram_simple")),
    "llama.cpp ngram-map-k": LlamaMode("NGRAM_MAP_K"),
    "llama.cpp ngram-map-k 3+8": LlamaMode("NGRAM_MAP_K", _short("ngram_map_k")),
    "llama.cpp ngram-map-k4v": LlamaMode("NGRAM_MAP_K4V"),
    "llama.cpp ngram-map-k4v 3+8": LlamaMode("NGRAM_MAP_K4V", _short("ngram_map_k4v")),
    "llama.cpp ngram-mod": LlamaMode("NGRAM_MOD", learns=True),
    "llama.cpp ngram-mod 3+8": LlamaMode(
        "NGRAM_MOD", {"ngram_mod.n_match": 3, "ngram_mod.n_min": 1, "ngram_mod.n_max": 8}, learns=True
    ),
    "llama.cpp ngram-cache": LlamaMode("NGRAM_CACHE", learns=True),
}


class LlamaSide:
    """One server in its own process. A mode that learns gets a new server for each answer, started before the clock."""

    def __init__(self, name: str, *, model: Path, threads: int, slots: int, context: int) -> None:
        """slots: sequences at a time, each with `context` tokens of prompt, answer and drafts."""
        self.name = name
        self.system_info = ""
        self._mode = MODES[name]
        self._slots = slots
        self._settings = {
            "model": str(model),
            "threads": threads,
            "slots": slots,
            "context": context,
            "mode": self._mode.type,
            "options": dict(self._mode.options),
        }
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    async def create(cls, name: str, **settings: Any) -> LlamaSide:
        side = cls(name, **settings)
        await side._start()
        return side

    def takes(self, load: Load) -> bool:
        return load.concurrency <= self._slots

    async def answer(self, load: Load) -> list[Sample]:
        if self._mode.learns:
            await self.close()
        if self._process is None:
            await self._start()
        questions = [[question.prompt_ids, question.num_tokens] for question in load.questions]
        reply = await self._exchange({"concurrency": load.concurrency, "questions": questions})
        return [self._sample(answer) for answer in reply["answers"]]

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.llama_server",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
        )
        self.system_info = (await self._exchange(self._settings))["system"]

    async def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ModelError when the process ends; it has said why on standard error."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise ModelError(f"{self.name}: its process ended with status {await process.wait()}; see above")
        reply: dict[str, Any] = orjson.loads(line)
        return reply

    def _sample(self, answer: dict[str, Any]) -> Sample:
        times = answer["times_s"]
        # Tokens of one speculative step come one by one: the gaps between them say nothing about steps.
        gaps = [b - a for a, b in itertools.pairwise(times)] if self._mode.type == "NONE" else []
        return Sample(
            start_s=answer["start_s"],
            first_s=times[0],
            end_s=times[-1],
            token_ids=(),
            gaps_s=tuple(gaps),
            num_drafted=answer["num_drafted"],
            num_accepted=answer["num_accepted"],
            text=answer["text"],
            num_untold=answer["num_tokens"],
            arrivals=tuple((at, 1) for at in times),
        )
