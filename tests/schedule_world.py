"""A device made of hashes, for the tests of the scheduler: what every stage reads and writes, without a tensor.

A KV slot holds the hash of the prefix it stands for, computed from what the slot before it holds when that is read
through the plan's page table. One wrong page, length, mark or carry changes every hash behind it, and with it the next
token. `World.step` does what `pipeline/loop.py` does in one step; what must hold is in `schedule_checks.py`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection
from collections.abc import Sequence as Items

import numpy as np

from specd.commit import RowReport, row_report
from specd.errors import EngineError, SpecdError
from specd.pages import BlockKeys, PagePool
from specd.pipeline.counters import Counters
from specd.pipeline.draft_length import DraftLength, DraftRequest, FixedLength
from specd.pipeline.plan import ScheduledStep
from specd.pipeline.refill import missing_tokens
from specd.pipeline.schedule import Limits, Scheduler
from specd.request import Request, SamplingParams, SequenceDelta, SpeculationParams
from specd.sequence import Phase, Sequence
from specd.step import AcceptanceReport, DraftSource, DraftTraits, RefillMode, StepPlan
from specd.text import Detokenizer, LeadingSpace
from tests.schedule_checks import chain, check, check_over, check_plan, link, truth

VOCAB = 13
MAX_DRAFT = 8
PROMPT = [*range(1, 13)] * 4
LM = DraftTraits(name="lm", max_depth=MAX_DRAFT)
EXACT_HEAD = DraftTraits(name="head", max_depth=MAX_DRAFT, shifted=True, features="last")
PADDED_HEAD = dataclasses.replace(EXACT_HEAD, refill_mode=RefillMode.PADDED)


def next_token(content: int) -> int:
    return link(content, 7) % VOCAB


def continuation(tokens: Items[int], count: int) -> list[int]:
    """What the target says after `tokens`, `count` tokens long."""
    content = chain(tokens)[-1]
    out: list[int] = []
    for _ in range(count):
        out.append(next_token(content))
        content = link(content, out[-1])
    return out


class Letters:
    """A tokenizer of one letter a token."""

    special_ids: Collection[int] = frozenset()
    leading_space = LeadingSpace.KEEP

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([ord("a") + token_id])


class Guesser:
    """A proposer that knows what the target will say and errs at random."""

    source = DraftSource.NGRAM
    tally = None

    def __init__(self, world: World) -> None:
        self.world = world
        self.tokens: list[int] = []

    def extend(self, tokens: Items[int]) -> None:
        self.tokens += tokens

    def propose(self, max_tokens: int) -> list[int]:
        return self.world.guess(self.tokens, self.world.random.randint(0, max_tokens))


class AnyLength:
    """A policy that wants anything at any time."""

    def __init__(self, rng: random.Random) -> None:
        self.random = rng
        self.asked: list[int] = []

    def begin(self, num_sequences: int, *, may_draft: bool = True) -> None:
        assert num_sequences >= 0

    def choose(self, requests: Items[DraftRequest], num_plain: int) -> list[int]:
        return [self.random.randint(0, request.max_drafts) for request in requests]

    def prefers(self, sequence: Sequence, source: DraftSource, other: DraftSource) -> bool:
        return self.random.random() < 0.7

    def wants_drafter(self, sequence: Sequence, source: DraftSource) -> bool:
        return self.random.random() < 0.8

    def observe_row(self, sequence: Sequence, source: DraftSource, *, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted

    def observe_step(self, stats: object) -> None:
        raise AssertionError("steps are measured by the loop")

    def forget(self, sequence: Sequence) -> None:
        assert sequence.phase is Phase.FINISHED


@dataclasses.dataclass(frozen=True)
class Faults:
    """Probabilities, each tried once a step (nan, broken: once a row)."""

    step: float = 0.0  # the forward of the whole step fails
    broken: float = 0.0  # ... and then that of a row alone
    nan: float = 0.0
    draft: float = 0.0
    refill: float = 0.0
    give_up: float = 0.0  # after a failed refill


NO_FAULTS = Faults()


class World:
    """A scheduler, the KV it plans for, and the loop in between."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        max_running: int = 4,
        max_tokens: int = 64,
        max_len: int = 64,
        mixed: str = "speculate",
        prefix_cache: bool = True,
        traits: DraftTraits | None = None,
        length: int | None = 4,
        pad_proposals: bool = False,
        seed: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        self.accuracy = 0.7
        self.max_len = max_len
        self.traits = traits
        self.extra = 0 if traits is None else traits.extra_slots
        self.shifted = traits is not None and traits.shifted
        self.pool = PagePool(num_pages=num_pages, page_size=page_size, prefix_cache=prefix_cache)
        policy: DraftLength = AnyLength(self.random) if length is None else FixedLength(length)
        limits = Limits(max_running, max_tokens, mixed, pad_proposals)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            pool=self.pool, limits=limits, traits=traits, length=policy, counters=Counters(MAX_DRAFT)
        )
        self.target: dict[int, int] = {}
        self.drafter: dict[int, int] = {}
        self.carry: dict[int, int] = {}
        self.scheduled: ScheduledStep | None = None
        self.refill_error = False  # the last refill failed, and nobody has looked yet
        self.num_steps = 0
        self.sequences: list[Sequence] = []
        self.deltas: dict[int, list[SequenceDelta]] = {}  # by id(sequence)
        self.key_tokens: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}  # (salt, prefix) of each key ever seen
        self.shown: dict[int, list[int]] = {}  # what a sequence's proposer has been shown, by id(sequence)
        self.history: list[ScheduledStep] = []  # every step that was launched

    # ---------------------------------------------------------------- requests

    def add(
        self,
        prompt: Items[int],
        *,
        max_tokens: int = 8,
        n: int = 1,
        max_draft: int = MAX_DRAFT,
        guesses: bool = False,
        stop_token_ids: tuple[int, ...] = (),
        salt: bytes = b"",
    ) -> list[Sequence]:
        request = Request(
            request_id=f"r{len(self.sequences)}",
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, seed=0, stop_token_ids=stop_token_ids),
            speculation=SpeculationParams(detail="detailed"),
            n=n,
            cache_salt=salt,
        )
        sequences = [self._sequence(request, index, max_draft, guesses) for index in range(n)]
        for sequence in sequences:
            self.sequences.append(sequence)
            self.deltas[id(sequence)] = []
            self.scheduler.add(sequence)
        return sequences

    def _sequence(self, request: Request, index: int, max_draft: int, guesses: bool) -> Sequence:
        size, guesser = self.pool.page_size, Guesser(self) if guesses else None
        sequence = Sequence(
            request,
            index,
            eos_ids=(),
            max_len=self.max_len,
            max_draft=max_draft,
            histogram_len=MAX_DRAFT + 1,
            detokenizer=Detokenizer(Letters()),
            keys=BlockKeys(secret=b"s", salt=request.cache_salt, page_size=size, lookahead=self.shifted),
            proposers=() if guesser is None else (guesser,),
        )
        if guesser is not None:
            self.shown[id(sequence)] = guesser.tokens
        return sequence

    def expected(self, sequence: Sequence) -> list[int]:
        """What it says in the end, whatever the schedule."""
        prompt = sequence.request.prompt_ids
        said = continuation(prompt, sequence.limit - len(prompt))
        ends = [i for i, token in enumerate(said) if token in sequence.sampling.stop_token_ids]
        return said[: ends[0] + 1] if ends else said

    def guess(self, tokens: Items[int], count: int) -> list[int]:
        """`count` tokens that continue `tokens`, each right with probability `accuracy`."""
        tokens = list(tokens)
        out: list[int] = []
        for _ in range(count):
            right = self.random.random() < self.accuracy
            out.append((continuation(tokens + out, 1)[0] + (0 if right else 1)) % VOCAB)
        return out

    # ---------------------------------------------------------------- the loop

    def step(self, faults: Faults = NO_FAULTS) -> bool:
        """One turn of the loop, False when there was nothing to run."""
        if self.scheduled is None:
            self._schedule([])
            check(self)
            return self.scheduled is not None
        scheduled, plan = self.scheduled, self.scheduled.plan
        self.history.append(scheduled)
        check_plan(self, scheduled)
        drafts = self.draft(scheduled, fails=self._happens(faults.draft))
        report = None if self._happens(faults.step) else self.verify(plan, drafts, faults)
        refills = report is not None and not self.refill_error and bool((plan.refills > 0).any())
        early = self._happens(0.5)  # the refill may be over before the report is looked at, or still run afterwards
        refill_fails = self._happens(faults.refill)
        if report is not None and refills and early:
            self.refill(plan, report, fails=refill_fails)
        deltas = self.scheduler.apply(scheduled, self._rows(scheduled, report, faults))
        if self.refill_error or (report is None and self.traits is not None):
            self.scheduler.refill_failed(scheduled)
            self.carry.clear()
        if self.refill_error and self._happens(faults.give_up):
            self.scheduler.give_up_drafter()
        self._schedule(deltas)
        if report is not None and refills and not early:
            self.refill(plan, report, fails=refill_fails)
        self.refill_error = refills and refill_fails
        check(self)
        return True

    def run(self, *, most: int = 3000) -> None:
        """Until nothing is left to do; then nothing may be held."""
        for _ in range(most):
            if not self.step():
                check_over(self)
                return
        raise AssertionError("the scheduler makes no progress")

    def _schedule(self, deltas: list[SequenceDelta]) -> None:
        deltas = deltas + self.scheduler.reap()
        self.num_steps += 1
        self.scheduled = self.scheduler.schedule(self.num_steps)
        live = {(s.request.request_id, s.index): s for s in self.sequences}
        for delta in deltas:
            self.deltas[id(live[delta.request_id, delta.index])].append(delta)

    def _happens(self, probability: float) -> bool:
        return self.random.random() < probability

    # ---------------------------------------------------------------- the stages

    def slot(self, plan: StepPlan, row: int, position: int) -> int:
        pages = plan.pages(row)
        return int(pages[position // plan.page_size]) * plan.page_size + position % plan.page_size

    def draft(self, scheduled: ScheduledStep, *, fails: bool) -> list[list[int]]:
        """Proposals, and the drafter's chain from the carry; extend writes the drafter's KV.

        The draft waits for the refill before it: when that failed, so does the draft.
        """
        plan, out = scheduled.plan, []
        for row, entry in enumerate(scheduled.rows):
            count = int(plan.num_drafts[row])
            if entry.source != DraftSource.DRAFTER or count == 0:
                out.append(plan.host_drafts[row, :count].tolist())
                continue
            if self.refill_error:
                out.append([-1] * count)
                continue
            tokens = entry.sequence.tokens
            assert self.carry[int(plan.slots[row])] == truth(self, tokens)[-1], "the carry is not the newest token's"
            drafts = self.guess(tokens, count)
            for depth, token in enumerate(drafts[:-1]):
                self._write_draft(plan, row, len(tokens) - 1 + self.extra + depth, token)
            out.append([-1] * count if fails else drafts)
        return out

    def _write_draft(self, plan: StepPlan, row: int, position: int, token: int) -> None:
        # A head's own guesses never hold a target feature: they are junk until refill overwrites them.
        before = self.drafter.get(self.slot(plan, row, position - 1), -1)
        content = self.random.getrandbits(60) if self.shifted else link(before, token)
        self.drafter[self.slot(plan, row, position)] = content

    def verify(self, plan: StepPlan, drafts: list[list[int]], faults: Faults = NO_FAULTS) -> AcceptanceReport:
        """The target's forward and the match rule."""
        size, width = plan.num_rows, plan.max_drafts
        tokens, failed = np.full((size, width + 1), -1, np.int32), np.zeros(size, np.int32)
        shown, accepted = np.full((size, width), -1, np.int32), np.zeros(size, np.int32)
        for row in range(size):
            said = self._forward(plan, row, drafts[row])
            shown[row, : len(drafts[row])] = drafts[row]
            if not plan.emits[row]:
                continue
            if self._happens(faults.nan):
                failed[row] = 1
                continue
            while accepted[row] < len(drafts[row]) and drafts[row][accepted[row]] == said[accepted[row]]:
                accepted[row] += 1
            tokens[row, : accepted[row] + 1] = said[: accepted[row] + 1]
        return AcceptanceReport(tokens=tokens, num_accepted=accepted, failed=failed, drafts=shown)

    def _forward(self, plan: StepPlan, row: int, drafts: list[int]) -> list[int]:
        """Writes the row's target KV; gives the target's token after the last known one and after each draft."""
        start = int(plan.num_known[:row].sum())
        known = plan.tokens[start : start + int(plan.num_known[row])].tolist()
        first = int(plan.kv_lens[row] - plan.query_lens[row])
        said = []
        for position, token in enumerate([*known, *(max(token, 0) for token in drafts)], first):
            slot = self.slot(plan, row, position)
            record = self.pool._pages[slot // plan.page_size]
            assert record.refs == 1, "verify writes a page that is not this sequence's alone"
            assert record.key is None, "verify writes a published page"
            before = 0 if position == 0 else self.target[self.slot(plan, row, position - 1)]
            self.target[slot] = link(before, token)
            said.append(next_token(self.target[slot]))
        return said[len(known) - 1 :]

    def refill(self, plan: StepPlan, report: AcceptanceReport, *, fails: bool) -> None:
        """EXACT or PADDED as `RefillStage` chooses; a failed one leaves junk behind."""
        if fails:
            for row in np.flatnonzero(plan.refills).tolist():
                for position in range(int(plan.drafter_lens[row]), int(plan.kv_lens[row])):
                    self.drafter[self.slot(plan, row, position)] = self.random.getrandbits(60)
            return
        padded = self.traits is not None and self.traits.refill_mode is RefillMode.PADDED
        contiguous = (plan.drafter_lens == plan.kv_lens - plan.query_lens) & (plan.refills > 0)
        if padded and contiguous.all():
            self._refill_padded(plan, report)
            return
        missing = missing_tokens(plan, report, shifted=self.shifted)
        for i, (row, tokens, start) in enumerate(zip(missing.rows, missing.tokens, missing.starts, strict=True)):
            for position, token in enumerate(tokens, start):
                content = self._write_refill(plan, row, position, token)
            if i in missing.carried:
                self.carry[int(plan.slots[row])] = content

    def _write_refill(self, plan: StepPlan, row: int, position: int, token: int) -> int:
        slot = self.slot(plan, row, position)
        before = 0 if position == 0 else self.drafter.get(self.slot(plan, row, position - 1), -1)
        content = link(before, self.target[slot], token) if self.shifted else link(before, token)
        self.drafter[slot] = content
        return content

    def _refill_padded(self, plan: StepPlan, report: AcceptanceReport) -> None:
        start = 0
        for row in range(plan.num_rows):
            known, emits = int(plan.num_known[row]), bool(plan.emits[row])
            verified = plan.tokens[start : start + known].tolist() + report.drafts[row].clip(0).tolist()
            start += known
            last = known - 1 + int(report.num_accepted[row]) if emits else known - 1
            inserted = report.tokens[row, report.num_accepted[row]] if emits else plan.next_prompt_tokens[row]
            first = int(plan.drafter_lens[row])
            for i in range(int(plan.query_lens[row])):
                if i > last:
                    self.drafter[self.slot(plan, row, first + i)] = self.random.getrandbits(60)
                    continue
                token = int(inserted) if i == last else verified[i + 1]
                content = self._write_refill(plan, row, first + i, token)
                self.carry[int(plan.slots[row])] = content

    def _rows(
        self, scheduled: ScheduledStep, report: AcceptanceReport | None, faults: Faults
    ) -> list[RowReport | SpecdError]:
        """What the loop hands to apply; without a report the step failed and each row is computed again, alone."""
        plan, rows = scheduled.plan, range(len(scheduled.rows))
        if report is not None:
            return [row_report(report, i, num_drafts=int(plan.num_drafts[i]), num_logprobs=None) for i in rows]
        out: list[RowReport | SpecdError] = []
        for row in rows:
            alone = self.verify(plan.select([row], drafts=False), [[]])
            broken = self._happens(faults.broken)
            out.append(EngineError("x") if broken else row_report(alone, 0, num_drafts=0, num_logprobs=None))
        return out
