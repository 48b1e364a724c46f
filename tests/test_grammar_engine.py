"""Structured output under speculation: the same tokens for every drafter, K, batch and preemption, and always valid.

The target is a tiny random model: what it would like to say never fits, so every mask counts.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import re
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch

from specd import assembly
from specd.config import Config, ModelConfig, SchedulerConfig
from specd.engine import Engine
from specd.errors import EngineError, GrammarError, QueueTimeoutError
from specd.grammar import GrammarMatcher, Grammars
from specd.request import FinishReason, Grammar, Request
from tests.engines import EOS, Result, ask, collect, generate, make_parts, running, tokenizer
from tests.test_mtp_engine import drafter_of, parts_of, target_of

PROMPT = [*[40, 41, 42, 43] * 4, 40, 41]  # a whole block, which others find again
LONG = [60 + i % 7 for i in range(30)]  # two chunks of at most 16 tokens
TIGHT: dict[str, Any] = {"num_slots": 80, "max_len": 64, "max_running": 5, "max_tokens": 16}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": -5, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"v": {"type": "boolean"}, "n": {"$ref": "#/$defs/node"}}}},
    "anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}, {"type": "number"}],
}
WORDS = ["yes", "yesterday", "no", 'a "quoted" \\ one', "<|end|>"]
REGEX = r"(yes|no|maybe) [a-z]{1,12}!([0-9]{2}-){0,4}"
LARK = 'start: item ("+" item)*\nitem: /[0-9]{1,3}/ | "(" start ")"'


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process an engine: `test_grammar.py` is about that."""

    async def harmless(self: Grammars, grammar: Grammar) -> dict[str, Any]:
        return {"error": None, "bytes": 0}

    monkeypatch.setattr(Grammars, "_try_out", harmless)


def lark_holds(text: str) -> bool:
    """By reduction: an item in brackets is an item."""
    while (shorter := re.sub(r"\(\d{1,3}(\+\d{1,3})*\)", "7", text)) != text:
        text = shorter
    return re.fullmatch(r"\d{1,3}(\+\d{1,3})*", text) is not None


def follows(schema: Any) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return check


# What each output must be, apart from the matcher that made it.
GRAMMARS: dict[str, tuple[Grammar, Callable[[str], bool]]] = {
    "person": (Grammar("json_schema", json.dumps(PERSON)), follows(PERSON)),
    "tree": (Grammar("json_schema", json.dumps(TREE)), follows(TREE)),
    "object": (Grammar("json_schema", '{"type":"object"}'), follows({"type": "object"})),
    "regex": (Grammar("regex", REGEX), lambda text: re.fullmatch(REGEX, text) is not None),
    "choice": (Grammar("choice", json.dumps(WORDS)), lambda text: text in WORDS),
    "lark": (Grammar("lark", LARK), lark_holds),
}


def bounded(name: str, temperature: float, prompt: list[int] = PROMPT, **changes: Any) -> Request:
    fields = {"max_tokens": 32, "temperature": temperature, "ignore_eos": False, "seed": 3}
    return ask(f"{name} {temperature}", prompt, grammar=GRAMMARS[name][0], **(fields | changes))


def batch() -> list[Request]:
    """Grammars greedy and sampled, with rows between them that have none."""
    names = [("person", 0.0), ("person", 1.0), ("tree", 1.0), ("regex", 0.0), ("regex", 1.0), ("choice", 1.0)]
    requests = [bounded(name, t, LONG if name == "regex" else PROMPT) for name, t in [*names, ("lark", 0.0)]]
    free = [ask(f"free {i}", LONG[: 30 - i], temperature=float(i), seed=i) for i in range(2)]
    return [*requests[:3], free[0], *requests[3:], free[1]]


_plain: dict[str, tuple[Any, ...]] = {}


async def plain_outcomes() -> dict[str, tuple[Any, ...]]:
    """Each request alone in an engine without a drafter."""
    if not _plain:
        async with running(make_parts(draft="none")) as engine:
            for request in batch():
                (result,) = await collect(engine, request)
                _plain[request.request_id] = result.outcome
    return _plain


async def check(engine: Engine) -> None:
    want = await plain_outcomes()
    for name, (result,) in (await generate(engine, batch())).items():
        assert result.outcome == want[name], name


@pytest.mark.parametrize("draft", ["none", "ngram"])
async def test_every_finished_output_is_what_was_asked_for(draft: str) -> None:
    """Several seeds of each grammar, judged by somebody else than the matcher."""
    requests = [bounded(name, 1.0, n=4, max_tokens=70) for name in GRAMMARS]
    async with running(make_parts(draft=draft, draft_len=3)) as engine:
        results = await generate(engine, requests)
    ended = collections.Counter[str]()
    for request_id, choices in results.items():
        name = request_id.split()[0]
        for result in choices:
            assert result.reason in (FinishReason.STOP, FinishReason.LENGTH)
            if result.reason is FinishReason.STOP:
                assert GRAMMARS[name][1](result.text), (request_id, result.text)
                assert result.tokens[-1] == EOS
                ended[name] += 1
    assert set(ended) == set(GRAMMARS)


@pytest.mark.parametrize(("draft", "draft_len"), [("ngram", 4), ("ngram", "adaptive"), ("layers", 1), ("lm", 3)])
async def test_the_same_tokens_for_every_drafter(draft: str, draft_len: int | str) -> None:
    """Chunked prompts, prefix hits and preemption in one batch."""
    parts = make_parts(draft=draft, draft_len=draft_len, **TIGHT)
    async with running(parts) as engine:
        await check(engine)
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert sum(stats.draft_tokens.values()) > 0


@pytest.mark.parametrize("device", ["serial-single", "chaos-stages"])
async def test_the_same_tokens_on_every_layout(device: str) -> None:
    async with running(make_parts(draft="ngram", draft_len=3, device=device, **TIGHT)) as engine:
        await check(engine)


async def test_the_same_tokens_with_a_head() -> None:
    """A head's drafts fit its target, which the grammar does not."""
    async with running(make_parts(target=target_of("torch"))) as engine:
        want = {name: result.outcome for name, (result,) in (await generate(engine, batch())).items()}
    async with running(parts_of("torch", drafter_of("torch"))) as engine:
        results = await generate(engine, batch())
        stats = engine.stats()
    assert {name: result.outcome for name, (result,) in results.items()} == want
    assert 0 < sum(stats.accepted_tokens.values()) < sum(stats.draft_tokens.values())


async def test_without_masks_behind_the_root_the_drafts_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a mask for the first position alone lets a draft through that the grammar refuses."""
    fill = GrammarMatcher.fill

    def root_alone(self: GrammarMatcher, drafts: list[int], words: Any) -> None:
        fill(self, drafts, words)
        words[1:] = -1

    want = await plain_outcomes()
    monkeypatch.setattr(GrammarMatcher, "fill", root_alone)
    parts = make_parts(draft="ngram", draft_len=4)
    async with running(parts) as engine:
        requests = [request for request in batch() if request.sampling.grammar is not None]
        results = await generate(engine, requests)
    assert any(result.outcome != want[name] for name, (result,) in results.items())


async def test_choices_of_one_request_have_matchers_of_their_own() -> None:
    request = bounded("person", 1.0, n=3)
    async with running(make_parts(draft="lm", draft_len=3)) as engine:
        together = [result.outcome for result in await collect(engine, request)]
    async with running(make_parts(draft="none")) as engine:
        assert [result.outcome for result in await collect(engine, request)] == together
    assert len({text for _, text, _, _ in together}) == 3


# ---------------------------------------------------------------- together with other parameters


def ids(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special=False))


async def outcomes(draft: str, requests: list[Request]) -> dict[str, Result]:
    async with running(make_parts(draft=draft, draft_len=3)) as engine:
        return {name: result for name, (result,) in (await generate(engine, requests)).items()}


@pytest.mark.parametrize("draft", ["none", "ngram"])
async def test_parameters_that_leave_something_hold_together_with_a_grammar(draft: str) -> None:
    biased = tuple((token, 100.0) for token in set(ids("no")))
    only = tuple(sorted({*ids("yesterday"), EOS}))
    requests = [
        bounded("choice", 0.0, logit_bias=tuple(sorted(biased))),
        bounded("choice", 1.0, allowed_token_ids=only, min_tokens=6),
        bounded("regex", 1.0, min_tokens=24),
        bounded("lark", 0.0, stop=("(",), max_tokens=20),
        bounded("object", 1.0, frequency_penalty=1.5, logprobs=2),
    ]
    results = await outcomes(draft, requests)
    assert results["choice 0.0"].text == "no"
    assert results["choice 1.0"].text == "yesterday"
    assert len(results["regex 1.0"].tokens) > 24
    assert "(" not in results["lark 0.0"].text
    assert len(results["object 1.0"].logprobs) == len(results["object 1.0"].tokens)


@pytest.mark.parametrize("draft", ["none", "ngram"])
async def test_a_request_that_nothing_is_left_for_fails_alone(draft: str) -> None:
    """At once, and behind some tokens: "yes" is written, then min_tokens holds the end back."""
    requests = [
        bounded("choice", 0.0, allowed_token_ids=ids("x")),
        bounded("choice", 1.0, allowed_token_ids=(*ids("no"), EOS), min_tokens=5),
        bounded("person", 0.0),
        ask("free", LONG),
    ]
    results = await outcomes(draft, requests)
    for name in ("choice 0.0", "choice 1.0"):
        last = results[name].last
        assert last is not None
        assert isinstance(last.error, GrammarError)
        assert "min_tokens" in str(last.error)
    want = await plain_outcomes()
    assert results["person 0.0"].outcome == want["person 0.0"]
    assert results["free"].reason is FinishReason.LENGTH


async def test_drafts_do_not_see_further_than_the_text_goes() -> None:
    """Behind the stop string, and behind "yes", nothing is left: a draft that gets there must not end what was."""
    only = (*ids("yes"), EOS)
    requests = [
        ask(
            "stop", LONG, grammar=Grammar("regex", "abc"), allowed_token_ids=ids("abc"), stop=("bc",), ignore_eos=False
        ),
        bounded("choice", 0.0, allowed_token_ids=only, min_tokens=5),
    ]
    plain, drafted = await outcomes("none", requests), await outcomes("ngram", requests)
    assert plain["stop"].outcome == ([*ids("abc")], "a", FinishReason.STOP, "bc")
    assert plain["choice 0.0"].tokens == [*ids("yes")]
    for name, result in drafted.items():
        assert result.outcome == plain[name].outcome, name


async def test_a_matcher_that_breaks_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = GrammarMatcher.fill

    def broken(self: GrammarMatcher, drafts: list[int], words: Any) -> None:
        if len(self._consumed) >= 2 and self._start is bad:
            raise RuntimeError("a bug")
        fill(self, drafts, words)

    monkeypatch.setattr(GrammarMatcher, "fill", broken)
    parts = make_parts(draft="ngram", draft_len=3)
    async with running(parts) as engine:
        await engine.prepare_grammar(bounded("regex", 0.0))
        bad = parts.grammars.matcher(GRAMMARS["regex"][0])._start
        results = await generate(engine, [bounded("regex", 0.0), bounded("person", 0.0), ask("free", LONG)])
    last = results["regex 0.0"][0].last
    assert last is not None
    assert isinstance(last.error, EngineError)
    assert not isinstance(last.error, GrammarError), "a bug is not the client's fault"
    assert results["person 0.0"][0].outcome == (await plain_outcomes())["person 0.0"]
    assert results["free"][0].reason is FinishReason.LENGTH


async def test_a_grammar_that_was_not_prepared_is_refused() -> None:
    async with running(make_parts()) as engine:
        with pytest.raises(EngineError, match="not prepared"):
            engine.submit(bounded("regex", 0.0))


async def test_the_time_for_a_first_token_runs_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def prepare(self: Grammars, grammar: Grammar, tenant: bytes = b"") -> None:
        tenants.append(tenant)
        await asyncio.sleep(1)

    tenants: list[bytes] = []
    monkeypatch.setattr(Grammars, "prepare", prepare)
    request = dataclasses.replace(bounded("regex", 0.0), tenant=b"key", arrival_s=time.monotonic())
    async with running(make_parts()) as engine:
        await engine.prepare_grammar(ask("free", LONG))
        engine.set_limits(SchedulerConfig(queue_timeout_s=0.02))
        with pytest.raises(QueueTimeoutError, match=r"no token within 0\.02 s"):
            await engine.prepare_grammar(request)
        assert engine.stats().accepted_requests == 0
    assert tenants == [b"key"]


@pytest.mark.parametrize("grammars", [False, True])
def test_what_grammars_need_is_loaded_with_the_model_where_asked(
    grammars: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts()
    monkeypatch.setattr(assembly, "_assemble", lambda *args: parts)
    config = Config(model=ModelConfig(path="tiny", threads=torch.get_num_threads()))
    assert assembly.assemble(config, device=parts.device, grammars=grammars) is parts
    assert (parts.grammars._trie is not None) == grammars
