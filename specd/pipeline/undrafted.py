"""Why a row of a step has no drafts, counted by reason (`status.UNDRAFTED`). No torch."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from specd.pipeline.plan import Row
from specd.step import DraftSource

if TYPE_CHECKING:
    from specd.pipeline.schedule import Scheduler


def count_undrafted(rows: Rows[Row], scheduler: Scheduler, *, mixed: bool) -> None:
    """Of decode rows whose drafts are settled. A row that can emit one token only had nothing to draft for.

    mixed: the batch holds prompts, and its rows were not to speculate. Nothing counts where no drafts are configured.
    """
    if not scheduler.counters.max_draft:
        return
    for row in rows:
        if not row.num_drafts and row.sequence.limit - len(row.sequence.tokens) > 1:
            scheduler.counters.undrafted[_reason(row, scheduler, mixed=mixed)] += 1


def _reason(row: Row, scheduler: Scheduler, *, mixed: bool) -> str:
    sequence, wish = row.sequence, row.sequence.request.speculation
    if sequence.max_draft == 0:  # by its wish, or since a step with drafts failed
        return "request" if wish.mode == "off" or wish.max_draft == 0 else "failing"
    if scheduler.switched_off:
        return "admin"
    if mixed:
        return "mixed_batch"
    if row.num_wanted:
        return "no_room"
    if row.source is not DraftSource.NONE:  # somebody would have drafted
        return "not_paying"
    if scheduler.given_up:
        return "failing"
    if scheduler.traits is None:
        return "no_proposal"
    if sequence.carry_valid:
        return "context"  # the drafter's, which is shorter than the target's
    return "catching_up" if scheduler.length.wants_drafter(sequence, DraftSource.NONE) else "not_paying"
