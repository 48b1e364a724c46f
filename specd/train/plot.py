"""A run's curves beside its log: `log.png` from `log.jsonl`. Needs matplotlib, of the extra `train`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import orjson

_SMOOTHING = 0.98  # of the training loss, a step


def draw(folder: Path) -> bool:
    """Replaces folder/log.png; one line on standard error, and False, where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        _say_once(f"no curves are drawn: {error}; specd's extra 'train' brings matplotlib")
        return False
    steps, looks = read_log(folder / "log.jsonl")
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, kept = figure.subplots(1, 2)
    loss.plot([line["step"] for line in steps], smoothed([line["loss"] for line in steps]), label="training, smoothed")
    at = [line["step"] for line in looks]
    for position in range(len(looks[0]["held_out"]["loss"]) if looks else 0):
        style = {"color": f"C{position + 1}", "marker": "."}
        values = {name: [line["held_out"][name][position] for line in looks] for name in ("loss", "top1", "overlap")}
        loss.plot(at, values["loss"], label=f"held out, position {position + 1}", **style)
        kept.plot(at, values["top1"], label=f"greedy, position {position + 1}", **style)
        kept.plot(at, values["overlap"], linestyle=":", label=f"sampled, position {position + 1}", **style)
    loss.set(xlabel="step", ylabel="divergence from the target, nats")
    kept.set(xlabel="step", ylabel="held-out drafts kept", ylim=(0, 1))
    for axes in (loss, kept):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    partial = folder / "log.partial.png"
    figure.savefig(partial, dpi=100)
    partial.replace(folder / "log.png")
    return True


def read_log(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The log's lines: of steps, and of looks at held-out sequences. None where there is no log."""
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    return [line for line in lines if "held_out" not in line], [line for line in lines if "held_out" in line]


def smoothed(values: list[float]) -> list[float]:
    """Averages that fade, with the start corrected."""
    total, weight, out = 0.0, 0.0, []
    for value in values:
        total, weight = _SMOOTHING * total + value, _SMOOTHING * weight + 1
        out.append(total / weight)
    return out


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
