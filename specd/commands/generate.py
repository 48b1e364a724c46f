"""`specd generate` and `specd chat`: the engine in this process, the text on the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import sys
import time

import uvloop

from specd import log
from specd.commands.settings import load_settings
from specd.commands.terminal import TextPrinter, note, summary, wants_color
from specd.daemon import load_engine
from specd.errors import ModelError, RequestError, UsageError
from specd.request import FinishReason, Request, SamplingParams, SpeculationParams
from specd.server.chat import render
from specd.supervision import DaemonEngine
from specd.text import Tokenizer

Message = dict[str, str]


def run(args: argparse.Namespace) -> int:
    prompt = "" if args.interactive else _split_words(args)
    config = load_settings(args)
    # Standard error carries the summary here; events below warning would only stand between the lines.
    log.configure("warning" if config.log.level == "info" else config.log.level, config.log.format)
    note(f"loading {config.model.path}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        engine = runner.run(load_engine(config))
        try:
            if args.interactive:
                return _chat(runner, engine, args)
            if args.raw:
                prompt_ids = engine.tokenizer.encode(prompt)
            else:
                prompt_ids = _encode(engine.tokenizer, [{"role": "user", "content": prompt}])
            _, ok = runner.run(_answer(engine, prompt_ids, args))
            return 0 if ok else 1
        finally:
            runner.run(engine.close())


def _split_words(args: argparse.Namespace) -> str:
    """`[MODEL] PROMPT` to args.model and the prompt. Raises UsageError."""
    if len(args.words) > 2:
        raise UsageError(f"{len(args.words)} arguments where a model and a prompt were expected; quote the prompt")
    args.model = args.words[0] if len(args.words) == 2 else None
    prompt: str = args.words[-1]
    return sys.stdin.read() if prompt == "-" else prompt


def _encode(tokenizer: Tokenizer, messages: list[Message]) -> list[int]:
    """Token ids of a chat, through the engine's template. Raises ModelError when there is none."""
    if tokenizer.chat_template is None:
        raise ModelError("the model has no chat template; use --raw, or give one with --chat-template FILE")
    rendered = render(
        messages,
        template=tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.special_tokens,
    )
    return tokenizer.encode_chat(rendered)


async def _answer(engine: DaemonEngine, prompt_ids: list[int], args: argparse.Namespace) -> tuple[str, bool]:
    """Streams one answer to standard output; its text, and whether it ended without an error."""
    room = engine.info.max_len - len(prompt_ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens; the maximum context length is {engine.info.max_len}",
            code="context_length_exceeded",
        )
    request = Request(
        request_id=f"terminal-{time.monotonic_ns()}",
        prompt_ids=tuple(prompt_ids),
        sampling=SamplingParams(
            max_tokens=min(args.max_tokens or room, room), seed=args.seed, temperature=args.temperature
        ),
        speculation=SpeculationParams(detail="detailed"),
        arrival_s=time.monotonic(),
    )
    color = wants_color(args.color, sys.stdout)
    printer = TextPrinter(sys.stdout, engine.tokenizer, color=color)
    try:
        async for delta in engine.submit(request):
            printer.push(delta)
    finally:
        engine.abort(request.request_id)  # after Ctrl-C; without effect when it has ended
        print()
    note(printer.legend())
    if delta.stats is not None:
        note(summary(delta.stats))
    if delta.finish_reason is FinishReason.ERROR:
        note(f"specd: {delta.error}")
    return printer.text, delta.finish_reason is not FinishReason.ERROR


def _chat(runner: asyncio.Runner, engine: DaemonEngine, args: argparse.Namespace) -> int:
    """Turns until end of file. Ctrl-C ends the answer; at the prompt it clears the line, twice in a row ends the chat.

    The loop runs during an answer only: `input` blocks this thread, and the engine is idle then.
    """
    messages: list[Message] = []
    interrupted = False  # by Ctrl-C at the prompt before this one
    with contextlib.suppress(ImportError):  # optional in Python: line editing and history for `input`
        importlib.import_module("readline")
    note(f"{engine.info.model}, drafter {engine.info.drafter}. Ctrl-D ends, Ctrl-C interrupts an answer.")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            if interrupted:
                return 0
            interrupted = True
            note("Ctrl-C again ends the chat.")
            continue
        interrupted = False
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            text, _ = runner.run(_answer(engine, _encode(engine.tokenizer, messages), args))
            messages.append({"role": "assistant", "content": text})
        except RequestError as error:
            note(f"specd: {error}")
            messages.pop()
        except KeyboardInterrupt:
            messages.pop()
