"""Grammars of requests: compiled once, within a deadline, then a matcher for every sequence. No torch.

    prepare:  cache? -> a process that may be killed compiles it -> a thread compiles it, knowing that it ends -> cache
    matcher:  a copy of the compiled one, host state of one sequence
              mask stage    fill(drafts)     the masks of a block, the matcher is where it was afterwards
              commit        advance(token)   one more token was emitted

The process is started when the first grammar comes; so is the vocabulary's trie built, unless `load` did it before.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specd.errors import (
    DrainingError,
    EngineError,
    GrammarError,
    OverloadedError,
    QueueFullError,
    RequestError,
    SpecdError,
)
from specd.log import get_logger
from specd.request import Grammar
from specd.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Words = npt.NDArray[np.int32]  # [R, ceil(V / 32)] packed masks, see `specd.tensors.LogitMasks`

log = get_logger(__name__)

_CACHE_BYTES = 256 << 20
# What a grammar holds, by measurement: the process that compiles it first sees no growth within memory it has already.
_LEAST_BYTES, _BYTES_A_CHARACTER = 32 << 10, 40
_MAX_WAITING = 64  # grammars to compile; each takes 2 s of one core at most
_MAX_REFUSED = 64  # of at most 64 KiB each
_QUICK_S = 0.004  # of processor time for what is asked between two steps
_INVALID = {"json_schema": "invalid_schema", "regex": "invalid_regex", "choice": "invalid_choice"}


class GrammarMatcher:
    """Where one sequence stands in its grammar. Used by one thread at a time: the mask stage between a step's launch
    and its report, commit between reports."""

    def __init__(self, start: LLMatcher, eos_ids: tuple[int, ...]) -> None:
        self._start = start
        self._eos_ids = eos_ids
        self._copy: LLMatcher | None = None
        self._consumed: list[int] = []
        self._quick = True
        self.failure: SpecdError | None = None  # why there are no masks any more

    @property
    def _matcher(self) -> LLMatcher:
        """Its own, from the first time that it is asked: that is in the mask stage, where nobody waits for the copy."""
        if self._copy is None:
            self._copy = self._start.deep_copy()
        return self._copy

    def fill(self, drafts: list[int], words: Words) -> None:
        """The masks of a block: what may follow the root, then what may follow each draft.

        words i32[K + 1, W], all ones on entry: rows behind a draft that is refused, or that ends the text, stay so, as
        no token is emitted from there. All zeros where llguidance gave up: whoever gets there fails.
        """
        consumed = 0
        for i, row in enumerate(words):
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error():
                self._give_up(words[i:], for_good=i == 0)
                return
            if i == len(drafts) or not _allows(row, drafts[i]) or drafts[i] in self._eos_ids:
                break
            if not self._matcher.consume_token(drafts[i]):
                self._give_up(words[i + 1 :], for_good=False)
                return
            consumed += 1
        if consumed and not self._matcher.rollback(consumed):
            self._restore()

    def advance(self, token: int) -> None:
        """One more token of the output, not an EOS. GrammarError when the grammar does not allow it.

        One that takes the matcher beyond a limit is allowed: the next mask ends the sequence.
        """
        from specd.guidance import error_of, too_complex

        if not self._matcher.consume_token(token) and not too_complex(error := error_of(self._matcher)):
            raise GrammarError(f"the grammar does not allow the token {token} here: {error}")
        self._consumed.append(token)

    def forced(self) -> list[int]:
        """Tokens that spell the only bytes that can follow; a draft of them is right unless others spell the same.

        None, and all tokens from `num_allowed`, once the grammar was slow to tell: the event loop waits for both.
        """
        with self._hurried() as usable:
            return self._matcher.compute_ff_tokens() if usable else []

    def num_allowed(self, tokens: list[int]) -> int:
        """How many of them the grammar allows to follow. Moves nothing."""
        with self._hurried() as usable:
            return self._matcher.validate_tokens(tokens) if usable else len(tokens)

    @contextlib.contextmanager
    def _hurried(self) -> Iterator[bool]:
        """Whether to ask the matcher between two steps; what is asked inside decides about the next time."""
        usable = self._quick and self.failure is None and not self._matcher.is_error()
        start_s = time.thread_time()
        yield usable
        self._quick = self._quick and time.thread_time() - start_s < _QUICK_S
        if usable and self._matcher.is_error():
            self._quick = False
            self._restore()

    def fail(self, words: Words, failure: SpecdError) -> None:
        """Ends the sequence: words [K + 1, W] of its block allow nothing."""
        words[:] = 0
        self.failure = failure

    def _give_up(self, words: Words, *, for_good: bool) -> None:
        """A matcher with an error has it for ever; one that went too far with drafts begins again."""
        from specd.guidance import error_of

        if for_good:
            error = error_of(self._matcher)
            self.fail(words, GrammarError(f"the grammar became too complex to go on with: {error}"))
        else:
            words[:] = 0
            self._restore()

    def _restore(self) -> None:
        self._copy = self._start.deep_copy()
        self._copy.consume_tokens(self._consumed)


def _allows(row: Words, token: int) -> bool:
    return 0 <= token < 32 * len(row) and bool(int(row[token // 32]) >> (token % 32) & 1)


@dataclasses.dataclass(slots=True)
class _Place:
    """A grammar that waits to be compiled, or is: whoever wants it waits here, one of them compiles."""

    tenant: bytes  # who came first
    turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    num_waiting: int = 0


class Grammars:
    """Compiles grammars and gives matchers. Lives on the event loop; nothing here blocks it but `load`."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """vocab_size: width of the logits, which may be more or less than the tokenizer has."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._cache: collections.OrderedDict[Grammar, tuple[LLMatcher, int]] = collections.OrderedDict()
        self._cached_bytes = 0
        self._refused: collections.OrderedDict[Grammar, tuple[str, str]] = collections.OrderedDict()  # (code, message)
        self._trie: LLTokenizer | None = None
        self._worker: asyncio.subprocess.Process | None = None
        self._places: dict[Grammar, _Place] = {}
        self._turn = asyncio.Lock()  # one at a time: hostile grammars take one core at most
        self._serial = 0
        self._closed = False

    def load(self) -> None:
        """Builds the vocabulary's trie, where there is none yet. Takes the GIL: about a second for 50,000 tokens."""
        if self._trie is not None or not self._eos_ids:
            return
        from specd.guidance import build_tokenizer

        start = time.monotonic()
        tokens, special = self._vocabulary()
        self._trie = build_tokenizer(tokens, special=special, eos=self._eos_ids, encode=self._encode_exactly)
        log.info("grammar_vocabulary_built", tokens=len(tokens), seconds=round(time.monotonic() - start, 2))

    async def prepare(self, grammar: Grammar, tenant: bytes = b"") -> None:
        """Makes `matcher` possible, until the caller awaits something else. At once for one that is known.

        tenant: who waits for it. RequestError when it is no grammar, or too complex; OverloadedError, DrainingError or
        EngineError when it could not be tried.
        """
        if not self._eos_ids:
            raise self._refusal(grammar, "grammar_unavailable", "this model has no token to end an output with")
        if not self._is_compiled(grammar):
            place = self._places.get(grammar) or self._take_place(grammar, tenant)
            place.num_waiting += 1
            try:
                async with place.turn:
                    if not self._is_compiled(grammar):
                        async with self._turn:
                            await self._compile(grammar)
            finally:
                place.num_waiting -= 1
                if not place.num_waiting:
                    del self._places[grammar]
        self._cache.move_to_end(grammar)

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning. EngineError when the grammar was not prepared."""
        if grammar not in self._cache:
            raise EngineError("the request's grammar was not prepared")
        return GrammarMatcher(self._cache[grammar][0], self._eos_ids)

    async def close(self) -> None:
        """Ends the process; whoever still waits for a grammar gets DrainingError."""
        self._closed = True
        self._kill()
        async with self._turn:  # behind those who wait: each of them leaves at once
            await self._end_worker()

    def _is_compiled(self, grammar: Grammar) -> bool:
        """RequestError for one that was refused lately."""
        if grammar in self._refused:
            self._refused.move_to_end(grammar)
            raise self._refusal(grammar, *self._refused[grammar])
        return grammar in self._cache

    def _take_place(self, grammar: Grammar, tenant: bytes) -> _Place:
        """A tenant may have as many places as it leaves free. Raises QueueFullError."""
        own = sum(place.tenant == tenant for place in self._places.values())
        if own >= _MAX_WAITING - len(self._places):
            raise QueueFullError(f"{len(self._places)} other grammars wait to be compiled, {own} of them for this key")
        place = self._places[grammar] = _Place(tenant)
        return place

    async def _compile(self, grammar: Grammar) -> None:
        self._check_open()
        await asyncio.to_thread(self.load)
        answer = await self._try_out(grammar)
        if answer.get("late"):
            raise OverloadedError(f"the grammar could not be tried: {answer['error']}")
        if answer["error"] is not None:
            self._refused[grammar] = code, message = self._judge(grammar, answer)
            if len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
            raise self._refusal(grammar, code, message)
        from specd.guidance import compile_matcher

        assert self._trie is not None
        compiled = await asyncio.to_thread(compile_matcher, self._trie, grammar.kind, grammar.text)
        size = max(int(answer["bytes"]), _LEAST_BYTES + _BYTES_A_CHARACTER * len(grammar.text))
        self._cache[grammar] = compiled, size
        self._cached_bytes += size
        while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
            _, (_, freed) = self._cache.popitem(last=False)
            self._cached_bytes -= freed

    def _check_open(self) -> None:
        if self._closed:
            raise DrainingError("the engine was closed before the grammar was compiled")

    @staticmethod
    def _judge(grammar: Grammar, answer: dict[str, Any]) -> tuple[str, str]:
        """(code, message)"""
        from specd.guidance import too_complex

        message = str(answer["error"])
        if answer.get("killed") or too_complex(message):
            return "schema_too_complex", message
        return _INVALID.get(grammar.kind, "invalid_grammar"), message

    @staticmethod
    def _refusal(grammar: Grammar, code: str, message: str) -> RequestError:
        return RequestError(f"'{grammar.param}' cannot be used: {message}", code=code, param=grammar.param)

    # ---------------------------------------------------------------- the vocabulary and the process

    def _vocabulary(self) -> tuple[list[bytes], list[int]]:
        """The bytes of every logit (none where the head is padded), and the special ones."""
        known = min(self._tokenizer.vocab_size, self._vocab_size)
        tokens = [self._tokenizer.token_bytes(token) for token in range(known)]
        tokens += [b""] * (self._vocab_size - known)
        return tokens, sorted(token for token in self._tokenizer.special_ids if token < self._vocab_size)

    def _encode_exactly(self, text: str) -> list[int] | None:
        """The canonical ids of a text; None from a tokenizer that puts a space in front of it."""
        ids = self._tokenizer.encode_text(text)
        return ids if b"".join(map(self._tokenizer.token_bytes, ids)) == text.encode() else None

    async def _try_out(self, grammar: Grammar) -> dict[str, Any]:
        """The worker's answer. A cancelled try leaves its answer behind, which the next one passes over."""
        worker = await self._running_worker()
        assert worker.stdin is not None
        assert worker.stdout is not None
        self._serial += 1
        job = {"id": self._serial, "kind": grammar.kind, "text": grammar.text}
        lost: ConnectionError | None = None
        try:
            worker.stdin.write(json.dumps(job).encode() + b"\n")
            await worker.stdin.drain()
            while line := await worker.stdout.readline():
                answer: dict[str, Any] = json.loads(line)
                if answer["id"] == self._serial:
                    return answer
        except ConnectionError as error:
            lost = error
        await self._end_worker()
        self._check_open()
        log.error("grammar_worker_lost", error=repr(lost))
        raise EngineError("the process that compiles grammars has ended") from lost

    async def _running_worker(self) -> asyncio.subprocess.Process:
        if self._worker is not None and self._worker.returncode is None:
            return self._worker
        from specd.guidance import vocabulary_line

        line = await asyncio.to_thread(lambda: vocabulary_line(*self._vocabulary(), self._eos_ids))
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "specd.grammar_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # it and its child end together
        )
        self._worker = worker
        self._check_open()
        assert worker.stdin is not None
        worker.stdin.write(line)
        log.info("grammar_worker_started", pid=worker.pid)
        return worker

    async def _end_worker(self) -> None:
        self._kill()
        if self._worker is not None:
            await self._worker.wait()
            self._worker = None

    def _kill(self) -> None:
        if self._worker is not None and self._worker.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._worker.pid, signal.SIGKILL)
