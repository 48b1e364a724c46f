"""`specd ctl status` as text: figures in groups, speculation and times as small tables. Standard library only."""

from __future__ import annotations

import math
from typing import Any

from specd.commands.tables import columns, table

_QUANTILES = (0.5, 0.9, 0.99)


def render(status: dict[str, Any]) -> str:
    """What /v1/status says. Everything is in it but the buckets of distributions, which become quantiles.

    A daemon of another version may say less.
    """
    status = {name: dict(value) if isinstance(value, dict) else value for name, value in status.items()}
    stats = status.get("stats", {})
    kept, made = (stats.pop(name, []) for name in ("accepted_per_position", "drafted_per_position"))
    sources = _sources(*(stats.pop(name, {}) for name in ("drafts", "draft_tokens", "accepted_tokens")))
    stages, sizes = stats.pop("stages", {}), stats.pop("step_tokens", {"counts": []})
    groups = {name: value for name, value in status.items() if isinstance(value, dict)}
    parts = [table({name: value for name, value in status.items() if name not in groups})]
    parts += [table({name: value}) for name, value in groups.items()]
    times = [_row({"stage": name}, stages[name], "_ms", 1e3) for name in stages if sum(stages[name]["counts"])]
    if sum(sizes["counts"]):
        parts += [columns(times), columns([_row({"step": "all"}, sizes, "_tokens", 1, whole=True)])]
    parts += [columns(rows) for rows in (sources, _positions(kept, made)) if rows]
    return "\n\n".join(parts)


def _sources(drafts: dict[str, int], made: dict[str, int], kept: dict[str, int]) -> list[dict[str, Any]]:
    """Who proposed: rows that had drafts, drafts, those that were kept, tokens a row."""
    return [
        {
            "source": name,
            "draft_steps": drafts[name],
            "drafted": made[name],
            "kept": kept[name],
            "kept_share": kept[name] / made[name],
            "tokens_a_draft_step": 1 + kept[name] / drafts[name],
        }
        for name in drafts
        if made.get(name)
    ]


def _positions(kept: list[int], made: list[int]) -> list[dict[str, Any]]:
    return [
        {"position": i, "drafted": tried, "kept": right, "kept_share": right / tried}
        for i, (right, tried) in enumerate(zip(kept, made, strict=True), 1)
        if tried
    ]


def _row(
    first: dict[str, Any], found: dict[str, Any], unit: str, factor: float, *, whole: bool = False
) -> dict[str, Any]:
    """whole: the values are whole numbers."""
    count = sum(found["counts"])
    row = {**first, "count": count, f"mean{unit}": factor * found["total"] / count}
    for q in _QUANTILES:
        value = quantile(found["bounds"], found["counts"], q)
        row[f"p{100 * q:g}{unit}"] = f"above {factor * found['bounds'][-1]:g}" if value is None else factor * value
        if whole and value is not None:
            row[f"p{100 * q:g}{unit}"] = math.ceil(value)
    return row


def quantile(bounds: list[float], counts: list[int], q: float) -> float | None:
    """Linear inside a bucket, as Prometheus's histogram_quantile; None where it is above the last bound."""
    rank, below, low = q * sum(counts), 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return None
