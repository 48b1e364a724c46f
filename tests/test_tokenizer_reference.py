"""Token ids against llama.cpp (in process, from the xllamacpp package): the real model, and every pre-tokenizer name.

The second part trains a small BPE without any pre-tokenizer on the very texts that are compared. Its merges cross
every border, so a pre-tokenizer that splits one character too early or too late gives other ids.
"""

from __future__ import annotations

import json
import random
import unicodedata
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from specd.models.gguf import read_metadata
from specd.pretokenizer import PRE_TOKENIZERS
from specd.text import RenderedChat, Tokenizer

xllamacpp = pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow

Encode = Callable[[str], list[int]]

TEXTS = [
    "",
    " ",
    "Hello, world! It's 2024 and we'll've 12345678901234567890 reasons; 3.14159e-10, 0xDEADBEEF, 1,000,000.",
    "DON'T SHOUT, I'LL HEAR YOU'VE DONE IT: WE'RE FINE, he'd said. 'tis 'S 'LL x'sy ''s '",
    'def f(x: int) -> str:\n\tif x != 0:\n        return f"{x:>10}"  # comment\n\n\n    return None\r\n\r\n',
    '{"a": [1, 2, {"b": null}], "c": "\\u00e9\\n"}\n<div class="x">&amp;</div>\n// ** == !== <= => -> ::',
    "   leading, trailing   \n  and\t\ttabs \t mixed \n\n \n   \n\t",
    "日本語のテキスト、漢字とカナ。中文字符，标点！한국어 텍스트입니다. ภาษาไทย עברית العربية ١٢٣ हिन्दी १२३",
    "emoji 😀😃👨‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪🇯🇵 skin 👍🏽 keycap 1️⃣ math ∑∫√ 𝔘𝔫𝔦 𝟙𝟚𝟛",
    "accents: naïve café déjà-vu Ångström e\u0301 a\u0308 ñ Ǆ ǅ ß ﬁ İstanbul ΑΒΓ абвГДЕ",
    "numbers ½ ¾ ² ³ ① Ⅷ ⅷ ४ ੪ 一二三 10² H₂O 5€ $7 £8 ¥9 %‰ №",
    "spaces:\u00a0nbsp\u2003em\u3000ideographic\u2028line\u2029para\u200bzero\u202fnarrow\ufeffbom \x0b\x0c vt ff",
    "<|im_start|>user\nWhat's up?<|im_end|>\n<|im_start|>assistant\n",
    "almost <|im_start| > <|im_end <|endoftext |> <|im_start|><|im_start|><|im_end|>tail<repo_name>x/y<file_sep>a.py",
    "a" * 300 + " " * 70 + "." * 90 + "\n" * 40 + "=" * 130 + "ab" * 100,
    "http://example.com/path?query=1&other=two#frag user@example.org C:\\dir\\file.txt ~/.config $HOME",
]
_ALPHABET = [
    *"aAbzZ éßΩжЖ", "e\u0301", "\u0301", "中", "の", "ア", "한", "ก", "ا", "हि", *"0123456789", "٣", "²", "½", "Ⅷ",
    *".,;:!?'\"()[]{}<>/\\|-_=+*&^%$#@~`", "’", "“", "…", "、", "。", "！", "€", "∑", "😀", "👍🏽", "\u200d",
    " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u3000", "'s", "'T", "'ll", "'RE", "the", "The", "THE",
]  # fmt: skip


def random_texts(count: int, seed: int) -> list[str]:
    """Reproducible strings of 1 to 40 pieces in which classes of characters meet in every order."""
    draw = random.Random(seed)
    return ["".join(draw.choices(_ALPHABET, k=draw.randint(1, 40))) for _ in range(count)]


@contextmanager
def llama_cpp(path: Path) -> Iterator[Callable[..., list[int]]]:
    """llama.cpp's `/tokenize` for one file: (text, add_special, parse_special) -> ids."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.port, params.verbosity = 64, 1, 0, -1
    params.warmup = params.ui = False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)

    def tokenize(text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return [int(token) for token in json.load(response)["tokens"]]

    yield tokenize


def differences(
    ours: Callable[[str], list[int]], theirs: Callable[[str], list[int]], texts: Sequence[str]
) -> list[Any]:
    return [(text, a, b) for text in texts if (a := ours(text)) != (b := theirs(text))]


@pytest.mark.real
def test_real_model_ids_equal_llama_cpp(real_model_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(read_metadata(real_model_path))
    texts = [*TEXTS, "\n".join(TEXTS * 20), *random_texts(500, seed=1)]
    with llama_cpp(real_model_path) as reference:
        assert differences(tokenizer.encode, lambda text: reference(text, add_special=True), texts) == []
        # Special tokens as ordinary text, which is how message text goes in.
        mask = {0xE000 + i: token for i, token in enumerate(tokenizer.special_tokens)}

        def ordinary(text: str) -> list[int]:
            for code, token in mask.items():
                text = text.replace(token, chr(code))
            return tokenizer.encode_chat(RenderedChat(text, mask))

        assert differences(ordinary, lambda text: reference(text, parse_special=False), texts) == []
        # A check that cannot fail proves nothing: parsed and unparsed specials must differ somewhere.
        assert differences(tokenizer.encode, lambda text: reference(text, parse_special=False), texts) != []


@pytest.fixture(scope="module")
def crossing_vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges) of a BPE trained on the texts themselves with no pre-tokenizer but the byte alphabet."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=6000, initial_alphabet=alphabet, show_progress=False, max_token_length=8)
    backend.train_from_iterator([*TEXTS, *random_texts(1000, seed=2)], trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    # Tokens whose merges are gone are reached by `ignore_merges` alone.
    return tokens, [" ".join(merge) for merge in model["merges"][:-400]]


def write_gguf(path: Path, tokens: list[str], merges: list[str], pre: str) -> dict[str, Any]:
    """A llama file of one tiny layer with this vocabulary; returns the tokenizer's metadata."""
    width, rng = 32, np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width)
    writer.add_vocab_size(len(tokens))
    types = [1] * len(tokens)
    for text, token_type in (("<|bos|>", 3), ("<|im_end|>", 3), ("<think>", 4)):
        tokens, types = [*tokens, text], [*types, token_type]
    bos = len(tokens) - 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(bos + 1)
    matrices = [*(f"attn_{name}" for name in ("q", "k", "v", "output")), "ffn_gate", "ffn_up", "ffn_down"]
    shapes: dict[str, tuple[int, ...]] = {f"blk.0.{name}.weight": (width, width) for name in matrices}
    shapes |= dict.fromkeys(("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"), (width,))
    for name, shape in {"token_embd.weight": (len(tokens), width), **shapes}.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": bos + 1,
    }


def without_marks_and_foreign_case(text: str) -> str:
    """llama.cpp has no \\p{Lu} and \\p{M}: it takes [A-Z] and [a-z] for case and splits at combining marks."""
    return "".join(
        c for c in text if c.isascii() or unicodedata.category(c) not in ("Lu", "Ll", "Lt", "Mn", "Mc", "Me")
    )


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_pre_tokenizer_equals_llama_cpp(
    name: str, crossing_vocabulary: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    metadata = write_gguf(tmp_path / "tiny.gguf", *crossing_vocabulary, name)
    tokenizer = Tokenizer.from_gguf(metadata)
    texts = [*TEXTS, *random_texts(300, seed=3)]
    if r"\p{Lu}" in PRE_TOKENIZERS[name].patterns[-1]:
        texts = [*map(without_marks_and_foreign_case, texts)]
    with llama_cpp(tmp_path / "tiny.gguf") as reference:
        wrong = differences(tokenizer.encode, lambda text: reference(text, add_special=True), texts)
    assert wrong == []


def test_comparison_sees_a_wrong_pre_tokenizer(
    crossing_vocabulary: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """Negative control: on these texts every two ways of splitting in the table give different ids."""
    metadata = write_gguf(tmp_path / "tiny.gguf", *crossing_vocabulary, "gpt-2")
    metadata["tokenizer.ggml.add_bos_token"] = False
    ways = {(pre.patterns, pre.ignore_merges): name for name, pre in PRE_TOKENIZERS.items()}
    seen: dict[str, str] = {}
    for name in ways.values():
        tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": name})
        ids = json.dumps([tokenizer.encode(text) for text in random_texts(300, seed=3)])
        assert ids not in seen, f"{name} cannot be told from {seen[ids]}"
        seen[ids] = name
    assert len(seen) >= 10
