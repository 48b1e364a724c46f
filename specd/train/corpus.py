"""Token sequences to learn from, each token marked with who wrote it.

A corpus is one safetensors file: `ids` u16 or i32[N], the sequences end to end; `role` u8[N]; `lens` i32[sequences];
optional `held_out` u8[sequences] (absent: every twentieth sequence). Those that ship with specd lie in `data/`.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from specd.errors import ConfigError
from specd.step import indptr

# A template or a written prompt; a user turn and an answer sampled from the model; what others wrote, learned from too.
GIVEN, USER, ANSWER, OTHERS = 0, 1, 2, 3
SHIPPED = {
    name: Path(__file__).parent / "data" / f"smollm2_{name.replace('-', '_')}.safetensors"
    for name in ("chats", "self-prompted")
}
HELD_OUT_EVERY = 20
_JOINED_SHARE = 5  # one token in so many comes from joined sequences


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One sequence."""

    ids: npt.NDArray[np.int32]  # [n]
    role: npt.NDArray[np.uint8]  # [n]
    held_out: bool  # never trained on


def corpus_file(given: Path | None) -> Path:
    """A file, or one that ships with specd by its name; None: the first of those."""
    return SHIPPED["chats"] if given is None else SHIPPED.get(str(given), given)


def read_corpus(path: Path) -> list[Text]:
    """Raises ConfigError naming the file and what is wrong with it."""
    try:
        tensors = load_file(path)
        ids, role, lens = (_numbers(path, name, tensors[name]) for name in ("ids", "role", "lens"))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a corpus: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{path}: not a corpus: it has no tensor {error}; ids, role and lens are needed") from error
    if len(ids) != len(role) or len(ids) != lens.sum() or (lens < 1).any():
        raise ConfigError(f"{path}: {len(ids)} ids, {len(role)} roles and lens that sum to {lens.sum()} do not agree")
    if not len(lens):
        raise ConfigError(f"{path}: holds no sequence")
    if (role > OTHERS).any():
        raise ConfigError(f"{path}: has role {role.max()}; {GIVEN} to {OTHERS} exist")
    if "held_out" in tensors:
        held_out = _numbers(path, "held_out", tensors["held_out"]).astype(bool)
    else:
        held_out = np.arange(len(lens)) % HELD_OUT_EVERY == 0
    if len(held_out) != len(lens):
        raise ConfigError(f"{path}: {len(held_out)} held_out marks for {len(lens)} sequences")
    offsets = indptr(lens.astype(np.int32))
    spans = [slice(int(begin), int(end)) for begin, end in itertools.pairwise(offsets)]
    return [
        Text(ids[span].astype(np.int32), role[span].astype(np.uint8), bool(mark))
        for span, mark in zip(spans, held_out, strict=True)
    ]


def _numbers(path: Path, name: str, tensor: torch.Tensor) -> npt.NDArray[np.int64]:
    """Raises ConfigError for anything but one row of whole numbers from 0 to what an i32 holds."""
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.is_complex():
        shape = list(tensor.shape)
        raise ConfigError(f"{path}: {name} is {shape} of {tensor.dtype}, it must be one row of whole numbers")
    numbers: npt.NDArray[np.int64] = tensor.to(torch.int64).numpy()
    wrong = numbers[(numbers < 0) | (numbers >= 1 << 31)]
    if len(wrong):
        raise ConfigError(f"{path}: {name} holds {wrong[0]}; it must be from 0 to {(1 << 31) - 1}")
    return numbers


def join(texts: list[Text], length: int, eos_ids: tuple[int, ...]) -> list[Text]:
    """About a fifth of the tokens in sequences of up to `length`: consecutive chats, one header for all of them.

    Held-out chats stay as they are and apart, and so do chats that were cut off before their end. The header that all
    chats share is kept in the first; what the template puts between turns is put between chats. Says how many tokens
    were joined; raises ConfigError when none could be.
    """
    ended = [not text.held_out and int(text.ids[-1]) in eos_ids for text in texts]
    header, between = _template([text for text, mark in zip(texts, ended, strict=True) if mark], eos_ids)
    joined: list[Text] = []
    group: list[Text] = []
    num_joined = 0
    credit = 0  # tokens that passed alone since the last joined sequence
    for text, mark in zip(texts, ended, strict=True):
        if mark and credit >= (_JOINED_SHARE - 1) * length:
            size = sum(len(t.ids) for t in group) + len(text.ids) + len(between)
            if group and size > length:
                joined.append(_concatenate(group))
                num_joined += len(joined[-1].ids) if len(group) > 1 else 0
                group, credit = [], credit - (_JOINED_SHARE - 1) * length + len(text.ids)
                joined.append(text)
            else:
                group.append(_shortened(text, header, between) if group else text)
        else:
            credit += 0 if text.held_out else len(text.ids)
            joined.append(text)
    if group:
        joined.append(_concatenate(group))
        num_joined += len(joined[-1].ids) if len(group) > 1 else 0
    total = sum(len(text.ids) for text in joined)
    if not num_joined:
        raise ConfigError(f"--join {length}: no two chats could be joined: {_why_none(texts, ended, length)}")
    print(f"{num_joined} of {total} tokens are in joined chats", file=sys.stderr, flush=True)
    return joined


def _why_none(texts: list[Text], ended: list[bool], length: int) -> str:
    """Why nothing was joined, and what to do."""
    sizes = [len(text.ids) for text, mark in zip(texts, ended, strict=True) if mark]
    if len(sizes) < 2:
        rest = "the others are held out, or do not end with an end token"
        return f"{len(sizes)} of {len(texts)} sequences can be: {rest}; give more chats, or leave --join out"
    alone = (_JOINED_SHARE - 1) * length
    there = sum(len(text.ids) for text in texts if not text.held_out)
    if there <= alone + sum(sorted(sizes)[:2]):
        return (
            f"the corpus is too small: a fifth of the tokens is joined, so {alone} tokens pass alone before the first "
            f"two chats are, and there are {there} to train on; give more chats, or a smaller --join"
        )
    return (
        f"its chats are too long: two in a row must have at most {length} tokens together, and half of the "
        f"{len(sizes)} chats have {sorted(sizes)[len(sizes) // 2]} or more; give a larger --join"
    )


def _template(chats: list[Text], eos_ids: tuple[int, ...]) -> tuple[int, npt.NDArray[np.int32]]:
    """Tokens of the header that every chat repeats, and what stands between one turn's end and the next one's start."""
    if not chats:
        return 0, np.zeros(0, np.int32)
    first = chats[0].ids
    shared = min(int(np.argmin(_equal(first, chat.ids))) for chat in chats)
    starts = np.flatnonzero(first == first[0])  # of its turns; one more than there are for a template's own begin token
    header = int(starts[starts < max(shared, 1)][-1])
    end = int(np.argmax(np.isin(first, eos_ids)))  # of its first turn
    following = starts[starts > end]
    return header, first[end + 1 : int(following[0])] if len(following) else first[:0]


def _equal(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    size = min(len(a), len(b))
    return np.append(a[:size] == b[:size], False)


def _shortened(text: Text, header: int, between: npt.NDArray[np.int32]) -> Text:
    given = np.zeros(len(between), np.uint8)
    return Text(np.append(between, text.ids[header:]), np.append(given, text.role[header:]), False)


def _concatenate(group: list[Text]) -> Text:
    return Text(np.concatenate([t.ids for t in group]), np.concatenate([t.role for t in group]), False)
