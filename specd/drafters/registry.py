"""Drafters and proposers by name (`speculation.draft`), checked against the target before anything is served."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from specd.attention.torch_attention import TorchAttention
from specd.config_options import check_draft
from specd.drafters.lm import LMDrafter
from specd.drafters.mtp import HeadModel, MtpDrafter
from specd.errors import ConfigError, DraftError
from specd.models.borrowed import load_borrowing
from specd.models.heads import Head, HeadFile, read_head
from specd.models.native import NativeLlama
from specd.models.native_head import NativeHead
from specd.models.registry import LoadedModel
from specd.text import Tokenizer

MAX_DEPTH = 64
SHIPPED = Path(__file__).parent / "shipped"  # KIND/NAME: for models whose names begin with NAME, as whole words


@dataclasses.dataclass(frozen=True, slots=True)
class DraftChoice:
    """What `speculation.draft` asks for. "auto", and "mtp" and "lm" alone, are settled when the target is known."""

    kind: Literal["auto", "none", "ngram", "layers", "lm", "mtp"]
    argument: str = ""
    shipped: bool = False  # the argument is the name of one that comes with specd
    proposes: bool = False  # the n-gram proposer overrides the drafter in rows where it is right about as often

    @property
    def name(self) -> str:
        name = f"{self.kind}:{self.argument}" if self.argument else self.kind
        return f"{name}+ngram" if self.proposes else name

    @property
    def folder(self) -> Path:
        """Of a head or a draft model."""
        return SHIPPED / self.kind / self.argument if self.shipped else Path(self.argument)

    @property
    def uses_ngram(self) -> bool:
        return self.kind == "ngram" or self.proposes


_WITHOUT_ARGUMENT = {
    "auto": DraftChoice("auto"),
    "none": DraftChoice("none"),
    "ngram": DraftChoice("ngram"),
    "mtp": DraftChoice("mtp"),
    "mtp+ngram": DraftChoice("mtp", proposes=True),
    "lm": DraftChoice("lm"),
}


def parse_draft(text: str) -> DraftChoice:
    """Raises DraftError for anything unknown."""
    try:
        check_draft(text)
    except ConfigError as error:
        raise DraftError(f"speculation.draft: {error}") from error
    if text in _WITHOUT_ARGUMENT:
        return _WITHOUT_ARGUMENT[text]
    kind, _, argument = text.partition(":")
    if kind == "layers":
        return DraftChoice("layers", argument)
    return DraftChoice("lm" if kind == "lm" else "mtp", argument)


def settle(choice: DraftChoice, target: LoadedModel, *names: str) -> DraftChoice:
    """ "auto" is the head that comes with specd for this model, overridden by n-grams, or n-grams where there is none.

    names: what else the model is called. Raises DraftError for "mtp" or "lm" where specd has none.
    """
    if choice.argument or choice.kind not in ("auto", "mtp", "lm"):
        return choice
    kind: Literal["mtp", "lm"] = "lm" if choice.kind == "lm" else "mtp"
    found = _shipped_for(kind, (target.name, *names))
    if found is not None and (kind == "lm" or not _differences(read_head(found), target)):
        return DraftChoice(kind, found.name, shipped=True, proposes=choice.proposes or choice.kind == "auto")
    if choice.kind == "auto":
        return DraftChoice("ngram")
    there = ", ".join(path.name for path in _shipped(kind)) or "no model at all"
    raise DraftError(f"speculation.draft is {kind!r}: specd has none for {target.name}; it has one for {there}")


def _shipped_for(kind: str, names: Iterable[str]) -> Path | None:
    """The folder whose name is the longest that one of a model's names begins with, as whole words."""
    lowered = [name.lower() for name in names]
    fitting = [path for path in _shipped(kind) if any(_begins(name, path.name) for name in lowered)]
    return max(fitting, key=lambda path: len(path.name), default=None)


def _begins(name: str, start: str) -> bool:
    return name.startswith(start) and not name[len(start) : len(start) + 1].isalnum()


def _shipped(kind: str) -> list[Path]:
    return sorted(path.parent for path in (SHIPPED / kind).glob("*/config.json"))


def _differences(file: HeadFile, target: LoadedModel) -> list[tuple[str, int, int]]:
    """What of a head does not fit: (name, the head's, the target's)."""
    shape, config = target.model.shape, file.config
    pairs = (
        ("hidden size", config.hidden_size, shape.hidden_size),
        ("vocabulary", config.vocab_size, shape.vocab_size),
        ("number of layers", file.target.get("num_layers", shape.num_layers), shape.num_layers),
    )
    return [pair for pair in pairs if pair[1] != pair[2]]


def layers_drafter(target: LoadedModel, num_layers: int) -> LMDrafter:
    """The target's first layers as its own draft model; no weights of its own. Raises DraftError."""
    most = target.model.shape.num_layers
    if num_layers > most:
        raise DraftError(f"drafter layers:{num_layers}: target {target.name} has only {most} layers")
    return LMDrafter(
        target.model.truncated(num_layers),
        name=f"layers:{num_layers}",
        vocab_size=target.model.shape.vocab_size,
        max_depth=MAX_DEPTH,
        max_context=None,
    )


def mtp_drafter(target: LoadedModel, path: Path) -> MtpDrafter:
    """The head in a folder. Raises ModelError for a bad folder, DraftError for a head of another target."""
    file = read_head(path)
    config = file.config
    for what, theirs, ours in _differences(file, target):
        raise DraftError(f"head {path} is for a target whose {what} is {theirs}; that of {target.name} is {ours}")
    model = target.model
    head: HeadModel
    if isinstance(model, NativeLlama):
        # A draft may be a little wrong: the head's weights take half the memory's time as int8.
        head = NativeHead(file, target=model, quantize="q8_0" if model.activations == "fast" else "none")
    else:
        head = Head(
            file,
            embedding=model.embedding,
            lm_head=model.head,
            attention=TorchAttention(),
            dtype=model.dtype,
            device=model.device,
        )
    return MtpDrafter(head, name=f"mtp:{path.name}", max_depth=MAX_DEPTH, max_context=config.max_position)


def borrowing_drafter(target: LoadedModel, path: Path) -> LMDrafter:
    """A draft model that borrows the target's embedding, output head and tokenizer. Raises ModelError."""
    draft = load_borrowing(path, target.model)
    return LMDrafter(
        draft,
        name=f"lm:{path.name}",
        vocab_size=target.model.shape.vocab_size,
        max_depth=MAX_DEPTH,
        max_context=draft.shape.max_position,
    )


def lm_drafter(
    target: LoadedModel, tokenizer: Tokenizer, draft: LoadedModel, draft_tokenizer: Tokenizer, *, name: str
) -> LMDrafter:
    """Another model as the draft. Raises DraftError, naming both sides, unless the two speak the same tokens.

    Logits may be padded to different widths; the tokenizers themselves must agree on every id.
    """
    ours, theirs = tokenizer.vocab_size, draft_tokenizer.vocab_size
    if ours != theirs:
        raise DraftError(
            f"drafter {name} has a vocabulary of {theirs} tokens, target {target.name} one of {ours}: "
            "a draft model must use the target's tokenizer"
        )
    for token in range(ours):
        if tokenizer.token_bytes(token) != draft_tokenizer.token_bytes(token):
            raise DraftError(
                f"drafter {name} and target {target.name} disagree about token {token}: "
                f"{draft_tokenizer.token_bytes(token)!r} and {tokenizer.token_bytes(token)!r}"
            )
    return LMDrafter(
        draft.model,
        name=name,
        vocab_size=target.model.shape.vocab_size,
        max_depth=MAX_DEPTH,
        max_context=draft.model.shape.max_position,
    )
