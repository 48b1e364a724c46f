"""The tokenizer on small vocabularies that show every border case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from specd.detokenizer import LeadingSpace
from specd.errors import ModelError, RequestError
from specd.text import Detokenizer, RenderedChat, Tokenizer, compile_any

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "12 3", "h e", "l l", "he ll", "hell o", "Ġ hello", "i m", "im _", "e n", "en d"]
SPECIAL = ("<|bos|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = "<think>"


def gguf_metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary of 256 bytes, MERGES, SPECIAL and one user-defined token, as GGUF metadata."""
    tokens = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL, USER_DEFINED]
    first = len(ALPHABET) + len(MERGES)
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": MERGES,
        "token_type": [1] * first + [3] * len(SPECIAL) + [4],
        "bos_token_id": first,
        "eos_token_id": first + 2,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata())


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_str(i) for i in ids]


# GGUF vocabularies


def test_pre_tokenizer_decides_about_digits(tokenizer: Tokenizer) -> None:
    assert names(tokenizer, tokenizer.encode("123")) == ["1", "2", "3"]
    whole = Tokenizer.from_gguf(gguf_metadata("gpt-2"))
    assert names(whole, whole.encode("123")) == ["123"]


def test_words_merge_with_their_leading_space(tokenizer: Tokenizer) -> None:
    assert names(tokenizer, tokenizer.encode("hello hello")) == ["hello", " hello"]


def test_attributes_of_a_gguf_vocabulary(tokenizer: Tokenizer) -> None:
    bos, start, end = (tokenizer.encode(text)[0] for text in SPECIAL)
    assert tokenizer.vocab_size == 256 + len(MERGES) + 4
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.add_bos) == (bos, "<|bos|>", False)
    assert (tokenizer.eos_ids, tokenizer.eos_token) == ((end,), "<|im_end|>")
    assert tokenizer.special_ids == {bos, start, end}
    assert set(tokenizer.special_tokens) == set(SPECIAL)
    assert tokenizer.chat_template is None


def test_turn_end_is_an_eos_beside_the_files_own() -> None:
    first = 256 + len(MERGES)
    tokenizer = Tokenizer.from_gguf(gguf_metadata(eos_token_id=first, eot_token_id=first + 1))
    assert tokenizer.eos_ids == (first, first + 1, first + 2)


def test_turn_end_is_special_whatever_its_type_says() -> None:
    types = gguf_metadata()["tokenizer.ggml.token_type"]
    first = 256 + len(MERGES)
    types[first + 2] = 4  # <|im_end|> as user defined
    tokenizer = Tokenizer.from_gguf(gguf_metadata(token_type=types, eos_token_id=first))
    assert first + 2 in tokenizer.special_ids


@pytest.mark.parametrize(("pre", "added"), [("llama-bpe", True), ("smollm", False)])
def test_bos_is_added_once(pre: str, added: bool) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata(pre))
    assert tokenizer.add_bos is added
    plain = tokenizer.encode("hello", add_special=False)
    assert tokenizer.encode("hello") == [*([tokenizer.bos_id] if added else []), *plain]
    assert tokenizer.encode("<|bos|>hello") == [tokenizer.bos_id, *plain]
    assert tokenizer.encode_chat(RenderedChat("<|bos|>hello")) == [tokenizer.bos_id, *plain]
    assert tokenizer.encode_chat(RenderedChat("hello")) == tokenizer.encode("hello")


def test_ignore_merges_takes_a_whole_word_that_is_a_token() -> None:
    tokens = [*gguf_metadata()["tokenizer.ggml.tokens"], "xyz"]
    types = [*gguf_metadata()["tokenizer.ggml.token_type"], 1]
    by_pre = {}
    for pre in ("llama-bpe", "dbrx"):
        tokenizer = Tokenizer.from_gguf(gguf_metadata(pre, tokens=tokens, token_type=types, add_bos_token=False))
        by_pre[pre] = names(tokenizer, tokenizer.encode("xyz"))
    assert by_pre == {"llama-bpe": ["xyz"], "dbrx": ["x", "y", "z"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "no-such"}, r"'no-such' is not a known pre-tokenizer.*llama-bpe.*smollm"),
        ({"pre": None}, "None is not a known pre-tokenizer"),
        ({"model": "llama"}, "'llama' is not supported.*Hugging Face folder"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "not a list of strings"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["nospace"]}, "'nospace'"),
        ({"merges": ["q zz"]}, "does not fit"),
        ({"token_type": [1]}, "1 entries for"),
        ({"eos_token_id": 9999}, "eos_token_id = 9999"),
        ({"bos_token_id": None, "add_bos_token": True}, "asks for a BOS token"),
    ],
)
def test_unusable_gguf_vocabulary_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(gguf_metadata(**changes))


def test_duplicate_tokens_are_refused() -> None:
    tokens = gguf_metadata()["tokenizer.ggml.tokens"]
    with pytest.raises(ModelError, match="1 tokens twice"):
        Tokenizer.from_gguf(gguf_metadata(tokens=["!", *tokens[1:-1], "!"]))


# Special tokens in text


def test_raw_prompt_parses_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert names(tokenizer, ids) == ["<|im_start|>", "hello", "<|im_end|>"]


def test_masked_text_is_ordinary_text(tokenizer: Tokenizer) -> None:
    chat = RenderedChat("<|im_start|>a\ue000 hello\ue000<|im_end|>", {0xE000: "<|im_end|>"})
    assert chat.plain == "<|im_start|>a<|im_end|> hello<|im_end|><|im_end|>"
    ids = tokenizer.encode_chat(chat)
    assert tokenizer.decode(ids, skip_special=False) == chat.plain
    assert [i for i in ids if i in tokenizer.special_ids] == tokenizer.encode("<|im_start|><|im_end|>")
    # Merges inside a mask and across its borders are those of the whole text: "im", "end" and " hello" are tokens.
    masked = ["<", "|", "im", "_", "end", "|", ">"]
    assert names(tokenizer, ids) == ["<|im_start|>", "a", *masked, " hello", *masked, "<|im_end|>"]


def test_user_defined_tokens_are_parsed_everywhere(tokenizer: Tokenizer) -> None:
    (think,) = tokenizer.encode("<think>")
    assert think not in tokenizer.special_ids
    assert tokenizer.encode_chat(RenderedChat("a<think>"))[-1] == think
    assert tokenizer.decode([think]) == "<think>"


def test_longest_special_token_wins() -> None:
    tokens = [*gguf_metadata()["tokenizer.ggml.tokens"], "<|im_end|>x"]
    types = [*gguf_metadata()["tokenizer.ggml.token_type"], 3]
    tokenizer = Tokenizer.from_gguf(gguf_metadata(tokens=tokens, token_type=types))
    assert names(tokenizer, tokenizer.encode("<|im_end|>xy<|im_end|>y")) == ["<|im_end|>x", "y", "<|im_end|>", "y"]


@given(st.lists(st.text("ab<|>", min_size=1, max_size=5), max_size=8), st.text("ab<|>", max_size=40))
def test_compile_any_finds_the_leftmost_longest(texts: list[str], text: str) -> None:
    pattern = compile_any(texts)
    found = [match.span() for match in pattern.finditer(text)] if pattern else []
    expected, at = [], 0
    while at < len(text):
        longest = max((len(t) for t in texts if text.startswith(t, at)), default=0)
        if longest:
            expected.append((at, at + longest))
        at += longest or 1
    assert found == expected


def test_lone_surrogate_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode") as caught:
        tokenizer.encode("a\ud800b")
    assert caught.value.code == "invalid_value"
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode_chat(RenderedChat("\udfff"))


# Ids to bytes


def test_token_str_and_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é<|im_end|>")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9", b"<|im_end|>"]
    assert names(tokenizer, ids) == ["bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_id_outside_the_vocabulary_is_an_error(tokenizer: Tokenizer, token_id: int) -> None:
    for call in (tokenizer.token_bytes, tokenizer.token_str, Detokenizer(tokenizer).push):
        with pytest.raises(RequestError, match="outside the vocabulary") as caught:
            call(token_id)
        assert caught.value.code == "out_of_range"


@given(st.text(max_size=60))
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


# Hugging Face folders and SentencePiece-like backends

PIECES = ["▁", "▁▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "a", "▁a", "▁▁a", "b", "é"]
PIECE_MERGES = [
    *(("▁", "▁"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "a"), ("▁▁", "a")),
]


def piece_backend(kind: str) -> tokenizers.Tokenizer:
    """A SentencePiece-like BPE with byte fallback: "prepend" (Llama 2) or a Metaspace scheme."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocabulary, PIECE_MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=kind)])
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


KINDS = ("prepend", "first", "always", "never")


def piece_tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(piece_backend(kind), eos_ids=(2,), bos_id=1, add_bos=True, chat_template=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["hello hello", " hello", "  a", "a</s>hello</s> a", "</s>hello", "é ü 😀b", ""])
def test_pieces_encode_as_the_backend_does(kind: str, text: str) -> None:
    assert piece_tokenizer(kind).encode(text) == piece_backend(kind).encode(text).ids


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=st.text("hello ab é▁😀", max_size=30))
def test_pieces_decode_as_the_backend_does(kind: str, text: str) -> None:
    tokenizer, backend = piece_tokenizer(kind), piece_backend(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.decode(ids[1:]) == backend.decode(ids[1:])


def test_first_space_of_pieces_is_dropped_once() -> None:
    tokenizer = piece_tokenizer("prepend")
    assert tokenizer.leading_space is LeadingSpace.STRIP_ONE
    hello = tokenizer.encode("hello", add_special=False)
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    assert [detokenizer.push(i) for i in [1, *hello, *hello]] == ["", "hello", " hello"]


def write_folder(path: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_folder_loads_through_transformers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, piece_backend("first"), chat_template="T")
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.add_bos) == ((2,), 1, True)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("<s>", "</s>", "T")
    assert tokenizer.encode("hello</s>hello") == piece_backend("first").encode("hello</s>hello").ids


def test_a_folder_s_truncation_and_padding_are_not_taken_over(tmp_path: Path) -> None:
    backend = piece_backend("first")
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert tokenizer.encode("hello</s>hello") == piece_backend("first").encode("hello</s>hello").ids


def test_template_file_of_a_folder_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, piece_backend("first"))
    (folder / "chat_template.jinja").write_text("{{ 'from the file' }}")
    assert Tokenizer.from_folder(folder).chat_template == "{{ 'from the file' }}"


def test_named_templates_of_a_folder(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
    folder = write_folder(tmp_path, piece_backend("first"), chat_template=templates)
    assert Tokenizer.from_folder(folder).chat_template == "D"
    write_folder(tmp_path, piece_backend("first"), chat_template=templates[:1])
    with pytest.raises(ModelError, match="tool_use"):
        Tokenizer.from_folder(folder)


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_load_picks_by_suffix(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tmp_path / "m.gguf", read_metadata=lambda path: gguf_metadata())
    assert tokenizer.vocab_size == 256 + len(MERGES) + 4
    folder = write_folder(tmp_path, piece_backend("never"))
    assert Tokenizer.load(folder, read_metadata=lambda path: {}).vocab_size == 3 + 256 + len(PIECES)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()])
def test_unknown_decoder_is_refused(decoder: Any) -> None:
    backend = piece_backend("never")
    backend.decoder = decoder
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer(backend, eos_ids=(), bos_id=None, add_bos=False, chat_template=None)


@pytest.mark.parametrize("text", ["a <m> b", "a<m>b", "<m>", " <m> <m> ", "a<m>"])
def test_added_token_flags_are_those_of_the_backend(text: str) -> None:
    for flags in ({"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"lstrip": True, "rstrip": True}):
        both = []
        for _ in range(2):
            backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(ALPHABET)}, []))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            backend.add_special_tokens([tokenizers.AddedToken("<m>", normalized=False, **flags)])
            both.append(backend)
        tokenizer = Tokenizer(both[0], eos_ids=(), bos_id=None, add_bos=False, chat_template=None)
        assert tokenizer.encode(text) == both[1].encode(text).ids
