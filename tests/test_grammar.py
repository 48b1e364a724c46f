"""Compiling grammars (deadline, limits, cache, the process that is killed) and what a matcher's masks say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from specd import grammar as module
from specd.errors import EngineError, GrammarError, RequestError
from specd.grammar import GrammarMatcher, Grammars
from specd.guidance import build_tokenizer, compile_matcher
from specd.request import Grammar
from specd.text import Detokenizer, PaddedTokens, Tokenizer
from tests.fake_engine import byte_tokenizer
from tests.test_text import KINDS, piece_tokenizer

PADDING = 70  # rows of the head that no token of the vocabulary has
ENDLESS = '{"type":"integer","multipleOf":999983}'  # to compile
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'


def make(tokenizer: Tokenizer | None = None, *, eos: tuple[int, ...] | None = None) -> Grammars:
    tokenizer = tokenizer or byte_tokenizer()
    ends = tokenizer.eos_ids if eos is None else eos
    return Grammars(tokenizer, vocab_size=tokenizer.vocab_size + PADDING, eos_ids=ends)


@contextlib.asynccontextmanager
async def grammars() -> AsyncIterator[Grammars]:
    made = make()
    try:
        yield made
    finally:
        await made.close()


async def refusal(made: Grammars, kind: Any, text: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await made.prepare(Grammar(kind, text, "the.field"))
    assert caught.value.param == "the.field"
    assert "'the.field'" in str(caught.value)
    return caught.value


# ---------------------------------------------------------------- compiling


async def test_what_is_wrong_is_told_apart_from_what_is_too_complex() -> None:
    """And everything that is good before and after is compiled: an error leaves nothing behind."""
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(40)}}
    wrong = [
        ("json_schema", '{"type":"objct"}', "invalid_schema"),
        ("json_schema", '{"type":"array","uniqueItems":true}', "invalid_schema"),
        ("json_schema", '{"uniqueItems":true,"type":"array","x-guidance":{"lenient":true}}', "invalid_schema"),
        ("json_schema", '{"$ref":"http://127.0.0.1:1/schema"}', "invalid_schema"),
        ("json_schema", "false", "invalid_schema"),
        ("regex", "(", "invalid_regex"),
        ("regex", r"[^\s\S]", "invalid_regex"),
        ("lark", "start: missing", "invalid_grammar"),
        ("json_schema", json.dumps({"allOf": [{"anyOf": [many, many, many]}] * 12}), "schema_too_complex"),
        (
            "lark",
            "start: A20\nA0: /[xy]/\n" + "\n".join(f"A{i + 1}: A{i} A{i}" for i in range(20)),
            "schema_too_complex",
        ),
    ]
    async with grammars() as made:
        for kind, text, code in wrong:
            error = await refusal(made, kind, text)
            assert error.code == code, (text[:80], str(error))
        await made.prepare(Grammar("json_schema", SCHEMA))
        assert isinstance(made.matcher(Grammar("json_schema", SCHEMA)), GrammarMatcher)


async def test_a_grammar_that_never_ends_is_killed_at_the_deadline_and_others_go_on() -> None:
    async with grammars() as made:
        await made.prepare(Grammar("regex", "a+"))  # the trie and the process are there
        worker = made._worker
        start = time.monotonic()
        hostile = asyncio.create_task(refusal(made, "json_schema", ENDLESS))
        await asyncio.sleep(0)
        lag = 0.0
        while not hostile.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            lag = max(lag, time.monotonic() - before)
        assert (await hostile).code == "schema_too_complex"
        assert 1.9 < time.monotonic() - start < 10
        assert lag < 1.0, "the event loop stood still"
        await made.prepare(Grammar("regex", "b+"))
        assert made._worker is worker, "the process itself is not lost"


async def test_a_cancelled_try_leaves_the_next_one_its_own_answer() -> None:
    async with grammars() as made:
        await made.prepare(Grammar("regex", "a+"))
        task = asyncio.create_task(made.prepare(Grammar("json_schema", ENDLESS)))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.prepare(Grammar("regex", "b+"))
        assert (await refusal(made, "regex", "(")).code == "invalid_regex"


async def test_a_lost_process_is_an_error_once() -> None:
    async with grammars() as made:
        await made.prepare(Grammar("regex", "a+"))
        assert made._worker is not None
        os.killpg(made._worker.pid, signal.SIGSTOP)  # so that it is lost while it compiles
        task = asyncio.create_task(made.prepare(Grammar("regex", "b+")))
        await asyncio.sleep(0.1)
        os.killpg(made._worker.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="ended"):
            await task
        await made.prepare(Grammar("regex", "b+"))


async def test_the_cache_is_bounded_by_bytes_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    async def answer(self: Grammars, grammar: Grammar) -> dict[str, Any]:
        compiled.append(grammar.text)
        return {"error": None, "bytes": 40}

    monkeypatch.setattr(Grammars, "_try_out", answer)
    monkeypatch.setattr(module, "_CACHE_BYTES", 100)
    monkeypatch.setattr(module, "_LEAST_BYTES", 0)
    monkeypatch.setattr(module, "_BYTES_A_CHARACTER", 1)
    made = make()
    for text in ("a", "b", "a", "c", "a", "b"):
        await made.prepare(Grammar("regex", text, param=f"field {len(compiled)}"))
    assert compiled == ["a", "b", "c", "b"]
    made.matcher(Grammar("regex", "a"))
    with pytest.raises(EngineError, match="not prepared"):
        made.matcher(Grammar("regex", "c"))


async def test_small_grammars_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that compiled it first may see no growth at all: millions of them would have filled the memory."""

    async def answer(self: Grammars, grammar: Grammar) -> dict[str, Any]:
        return {"error": None, "bytes": 0}

    monkeypatch.setattr(Grammars, "_try_out", answer)
    made = make()
    await made.prepare(Grammar("regex", "a{3}"))
    assert made._cached_bytes > 30_000


async def test_a_model_without_an_end_takes_no_grammar() -> None:
    assert (await refusal(make(eos=()), "regex", "a")).code == "grammar_unavailable"


# ---------------------------------------------------------------- masks


class World:
    """Matchers over the byte vocabulary, compiled on the spot."""

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        made = make(self.tokenizer)
        tokens, special = made._vocabulary()
        self.width = -(-len(tokens) // 32)
        self.num_ids = len(tokens)
        self.trie = build_tokenizer(
            tokens, special=special, eos=self.tokenizer.eos_ids, encode=self.tokenizer.encode_text
        )

    def matcher(self, kind: Any, text: str) -> GrammarMatcher:
        return GrammarMatcher(compile_matcher(self.trie, kind, text), self.tokenizer.eos_ids)

    def masks(self, matcher: GrammarMatcher, drafts: list[int]) -> list[set[int]]:
        words = np.full((len(drafts) + 1, self.width), -1, np.int32)
        matcher.fill(drafts, words)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        return [set(np.flatnonzero(row).tolist()) for row in bits]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode_text(text)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_the_end_is_allowed_exactly_where_the_grammar_accepts(world: World) -> None:
    (eos,) = world.tokenizer.eos_ids
    matcher = world.matcher("choice", '["no","nobody"]')
    (root,) = world.masks(matcher, [])
    assert root == set(world.ids("n"))
    for token in world.ids("no"):
        matcher.advance(token)
    (root,) = world.masks(matcher, [])
    assert root == {eos, *world.ids("b")}
    for token in world.ids("body"):
        matcher.advance(token)
    assert world.masks(matcher, []) == [{eos}]


def test_special_tokens_and_padding_are_never_text(world: World) -> None:
    special = world.tokenizer.special_ids
    (root,) = world.masks(world.matcher("regex", r"(.|\n){5}"), [])
    assert root.isdisjoint(special)
    assert max(root) < world.tokenizer.vocab_size < world.num_ids
    # Text that reads like a special token is ordinary text, also where the grammar forces it.
    matcher = world.matcher("choice", '["a<|im_end|>b"]')
    for token in world.ids("a<|im_end|>b"):
        assert token not in special
        assert token in world.masks(matcher, [])[0]
        matcher.advance(token)


def test_a_block_has_the_masks_of_its_tokens_one_by_one(world: World) -> None:
    """Random walks with right and wrong drafts: masks of a block equal those of plain decoding, and leave no trace."""
    source = random.Random(0)
    everything = set(range(32 * world.width))
    for kind, text in (("json_schema", SCHEMA), ("regex", "(he|hell|help)[a-c]{1,4}"), ("choice", '["he","hex"]')):
        for _ in range(6):
            block, plain = world.matcher(kind, text), world.matcher(kind, text)
            for _ in range(12):
                ahead = world.matcher(kind, text)
                for token in plain._consumed:
                    ahead.advance(token)
                drafts, want, on_path = [], [], True
                for _ in range(4):
                    mask = world.masks(ahead, [])[0] if on_path else everything
                    want.append(mask)
                    right = on_path and source.random() < 0.8
                    drafts.append(source.choice(sorted(mask)) if right else source.randrange(world.num_ids))
                    on_path = on_path and drafts[-1] in mask and drafts[-1] not in world.tokenizer.eos_ids
                    if on_path:
                        ahead.advance(drafts[-1])
                want.append(world.masks(ahead, [])[0] if on_path else everything)
                assert world.masks(block, drafts) == want
                token = source.choice(sorted(world.masks(plain, [])[0]))
                if token in world.tokenizer.eos_ids:
                    break
                plain.advance(token)
                block.advance(token)


def test_a_draft_that_is_not_there_ends_the_block(world: World) -> None:
    masks = world.masks(world.matcher("regex", "ab"), [-1, 5])
    assert masks[0] == set(world.ids("a"))
    assert len(masks[1]) == len(masks[2]) == 32 * world.width


def test_a_token_that_the_grammar_refuses_is_an_error(world: World) -> None:
    with pytest.raises(GrammarError, match="does not allow"):
        world.matcher("regex", "ab").advance(world.ids("x")[0])


class Exhausted:
    """A matcher of llguidance that gives up at the mask after `limit` tokens."""

    def __init__(self, real: Any, limit: int, consumed: int = 0) -> None:
        self._real, self._limit, self._consumed, self._error = real, limit, consumed, False

    def deep_copy(self) -> Exhausted:
        return Exhausted(self._real.deep_copy(), self._limit, self._consumed)

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        self._real.unsafe_compute_mask_ptr(pointer, size)
        self._error = self._error or self._consumed >= self._limit

    def is_error(self) -> bool:
        return self._error

    def get_error(self) -> str:
        return "too many items"

    def consume_token(self, token: int) -> bool:
        self._consumed += 1
        return bool(self._real.consume_token(token))

    def consume_tokens(self, tokens: list[int]) -> bool:
        return all(map(self.consume_token, tokens))

    def rollback(self, count: int) -> bool:
        self._consumed -= count
        return bool(self._real.rollback(count))


def test_a_matcher_that_gives_up_among_the_drafts_goes_on_without_them(world: World) -> None:
    """Only who gets there fails: with other drafts the same sequence would not have met the limit either."""
    tokens = world.ids("abcd")
    start: Any = Exhausted(compile_matcher(world.trie, "regex", "[a-z]{9}"), limit=3)
    matcher = GrammarMatcher(start, world.tokenizer.eos_ids)
    masks = world.masks(matcher, tokens)
    letters = masks[0]
    assert masks == [letters, letters, letters, set(), set()]
    assert matcher.failure is None
    for token in tokens[:2]:
        matcher.advance(token)
        assert world.masks(matcher, [])[0] == letters
    matcher.advance(tokens[2])
    assert world.masks(matcher, tokens[3:]) == [set(), set()]
    assert isinstance(matcher.failure, GrammarError)
    assert "too many items" in str(matcher.failure)


def test_a_token_that_leads_beyond_a_limit_is_the_last_one(world: World) -> None:
    """It is allowed, and stays: the client's grammar is at fault for what comes next, not the server."""
    schema = {"type": "object", "properties": {f"prop{i}": {"type": "string"} for i in range(900)}}
    matcher = world.matcher("json_schema", json.dumps(schema | {"additionalProperties": False}))
    for token in world.ids('{"prop1'):
        assert token in world.masks(matcher, [])[0]
        matcher.advance(token)
        if matcher._matcher.is_error():
            break
    assert world.masks(matcher, []) == [set()]
    assert isinstance(matcher.failure, GrammarError)
    assert "too complex" in str(matcher.failure)
    with pytest.raises(GrammarError, match="does not allow"):
        world.matcher("regex", "a").advance(world.ids("b")[0])


def test_a_matcher_is_copied_when_it_is_used_first(world: World) -> None:
    """A thousand choices that wait would cost a thousand copies, of the event loop's time."""
    copies: list[None] = []

    class Start:
        def deep_copy(self) -> Any:
            copies.append(None)
            return real.deep_copy()

    real, start = compile_matcher(world.trie, "regex", "[a-z]{9}"), Start()
    matcher = GrammarMatcher(start, world.tokenizer.eos_ids)  # type: ignore[arg-type]
    assert not copies
    assert world.masks(matcher, [])[0]
    matcher.advance(world.ids("a")[0])
    assert len(copies) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_walk_is_what_the_grammar_says_for_every_kind_of_tokenizer(kind: str) -> None:
    """Also the space of the first word, which a SentencePiece tokenizer writes and its detokenizer drops."""
    tokenizer = piece_tokenizer(kind)
    tokens, special = make(tokenizer)._vocabulary()
    encode = make(tokenizer)._encode_exactly
    trie = build_tokenizer(tokens, special=special, eos=tokenizer.eos_ids, encode=encode)
    options = [" hello", "hello hello", "é😀", "</s>", "a b"]
    source, found = random.Random(1), set()
    for _ in range(40):
        matcher = GrammarMatcher(compile_matcher(trie, "choice", json.dumps(options)), tokenizer.eos_ids)
        detokenizer = Detokenizer(PaddedTokens(tokenizer, keep_space=True))
        text = ""
        while True:
            words = np.full((1, -(-len(tokens) // 32)), -1, np.int32)
            matcher.fill([], words)
            token = source.choice(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
            if token in tokenizer.eos_ids:
                break
            matcher.advance(token)
            text += detokenizer.push(token)
        found.add(text)
    assert found == set(options)
