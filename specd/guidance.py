"""Everything that touches llguidance: token tries, grammars, limits. No torch.

llguidance (Rust, https://github.com/guidance-ai/llguidance) walks a grammar byte by byte over the trie of a vocabulary.
Its limits end most hostile grammars in milliseconds, but not all: measured on two busy cores, {"multipleOf": 999983}
compiles for more than 30 s, an object of 2,000 optional properties for 3.8 s. So what a client sends is compiled once
in a process that can be killed (`specd.grammar_worker`), and only what ended there in time is compiled here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from specd import one_of
from specd.request import GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Encode = Callable[[str], Sequence[int] | None]  # text -> ids of ordinary tokens; None: it has no canonical ones

_ONE_OF = "oneOf constraints are not supported"  # llguidance's words (1.9)
# Earley items of one mask: llguidance's default of 50,000 lets one take 1.6 s (2,500 alternative rules).
_MAX_STEP_ITEMS = 5_000
_MAX_LEXER_STATES = 20_000  # 1-2 KB each; the default is 250,000
# A JSON text may have any amount of white space between its tokens. A model that is forced into JSON likes to stay
# there for ever, so a run of it is bounded.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# How JSON is written and its schemas are read. They override an "x-guidance" in a client's schema, which could make
# llguidance ignore what it does not know.
JSON_OPTIONS: JsonCompileOptions = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITE_SPACE,
    "item_separator": ",",
    "key_separator": ":",
}


class _Vocabulary:
    """What LLTokenizer reads (its TokenizerWrapper, which takes more than there is here)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int], encode: Encode | None
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos[0]
        self.trie: LLTokenizer | None = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        ids = None if self._encode is None else self._encode(text)
        if ids is None:
            assert self.trie is not None
            ids = self.trie.greedy_tokenize(text)
        return list(ids)


def build_tokenizer(
    tokens: Sequence[bytes], *, special: Sequence[int], eos: Sequence[int], encode: Encode | None = None
) -> LLTokenizer:
    """The trie of a vocabulary; seconds for 50,000 tokens. Special tokens are never text, `eos` ends what a grammar
    accepts. encode: the canonical tokens of text that a grammar forces; without it the longest ones are.
    """
    vocabulary = _Vocabulary(tokens, special, eos, encode)
    vocabulary.trie = LLTokenizer(vocabulary, n_vocab=len(tokens), eos_token=list(eos))  # type: ignore[arg-type]
    return vocabulary.trie


def compile_matcher(tokenizer: LLTokenizer, kind: GrammarKind, text: str) -> LLMatcher:
    """A matcher at the grammar's beginning. ValueError, with what is wrong, when it is no grammar or too complex."""
    matcher = LLMatcher(tokenizer, _source(kind, text), log_level=0, limits=limits())
    if matcher.is_error():
        error = error_of(matcher)
        raise ValueError(_one_of_error(tokenizer, text) if kind == "json_schema" and _ONE_OF in error else error)
    return matcher


def _one_of_error(tokenizer: LLTokenizer, text: str) -> str:
    """Which `oneOf` of a schema cannot be told to be an `anyOf`: the first one that fails by itself."""
    paths = []
    for path, schema in one_of.alone(text):
        matcher = LLMatcher(tokenizer, _source("json_schema", schema), log_level=0, limits=limits())
        paths.append(path)
        if matcher.is_error() and _ONE_OF in error_of(matcher):
            paths = [path]
            break
    return (
        f"{' or '.join(paths)}: its branches are not known to exclude each other; tell them apart by type, by const or "
        "enum, or by a required property with a const of its own in each, or use anyOf"
    )


def check_beginning(matcher: LLMatcher) -> None:
    """Computes the first mask. ValueError when no text begins the grammar, or that takes too much."""
    matcher.compute_bitmask()
    if matcher.is_error():
        error = error_of(matcher)
        raise ValueError(error if too_complex(error) else f"no text can satisfy it ({error})")


def error_of(matcher: LLMatcher) -> str:
    return matcher.get_error().replace("<non-verbose/>", "").strip()


def limits() -> LLParserLimits:
    return LLParserLimits(step_max_items=_MAX_STEP_ITEMS, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)


def _source(kind: GrammarKind, text: str) -> str:
    if kind != "json_schema":
        return grammar_from(kind, text)
    return LLMatcher.grammar_from_json_schema(one_of.settled(text), overrides=JSON_OPTIONS)


def too_complex(message: str) -> bool:
    """Whether an error of llguidance is about a limit (its wording of 1.9), and not about what is unknown or wrong."""
    return any(
        words in message for words in ("too big", "too large", "oo many", "fuel exhausted", "too complex", "; max is ")
    )


def vocabulary_line(tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int]) -> bytes:
    """A vocabulary as one line of JSON; inverse of `read_vocabulary`."""
    fields = {"tokens": [token.hex() for token in tokens], "special": list(special), "eos": list(eos)}
    return json.dumps(fields).encode() + b"\n"


def read_vocabulary(line: bytes) -> LLTokenizer:
    fields = json.loads(line)
    tokens = [bytes.fromhex(token) for token in fields["tokens"]]
    return build_tokenizer(tokens, special=fields["special"], eos=fields["eos"])
