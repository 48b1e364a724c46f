"""Drafters and proposers by name (`speculation.draft`), checked against the target before anything is served."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from specd.attention.torch_attention import TorchAttention
from specd.drafters.lm import LMDrafter
from specd.drafters.mtp import HeadModel, MtpDrafter
from specd.errors import DraftError
from specd.models.heads import Head, read_head
from specd.models.native import NativeLlama
from specd.models.native_head import NativeHead
from specd.models.registry import LoadedModel
from specd.text import Tokenizer

MAX_DEPTH = 64


@dataclasses.dataclass(frozen=True, slots=True)
class DraftChoice:
    """What `speculation.draft` asks for."""

    kind: Literal["none", "ngram", "layers", "lm", "mtp"]
    argument: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.argument}" if self.argument else self.kind


def parse_draft(text: str) -> DraftChoice:
    """ "auto" is the best one there is for the model: the n-gram proposer. Raises DraftError for anything unknown."""
    kind, _, argument = text.partition(":")
    if text in ("auto", "ngram"):
        return DraftChoice("ngram")
    if text == "none":
        return DraftChoice("none")
    if kind == "layers" and argument.isdigit() and int(argument) > 0:
        return DraftChoice("layers", argument)
    if kind == "lm" and argument:
        return DraftChoice("lm", argument)
    if kind == "mtp" and argument == "builtin":
        raise DraftError("speculation.draft is 'mtp:builtin': heads inside a model's checkpoint are not read yet")
    if kind == "mtp" and argument:
        return DraftChoice("mtp", argument)
    raise DraftError(f"speculation.draft is {text!r}; give auto, none, ngram, layers:N, lm:MODEL or mtp:FOLDER")


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
    shape, config = target.model.shape, file.config
    for what, theirs, ours in (
        ("hidden size", config.hidden_size, shape.hidden_size),
        ("vocabulary", config.vocab_size, shape.vocab_size),
        ("number of layers", file.target.get("num_layers", shape.num_layers), shape.num_layers),
    ):
        if theirs != ours:
            raise DraftError(f"head {path} is for a target whose {what} is {theirs}; that of {target.name} is {ours}")
    if config.features == "pre":
        raise DraftError(f"head {path} reads hidden states before the final norm; they cannot be had yet")
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
