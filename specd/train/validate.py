"""What a head is worth where it serves: `replay` over held-out sequences, beside what its trainer said of it.

    loss      the divergence that is trained on: of the draft from the target, over what the draft can say
    overlap   sum of min(p, q) over the whole vocabulary: a sampled draft is kept with this probability
    top1      the draft's argmax is the target's, given that it was so at every position before and that the text went
              that way: a greedy draft is kept
    sampled   the overlap, given that every position before was kept and that the text went that way: each position is
              weighted by the product of min(1, q / p) of the text's tokens before it. Exact in expectation for text
              that was sampled from the target at temperature 1

By position in the draft. `kept_greedy` and `kept_sampled` are the drafts that verification keeps of a whole chain.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from specd.attention.torch_attention import TorchAttention
from specd.drafters.mtp import MtpDrafter
from specd.drafters.registry import mtp_drafter
from specd.errors import ConfigError
from specd.models.base import Model
from specd.models.registry import KernelChoice, load_target
from specd.train.held_out import HeldOut, read_held_out
from specd.train.replay import Replay, Table

NAMES = ("loss", "top1", "overlap", "sampled")
_CONTEXTS = (256, 512, 1024, 2048, 4096)  # tokens that stand when a draft begins, at most
_CPU = torch.device("cpu")
_KV_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, slots=True)
class ValidateSettings:
    """Exactly one of shards and corpus says what is replayed."""

    model: Path
    head: Path
    shards: tuple[Path, ...] = ()  # folders
    corpus: Path | None = None
    tokens: int = 16384  # of held-out sequences, chosen as the trainer chooses them
    depth: int = 3  # drafts of a chain
    chunk_tokens: int = 256  # of a forward, and chains that are drafted together
    kv_dtype: str = "auto"  # "auto": the target's
    kernels: KernelChoice = dataclasses.field(default_factory=lambda: KernelChoice("auto"))


def validate(settings: ValidateSettings) -> dict[str, Any]:
    """The report. Raises ConfigError, ModelError or DraftError before anything is computed."""
    texts = read_held_out(shards=settings.shards, corpus=settings.corpus, num_tokens=settings.tokens)
    trained = trained_figures(settings.head)
    target = load_target(
        settings.model, dtype="auto", device=_CPU, attention=TorchAttention(), kernels=settings.kernels
    )
    drafter = mtp_drafter(target, settings.head)
    _check(texts, target.model, drafter, settings.depth)
    replay = Replay(
        target.model,
        drafter,
        depth=settings.depth,
        longest=max(len(text.ids) for text in texts),
        chunk_tokens=settings.chunk_tokens,
        kv_dtype=_KV_DTYPES.get(settings.kv_dtype, target.model.dtype),
    )
    started = time.monotonic()
    tables = [replay.run(text) for text in texts]
    served = figures(tables)
    return {
        "model": target.name,
        "head": str(settings.head),
        "kernels": target.kernels,
        "sequences": len(texts),
        "tokens": sum(len(text.ids) for text in texts),
        "seconds": round(time.monotonic() - started, 1),
        "served": served,
        "trained": trained,
        "difference": difference(served, trained),
        "by_context": by_context(tables),
        **by_label(texts, tables),
    }


def figures(tables: Sequence[Table]) -> dict[str, Any]:
    """Of every column of the tables; None at positions that no text reaches."""
    whole = Table(*(torch.cat([getattr(t, f.name) for t in tables], 1) for f in dataclasses.fields(Table)))
    alive = torch.ones(whole.valid.shape[1], dtype=torch.bool)
    weight = torch.ones(whole.valid.shape[1], dtype=torch.float64)
    found: dict[str, list[float | None]] = {name: [] for name in NAMES}
    columns = (getattr(whole, field.name) for field in dataclasses.fields(Table))
    for valid, kl, overlap, agreed, right, kept in zip(*columns, strict=True):
        reached = valid & alive
        found["loss"].append(_ratio(kl[valid].sum(), valid.sum()))
        found["overlap"].append(_ratio(overlap[valid].sum(), valid.sum()))
        found["top1"].append(_ratio((reached & agreed).sum(), reached.sum()))
        found["sampled"].append(_ratio((weight * overlap)[valid].sum(), weight[valid].sum()))
        alive = reached & agreed & right
        weight = weight * kept * valid
    return {
        "rows": whole.valid.sum(1).tolist(),
        **found,
        "kept_greedy": _chain(found["top1"]),
        "kept_sampled": _chain(found["sampled"]),
    }


def by_context(tables: Sequence[Table]) -> dict[str, Any]:
    """The same by the tokens that stand when the draft begins: t_0..t_{i+1} for a chain from pair i."""
    groups: dict[str, Any] = {}
    for low, high in zip((0, *_CONTEXTS), (*_CONTEXTS, None), strict=True):
        parts = [_columns(table, slice(max(low - 1, 0), None if high is None else high - 1)) for table in tables]
        if any(bool(part.valid.any()) for part in parts):
            groups[f"over {low}" if high is None else str(high)] = figures(parts)
    return groups


def by_label(texts: Sequence[HeldOut], tables: Sequence[Table]) -> dict[str, Any]:
    """The same by whatever the corpus records of its sequences: {"by_temperature": {"0.7": ..}}."""
    groups: dict[str, Any] = {}
    for name in sorted({name for text in texts for name in text.labels}):
        values = [text.labels[name] for text in texts]
        groups[f"by_{name}"] = {
            value: figures([table for table, own in zip(tables, values, strict=True) if own == value])
            for value in sorted(set(values))
        }
    return groups


def trained_figures(head: Path) -> dict[str, list[float]] | None:
    """What the trainer measured, from provenance.json; None when the head has none. Raises ConfigError."""
    path = head / "provenance.json"
    if not path.exists():
        return None
    try:
        found = orjson.loads(path.read_bytes())["figures"]["held_out"]
        return {name: [float(value) for value in found[name]] for name in ("loss", "top1", "overlap")}
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: has no figures.held_out with loss, top1 and overlap: {error!r}") from error


def difference(served: dict[str, Any], trained: dict[str, list[float]] | None) -> dict[str, list[float]] | None:
    """Served less trained, at the positions that both have."""
    if trained is None:
        return None
    return {
        name: [round(ours - theirs, 4) for ours, theirs in zip(served[name], values, strict=False) if ours is not None]
        for name, values in trained.items()
    }


def render(report: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{report['sequences']} held-out sequences, {report['tokens']} tokens, {report['kernels']}, "
        f"{report['seconds']} s",
        *_lines("served", report["served"]),
    ]
    if report["trained"] is None:
        lines.append("the head has no provenance.json: nothing to compare with")
    else:
        lines += [*_lines("trained", report["trained"]), *_lines("difference", report["difference"])]
    for key in (key for key in report if key.startswith("by_")):
        for value, found in report[key].items():
            lines += _lines(f"{key.removeprefix('by_')} {value} ({found['rows'][0]} tokens)", found)
    return "\n".join(lines)


def _lines(title: str, found: dict[str, Any]) -> list[str]:
    words = "".join(f", {found[key]:.3f} kept {key.removeprefix('kept_')}" for key in found if key.startswith("kept_"))
    rows = [f"  {name:8}" + "".join(_cell(value) for value in found[name]) for name in NAMES if name in found]
    return [title + words, *rows]


def _cell(value: float | None) -> str:
    return "        -" if value is None else f"{value:9.4f}"


def _columns(table: Table, columns: slice) -> Table:
    return Table(*(getattr(table, field.name)[:, columns] for field in dataclasses.fields(Table)))


def _ratio(top: torch.Tensor, bottom: torch.Tensor) -> float | None:
    return round(float(top / bottom), 4) if float(bottom) > 0 else None


def _chain(rates: Sequence[float | None]) -> float:
    """The expected number of drafts that are kept, when each position's rate is given that those before were."""
    total, reaching = 0.0, 1.0
    for rate in rates:
        reaching *= rate or 0.0
        total += reaching
    return round(total, 4)


def _check(texts: Sequence[HeldOut], model: Model, drafter: MtpDrafter, depth: int) -> None:
    longest, highest = max(len(text.ids) for text in texts), max(int(text.ids.max()) for text in texts)
    limit = min(model.shape.max_position, drafter.traits.max_context or model.shape.max_position)
    if longest > limit:
        raise ConfigError(f"a held-out sequence has {longest} tokens; target and head were made for {limit}")
    if highest >= model.shape.vocab_size:
        raise ConfigError(f"a held-out sequence has token {highest}; the target has {model.shape.vocab_size} tokens")
    if depth > drafter.traits.max_depth:
        raise ConfigError(f"--depth {depth}: {drafter.traits.name} drafts at most {drafter.traits.max_depth} tokens")
