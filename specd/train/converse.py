"""Chats in which the model writes the user's turns too: a corpus without any prompt of one's own.

    opening -> user's turn (sampled) -> what the template puts between -> answer (sampled) -> user's turn -> ...

Chats run at the same time as requests to an engine in this process. Each has a seed of its own, so a chat depends on
its number and the settings alone. Finished ones are kept in a journal beside the output, from which a run goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from safetensors import SafetensorError, safe_open

from specd.config import Config, KVConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from specd.engine import Engine
from specd.errors import ConfigError, EngineError, ModelError
from specd.models.saving import save_tensors
from specd.request import FinishReason, Request, SamplingParams
from specd.text import Tokenizer
from specd.train.corpus import ANSWER, GIVEN, USER
from specd.train.journal import Chat, Journal
from specd.train.target import weights_fingerprint
from specd.train.template import ChatRenderer, TurnTokens, turn_tokens

RendererFactory = Callable[[Tokenizer], ChatRenderer | None]
_SETTINGS = "specd_chats"  # in the corpus' metadata, as JSON
_PROBE_TOKENS = 16  # of each of the requests that are timed for the estimate
_PROGRESS_S = 10.0  # between lines of progress
_BYTES_A_TOKEN = 5  # of the corpus at most: an i32 id and a role


@dataclasses.dataclass(frozen=True, slots=True)
class ConverseSettings:
    model: Path  # a .gguf file or a folder
    output: Path  # the corpus
    chats: int
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # of answers, by turns
    user_temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 256
    turns: int = 3  # answers of the longest chats; others have fewer
    chat_tokens: int = 448  # a chat is cut off there
    seed: int = 0
    concurrency: int = 32
    threads: int = 0  # of the forwards; 0: all cores

    def identity(self) -> dict[str, Any]:
        """What a journal must agree with."""
        fields = dataclasses.asdict(self) | {"temperatures": list(self.temperatures)}
        free = ("model", "output", "concurrency", "threads")
        return {k: v for k, v in fields.items() if k not in free} | {"weights": weights_fingerprint(self.model)}


def converse(settings: ConverseSettings, make_renderer: RendererFactory) -> Path:
    """Writes settings.output unless it is there already, of the same settings. Gives its path.

    make_renderer: from the model's tokenizer. Raises ConfigError, ModelError (no template, or one whose turns cannot
    be sampled) and EngineError.
    """
    identity = settings.identity()
    if settings.output.exists():
        _check_finished(settings.output, identity)
        _say(f"{settings.output} is there")
        return settings.output
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    with Journal.open(settings.output.with_suffix(".journal.jsonl"), identity) as journal:
        asyncio.run(_run(settings, make_renderer, journal))
        _write_corpus(settings, identity, [journal.chats[index] for index in range(settings.chats)])
    journal.remove()
    return settings.output


async def _run(settings: ConverseSettings, make_renderer: RendererFactory, journal: Journal) -> None:
    missing = [index for index in range(settings.chats) if index not in journal.chats]
    if not missing:
        return
    engine = await Engine.create(_config(settings))
    try:
        render = make_renderer(engine.tokenizer)
        if render is None:
            raise ModelError(f"{settings.model}: has no chat template; give one with --chat-template FILE")
        turns = turn_tokens(engine.tokenizer, render, engine.info.eos_ids)
        if len(turns.opening) + 2 > settings.chat_tokens:
            raise ConfigError(
                f"--chat-tokens {settings.chat_tokens}: what opens a chat has {len(turns.opening)} tokens already"
            )
        writer = ChatWriter(engine, turns, settings)
        await _estimate(writer, settings, len(missing))
        writer.progress = progress = _Progress(len(missing), settings.chat_tokens)
        waiting = iter(missing)

        async def work() -> None:
            for index in waiting:  # shared: each worker takes the next one
                chat = await writer.write(index)
                journal.add(index, chat)
                progress.ended(len(chat.ids))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(settings.concurrency, len(missing))):
                group.create_task(work())
        progress.show()
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    finally:
        await engine.close()


class ChatWriter:
    """One chat at a time and worker, turn after turn."""

    def __init__(self, engine: Engine, turns: TurnTokens, settings: ConverseSettings) -> None:
        self._engine, self.turns, self._settings = engine, turns, settings
        self.progress: _Progress | None = None  # told of every token, when there is one

    async def write(self, index: int) -> Chat:
        """Chat number `index`: its length in turns and its temperature follow from that, and its seed."""
        settings, turns = self._settings, self.turns
        temperature = settings.temperatures[index // settings.turns % len(settings.temperatures)]
        plan = [
            (turns.opening, USER, settings.user_temperature, turns.user_end),
            (turns.after_user, ANSWER, temperature, turns.answer_end),
            (turns.after_answer, USER, settings.user_temperature, turns.user_end),
        ]
        ids: list[int] = []
        role: list[int] = []
        for turn in range(2 * (1 + index % settings.turns)):
            header, who, heat, end = plan[2 - turn % 2 if turn else 0]
            room = settings.chat_tokens - len(ids) - len(header)
            if room < 1:
                break
            ids += header
            role += [GIVEN] * len(header)
            said = await self.sample(f"chat-{index}-{turn}", ids, index, heat, room)
            ids += said
            role += [who] * len(said)
            if said[-1] != end:  # cut off, or ended by a token that ends more than a turn
                break
        return Chat(ids, role, temperature)

    async def sample(self, name: str, prompt: list[int], index: int, temperature: float, limit: int) -> list[int]:
        """At least one token; the last one is an end token unless the limit came first. Raises the engine's errors."""
        settings = self._settings
        params = SamplingParams(
            max_tokens=limit,
            seed=(settings.seed * 1_000_003 + index) % 2**63,
            temperature=temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_tokens=1,  # an empty turn teaches nothing
        )
        tokens: list[int] = []
        async for delta in self._engine.submit(Request(name, tuple(prompt), params, arrival_s=time.monotonic())):
            tokens += delta.token_ids
            if self.progress is not None:
                self.progress.sampled(len(delta.token_ids))
        if delta.error is not None:
            raise delta.error
        if delta.finish_reason is FinishReason.ABORT:
            raise EngineError(f"the engine gave up {name}")
        return tokens


def _config(settings: ConverseSettings) -> Config:
    """Without a drafter: what is sampled does not depend on one, and a full batch leaves it little to gain."""
    return Config(
        model=ModelConfig(path=str(settings.model), max_len=settings.chat_tokens, threads=settings.threads),
        speculation=SpeculationConfig(draft="none", self_check=False),
        scheduler=SchedulerConfig(max_running=settings.concurrency, max_waiting=settings.concurrency),
        kv=KVConfig(memory="auto"),
    )


async def _estimate(writer: ChatWriter, settings: ConverseSettings, num_chats: int) -> None:
    """An upper bound of what the run takes, from a few tokens of as many sequences as there will be."""
    count = min(settings.concurrency, num_chats)
    start = time.monotonic()
    opening = list(writer.turns.opening)
    limit = min(_PROBE_TOKENS, settings.chat_tokens - len(opening))
    samples = [writer.sample(f"probe-{i}", opening, i, settings.user_temperature, limit) for i in range(count)]
    rate = sum(map(len, await asyncio.gather(*samples))) / (time.monotonic() - start)
    tokens = num_chats * settings.chat_tokens
    size = settings.chats * settings.chat_tokens * _BYTES_A_TOKEN
    words = f"{num_chats} chats of at most {settings.chat_tokens} tokens: at most {size / 1e6:.1f} MB"
    _say(f"{words}; at {rate:.0f} tokens a second at most {tokens / rate:.0f} s")


def _write_corpus(settings: ConverseSettings, identity: dict[str, Any], chats: list[Chat]) -> None:
    ids = np.concatenate([np.asarray(chat.ids, np.int32) for chat in chats])
    tensors = {
        "ids": torch.from_numpy(ids.astype(np.uint16) if ids.max() < 1 << 16 else ids),
        "role": torch.from_numpy(np.concatenate([np.asarray(chat.role, np.uint8) for chat in chats])),
        "lens": torch.tensor([len(chat.ids) for chat in chats], dtype=torch.int32),
        "temperature": torch.tensor([chat.temperature for chat in chats], dtype=torch.float32),
    }
    partial = settings.output.with_suffix(".partial")
    # One entry: the order of several in the file would be by chance.
    save_tensors(partial, tensors, {_SETTINGS: orjson.dumps(identity).decode()})
    partial.replace(settings.output)
    _say(f"{len(chats)} chats, {len(ids)} tokens written to {settings.output}")


def _check_finished(path: Path, identity: dict[str, Any]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            found = dict(orjson.loads((file.metadata() or {})[_SETTINGS]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: is there, and not of such a run: {error!r}; give another file") from error
    for name, value in identity.items():
        if found.get(name) != value:
            raise ConfigError(f"{path}: was made with {name} {found.get(name)!r}, not {value!r}; give another file")


class _Progress:
    """A line on standard error every few seconds. Time left: as if all chats were as long as those that ended."""

    def __init__(self, total: int, longest: int) -> None:
        self._total, self._longest = total, longest
        self._done = self._tokens = self._written = 0
        self._start = self._said = time.monotonic()

    def sampled(self, tokens: int) -> None:
        self._written += tokens
        if time.monotonic() - self._said >= _PROGRESS_S:
            self._said = time.monotonic()
            self.show()

    def ended(self, tokens: int) -> None:
        """A chat of so many tokens."""
        self._done += 1
        self._tokens += tokens

    def show(self) -> None:
        rate = self._written / max(time.monotonic() - self._start, 1e-6)
        each = self._tokens / self._done if self._done else self._longest
        left = max(self._total * each - self._written, 0) / max(rate, 1e-6) if self._done < self._total else 0
        _say(
            f"{self._done}/{self._total} chats, {self._written} tokens sampled, {rate:.0f} a second, {left:.0f} s left"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
