"""Requests in, streams of deltas out: owns the pipeline, the request table and the token streams.

Everything here runs on the event loop and never blocks it. Accepted requests end in exactly one of three ways, and
the counts always add up: accepted == finished + failed + aborted + live.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence as Items
from typing import Any

from specd.account import Account
from specd.admission import Admission
from specd.assembly import Parts, assemble
from specd.config import Config, SchedulerConfig
from specd.corpora import Corpora
from specd.deadlines import Deadlines, before_first_token
from specd.deltas import TokenStream
from specd.device import Device
from specd.errors import DrainingError, EngineError, RequestError, ShutdownError, SpecdError
from specd.log import get_logger
from specd.pages import BlockKeys
from specd.pipeline.counters import Counters
from specd.pipeline.length_override import LengthOverride
from specd.pipeline.loop import Pipeline
from specd.request import FinishReason, Request, SequenceDelta
from specd.selfcheck import self_check, warm_up
from specd.sequence import Phase, Sequence
from specd.snapshot import kv_status, live_sequences, page_map, request_detail, request_status
from specd.status import (
    EngineInfo,
    EngineState,
    EngineStats,
    KVStatus,
    LengthPolicy,
    PageMap,
    RequestDetail,
    RequestStatus,
)
from specd.text import Detokenizer, Tokenizer, TokenReadings

log = get_logger(__name__)


class _Live:
    """A request in the table."""

    def __init__(self, stream: TokenStream, sequences: list[Sequence]) -> None:
        self.stream = stream
        self.sequences = sequences
        self.ended: set[int] = set()  # choices whose last delta was handed out
        self.outcome = FinishReason.STOP  # the worst of its choices


class Engine:
    """See the module. `await Engine.create(config)` gives one that has already produced a token."""

    def __init__(self, parts: Parts) -> None:
        self.info: EngineInfo = parts.info
        self.tokenizer: Tokenizer = parts.tokenizer
        self.corpora: Corpora = parts.corpora
        self._readings = TokenReadings(parts.tokenizer)
        self._parts = parts
        self._scheduler = parts.scheduler
        self._limits = parts.config.scheduler
        self._admission = Admission(parts.scheduler.waiting)
        self._deadlines = Deadlines(self.abort)
        self._secret = os.urandom(32)
        self._live: dict[str, _Live] = {}
        self._state = EngineState.LOADING
        self._started_s = time.monotonic()
        self.account = Account()
        self._idle = asyncio.Event()
        self._idle.set()
        self._pipeline = Pipeline(
            scheduler=parts.scheduler,
            device=parts.device,
            draft=parts.draft,
            verify=parts.verify,
            masks=parts.masks,
            accept=parts.accept,
            refill=parts.refill,
            make_carry=None if parts.drafter is None else parts.make_carry,
            publish=self._publish,
        )
        self._length = LengthOverride(parts.scheduler, parts.config, self.info)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="specd-pipeline")

    @classmethod
    async def create(cls, config: Config, *, device: Device | None = None, grammars: bool = False) -> Engine:
        """Loads in a thread, starts the pipeline and sends a first request through draft and verify.

        grammars: loads what they need as well, which else would hold up everybody when the first one comes.
        Raises ConfigError, FetchError, ModelError, DraftError, or EngineError when the first tokens fail.
        """
        return await cls.start(await asyncio.to_thread(assemble, config, device=device, grammars=grammars))

    @classmethod
    async def start(cls, parts: Parts, *, warm: bool = True) -> Engine:
        """An engine over parts that are there already; `warm` sends the first request. Raises EngineError."""
        engine = cls(parts)
        try:
            engine._state = EngineState.READY
            if warm:
                submit, info, tokenizer = engine.submit, engine.info, engine.tokenizer
                with parts.scheduler.pinned(min(2, info.max_draft)):
                    await warm_up(submit, info, tokenizer)
                if parts.config.speculation.self_check and info.max_draft:
                    with parts.scheduler.pinned(info.max_draft, pad=False):
                        await self_check(submit, info, tokenizer)
                engine.reset_counters()
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def state(self) -> EngineState:
        return self._state

    # ---------------------------------------------------------------- requests

    async def prepare_grammar(self, request: Request) -> None:
        """Compiles the grammar of a request, if it has one: `submit` then takes it, when nothing is awaited in between.

        Raises RequestError, OverloadedError, QueueTimeoutError, DrainingError or EngineError.
        """
        if request.sampling.grammar is not None:
            async with before_first_token(request, self._limits):
                await self._parts.grammars.prepare(request.sampling.grammar, request.tenant)

    def submit(self, request: Request) -> TokenStream:
        """Accepts a request at once. Raises RequestError, QueueFullError, DrainingError or EngineError."""
        self._check(request)
        self.admit(request.tenant, (request,))
        stream = TokenStream(request, self.abort)
        sequences = [self._sequence(request, index) for index in range(request.n)]
        self._live[request.request_id] = _Live(stream, sequences)
        self.account.begin(request.request_id)
        self._admission.begin(request)
        self._deadlines.begin(request, sequences, self._limits)
        self._idle.clear()
        for sequence in sequences:
            self._scheduler.add(sequence)
        self._pipeline.wake()
        return stream

    def admit(self, tenant: bytes, requests: Items[Request] = ()) -> None:
        """Raises unless all of them (none: one more) would be accepted now: QueueFullError, RateLimitError, or
        RequestError when they never would."""
        self._admission.check(self._limits, tenant, requests)

    def abort(self, request_id: str, error: SpecdError | None = None) -> bool:
        """Ends a live request; its pages are free before the next step. False when there is none of that name.

        error: what its stream says of it; None when the client itself has gone.
        """
        live = self._live.get(request_id)
        if live is None:
            return False
        for sequence in live.sequences:
            sequence.abort_requested = sequence.phase is not Phase.FINISHED
            sequence.abort_error = sequence.abort_error or error
        self._pipeline.wake()
        return True

    def _check(self, request: Request) -> None:
        if self._state in (EngineState.DRAINING, EngineState.STOPPED):
            raise DrainingError("the server is shutting down")
        if self._state is not EngineState.READY:
            raise EngineError("the engine is not running")
        if request.request_id in self._live:
            raise RequestError(
                f"a request {request.request_id!r} is still running", code="duplicate_request", param="request_id"
            )
        longest = self.info.max_len
        if not 1 <= len(request.prompt_ids) < longest:
            raise RequestError(
                f"the prompt has {len(request.prompt_ids)} tokens; this model's maximum context length is {longest} "
                "tokens, prompt and output together, and a prompt has at least one",
                code="context_length_exceeded",
                param="prompt",
            )

    def _sequence(self, request: Request, index: int) -> Sequence:
        parts, wish, grammar = self._parts, request.speculation, request.sampling.grammar
        max_draft = self.info.max_draft if wish.max_draft is None else min(wish.max_draft, self.info.max_draft)
        if wish.mode == "off":
            max_draft = 0
        traits = self._scheduler.traits
        matcher = None if grammar is None else parts.grammars.matcher(grammar)
        tokens = self._readings.get(keep_space=grammar is not None, shown=request.sampling.shown_special_ids)
        return Sequence(
            request,
            index,
            eos_ids=self.info.eos_ids,
            max_len=self.info.max_len,
            max_draft=max_draft,
            histogram_len=self.info.max_draft + 1,
            detokenizer=Detokenizer(tokens, request.sampling.skip_special_tokens),
            keys=BlockKeys(
                secret=self._secret,
                salt=request.cache_salt,
                page_size=self.info.page_size,
                lookahead=traits is not None and traits.shifted,
            ),
            proposers=parts.proposers(request, matcher) if max_draft else (),
            grammar=matcher,
        )

    def _publish(self, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            live = self._live[delta.request_id]
            live.stream.put(delta)
            if delta.finish_reason is None:
                continue
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                live.outcome = delta.finish_reason
            live.ended.add(delta.index)
            live.stream.left -= 1
            if live.stream.left == 0:
                self._forget(delta.request_id, live.outcome)

    def _forget(self, request_id: str, outcome: FinishReason) -> None:
        request = self._live.pop(request_id).stream.request
        self._admission.end(request)
        self._deadlines.end(request)
        self.account.end(request_id, outcome)
        if not self._live:
            self._idle.set()

    # ---------------------------------------------------------------- an operator's hand

    def pause(self) -> None:
        """Schedules nothing more; accepted and new requests wait. Without effect unless the engine is ready."""
        self._pipeline.paused = self._state is EngineState.READY

    def unpause(self) -> None:
        self._pipeline.paused = False
        self._pipeline.wake()

    def resume(self) -> None:
        """Accepts requests again after `drain`."""
        if self._state is EngineState.DRAINING:
            self._state = EngineState.READY

    def flush_kv(self) -> int:
        """Forgets the cached prefixes that nobody uses; how many pages that freed."""
        flushed = self._scheduler.pool.num_cached
        self._scheduler.pool.flush()
        return flushed

    def set_limits(self, limits: SchedulerConfig) -> None:
        """Limits of what is accepted from now on: those of `scheduler.*` that are reloadable."""
        self._limits = limits

    @property
    def draft_length(self) -> LengthPolicy:
        return self._length.policy

    def set_draft_length(self, k: int | str | None) -> None:
        """Drafts a step from the next one on, running requests included: a number, "adaptive", or None: as configured.

        Raises RequestError when there is no drafter or no room for so many.
        """
        self._length.set(k)

    # ---------------------------------------------------------------- life

    async def _run(self) -> None:
        try:
            await self._pipeline.run()
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("pipeline_failed")
            self._state = EngineState.FAILED
            self._end_all(FinishReason.ERROR, EngineError("the engine failed"))

    def _end_all(self, reason: FinishReason, error: SpecdError) -> None:
        """Gives every live stream its last deltas without the pipeline."""
        for request_id, live in list(self._live.items()):
            for sequence in live.sequences:
                if sequence.index in live.ended:  # its phase does not tell: a last delta may have been lost on the way
                    continue
                live.stream.left -= 1
                live.stream.put(
                    SequenceDelta(
                        request_id=request_id,
                        index=sequence.index,
                        finish_reason=reason,
                        error=error,
                        stats=sequence.stats(),
                    )
                )
            self._forget(request_id, reason)

    async def drain(self, timeout_s: float) -> bool:
        """Accepts nothing more and waits for what was accepted; False when the time ran out. Ends a pause."""
        if self._state is EngineState.READY:
            self._state = EngineState.DRAINING
            self.account.drains += 1
        self.unpause()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends what still runs (each stream gets its last delta) and frees threads and memory."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._state is not EngineState.FAILED:
            self._state = EngineState.STOPPED
        self._end_all(FinishReason.ABORT, ShutdownError("the server stopped before this request was complete"))
        await self._parts.grammars.close()
        await asyncio.to_thread(self._parts.device.close)

    # ---------------------------------------------------------------- looking at it

    def reset_counters(self) -> None:
        """Forgets the warm-up: counters start with what users ask for."""
        self._scheduler.counters = Counters(self.info.max_draft)
        self.account.reset()

    def stats(self) -> EngineStats:
        pool, counters = self._scheduler.pool, self._scheduler.counters
        waiting_keys, waiting_spread = self._scheduler.waiting.spread()
        busy = bool(self._scheduler.running or self._scheduler.waiting) and not self._pipeline.paused
        return EngineStats(
            state=self._state,
            uptime_s=time.monotonic() - self._started_s,
            last_progress_s=time.monotonic() - self._pipeline.last_step_s if busy else 0.0,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            accepted_requests=self.account.accepted,
            finished_requests=dict(counters.finished),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
            drafts=dict(counters.drafts),
            draft_tokens=dict(counters.draft_tokens),
            accepted_tokens=dict(counters.accepted_tokens),
            accepted_per_position=tuple(counters.accepted_per_position),
            drafted_per_position=tuple(counters.drafted_per_position),
            requests_failed=self.account.failed,
            requests_aborted=self.account.aborted,
            requests_finished=self.account.finished,
            lost_before=self.account.num_lost_before,
            drains=self.account.drains,
            failed_drafts=counters.failed_drafts,
            failed_refills=counters.failed_refills,
            undrafted=dict(counters.undrafted),
            wasted_s=counters.wasted_s,
            speedup=counters.speedup.value,
            paused=self._pipeline.paused,
            live_requests=len(self._live),
            refused=dict(self._admission.rejected),
            waiting_tokens=self._scheduler.waiting.num_tokens,
            waiting_keys=waiting_keys,
            waiting_spread=waiting_spread,
            stages={name: stage.copy() for name, stage in counters.stages.items()},
            step_tokens=counters.step_tokens.copy(),
        )

    def requests(self, most: int | None = None) -> list[RequestStatus]:
        """The first `most` choices that have not ended; None: every one."""
        return [request_status(sequence) for sequence in itertools.islice(live_sequences(self._scheduler), most)]

    def request(self, request_id: str) -> list[RequestDetail]:
        """The choices of one live request; empty when there is none of that name."""
        live = live_sequences(self._scheduler)
        return [request_detail(sequence) for sequence in live if sequence.request.request_id == request_id]

    def kv(self) -> KVStatus:
        counters = self._scheduler.counters
        return kv_status(
            self.info,
            self._scheduler.pool,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
        )

    def page_map(self) -> PageMap:
        return page_map(self._scheduler.pool)

    def trace(self, seconds: float) -> dict[str, Any]:
        """Chrome trace JSON of the last `seconds`."""
        return self._parts.device.timeline.chrome_trace(seconds)
