"""What speculation costs and brings: why there are no drafts, computing in vain, the speed-up over plain decoding."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specd.server.protocol import EngineProtocol
from specd.status import UNDRAFTED


class SpeculationCollector:
    """Families made from `engine.stats()`, one snapshot a scrape."""

    def __init__(self, engine: EngineProtocol) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        disabled = CounterMetricFamily(
            "specd_spec_disabled",
            "Sequences' decode steps without a draft though more than one token was to come, by reason: request (its "
            "wish), admin (specd ctl speculation off), not_paying (plain decoding is faster), failing (a step with "
            "drafts or the drafter failed), catching_up (the drafter has not computed the text yet), no_proposal, "
            "mixed_batch (scheduler.mixed), no_room (tokens or pages ran out), context (the drafter's is full). All "
            "stay 0 where no drafts are configured.",
            labels=["reason"],
        )
        for reason in UNDRAFTED:
            disabled.add_metric([reason], stats.undrafted.get(reason, 0))
        yield disabled
        yield CounterMetricFamily(
            "specd_spec_wasted_seconds",
            "Time of computing that went into drafts that were not kept: of each step, its draft stage's time divided "
            "evenly among the drafts, and that of verify and accept among all tokens that it computed.",
            value=stats.wasted_s,
        )
        yield GaugeMetricFamily(
            "specd_spec_speedup_estimate",
            "How many times faster decoding is than without drafts: over the latest decode steps, plain ones included, "
            "tokens times the time per token of plain steps of as many sequences, as they were measured, divided by "
            "the time taken. NaN while no plain step of about that size was made.",
            value=math.nan if stats.speedup is None else stats.speedup,
        )
