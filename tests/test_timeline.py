"""The ring of spans and the trace that Perfetto reads."""

from __future__ import annotations

import json
import threading
import time

import pytest

from specd.timeline import Span, Timeline


def span(number: int, track: str = "host") -> Span:
    return Span("schedule", track, number, number * 1000, number * 1000 + 500)


def test_the_ring_keeps_the_latest() -> None:
    timeline = Timeline(capacity=4)
    for number in range(10):
        timeline.record(span(number))
    assert [kept.step for kept in timeline.spans()] == [6, 7, 8, 9]


def test_only_the_last_seconds_are_asked_for() -> None:
    timeline = Timeline()
    now = time.perf_counter_ns()
    timeline.record(Span("verify", "target", 1, now - 9_000_000_000, now - 8_000_000_000))
    timeline.record(Span("verify", "target", 2, now - 6_000_000_000, now))
    assert [kept.step for kept in timeline.spans(5.0)] == [2], "a span counts by its end"
    assert [kept.step for kept in timeline.spans()] == [1, 2]


def test_measure_records_what_raised_too() -> None:
    timeline = Timeline()
    with timeline.measure("schedule", 3):
        time.sleep(0.002)
    with pytest.raises(KeyError), timeline.measure("commit", 4, track="other"):
        raise KeyError
    first, second = timeline.spans()
    assert (first.name, first.track, first.step, second.track) == ("schedule", "host", 3, "other")
    assert first.end_ns - first.start_ns >= 2_000_000
    assert first.end_ns <= second.start_ns


def test_chrome_trace() -> None:
    timeline = Timeline()
    timeline.record(span(2, "draft"))
    timeline.record(span(3))
    trace = timeline.chrome_trace()
    assert json.loads(json.dumps(trace)) == trace
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert all(event["name"] == "thread_name" for event in trace["traceEvents"] if event["ph"] == "M")
    assert sorted(names.values()) == ["draft", "host"]
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(names[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in complete] == [
        ("draft", "schedule", 2.0, 0.5, {"step": 2}),  # microseconds
        ("host", "schedule", 3.0, 0.5, {"step": 3}),
    ]
    assert len({event["pid"] for event in trace["traceEvents"]}) == 1


def test_an_empty_trace_is_a_trace() -> None:
    events = Timeline().chrome_trace(1.0)["traceEvents"]
    assert [event["args"]["name"] for event in events] == ["host"]


def test_reading_while_streams_record() -> None:
    timeline = Timeline(capacity=200)
    over = threading.Event()

    def record() -> None:
        number = 0
        while not over.is_set():
            timeline.record(span(number := number + 1))

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while len(timeline.spans()) < 200:
            time.sleep(0.001)
        sizes = {len(timeline.spans()) for _ in range(200)}
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert sizes == {200}
