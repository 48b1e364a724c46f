"""Stage 1, on the host: who runs, how many drafts, which pages. No torch.

One path for everything: a row is `num_known` tokens that the host knows and `num_drafts` guesses. A prompt chunk is a
row without drafts, a decode row knows exactly one token, the root.

Order of a step, which is also the order of rights: decode rows (oldest first, never starved by prompts), their drafts,
prompts that have begun, prompts that wait. Every page that the step can touch is owned before it is launched: the
drafts', and the one more slot that an LM drafter fills with the newest token.

When pages run out the youngest sequence is preempted: its pages go back (full ones stay findable), and it computes its
tokens again later. Its text does not change: noise is keyed by position.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import Literal

from specd.commit import RowReport, abortion, commit, failure
from specd.errors import EngineError, SpecdError
from specd.log import get_logger
from specd.pages import PagePool
from specd.pipeline import pinned
from specd.pipeline.counters import Counters
from specd.pipeline.draft_length import DraftLength, DraftRequest, FixedLength
from specd.pipeline.plan import Row, ScheduledStep, build_plan
from specd.pipeline.proposals import propose
from specd.pipeline.undrafted import count_undrafted
from specd.pipeline.waiting import WaitingQueue
from specd.request import FinishReason, SequenceDelta
from specd.sequence import Phase, Sequence, page_ids
from specd.status import StepRecord
from specd.step import DraftSource, DraftTraits, Refill

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one step may hold (`scheduler.*`)."""

    max_running: int
    max_tokens: int
    mixed: Literal["speculate", "plain"] = "speculate"
    pad_proposals: bool = False  # `speculation.draft_len` is a number: proposals are filled up to exactly that many
    priority_ageing_s: float = 10.0  # of waiting that one level of priority is worth


class Scheduler:
    """Owns the sequences, the page pool and the token budget. Called between a step's report and the next launch."""

    def __init__(
        self,
        *,
        pool: PagePool,
        limits: Limits,
        traits: DraftTraits | None,
        length: DraftLength,
        counters: Counters,
    ) -> None:
        self.pool = pool
        self.counters = counters
        self.limits = limits
        self.length = length
        self._configured = length, limits
        self.traits = traits  # None: no drafter, or it was given up
        self.given_up = self.switched_off = False  # the drafter, since it failed; drafts, by an operator
        self.waiting = WaitingQueue(ageing_s=limits.priority_ageing_s)
        self.running: list[Sequence] = []  # oldest first
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._extra_slots = 0 if traits is None else traits.extra_slots

    # ---------------------------------------------------------------- sequences

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def reap(self) -> list[SequenceDelta]:
        """Ends what was aborted since the last step; its pages are free afterwards."""
        aborted = [s for s in (*self.running, *self.waiting) if s.abort_requested]
        for sequence in aborted:
            self._finish(sequence)
        deltas = [abortion(sequence) for sequence in aborted]
        for delta in deltas:
            self.counters.ended(delta)
        return deltas

    def apply(self, scheduled: ScheduledStep, reports: Rows[RowReport | SpecdError]) -> list[SequenceDelta]:
        """Commits one step's report, row by row; an error instead of a report ends that row's sequence alone."""
        deltas = []
        for row, report in zip(scheduled.rows, reports, strict=True):
            try:
                delta = self._apply_row(row, report, scheduled.plan.step)
            except Exception as error:
                log.error("commit_failed", request_id=row.sequence.request.request_id, exc_info=error)
                delta = failure(row.sequence, EngineError("the engine failed while it computed this request"))
            if delta is None:
                continue
            deltas.append(delta)
            self.counters.ended(delta)
            if delta.finish_reason is FinishReason.ERROR:
                self.pool.unpublish(row.sequence.pages)  # an earlier chunk may hold what made it fail
            if delta.finish_reason is not None:
                self._finish(row.sequence)
        return deltas

    def _apply_row(self, row: Row, report: RowReport | SpecdError, step: int) -> SequenceDelta | None:
        sequence = row.sequence
        if isinstance(report, SpecdError):
            return failure(sequence, report)
        sequence.prompt_logprobs += report.prompt_logprobs
        delta = None
        if row.emits and report.failed and report.num_drafts:
            # What stands before the place that failed is good, and may end the text: it is computed again, plainly.
            sequence.max_draft, sequence.carry_valid = 0, False
            return None
        if row.emits:
            delta = commit(sequence, report, source=row.source, step=step, num_predicted=row.num_predicted)
            self.counters.text_s += sequence.text_s
            self.counters.committed(delta, row.source, report.num_drafts, num_planned=row.num_drafts)
            self.waiting.charge(sequence, len(delta.token_ids))
            name = row.source.name.lower() if report.num_drafts else "none"
            sequence.history.append(StepRecord(step, name, report.num_drafts, len(delta.token_ids)))
            if report.failed:
                return delta  # what it computed is in doubt: nothing of it is published
            sequence.num_computed = len(sequence.tokens) - 1
            self._observe(row, report)
        else:
            sequence.num_computed += row.num_known
        self._advance_drafter(row)
        self._publish(sequence)
        return delta

    def refill_failed(self, scheduled: ScheduledStep) -> None:
        """The drafter's KV is in doubt: every mark goes back to 0, nothing else happens."""
        self.pool.forget_drafter()
        for sequence in (*self.running, *(row.sequence for row in scheduled.rows)):
            sequence.drafter_len = sequence.num_marked = 0
            sequence.carry_valid = False

    def give_up_drafter(self) -> None:
        """The drafter keeps failing: from now on there is none."""
        self.traits, self.given_up = None, True

    def override_length(self, length: DraftLength | None, *, pad: bool = False) -> None:
        """Another length policy from the next step on; None: the configured one, with what it has learnt."""
        self.switched_off = isinstance(length, FixedLength) and not pad
        if length is None:
            self.length, self.limits = self._configured
        else:
            self.length, self.limits = length, dataclasses.replace(self._configured[1], pad_proposals=pad)

    @contextlib.contextmanager
    def pinned(self, length: int, *, pad: bool = True) -> Iterator[None]:
        """Exactly `length` drafts a step while this lasts (without pad: as many of them as a proposer really has)."""
        before = self.length, self.limits
        self.length, self.limits = FixedLength(length), dataclasses.replace(self.limits, pad_proposals=pad)
        try:
            yield
        finally:
            self.length, self.limits = before

    # ---------------------------------------------------------------- one step

    def schedule(self, step: int) -> ScheduledStep | None:
        """The next step, or None when there is nothing to run."""
        num_sequences = min(len(self.running) + len(self.waiting), self.limits.max_running)
        self.length.begin(num_sequences, may_draft=any(sequence.max_draft for sequence in self.running))
        rows = self._decode_rows()
        budget = self.limits.max_tokens - len(rows)
        if self.limits.mixed == "plain":
            prefills = self._prefill_rows(budget)
            if not prefills:
                self._add_drafts(rows, budget)
        else:
            budget -= self._add_drafts(rows, budget - self._prompt_share(budget))
            prefills = self._prefill_rows(budget)
        count_undrafted(rows, self, mixed=self.limits.mixed == "plain" and bool(prefills))
        rows += prefills
        if not rows:
            return None
        self._add_refills(rows)
        for row in rows:
            row.sequence.draft_len = row.num_drafts
        return ScheduledStep(build_plan(step, rows, self.pool.page_size), tuple(rows))

    def _prompt_share(self, budget: int) -> int:
        """Tokens kept for prompts while there are any: drafts that pay must not keep them waiting."""
        if self.limits.pad_proposals:
            return 0  # pinned lengths are never cut; the configuration leaves room for prompts
        prompts = (self.waiting and self._free_slots) or any(not sequence.decoding for sequence in self.running)
        return budget // 4 if prompts else 0

    def _decode_rows(self) -> list[Row]:
        rows = []
        for sequence in self.running.copy():
            if not sequence.decoding:
                continue
            while sequence.phase is Phase.RUNNING and not self._reserve(sequence, sequence.num_computed + 1):
                self._preempt(self.running[-1])
            if sequence.phase is Phase.RUNNING:
                rows.append(Row(sequence, num_known=1, emits=True))
        return [row for row in rows if row.sequence.phase is Phase.RUNNING]

    def _add_drafts(self, rows: list[Row], budget: int) -> int:
        """Gives decode rows their drafts; returns how many there are in all."""
        requests, owners, proposals = [], [], []
        for row in rows:
            most = self._most_drafts(row.sequence)
            pad = self.limits.pad_proposals or pinned.is_pinned(row.sequence)
            proposal = propose(row.sequence, most, pad=pad, invent=self.traits is None and not self.given_up)
            draftable = self._draftable(row.sequence, most)
            if proposal and draftable and not pinned.prefers(self.length, row.sequence, proposal.source):
                row.passed_over, proposal = proposal, None
            if proposal:
                source, most = proposal.source, min(most, len(proposal.tokens))
            else:
                source, most = DraftSource.DRAFTER, draftable
            if most:
                requests.append(DraftRequest(row.sequence, source, most))
                owners.append(row)
                proposals.append(proposal)
        lengths = pinned.choose(self.length, requests, len(rows) - len(requests))
        total = 0
        for request, row, proposal, length in zip(requests, owners, proposals, lengths, strict=True):
            row.source, row.num_wanted = request.source, length
            if proposal:  # also kept when nothing is verified: it is compared with what comes
                row.host_drafts, row.num_guessed, row.tally = proposal.tokens, proposal.num_guessed, proposal.tally
            row.num_drafts = self._fit(row.sequence, min(length, budget - total))
            total += row.num_drafts
        return total

    def _most_drafts(self, sequence: Sequence) -> int:
        left = sequence.limit - len(sequence.tokens)
        depth = 64 if self.traits is None else self.traits.max_depth
        return max(0, min(sequence.max_draft, left - 1, depth))

    def _draftable(self, sequence: Sequence, most: int) -> int:
        """Of `most` drafts, those the drafter can make: none without a carry, none that leave its context."""
        if self.traits is None or not sequence.carry_valid:
            return 0
        if self.traits.max_context is not None:
            most = min(most, self.traits.max_context - self._extra_slots - len(sequence.tokens))
        return max(most, 0)

    def _fit(self, sequence: Sequence, drafts: int) -> int:
        """Most drafts (<= drafts) for which pages can be had without preempting anybody."""
        while drafts > 0 and not self._reserve(sequence, sequence.num_computed + 1 + drafts):
            drafts -= 1
        return max(drafts, 0)

    def _prefill_rows(self, budget: int) -> list[Row]:
        rows = []
        for sequence in self.running:
            if not sequence.decoding and budget > 0:
                rows.append(self._chunk(sequence, budget))
                budget -= rows[-1].num_known
        for sequence in self.waiting:
            if budget <= 0 or not self._free_slots:
                break
            if self._sibling_prefills(sequence):
                continue
            if not self._admit(sequence):
                break
            rows.append(self._chunk(sequence, budget))
            budget -= rows[-1].num_known
        return rows

    def _chunk(self, sequence: Sequence, budget: int) -> Row:
        left = len(sequence.tokens) - sequence.num_computed
        return Row(sequence, num_known=min(left, budget), emits=left <= budget)

    def _sibling_prefills(self, sequence: Sequence) -> bool:
        """Whether another choice of the same prompt is computing what this one would find in the prefix cache."""
        return self.pool.prefix_cache and any(
            other.request is sequence.request and other.num_output == 0 and other.num_prompt > self.pool.page_size
            for other in self.running
        )

    def _admit(self, sequence: Sequence) -> bool:
        """Moves a sequence from waiting to running with all pages of its tokens, or does nothing."""
        keys = sequence.keys.update(sequence.tokens, len(sequence.tokens) - 1)
        pages = self.pool.match(keys[: sequence.reusable(self.pool.page_size)])
        sequence.pages = page_ids(pages)
        if not self._reserve(sequence, len(sequence.tokens)):
            self.pool.release(pages)
            sequence.pages = page_ids()
            return False
        self.waiting.take(sequence)
        self.running.append(sequence)
        sequence.phase = Phase.RUNNING
        sequence.slot = self._free_slots.pop()
        sequence.num_published = len(pages)
        sequence.num_computed = len(pages) * self.pool.page_size
        sequence.drafter_len = self.pool.drafter_len(pages)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = time.monotonic()
            sequence.num_cached = sequence.num_computed
            self.counters.admitted(sequence)
        return True

    def _add_refills(self, rows: list[Row]) -> None:
        """Says what the drafter catches up after verify, oldest row first, within one step's token budget."""
        if self.traits is None:
            return
        budget = self.limits.max_tokens
        for row in rows:
            sequence = row.sequence
            longest = len(sequence.tokens) + row.num_drafts + self._extra_slots
            if self.traits.max_context is not None and longest > self.traits.max_context:
                continue
            source = row.source if row.num_drafts else DraftSource.NONE
            if sequence.max_draft == 0 or not pinned.wants_drafter(self.length, sequence, source):
                continue
            lacking = sequence.num_computed + row.num_known - sequence.drafter_len
            row.num_refill = max(0, min(lacking, budget))
            budget -= row.num_refill
            whole = row.num_refill >= lacking
            row.refill = Refill.NEWEST if row.emits and whole else Refill.KNOWN
            if row.refill == Refill.KNOWN and row.num_refill == 0:
                row.refill = Refill.NONE

    # ---------------------------------------------------------------- pages

    def _reserve(self, sequence: Sequence, num_slots: int) -> bool:
        """Makes the sequence own pages for num_slots KV slots and the drafter's extra one; False changes nothing."""
        size = self.pool.page_size
        missing = -(-(num_slots + self._extra_slots) // size) - len(sequence.pages)
        if missing > 0:
            pages = self.pool.allocate(missing)
            if pages is None:
                return False
            sequence.pages.extend(pages)
        return True

    def _publish(self, sequence: Sequence) -> None:
        """Makes the blocks findable whose target KV is final, with the drafter's marks."""
        size = self.pool.page_size
        keys = sequence.keys.update(sequence.tokens, sequence.num_computed)
        for i in range(sequence.num_published, min(len(keys), sequence.num_computed // size)):
            self.pool.publish(sequence.pages[i], keys[i])
            sequence.num_published = i + 1
        if self.traits is not None:
            reached = -(-sequence.drafter_len // size)  # pages; the others' marks are 0, and stay so while it rests
            for i in range(sequence.num_marked, min(sequence.num_published, reached)):
                self.pool.raise_drafter_len(sequence.pages[i], sequence.drafter_len - i * size)
            sequence.num_marked = min(sequence.num_published, sequence.drafter_len // size)

    def _advance_drafter(self, row: Row) -> None:
        """Marks what the refill that is about to run will have written."""
        sequence = row.sequence
        if row.refill == Refill.NEWEST:
            sequence.drafter_len = len(sequence.tokens) - 1 + self._extra_slots
        elif row.refill == Refill.KNOWN:
            sequence.drafter_len += row.num_refill
        sequence.carry_valid = row.refill == Refill.NEWEST

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.phase = Phase.WAITING
        sequence.num_preemptions += 1
        self.counters.preemptions += 1
        self.waiting.put_back(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.waiting.end(sequence, waiting=sequence.phase is Phase.WAITING)
        if sequence.phase is Phase.RUNNING:
            self._release(sequence)
        sequence.phase = Phase.FINISHED
        self.length.forget(sequence)
        self._configured[0].forget(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.pages, sequence.slot = page_ids(), -1
        sequence.num_computed = sequence.num_published = 0
        sequence.drafter_len = sequence.num_marked = 0
        sequence.carry_valid = False

    # ---------------------------------------------------------------- what was learnt

    def _observe(self, row: Row, report: RowReport) -> None:
        if row.passed_over and report.tokens:
            right = int(row.passed_over.tokens[0] == report.tokens[0])
            self.length.observe_row(row.sequence, row.passed_over.source, drafted=1, accepted=right)
        if report.num_drafts:
            self.length.observe_row(row.sequence, row.source, drafted=report.num_drafts, accepted=report.num_accepted)
            if row.tally is not None:
                drafted = min(report.num_drafts, row.num_guessed)
                row.tally.add(drafted, min(report.num_accepted, drafted))
        elif row.host_drafts and report.tokens:
            kept = int(row.host_drafts[0] == report.tokens[0])
            self.length.observe_row(row.sequence, row.source, drafted=1, accepted=kept)
