"""The step loop: launches the five stages and keeps the host's work under the device's.

    host    | schedule 1 |  launch 1 . publish 0 . wait     | apply 1 + schedule 2 | launch 2 . publish 1 ...
    draft   |            [draft 1]                          [refill 1 ...........][draft 2]
    target  |                     [verify 1 .... ][accept 1]                               [verify 2 ...

One host wait a step, the report. An EXACT refill needs it too, a PADDED one is launched before it. Where the streams'
threads take every core (`Device.overlaps`), the host waits for a decode step's refill as well before it works.
Invariants: between a step's report and the next launch nothing on a stream reads the scheduler's state (plans are
frozen); what a refill writes is waited for by the next draft, hence by the next verify.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

import torch

from specd.commit import RowReport, row_report
from specd.device import Device, Handle, ready
from specd.errors import EngineError, SpecdError
from specd.log import get_logger
from specd.pipeline.accept import AcceptStage
from specd.pipeline.draft import DraftStage
from specd.pipeline.failures import FailureLimit
from specd.pipeline.masks import MaskStage
from specd.pipeline.plan import ScheduledStep
from specd.pipeline.prompt_scores import split_scores
from specd.pipeline.refill import RefillStage
from specd.pipeline.schedule import Scheduler
from specd.pipeline.verify import VerifyBatch, VerifyStage
from specd.request import SequenceDelta
from specd.step import AcceptanceReport, DraftSource, StepPlan, StepStats
from specd.tensors import Acceptance, DraftState, DraftTokens, TargetOutput

log = get_logger(__name__)

MAX_FAILURES = 3  # in a row; then the drafter is given up


@dataclasses.dataclass(slots=True)
class Launched:
    """One step on its way."""

    scheduled: ScheduledStep
    batch: Handle[VerifyBatch]
    drafts: Handle[DraftTokens]
    output: Handle[TargetOutput]
    accepted: Handle[Acceptance]
    report: Handle[AcceptanceReport]
    num_draft_steps: int
    refill: Handle[DraftState] | None = None
    refill_counted: bool = False  # its time is in the statistics

    @property
    def plan(self) -> StepPlan:
        return self.scheduled.plan


class Pipeline:
    """Runs steps while there is work. Owns the carry; everything else belongs to the stages."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        device: Device,
        draft: DraftStage,
        verify: VerifyStage,
        masks: MaskStage,
        accept: AcceptStage,
        refill: RefillStage | None,
        make_carry: Callable[[], DraftState] | None,
        publish: Callable[[list[SequenceDelta]], None],
    ) -> None:
        self.scheduler = scheduler
        self.paused = False  # no step is scheduled; what is on its way is finished
        self._num_steps = 0
        self.last_step_s = time.monotonic()
        self._device = device
        self._draft = draft
        self._verify = verify
        self._masks = masks
        self._accept = accept
        self._refill = refill
        self._make_carry = make_carry
        self._carry = None if make_carry is None else ready(make_carry())
        self._publish = publish
        self._work = asyncio.Event()
        self._idle = True  # `run` waits for work
        self._failures = FailureLimit()
        self._refill_failures = self._draft_failures = 0
        self._last_report_s = 0.0

    def wake(self) -> None:
        """Something was added or aborted."""
        if self._idle:
            self.last_step_s = time.monotonic()  # being idle was no stall
        self._work.set()

    async def run(self) -> None:
        """Steps until cancelled. An exception here is a bug or a dead device: the engine fails every stream."""
        deltas: list[SequenceDelta] = []
        scheduled: ScheduledStep | None = None
        previous: Launched | None = None
        while True:
            if scheduled is None:
                self._publish(deltas)
                self._idle = True
                await self._work.wait()
                self._idle = False
                self._work.clear()
                self._last_report_s = time.perf_counter()
                deltas, scheduled = self._next_step([])
                continue
            launched = self._launch(scheduled)
            self._publish(deltas)
            async with asyncio.TaskGroup() as group:
                caught_up = group.create_task(self._catch_up(launched, previous))
                planned = group.create_task(self._commit_and_schedule(launched, previous, caught_up))
            deltas, scheduled = planned.result()
            previous = launched

    # ---------------------------------------------------------------- one step

    def _launch(self, scheduled: ScheduledStep) -> Launched:
        plan = scheduled.plan
        drafts, forwards = self._draft.launch(plan, self._carry)
        batch = self._verify.prepare(plan)
        masks = self._masks.launch(plan, drafts)
        output = self._verify.launch(plan, batch, drafts)
        accepted, report = self._accept.launch(plan, batch, drafts, output, masks)
        return Launched(scheduled, batch, drafts, output, accepted, report, forwards)

    async def _catch_up(self, launched: Launched, previous: Launched | None) -> None:
        """Launches the refill: at once, or when the report is there."""
        if self._refill is None or self._carry is None or self.scheduler.traits is None:
            return
        if not (launched.plan.refills > 0).any():
            return
        if self._refill.padded(launched.plan):
            launched.refill = self._refill.launch_padded(
                launched.plan, launched.batch, launched.output, launched.accepted, self._carry
            )
        else:
            try:
                report = await launched.report
            except Exception as error:  # noqa: BLE001 - the other task of the group handles it; there is nothing to refill
                log.debug("refill_skipped", step=launched.plan.step, error=repr(error))
                return
            if _refill_error(previous) is not None:
                return
            launched.refill = self._refill.launch_exact(launched.plan, report, self._carry)
        self._carry = launched.refill

    async def _commit_and_schedule(
        self, launched: Launched, previous: Launched | None, caught_up: asyncio.Task[None]
    ) -> tuple[list[SequenceDelta], ScheduledStep | None]:
        if not (self._device.overlaps or launched.scheduled.num_prefill_tokens):  # nobody's first token waits
            await caught_up  # before the report: to wake up twice would take a core from the refill
            if launched.refill is not None:
                await launched.refill.settled()
        reports, whole = await self._reports(launched)
        self._measure(launched, previous, reports)
        start = time.perf_counter()
        with self._device.timeline.measure("schedule", launched.plan.step + 1):
            deltas = self.scheduler.apply(launched.scheduled, reports)
            committed = time.perf_counter()
            if whole:
                self._check_drafts(launched, reports)
            self._check_refill(launched, previous, whole=whole)
            deltas, scheduled = self._next_step(deltas)
        self.scheduler.counters.worked(commit_s=committed - start, schedule_s=time.perf_counter() - committed)
        if self._device.frames is not None and previous is not None:
            self._device.frames.retire(previous.plan.step)
        return deltas, scheduled

    def _next_step(self, deltas: list[SequenceDelta]) -> tuple[list[SequenceDelta], ScheduledStep | None]:
        deltas = deltas + self.scheduler.reap()
        scheduled = None if self.paused else self.scheduler.schedule(self._num_steps)
        self._num_steps += scheduled is not None
        return deltas, scheduled

    # ---------------------------------------------------------------- when a stage fails

    async def _reports(self, launched: Launched) -> tuple[list[RowReport | SpecdError], bool]:
        """One report or error a row, and whether the step succeeded as a whole."""
        rows = list(range(launched.plan.num_rows))
        try:
            report = await launched.report
        except Exception as error:  # noqa: BLE001 - whatever a forward raises ends at most the requests that cause it
            log.error("step_failed", step=launched.plan.step, rows=len(rows), error=repr(error))
            found = await self._isolate(launched.scheduled, rows, retry=launched.plan.max_drafts > 0)
            self._failures.note(computed=any(isinstance(report, RowReport) for report in found.values()))
            return [found[row] for row in rows], False
        self._failures.note(computed=True)
        return _row_reports(launched.scheduled, rows, report), True

    async def _isolate(
        self, scheduled: ScheduledStep, rows: list[int], *, retry: bool
    ) -> dict[int, RowReport | SpecdError]:
        """Computes rows of a failed step again in halves, without drafts, until the ones that fail are alone."""
        if len(rows) == 1 and not retry:
            return {rows[0]: EngineError("the engine failed while it computed this request")}
        halves = [rows] if len(rows) == 1 else [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        found: dict[int, RowReport | SpecdError] = {}
        for half in halves:
            plan = scheduled.plan.select(half, drafts=False)
            drafts = ready(
                DraftTokens(torch.zeros((len(half), 0), dtype=torch.int64, device=self._device.torch_device))
            )
            batch, masks = self._verify.prepare(plan), self._masks.launch(plan, drafts)
            _, handle = self._accept.launch(plan, batch, drafts, self._verify.launch(plan, batch, drafts), masks)
            try:
                report = await handle
            except Exception as error:  # noqa: BLE001 - see _reports
                log.error("rows_failed", step=plan.step, rows=len(half), error=repr(error))
                found |= await self._isolate(scheduled, half, retry=False)
            else:
                found |= dict(zip(half, _row_reports(scheduled, half, report), strict=True))
        return found

    def _check_refill(self, launched: Launched, previous: Launched | None, *, whole: bool) -> None:
        """Puts the drafter's marks back when its state is in doubt. A refill is over when the next report is there."""
        if self._make_carry is None:
            return
        error = _refill_error(previous)
        if error is None:
            if previous is not None and previous.refill is not None:
                self._refill_failures = 0
            if not whole:
                self._restart_drafter(launched)
            return
        self._refill_failures += 1
        self.scheduler.counters.failed_refills += 1
        log.warning("refill_failed", in_a_row=self._refill_failures, error=repr(error))
        self._restart_drafter(launched)
        if self._refill_failures >= MAX_FAILURES:
            self._give_up_drafter(self._refill_failures)

    def _check_drafts(self, launched: Launched, reports: list[RowReport | SpecdError]) -> None:
        """Counts steps whose drafter failed. Its rows' drafts were all -1: they cost verify's time and no more."""
        asked = launched.plan.sources == DraftSource.DRAFTER
        if not asked.any() or self.scheduler.traits is None:
            return
        drafted = (isinstance(r, RowReport) and r.num_drafts > 0 for r, a in zip(reports, asked, strict=True) if a)
        if any(drafted):
            self._draft_failures = 0
            return
        self._draft_failures += 1
        self.scheduler.counters.failed_drafts += 1
        if self._draft_failures >= MAX_FAILURES:
            self._give_up_drafter(self._draft_failures)

    def _give_up_drafter(self, failures: int) -> None:
        log.error("drafter_given_up", failures=failures)
        self.scheduler.give_up_drafter()

    def _restart_drafter(self, launched: Launched) -> None:
        """Nothing the drafter has computed is used again, this step's refill included: it would not count as its own.

        A refill that still runs is harmless: no carry is valid now, and the next refill follows it on its stream.
        """
        assert self._make_carry is not None
        self.scheduler.refill_failed(launched.scheduled)
        launched.refill = None
        self._carry = ready(self._make_carry())

    # ---------------------------------------------------------------- measuring

    def _measure(self, launched: Launched, previous: Launched | None, reports: list[RowReport | SpecdError]) -> None:
        now = time.perf_counter()
        scheduled = launched.scheduled
        good = [report for report in reports if isinstance(report, RowReport)]
        refill_s, num_refill_rows = _refilled(previous, launched)
        stats = StepStats(
            step=scheduled.plan.step,
            num_rows=scheduled.plan.num_rows,
            num_tokens=scheduled.plan.num_tokens,
            num_prefill_tokens=scheduled.num_prefill_tokens,
            num_draft_tokens=int(scheduled.plan.num_drafts.sum()),
            num_draft_steps=launched.num_draft_steps,
            num_accepted=sum(report.num_accepted for report in good),
            num_emitted=sum(len(report.tokens) for report in good),
            num_refill_rows=num_refill_rows,
            verify_s=launched.batch.duration_s + launched.output.duration_s + launched.accepted.duration_s,
            draft_s=launched.drafts.duration_s,
            refill_s=refill_s,
            duration_s=now - max(self._last_report_s, 0.0),
            accept_s=launched.accepted.duration_s,
        )
        self._last_report_s = now
        self.last_step_s = time.monotonic()
        self.scheduler.counters.measured(stats)
        if len(good) == len(reports):
            self.scheduler.length.observe_step(stats)


def _row_reports(scheduled: ScheduledStep, rows: list[int], report: AcceptanceReport) -> list[RowReport | SpecdError]:
    """Rows of a report; `rows` are their indices in the scheduled step."""
    asked = scheduled.plan.prompt_scores
    prompts = split_scores(report, [asked[row] if asked else None for row in rows])
    drafted = (report.drafts >= 0).sum(axis=1).tolist()  # fewer than planned when the drafter failed
    sequences = [scheduled.rows[row].sequence for row in rows]
    return [
        row_report(
            report,
            i,
            num_drafts=drafted[i],
            num_logprobs=sequence.sampling.logprobs,
            prompt_logprobs=prompts[i],
            tells_drafts=sequence.request.speculation.detail == "tokens",
        )
        for i, sequence in enumerate(sequences)
    ]


def _refilled(*steps: Launched | None) -> tuple[float, int]:
    """Seconds of the refills that are over and not counted yet, and how many rows one had; 0 rows when that is no
    measure of a decode step: there are several refills, or a prompt's."""
    seconds, rows = 0.0, []
    for step in steps:
        if step is None or step.refill is None or step.refill_counted or not step.refill.done():
            continue
        step.refill_counted = True
        seconds += step.refill.duration_s
        rows.append(0 if step.scheduled.num_prefill_tokens else int((step.plan.refills > 0).sum()))
    return seconds, rows[0] if len(rows) == 1 else 0


def _refill_error(launched: Launched | None) -> BaseException | None:
    return None if launched is None or launched.refill is None else launched.refill.error()
