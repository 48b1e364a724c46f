"""Text in and out: the tokenizer over GGUF vocabularies and Hugging Face folders. No torch.

Special tokens are found here, not in the `tokenizers` backend, because one rule must hold in both ways in:
text of a raw prompt may name special tokens, text that came from a chat message may not.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specd.detokenizer import Detokenizer, LeadingSpace, PaddedTokens, StopMatcher, TokenReadings
from specd.errors import ModelError, RequestError
from specd.pretokenizer import TURN_ENDS, build_backend, select
from specd.token_bound import byte_alphabet, token_bound

__all__ = [
    "Detokenizer", "LeadingSpace", "PaddedTokens", "RenderedChat", "StopMatcher", "TokenReadings", "Tokenizer",
    "compile_any",
]  # fmt: skip

_UNDERLINE = "\u2581"  # SentencePiece's space


@dataclasses.dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat after its template. `text` holds one private-use character for each piece of message text that reads
    like a special token; `masked` gives that text back (code point -> text). Special tokens in `text` are genuine.
    """

    text: str
    masked: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def plain(self) -> str:
        """The text with every mask undone, as a template would have written it."""
        return self.text.translate(self.masked)


class Tokenizer:
    """Token ids of text and bytes of token ids. Immutable after construction; safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...],
        bos_id: int | None,
        add_bos: bool,
        chat_template: str | None,
    ) -> None:
        """`backend`: byte-level BPE or SentencePiece style; its post-processor is not used (see `encode`).

        ModelError when its decoder is of another kind, or when BOS is wanted and there is none.
        """
        if add_bos and bos_id is None:
            raise ModelError("the tokenizer asks for a BOS token but names none")
        backend.encode_special_tokens = True  # special tokens are split off before; what is left is ordinary text
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._continuation = _continuation(backend)
        self._special = {token.content: (i, token) for i, token in added.items() if token.special}
        self._special_pattern = compile_any(self._special)
        self._bytes, self.leading_space = _byte_table(backend)
        self.vocab_size = len(self._bytes)
        self.bound = token_bound(backend, self._bytes)
        self.special_ids = frozenset(i for i, _ in self._special.values())
        self.special_tokens = tuple(self._special)
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self.add_bos = add_bos
        self.chat_template = chat_template
        for name, token_id in (("bos", bos_id), *(("eos", i) for i in eos_ids)):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise ModelError(f"{name} token id {token_id} is outside the vocabulary of {self.vocab_size}")
        self.bos_token = "" if bos_id is None else self._text(bos_id)
        self.eos_token = self._text(eos_ids[0]) if eos_ids else ""

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file: plain Python values by key. ModelError when it is not supported."""
        backend = build_backend(metadata)
        tokens = metadata["tokenizer.ggml.tokens"]
        ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        ends += [backend.token_to_id(text) for text in TURN_ENDS]
        bos_id = metadata.get("tokenizer.ggml.bos_token_id")
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", select(metadata).add_bos)
        if len(tokens) != backend.get_vocab_size(with_added_tokens=True):
            raise ModelError("the tokens of the GGUF file and its special tokens disagree")
        return cls(
            backend,
            eos_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
            bos_id=None if bos_id is None else int(bos_id),
            add_bos=bool(add_bos),
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """From a Hugging Face folder, through transformers (imported here). Code in the folder is never run."""
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            if not any(path.glob("*token*")):
                raise ModelError(f"{path}: holds no tokenizer (tokenizer.json)") from error
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"{path}: its tokenizer cannot be loaded ({type(error).__name__}): {reason}") from error
        backend = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ModelError(f"the tokenizer in {path} ({type(loaded).__name__}) has no tokenizers backend")
        eos_id, bos_id = loaded.eos_token_id, loaded.bos_token_id
        own = tokenizers.Tokenizer.from_str(backend.to_str())  # a copy: settings of the loaded object do not leak in
        own.no_truncation()  # which a folder may have; a prompt is never cut
        own.no_padding()
        return cls(
            own,
            eos_ids=() if eos_id is None else (int(eos_id),),
            bos_id=None if bos_id is None else int(bos_id),
            add_bos=bos_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_id],
            chat_template=_default_template(loaded.chat_template),
        )

    @classmethod
    def load(cls, path: Path, *, read_metadata: Callable[[Path], Mapping[str, Any]]) -> Tokenizer:
        """From a .gguf file (its metadata comes from `read_metadata`) or a Hugging Face folder."""
        return cls.from_gguf(read_metadata(path)) if path.suffix == ".gguf" else cls.from_folder(path)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a raw prompt. The text of a special token in it is that token, as in vLLM's /v1/completions.

        With `add_special`, BOS is put in front where the model wants one and the text does not begin with it. An EOS
        is never appended, also where a tokenizer would: a prompt is there to be continued. RequestError
        (`invalid_value`) for text that is not Unicode (lone surrogates).
        """
        return self._encode(text, {}, add_special)

    def encode_chat(self, rendered: RenderedChat) -> list[int]:
        """Ids of a rendered chat: special tokens of the template are special, those of message text are ordinary text.

        BOS is there once, written by the template or not, where the model wants one. Errors as `encode`.
        """
        return self._encode(rendered.text, rendered.masked, True)

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text: nothing in it is a special token, nothing is put in front."""
        return self._continuation.encode_batch([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; malformed UTF-8 becomes U+FFFD. RequestError for an id outside the vocabulary."""
        detokenizer = Detokenizer(self, skip_special)
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; for a special token the UTF-8 of its text, for an unused id none.

        RequestError (`out_of_range`) for an id outside the vocabulary.
        """
        if not 0 <= token_id < len(self._bytes):
            raise RequestError(
                f"token id {token_id} is outside the vocabulary (0..{len(self._bytes) - 1})", code="out_of_range"
            )
        return self._bytes[token_id]

    def token_str(self, token_id: int) -> str:
        """One token as logprobs show it: its text, or `bytes:\\xf0\\x9f` when it is not whole UTF-8."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _text(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""

    def _encode(self, text: str, masked: Mapping[int, str], add_special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error.reason}", code="invalid_value") from error
        ids: list[int] = []
        for start, end, token_id in self._split(text):
            if token_id is not None:
                ids.append(token_id)
            else:
                backend = self._backend if start == 0 else self._continuation
                # encode_batch, because it alone lets go of the GIL: a long text must not stop the event loop.
                piece = text[start:end].translate(masked) if masked else text[start:end]
                ids += backend.encode_batch([piece], add_special_tokens=False)[0].ids
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _split(self, text: str) -> Iterator[tuple[int, int, int | None]]:
        """(start, end, special token id or None) of each stretch; the longest of the special tokens at a place."""
        done = 0
        for match in self._special_pattern.finditer(text) if self._special_pattern else ():
            token_id, token = self._special[match.group()]
            start, end = match.span()
            if start < done or (token.single_word and _inside_word(text, start, end)):
                continue
            if token.lstrip:
                start = done + len(text[done:start].rstrip())
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip())
            if start > done:
                yield done, start, None
            yield start, end, token_id
            done = end
        if done < len(text):
            yield done, len(text), None


def compile_any(texts: Collection[str]) -> re.Pattern[str] | None:
    """An expression that finds any of `texts`, the longest one at a place; None when there are none.

    It is a trie, so the number of texts does not matter to its speed: some vocabularies have a thousand.
    """
    return re.compile(_trie(sorted(set(texts)))) if texts else None


def _trie(texts: list[str]) -> str:
    first, last = texts[0], texts[-1]  # sorted: what these two share, all share
    length = next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    prefix = first[:length]
    rests = [text[length:] for text in texts]
    branches = [_trie(list(group)) for start, group in itertools.groupby(rests, key=lambda rest: rest[:1]) if start]
    if not branches:
        return re.escape(prefix)
    return f"{re.escape(prefix)}(?:{'|'.join(branches)}){'' if all(rests) else '?'}"


def _inside_word(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start], text[end : end + 1]
    return bool(re.match(r"\w", before) or re.match(r"\w", after))


def _default_template(template: str | Mapping[str, str] | None) -> str | None:
    if template is None or isinstance(template, str):
        return template
    if "default" not in template:
        raise ModelError(f"the folder has chat templates ({', '.join(sorted(template))}) but none called 'default'")
    return template["default"]


def _continuation(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The backend for text that follows a special token.

    A Metaspace pre-tokenizer with the scheme "first" puts its space before the first word of the whole text only,
    which it cannot know when it is given a stretch from the middle.
    """
    state = json.loads(backend.to_str())
    pre = state["pre_tokenizer"] or {}
    firsts = [
        part
        for part in (pre, *pre.get("pretokenizers", ()))
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first"
    ]
    if not firsts:
        return backend
    for part in firsts:
        part["prepend_scheme"] = "never"
    continuation = tokenizers.Tokenizer.from_str(json.dumps(state))
    continuation.encode_special_tokens = True
    return continuation


def _byte_table(backend: tokenizers.Tokenizer) -> tuple[list[bytes], LeadingSpace]:
    """The bytes of every id, and the rule for the first space, read from the backend's decoder."""
    decoder = json.loads(backend.to_str())["decoder"] or {"type": "none"}
    parts = decoder.get("decoders", [decoder])
    leading = LeadingSpace.KEEP
    byte_level = byte_fallback = False
    for part in parts:
        match part:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}:
                leading = LeadingSpace.KEEP if scheme == "never" else LeadingSpace.STRIP_FIRST_TOKEN
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                leading = LeadingSpace.STRIP_ONE
            case {"type": "Fuse"} | {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                pass
            case _:
                shown = json.dumps(part, ensure_ascii=False)
                raise ModelError(f"a tokenizer with the decoder {shown} is not supported")
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        if token_id in added:
            table[token_id] = token.encode()
        elif byte_level:
            table[token_id] = _byte_level(token)
        else:
            table[token_id] = _metaspace(token, byte_fallback)
    return table, leading


_BYTES = byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:  # not written in the byte alphabet: the token is its own text
        return token.encode()


def _metaspace(token: str, byte_fallback: bool) -> bytes:
    if byte_fallback and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace(_UNDERLINE, " ").encode()
