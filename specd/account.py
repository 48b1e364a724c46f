"""What became of the requests: accepted == finished + failed + aborted + live, at any time. No torch."""

from __future__ import annotations

from specd.journal import RequestJournal
from specd.request import FinishReason


class Account:
    """Counts since the start; the journal, where there is one, is told the same."""

    def __init__(self) -> None:
        self.journal: RequestJournal | None = None
        self.reset()

    def reset(self) -> None:
        """Counting begins anew; `num_lost_before` is of the process before this one."""
        self.accepted = self.finished = self.failed = self.aborted = 0
        self.drains = 0

    @property
    def num_lost_before(self) -> int:
        return 0 if self.journal is None else len(self.journal.lost)

    def begin(self, request_id: str) -> None:
        """A request was accepted."""
        self.accepted += 1
        if self.journal is not None:
            self.journal.begin(request_id)

    def end(self, request_id: str, outcome: FinishReason) -> None:
        """It has ended; outcome: the worst of its choices."""
        how = {FinishReason.ERROR: "failed", FinishReason.ABORT: "aborted"}.get(outcome, "finished")
        self.failed += how == "failed"
        self.aborted += how == "aborted"
        self.finished += how == "finished"
        if self.journal is not None:
            self.journal.end(request_id, how)
