"""What a grammar forces as drafts: fewer steps, the same tokens. And proposals that are cut where it forbids them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from specd.corpora import Tally
from specd.grammar import GrammarMatcher, Grammars
from specd.pipeline import proposals
from specd.proposers.base import Proposer
from specd.proposers.grammar import GrammarProposer
from specd.request import Grammar, SpeculationParams, TokenOrigin
from specd.step import DraftSource
from tests.engines import EOS, Result, ask, make_parts, running, tokenizer
from tests.test_grammar_engine import PROMPT, no_worker  # noqa: F401  a fixture

NAMES = ("customer_full_name", "delivery_street_and_number", "items_that_were_ordered")
SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": ["yes", "no"]} for name in NAMES},
    "required": list(NAMES),
    "additionalProperties": False,
}


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False)


def matcher_of(kind: Any, text: str) -> GrammarMatcher:
    from specd.guidance import compile_matcher

    grammars = Grammars(tokenizer(), vocab_size=97, eos_ids=(EOS,))
    grammars.load()
    assert grammars._trie is not None
    return GrammarMatcher(compile_matcher(grammars._trie, kind, text), (EOS,))


def follow(matcher: GrammarMatcher, guesser: GrammarProposer, text: str) -> None:
    for token in ids(text):
        matcher.advance(token)
    guesser.extend(ids(text))


def proposed(guesser: GrammarProposer, count: int = 64) -> str:
    return tokenizer().decode(guesser.propose(count))


def test_what_is_forced_and_what_stood_behind_the_last_one() -> None:
    matcher = matcher_of("json_schema", json.dumps(SCHEMA))
    guesser = GrammarProposer(matcher)
    guesser.extend(ids("a prompt"))
    assert proposed(guesser) == "{"
    follow(matcher, guesser, "{")
    assert proposed(guesser) == "", "white space may follow"
    follow(matcher, guesser, '"')
    assert proposed(guesser).startswith('customer_full_name"')
    assert proposed(guesser, 3) == "cus"
    follow(matcher, guesser, "cust")
    assert proposed(guesser).startswith('omer_full_name"')
    follow(matcher, guesser, 'omer_full_name": "')
    assert proposed(guesser) == ""
    follow(matcher, guesser, 'yes",\n"')
    assert proposed(guesser) == 'delivery_street_and_number": '


def test_another_way_to_cut_the_same_text_is_followed() -> None:
    """The proposal may be wrong, so it must not be insisted on."""
    matcher = matcher_of("regex", "abc(d|e)fgh")
    guesser = GrammarProposer(matcher)
    assert proposed(guesser) == "abc"
    guesser._forced = ids("xyz")[::-1]
    follow(matcher, guesser, "a")
    assert proposed(guesser) == "bc"
    follow(matcher, guesser, "bcd")
    assert proposed(guesser).startswith("fgh")


def test_asking_moves_nothing_and_a_slow_grammar_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = matcher_of("regex", "ab(c|d)e")
    assert tokenizer().decode(matcher.forced()) == "ab"
    assert matcher.num_allowed(ids("abce")) == 4
    assert matcher.num_allowed(ids("abxe")) == 2
    assert matcher.num_allowed(ids("zab")) == 0
    assert tokenizer().decode(matcher.forced()) == "ab"
    monkeypatch.setattr("specd.grammar._QUICK_S", 0.0)
    assert matcher.num_allowed(ids("zab")) == 0
    assert matcher.forced() == [], "the event loop has waited enough"
    assert matcher.num_allowed(ids("zab")) == 3, "what is not asked is not cut"
    matcher.advance(ids("a")[0])


@dataclasses.dataclass
class Scripted:
    guess: list[int]
    source: DraftSource = DraftSource.NGRAM
    tally: Tally | None = None

    def extend(self, tokens: Sequence[int]) -> None: ...

    def propose(self, max_tokens: int) -> list[int]:
        return self.guess[:max_tokens]


@pytest.mark.parametrize(
    ("guess", "source", "text"),
    [
        ("abc then", DraftSource.NGRAM, "abc"),  # as long and longer than what is forced: cut where it is forbidden
        ("ab", DraftSource.NGRAM, "ab"),
        ("axc", DraftSource.GRAMMAR, "ab"),
        ("", DraftSource.GRAMMAR, "ab"),
    ],
)
def test_proposals_are_cut_where_the_grammar_forbids_them(guess: str, source: DraftSource, text: str) -> None:
    parts = make_parts(draft="ngram")
    matcher = matcher_of("regex", "ab(c|d)e")
    proposers: tuple[Proposer, ...] = (GrammarProposer(matcher), Scripted(ids(guess)))
    sequence: Any = dataclasses.make_dataclass("S", ["proposers", "grammar", "tokens"])(proposers, matcher, [1])
    found = proposals.propose(sequence, 8, pad=False, invent=True)
    assert found is not None
    assert (found.source, tokenizer().decode(found.tokens), found.num_guessed) == (source, text, len(text))
    padded = proposals.propose(sequence, 8, pad=True, invent=True)
    assert padded is not None
    assert (len(padded.tokens), padded.num_guessed) == (8, len(text))
    parts.device.close()


async def run(draft: str, mode: Any, temperature: float) -> tuple[list[int], int, list[TokenOrigin]]:
    """Tokens, steps and origins of one answer."""
    parts = make_parts(draft=draft, draft_len="adaptive", max_len=256, num_slots=512)
    request = ask("r", PROMPT, max_tokens=150, temperature=temperature, ignore_eos=False, seed=3)
    sampling = dataclasses.replace(request.sampling, grammar=Grammar("json_schema", json.dumps(SCHEMA)))
    request = dataclasses.replace(request, sampling=sampling, speculation=SpeculationParams(mode=mode))
    result, steps, origins = Result(), set(), []
    async with running(parts) as engine:
        await engine.prepare_grammar(request)
        async for delta in engine.submit(request):
            result.add(delta)
            steps |= {step for _, step, _ in delta.origins}
            origins += [origin for origin, _, _ in delta.origins]
    return result.tokens, len(steps), origins


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_forced_text_is_decoded_in_fewer_steps_and_is_the_same(temperature: float) -> None:
    plain, plain_steps, _ = await run("ngram", "off", temperature)
    assert plain_steps == len(plain)
    for draft in ("ngram", "lm"):
        tokens, steps, origins = await run(draft, "auto", temperature)
        assert tokens == plain
        assert origins.count(TokenOrigin.GRAMMAR) > sum(map(len, NAMES)) // 2
        assert steps < plain_steps * 0.8
