"""GGUF vocabularies (`tokenizer.ggml.model = "gpt2"`) as byte-level BPE, and the pre-tokenizers that GGUF files name.

A GGUF file does not hold its pre-tokenizer, only a name for it (`tokenizer.ggml.pre`), so the table below is part of
the format. The expressions are those of the models' own tokenizer.json files; the names and which of them share an
expression are as in llama.cpp (src/llama-vocab.cpp), and its ids are what the tests compare with (for the gpt-4o and
tekken expressions up to marks and case outside ASCII, which llama.cpp only approximates). A name that is not in the
table is refused: a near miss changes token ids without any error.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specd.errors import ModelError

# Control tokens that end a turn in chat vocabularies and are often not the file's eos token.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


class TokenType(enum.IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Text is split by each expression in turn: what it matches and what lies between are pieces of their own."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is that token, whatever the merges say
    add_bos: bool = False  # when the file does not say


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASH_TAIL}"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_FAMILIES: dict[tuple[str, ...], PreTokenizer] = {
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "exaone4", "trillion", "granite-docling"): (
        PreTokenizer((_GPT2,))
    ),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): (
        PreTokenizer((r"\p{N}", _GPT2))
    ),
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"): (
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("glm4",): PreTokenizer((_LLAMA3,), ignore_merges=True),
    ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "grok-2"): PreTokenizer((_QWEN2,)),
    ("gpt-4o", "llama4"): PreTokenizer((_GPT4O,)),
    ("tekken",): PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("deepseek-v3",): PreTokenizer((r"\p{N}{1,3}", r"[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: pre for names, pre in _FAMILIES.items() for name in names}


def select(metadata: Mapping[str, Any]) -> PreTokenizer:
    """The pre-tokenizer that a GGUF file names. ModelError for a vocabulary that is not byte-level BPE, or no name."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(
            f"tokenizer.ggml.model = {model!r} is not supported, only 'gpt2' (byte-level BPE); "
            "serve the model from its Hugging Face folder instead"
        )
    name = metadata.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"tokenizer.ggml.pre = {name!r} is not a known pre-tokenizer; known are: {known}")
    return pre


def build_backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A `tokenizers.Tokenizer` with the file's tokens, merges and pre-tokenizer, and no post-processor.

    Control tokens become special added tokens, user-defined ones plain added tokens. The file's bos and eos tokens and
    TURN_ENDS are special whatever their type says: message text must never be able to write them. ModelError when the
    vocabulary is incomplete or contradicts itself.
    """
    pre = select(metadata)
    tokens, types = _vocabulary(metadata)
    merges = [_merge(merge) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ModelError(f"tokenizer.ggml.tokens holds {len(tokens) - len(ids)} tokens twice")
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:
        raise ModelError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    special = _special_ids(metadata, tokens, types)
    defined = {i for i, token_type in enumerate(types) if token_type == TokenType.USER_DEFINED} - special
    backend.add_special_tokens([_added(tokens[i], special=True) for i in sorted(special)])
    backend.add_tokens([_added(tokens[i], special=False) for i in sorted(defined)])
    return backend


def _added(text: str, *, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=special, normalized=False)


def _special_ids(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> set[int]:
    special = {i for i, token_type in enumerate(types) if token_type in (TokenType.CONTROL, TokenType.UNKNOWN)}
    special |= {i for i, token in enumerate(tokens) if token in TURN_ENDS}
    for name in ("bos", "eos", "eot", "eom"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ModelError(f"tokenizer.ggml.{name}_token_id = {token_id} is outside the {len(tokens)} tokens")
        special |= set() if token_id is None else {int(token_id)}
    return special


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    # An empty token can never be matched; its id must stay taken, so it gets a name that no text contains.
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return tokens, [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return tokens, [int(token_type) for token_type in types]


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if values is None or not len(values):
        raise ModelError(f"the GGUF file has no {key}")
    if not all(isinstance(value, str) for value in values):
        raise ModelError(f"{key} is not a list of strings")
    return list(values)


def _merge(merge: str) -> tuple[str, str]:
    # The space that separates is never the first character: llama.cpp looks for it from the second one on.
    cut = merge.find(" ", 1)
    if cut < 0:
        raise ModelError(f"tokenizer.ggml.merges holds {merge!r}, which is not two tokens")
    return merge[:cut], merge[cut + 1 :]
