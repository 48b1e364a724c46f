"""Replies of the control socket as text. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(value: Any) -> str:
    """A list of records as columns, a record as `name  value` lines (nested names joined with dots)."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return columns(value) if value else "none"
    if isinstance(value, Mapping):
        lines = _flatten(value)
        width = max((len(name) for name, _ in lines), default=0)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)
    return cell(value)


def columns(records: Sequence[Any]) -> str:
    if not all(isinstance(record, Mapping) for record in records):
        return "\n".join(cell(record) for record in records)
    names = list(dict.fromkeys(name for record in records for name in record))
    rows = [names, *([cell(record.get(name)) for name in names] for record in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _flatten(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for name, value in record.items():
        lines += _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, cell(value))]
    return lines


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(cell(item) for item in value) or "-"
    return str(value)
