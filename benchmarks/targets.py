"""What a comparison with llama.cpp is for: the ratios that are aimed at, and the result as a table for people."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.llama_cpp import MODES, PLAIN
from benchmarks.measure import Cell, figures, ratio
from specd.bench.report import percentile

# What a target is about: the fastest kernels that took part.
_KERNELS = ("native fast", "native exact", "torch")
_RATE, _ALL, _STEP, _TTFT = "full_tokens_per_s", "tokens_per_s", "gap_p50_ms", "ttft_ms"


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One ratio: `ours` over `theirs` in one load. Names that are not llama.cpp's modes are specd's speculation."""

    row: str
    kind: str
    concurrency: int
    figure: str
    ours: tuple[str, ...]  # the best of them
    theirs: tuple[str, ...]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def words(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least}"
        return "" if self.at_most is None else f"at most {self.at_most}"

    def met(self, value: float | None) -> bool | None:
        if value is None or (self.at_least is None and self.at_most is None):
            return None
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)


_NONE, _BOTH, _ADAPTIVE, _FIXED = ("none",), ("mtp+ngram",), ("ngram adaptive",), ("ngram K=3",)
_HEAD = ("mtp adaptive", "mtp K=1", "mtp K=2")
TARGETS = (
    Target("plain decode, batch 1, against llama.cpp", "chat", 1, _RATE, _NONE, (PLAIN,), at_least=1.4),
    Target("plain decode, batch 8, aggregate, against llama.cpp", "chat", 8, _RATE, _NONE, (PLAIN,), at_least=2.5),
    Target("plain, batch 8, prompts included, against llama.cpp", "chat", 8, _ALL, _NONE, (PLAIN,)),
    Target("a step of m = 4 against m = 1", "chat", 1, _STEP, _FIXED, _NONE, at_most=1.35),
    Target(
        "best speculative mode against llama.cpp's best mode, chat, batch 1",
        "chat",
        1,
        _RATE,
        _BOTH + _ADAPTIVE + _FIXED + _HEAD,
        tuple(MODES),
        at_least=2.0,
    ),
    Target("copy-heavy, ngram against own plain, batch 1", "copy", 1, _RATE, _ADAPTIVE, _NONE, at_least=2.5),
    Target("copy-heavy, mtp+ngram against own plain, batch 1", "copy", 1, _RATE, _BOTH, _NONE, at_least=2.5),
    Target("mtp+ngram against own plain, chat, batch 1", "chat", 1, _RATE, _BOTH, _NONE),
    Target("the head alone against own plain, chat, batch 1", "chat", 1, _RATE, _HEAD, _NONE),
    # Over the whole time: with drafts the first answers of a large batch end while the last prompts are computed, so
    # that the time in which all decode has other rows in it than without.
    *(
        Target(f"{words} against own plain, {kind}, batch {n}", kind, n, _ALL, ours, _NONE, at_least=0.98)
        for words, ours in (("n-grams", _ADAPTIVE), ("mtp+ngram", _BOTH))
        for n in (8, 32)
        for kind in ("chat", "copy")
    ),
    Target("TTFT, 200-token prompt, cold, against llama.cpp", "ttft-200", 1, _TTFT, _NONE, (PLAIN,), at_most=0.7),
    Target("TTFT, 1000-token prompt, cold, against llama.cpp", "ttft-1000", 1, _TTFT, _NONE, (PLAIN,)),
    Target("TTFT, 4000-token prompt, cold, against llama.cpp", "ttft-4000", 1, _TTFT, _NONE, (PLAIN,)),
)


def targets(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The targets that these cells can answer, each with its ratio (median and quartiles over rounds)."""
    sides = {cell.side for cell in cells}
    kernels = next((k for k in _KERNELS if any(side.startswith(f"specd {k} ") for side in sides)), None)
    rows = []
    for target in TARGETS:
        ours, theirs = (_best(cells, target, names, kernels) for names in (target.ours, target.theirs))
        if ours is None or theirs is None:
            continue
        found = ratio(ours, theirs, target.figure)
        rows.append(
            {
                "row": target.row,
                "ours": ours.side,
                "theirs": theirs.side,
                "figure": target.figure,
                "ratio": found,
                "target": target.words,
                "met": target.met(found["median"]),
            }
        )
    return rows


def _best(cells: Sequence[Cell], target: Target, names: Sequence[str], kernels: str | None) -> Cell | None:
    """The cell of the target's load with the best median, among sides of these names; None when there is none."""
    wanted = {name if name in MODES else f"specd {kernels} {name}" for name in names}
    found = [
        (value, cell)
        for cell in cells
        if (cell.load.kind, cell.load.concurrency) == (target.kind, target.concurrency)
        and cell.side in wanted
        and (value := _median(cell, target.figure)) is not None
    ]
    pick = max if target.figure in (_RATE, _ALL) else min
    return pick(found, key=lambda pair: pair[0])[1] if found else None


def _median(cell: Cell, figure: str) -> float | None:
    return percentile([value for samples in cell.rounds if (value := figures(samples)[figure]) is not None], 50)


# ---------------------------------------------------------------- markdown


def markdown(
    command: str,
    machine: Mapping[str, Any],
    built: Mapping[str, Any],
    entries: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
    *,
    against: str,
) -> str:
    """The targets, and a table for each load. entries: `measure.table`; rows: `targets`."""
    parts = [
        f"`{command}`",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']:.2f} at the start. Medians over "
        f"{len(entries[0]['rounds'])} rounds; ratios within a round, [quartiles]. x: against {against}. tok/s: all "
        "tokens over the whole time. decode: while no answer of a batch waited for its first token. gap: between what "
        "arrives together.",
        *(f"{name}: {value}" for name, value in built.items() if value),
    ]
    if rows:
        parts.append(_table(("", "ours", "theirs", "ratio", "target", "met"), [_target_row(row) for row in rows]))
    head = ("side", "tok/s", "x", "decode tok/s", "x", "x own plain", "TTFT ms", "x", "gap ms p50 / p99", "drafts kept")
    head += (f"equal to {against}", "to own plain")
    for (kind, concurrency), group in itertools.groupby(entries, key=lambda e: (e["kind"], e["concurrency"])):
        members = list(group)
        parts.append(f"### {kind}, {concurrency} at a time, prompts of {members[0]['prompt_tokens']:.0f} tokens")
        parts.append(_table(head, [_entry_row(entry, against) for entry in members]))
    return "\n\n".join(parts) + "\n"


def _target_row(row: dict[str, Any]) -> tuple[str, ...]:
    met = {True: "yes", False: "no", None: ""}[row["met"]]
    return (row["row"], row["ours"], row["theirs"], _spread(row["ratio"]), row["target"], met)


def _entry_row(entry: dict[str, Any], against: str) -> tuple[str, ...]:
    median, theirs, own = entry["median"], entry.get(f"ratio to {against}", {}), entry.get("ratio to own plain", {})
    equal_theirs, equal_own = (entry.get(f"answers equal to {name}") for name in (against, "own plain"))
    return (
        entry["side"],
        _number(median["tokens_per_s"], 1),
        _number(theirs.get("tokens_per_s", {}).get("median")),
        _number(median[_RATE], 1),
        _spread(theirs.get(_RATE, {})),
        _spread(own.get(_RATE, {})),
        _number(median["ttft_ms"], 0),
        _number(theirs.get("ttft_ms", {}).get("median")),
        f"{_number(median['gap_p50_ms'], 1)} / {_number(median['gap_p99_ms'], 1)}",
        _number(median["drafts_kept"]),
        *("" if equal is None else f"{equal}/{entry['answers']}" for equal in (equal_theirs, equal_own)),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _spread(ratio: Mapping[str, float | None]) -> str:
    if ratio.get("median") is None:
        return ""
    return f"{_number(ratio['median'])} [{_number(ratio['p25'])}, {_number(ratio['p75'])}]"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
