"""How many tokens a text has at least, from its bytes and the tokenizer's own description. No torch.

A text that cannot fit into the context is known before anybody has tokenised it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

# Canonically equivalent texts are at most 3.5 times as long as their composed form, in UTF-8: the greatest sum, over
# the pieces of one composed character, of what the longest character with that piece has for it.
_NFC_SHRINKS = 4
_SLICE = 1 << 16  # characters that are looked at in one go: other threads run in between
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
_IN_UTF8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


@dataclasses.dataclass(frozen=True, slots=True)
class TokenBound:
    """What is known of any text's tokens without tokenising it."""

    max_bytes: int  # of the input, in UTF-8, that one token stands for at most; `lost` ones do not count
    lost: bytes = b""  # bytes that the vocabulary cannot write: they may be dropped, any number of them

    def least_tokens(self, text: str, masked: Mapping[int, str] | None = None) -> int:
        """As many tokens as a text has at least. masked: as in `RenderedChat`."""
        kept = 0
        for at in range(0, len(text), _SLICE):
            piece = text[at : at + _SLICE]
            if masked:
                piece = piece.translate(masked)
            kept += len(piece.encode(errors="surrogatepass").translate(None, self.lost))
        return -(-kept // self.max_bytes)


def token_bound(backend: tokenizers.Tokenizer, table: Sequence[bytes]) -> TokenBound | None:
    """table: the bytes that each id is decoded to.

    None where there is no bound: text may vanish (white space around some tokens, what a normalizer drops) or become
    an unknown token of any length.
    """
    state = json.loads(backend.to_str())
    model = state["model"]
    shrinks = _shrinks(state["normalizer"])
    splits = _parts(state["pre_tokenizer"], "pretokenizers")
    steps = [*splits, *_parts(state["normalizer"], "normalizers")]
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    kept = all(step["type"] in _KEEPING and step.get("behavior") != "Removed" for step in splits)
    swallowed = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model["type"] != "BPE" or shrinks is None or not kept or swallowed or affixes:
        return None
    lost = _lost(model["vocab"]) if byte_level else b""
    if (lost and shrinks > 1) or not (byte_level or _has_all_bytes(model)):
        return None
    own = [] if byte_level else [len(token.encode()) for token in model["vocab"]]  # a space is written as three bytes
    added = [token["content"] for token in state["added_tokens"]]
    if backend.normalizer is not None:  # such tokens are looked for as they are normalized: that may be longer
        added += [backend.normalizer.normalize_str(t["content"]) for t in state["added_tokens"] if t["normalized"]]
    return TokenBound(shrinks * max([*map(len, table), *own, *(len(text.encode()) for text in added)]), lost)


def _lost(vocabulary: Collection[str]) -> bytes:
    """Bytes of UTF-8 that have no token of their own in a byte-level vocabulary."""
    alphabet = byte_alphabet()
    return bytes(byte for character, byte in alphabet.items() if character not in vocabulary and byte in _IN_UTF8)


def _parts(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The steps of a sequence of them, flat."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [part for one in step[name] for part in _parts(one, name)]


def _shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """How much shorter a text may become; None: any."""
    factor = 1
    for part in _parts(normalizer, "normalizers"):
        match part:
            case {"type": "NFC"}:
                factor *= _NFC_SHRINKS
            case {"type": "ByteLevel" | "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case _:
                return None
    return factor


def _has_all_bytes(model: Mapping[str, Any]) -> bool:
    """Whether what is in no token is written byte by byte."""
    return bool(model["byte_fallback"]) and set(model["vocab"]) >= _BYTE_TOKENS


def byte_alphabet() -> dict[str, int]:
    """GPT-2's map: printable bytes are their own character, the others U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    assert table.keys() == set(ByteLevel.alphabet())
    return table
