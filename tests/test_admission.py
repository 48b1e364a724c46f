"""Limits on what may wait, and when to come back; deadlines; bounded queues of deltas."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.admission import Admission, DrainRate
from specd.config import SchedulerConfig
from specd.deadlines import Deadlines, before_first_token
from specd.deltas import DeltaQueue, TokenStream, join
from specd.errors import (
    DeadlineError,
    OverloadedError,
    QueueFullError,
    QueueTimeoutError,
    RateLimitError,
    RequestError,
)
from specd.pipeline.waiting import WaitingQueue
from specd.request import FinishReason, Request, SequenceDelta, TokenLogprob, TokenOrigin
from specd.status import REFUSALS
from tests.test_waiting import A, B, Clock, choices, fill


def request_of(name: str, size: int = 1, *, key: bytes = A, n: int = 1) -> Request:
    return choices(name, size, key=key, n=n)[0].request


# ---------------------------------------------------------------- limits


def test_each_limit_refuses_at_its_own_border() -> None:
    waiting = WaitingQueue()
    admission = Admission(waiting, clock=Clock())
    fill(waiting, choices("x", 10, n=2), choices("y", 5, key=B))
    for key, name in ((A, "x"), (A, "r"), (B, "y")):
        admission.begin(request_of(name, key=key))
    cases: list[tuple[SchedulerConfig, bytes, tuple[Request, ...], type[OverloadedError] | None, str]] = [
        (SchedulerConfig(max_waiting=4), A, (), None, ""),
        (SchedulerConfig(max_waiting=4), A, (request_of("z", n=2),), QueueFullError, "4 sequences"),
        (SchedulerConfig(max_waiting=3), B, (), QueueFullError, "3 sequences"),
        (SchedulerConfig(max_waiting_tokens=20), A, (request_of("z", 5),), None, ""),
        (SchedulerConfig(max_waiting_tokens=20), A, (request_of("z", 6),), QueueFullError, "20 prompt tokens"),
        (SchedulerConfig(max_requests_per_key=3), A, (), None, ""),
        (SchedulerConfig(max_requests_per_key=3), A, (request_of("z"), request_of("w")), RateLimitError, "3 requests"),
        (SchedulerConfig(max_requests_per_key=2), A, (), RateLimitError, "2 requests"),
        (SchedulerConfig(max_requests_per_key=2), B, (), None, ""),
        (SchedulerConfig(max_waiting_tokens_per_key=9), B, (request_of("z", 4),), None, ""),
        (SchedulerConfig(max_waiting_tokens_per_key=9), B, (request_of("z", 5),), RateLimitError, "9 waiting"),
        (SchedulerConfig(max_waiting_tokens_per_key=9), b"new", (request_of("z", 50),), None, ""),
    ]
    for limits, key, requests, error, text in cases:
        if error is None:
            admission.check(limits, key, requests)
            continue
        with pytest.raises(error, match=text):
            admission.check(limits, key, requests)
    assert admission.rejected == {"waiting_sequences": 2, "waiting_tokens": 1, "key_requests": 2, "key_tokens": 1}
    assert set(admission.rejected) == set(REFUSALS)


def test_a_long_prompt_may_wait_alone() -> None:
    waiting = WaitingQueue()
    admission = Admission(waiting, clock=Clock())
    limits = SchedulerConfig(max_waiting_tokens=10, max_waiting_tokens_per_key=10, max_requests_per_key=1)
    admission.check(limits, A, (request_of("x", 500),))
    fill(waiting, choices("x", 500))
    with pytest.raises(QueueFullError):
        admission.check(limits, B, (request_of("y", 1, key=B),))


def test_more_than_may_ever_wait_is_not_worth_another_try() -> None:
    admission = Admission(WaitingQueue(), clock=Clock())
    limits = SchedulerConfig(max_waiting=5, max_requests_per_key=1)
    admission.check(limits, A, (request_of("x", n=5),))
    with pytest.raises(RequestError) as caught:
        admission.check(limits, A, tuple(request_of(name, n=3) for name in ("x", "y")))
    assert (caught.value.code, caught.value.param) == ("out_of_range", "n")
    for part in ("is 6 (3 times 2)", "at most 5 sequences", "scheduler.max_waiting"):
        assert part in str(caught.value)
    assert not admission.rejected


def test_keys_are_forgotten_when_nothing_is_known_of_them() -> None:
    clock = Clock()
    admission = Admission(WaitingQueue(), clock=clock)
    limits = SchedulerConfig(max_requests_per_key=1)
    running = request_of("x", key=b"running")
    admission.begin(running)
    for number in range(100):
        request = request_of("y", key=b"%d" % number)
        admission.begin(request)
        admission.end(request)
        clock.now += 1.0
    assert len(admission._keys) <= 1 + 31
    with pytest.raises(RateLimitError):
        admission.check(limits, b"running")
    admission.end(running)
    admission.check(limits, b"running")


def test_what_has_ended_is_room_again() -> None:
    admission = Admission(WaitingQueue(), clock=Clock())
    limits = SchedulerConfig(max_requests_per_key=1)
    first = request_of("x")
    admission.begin(first)
    with pytest.raises(RateLimitError):
        admission.check(limits, A)
    admission.end(first)
    admission.check(limits, A)


def test_the_time_to_come_back_is_the_excess_by_what_is_finished_in_a_second() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    assert rate.seconds_for(1) == 1, "nothing is known yet"
    for _ in range(20):  # 3 a second
        clock.now += 1.0
        rate.add(1)
        rate.add(2)
    assert [rate.seconds_for(n) for n in (1, 3, 30, 100_000)] == [1, 1, 10, 60]
    clock.now += 20.0  # ten of those seconds are still in sight, the rest was silence
    assert rate.seconds_for(30) == 30
    clock.now += 100.0
    assert rate.seconds_for(1) == 30, "less than one in half a minute"
    assert rate.seconds_for(2) == 60


def test_refusals_say_when_to_come_back() -> None:
    clock = Clock()
    waiting = WaitingQueue()
    admission = Admission(waiting, clock=clock)
    fill(waiting, choices("x", 10, n=9))
    for second in range(1, 11):
        clock.now = float(second)
        for number in range(2):
            done = request_of(f"{second}.{number}", 100)
            admission.begin(done)
            admission.end(done)
    for limits, asked, seconds in (
        (SchedulerConfig(max_waiting=9), request_of("z", n=9), 5),  # nine too many, two a second
        (SchedulerConfig(max_waiting_tokens=10), request_of("z", 1000), 5),  # 200 prompt tokens a second
    ):
        with pytest.raises(QueueFullError) as caught:
            admission.check(limits, A, (asked,))
        assert caught.value.retry_after_s == seconds


# ---------------------------------------------------------------- deadlines


async def expired(limits: SchedulerConfig, *, timeout_s: float | None = None, begun: bool = False) -> Exception | None:
    found: list[Exception] = []
    deadlines = Deadlines(lambda name, error: found.append(error))
    sequences = choices("x")
    request = Request("x", (1,), sequences[0].request.sampling, timeout_s=timeout_s, arrival_s=time.monotonic())
    deadlines.begin(request, sequences, limits)
    if begun:
        sequences[0].append(1)
    await asyncio.sleep(0.05)
    deadlines.end(request)
    assert len(found) <= 1
    return found[0] if found else None


async def test_what_is_done_before_a_request_is_accepted_is_in_its_time() -> None:
    sampling = request_of("x").sampling
    queue, total = SchedulerConfig(queue_timeout_s=0.01), SchedulerConfig(request_timeout_s=0.01)
    for limits, timeout_s, waited_s in (
        (queue, None, 0.0),
        (total, 9.0, 0.0),
        (SchedulerConfig(request_timeout_s=9), 0.01, 0.0),
        (SchedulerConfig(queue_timeout_s=8, request_timeout_s=9), None, 8.1),
    ):
        arrival_s = time.monotonic() - waited_s
        request = Request("x", (1,), sampling, timeout_s=timeout_s, arrival_s=arrival_s)
        with pytest.raises(QueueTimeoutError, match=r"within (0\.01|8) s"):
            async with before_first_token(request, limits):
                await asyncio.sleep(60)
    async with before_first_token(Request("x", (1,), sampling), SchedulerConfig()):
        await asyncio.sleep(0.01)


async def test_deadlines() -> None:
    queue, total = SchedulerConfig(queue_timeout_s=0.01), SchedulerConfig(request_timeout_s=0.01)
    assert isinstance(await expired(queue), QueueTimeoutError)
    assert await expired(queue, begun=True) is None
    assert isinstance(await expired(total), QueueTimeoutError), "nothing was begun"
    assert isinstance(await expired(total, begun=True), DeadlineError)
    assert isinstance(await expired(SchedulerConfig(), timeout_s=0.01, begun=True), DeadlineError)
    assert isinstance(await expired(SchedulerConfig(request_timeout_s=9), timeout_s=0.01, begun=True), DeadlineError)
    assert isinstance(await expired(total, timeout_s=9, begun=True), DeadlineError), "a client cannot ask for more"
    assert await expired(SchedulerConfig(), timeout_s=0.2) is None


# ---------------------------------------------------------------- deltas


def delta_of(index: int, token: int, *, last: bool = False) -> SequenceDelta:
    return SequenceDelta(
        "x",
        index,
        token_ids=(token,),
        text=chr(97 + token % 26),
        logprobs=(TokenLogprob(token, -1.0),),
        origins=((TokenOrigin.TARGET, token, 0),),
        finish_reason=FinishReason.STOP if last else None,
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80), st.integers(1, 9))
def test_a_full_queue_joins_deltas_and_loses_nothing(load: list[tuple[int, bool]], most: int) -> None:
    queue = DeltaQueue(most)
    read: list[tuple[int, SequenceDelta]] = []
    for token, (choice, reads) in enumerate(load):
        queue.put(choice, delta_of(choice, token))
        assert len(queue) <= max(most, 8)
        if reads:
            read.append(queue.pop())
    parts = len(read) + len(queue)
    read += queue.take()
    assert queue.num_joined == len(load) - parts
    for choice in range(4):
        given_ = [delta_of(choice, token) for token, (c, _) in enumerate(load) if c == choice]
        found = [delta for c, delta in read if c == choice]
        assert bool(given_) == bool(found)
        if given_:
            assert join(found) == join(given_)


async def test_a_stream_that_is_not_read_stays_small() -> None:
    stream = TokenStream(request_of("x", n=2), lambda name: None)
    for token in range(5000):
        stream.put(delta_of(token % 2, token))
    stream.put(delta_of(0, 1, last=True))
    stream.put(delta_of(1, 2, last=True))
    assert len(stream._queue) <= 256
    found = [delta async for delta in stream]
    assert sum(len(delta.token_ids) for delta in found) == 5002
    assert sum(delta.finish_reason is not None for delta in found) == 2


async def test_a_cancelled_reader_aborts_and_a_closed_stream_once() -> None:
    aborted: list[str] = []
    stream = TokenStream(request_of("x"), aborted.append)
    task = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert aborted == ["x"]
    await stream.aclose()
    assert aborted == ["x", "x"]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
