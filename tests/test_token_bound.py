"""A text's bytes bound its tokens from below, where the tokenizer loses nothing of it."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from specd.server.context import Room, least_tokens
from specd.text import RenderedChat, Tokenizer
from specd.token_bound import _NFC_SHRINKS, TokenBound
from tests.fake_engine import byte_tokenizer

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
SPACES = "  " * 8
PIECES = ["a", "b", " ", "é", "e\u0301", "\u212b", "漢", "ᄀ", "ᅡ", "ᆨ", "▁", "\n", "\0"]
WORDS = st.lists(st.sampled_from(PIECES)).map("".join)


def changed(state: dict[str, Any] | None = None, **model: Any) -> Tokenizer:
    """The byte-level tokenizer of the tests with parts of its JSON exchanged."""
    whole = json.loads(byte_tokenizer()._backend.to_str())
    whole["model"] |= model
    whole |= state or {}
    return tokenizer_of(tokenizers.Tokenizer.from_str(json.dumps(whole)))


def tokenizer_of(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, eos_ids=(), bos_id=None, add_bos=False, chat_template=None)


def metaspace(*, fallback: bool = True, prepend: str = "always") -> Tokenizer:
    """As Llama 2 has it: spaces are written as U+2581, what is in no token as bytes."""
    vocabulary = {"<unk>": 256, **BYTES, "▁": 257, "a": 258, "b": 259, "▁a": 260, "▁▁": 261}
    merges = [("▁", "a"), ("▁", "▁")]
    model = tokenizers.models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=fallback
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prepend)
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=prepend)])
    return tokenizer_of(backend)


def with_spaces() -> Tokenizer:
    """A normalizer that writes spaces as U+2581, and an added token of spaces that is looked for in what it gives."""
    tokenizer = metaspace()
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = None
    backend.add_tokens([tokenizers.AddedToken(" " * 9, normalized=True)])
    return tokenizer_of(backend)


NFC = changed({"normalizer": {"type": "NFC"}})
PART = changed(vocab={"a": 0, "Ġ": 1, "aa": 2, "é": 3}, merges=["a a"])  # most bytes have no token of their own
KEEPING = {
    "bytes": byte_tokenizer(),
    "some bytes": PART,
    "NFC": NFC,
    "metaspace": metaspace(),
    "never": metaspace(prepend="never"),
    "added spaces": with_spaces(),
}


@pytest.mark.parametrize("name", list(KEEPING))
@given(text=WORDS)
@example(text="▁" * 9)
@example(text="▁" * 90)
@example(text="\u212b" * 9)
@example(text="<|im_start|>he<|im_end|>")
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer = KEEPING[name]
    assert tokenizer.bound is not None
    assert least_tokens(text, tokenizer) <= len(tokenizer.encode(text))
    masked = RenderedChat(text.replace("a", "\uf0fe"), {0xF0FE: "<|im_start|>"})
    assert least_tokens(masked.plain, tokenizer) <= len(tokenizer.encode_chat(masked))


def test_the_bound_is_the_longest_token() -> None:
    special = max(len(token) for token in byte_tokenizer().special_tokens)
    assert byte_tokenizer().bound == TokenBound(special)
    assert NFC.bound == TokenBound(_NFC_SHRINKS * special)
    assert metaspace().bound == TokenBound(len("▁▁".encode()))
    assert least_tokens("x" * (special * 3 + 1), byte_tokenizer()) == 4


ADDED = json.loads(byte_tokenizer()._backend.to_str())["added_tokens"]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}
LOSING = {
    "white space": lambda: changed({"added_tokens": [{**token, "lstrip": True} for token in ADDED]}),
    "trimmed": lambda: changed({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}),
    "accents": lambda: changed({"normalizer": {"type": "StripAccents"}}),
    "compatibility": lambda: changed({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}}),
    "a character": lambda: changed(
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTE_LEVEL]}}
    ),
    "bytes, composed": lambda: changed({"normalizer": {"type": "NFC"}}, vocab={"a": 0, "b": 1}, merges=[]),
    "unknown characters": lambda: metaspace(fallback=False),
    "spaces before a script": lambda: changed(
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "UnicodeScripts"}, BYTE_LEVEL]}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(LOSING))
def test_a_tokenizer_that_loses_text_has_no_bound(name: str) -> None:
    """Each of them writes some text of any length in few tokens."""
    tokenizer = LOSING[name]()
    lost = {"white space": " " * 50 + "<|bos|>", "accents": "\u0301" * 50, "compatibility": "\ufdfa" * 9}
    lost |= {"a character": "a" * 50, "trimmed": " " * 50, "spaces before a script": " " * 50 + "a"}
    text = lost.get(name, "漢" * 50)
    assert tokenizer.bound is None
    assert least_tokens(text, tokenizer) == 0
    if name != "compatibility":  # which makes this one longer: its bound would be another
        assert len(tokenizer.encode(text)) < 50


def test_composition_shortens_by_no_more_than_that() -> None:
    """Over all characters: what stands for a piece of a composed one is at most as long as its own longest share."""
    most: dict[str, float] = {}
    everything = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for character in everything:
        pieces = unicodedata.normalize("NFD", character)
        for piece in pieces:
            most[piece] = max(most.get(piece, 0.0), len(character.encode()) / len(pieces))
    composed = [c for c in everything if unicodedata.normalize("NFC", c) == c]
    worst = max(sum(most[p] for p in unicodedata.normalize("NFD", c)) / len(c.encode()) for c in composed)
    assert 3 <= worst <= _NFC_SHRINKS


def test_both_numbers_are_told() -> None:
    for room, texts in ((Room(10), ["x" * 1000]), (Room(100, asked=90), ["a", "x" * 1500])):
        with pytest.raises(Exception, match=rf"maximum context length is {room.max_len} tokens.*has at least \d+ "):
            room.check_texts(texts, byte_tokenizer())
    assert Room(100, asked=5).check(95) == 5
    Room(100, asked=99).check_texts([SPACES * 40], byte_tokenizer())  # its tokens tell how many there are
