"""Metrics of load: admission, the queue and its fairness, the time of each stage, and how late the event loop runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from specd.account import Account
from specd.reload import Reloader
from specd.server.protocol import EngineProtocol
from specd.status import REFUSALS, Distribution, EngineStats

_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class LoadCollector:
    """Families made from `engine.stats()`, one snapshot a scrape. `labels` are vLLM's, `prefix` is of its names."""

    def __init__(self, engine: EngineProtocol, labels: Mapping[str, str], prefix: str) -> None:
        self._engine = engine
        self._prefix = prefix
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        refused = CounterMetricFamily(
            "specd_admission_refusals",
            "Requests that were answered 429, by the limit that was reached.",
            labels=["limit"],
        )
        for limit in REFUSALS:
            refused.add_metric([limit], stats.refused.get(limit, 0))
        yield refused
        yield from self._queue(stats)
        stages = HistogramMetricFamily(
            "specd_stage_seconds",
            "Time of one step in each stage; step is the whole from report to report, the others are apart: draft, "
            "verify, accept (sampling) and refill compute; schedule, commit and detokenize are the host's own work.",
            labels=["stage"],
        )
        for name, distribution in stats.stages.items():
            stages.add_metric([name], *_samples(distribution))
        yield stages
        tokens = HistogramMetricFamily(
            f"{self._prefix}iteration_tokens_total",
            "Tokens that one step computed, drafts included.",
            labels=[*self._labels],
        )
        tokens.add_metric([*self._labels.values()], *_samples(stats.step_tokens))
        yield tokens

    def _queue(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("tokens", "Prompt tokens of the requests that wait now.", stats.waiting_tokens),
            ("keys", "API keys that have requests waiting now.", stats.waiting_keys),
            (
                "spread_tokens",
                "By how many tokens per weight the most and the least served of the waiting keys differ.",
                stats.waiting_spread,
            ),
        ):
            yield GaugeMetricFamily(f"specd_waiting_{name}", text, value=value)
        yield self._split(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "Sequences that wait now; all of them for a place in the batch.",
            "reason",
            {"capacity": stats.waiting, "deferred": 0},
        )
        yield self._split(
            CounterMetricFamily,
            "prompt_tokens_by_source",
            "Prompt tokens of the choices that were scheduled, by where their KV came from.",
            "source",
            {
                "local_compute": stats.prompt_tokens - stats.cached_tokens,
                "local_cache_hit": stats.cached_tokens,
                "external_kv_transfer": 0,
            },
        )
        lost = stats.accepted_requests - stats.requests_finished - stats.requests_failed - stats.requests_aborted
        text = (
            "Accepted requests that ended in no way that was accounted for: those that a crash of the process before "
            "this one cut off, by its journal, and any of this one. It must stay 0."
        )
        value = stats.lost_before + lost - stats.live_requests
        yield CounterMetricFamily("specd_requests_lost", text, value=value)
        text = "Times that it stopped accepting and finished what it had, by a signal or an operator's wish."
        yield CounterMetricFamily("specd_drains", text, value=stats.drains)

    def _split(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, int],
    ) -> Metric:
        """One of vLLM's families with a label more than the common ones."""
        family = kind(self._prefix + name, text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family


class ReloadCollector:
    """How often the configuration was read again."""

    def __init__(self, reloader: Reloader) -> None:
        self._reloader = reloader

    def collect(self) -> Iterator[Metric]:
        text = "Times that the configuration was read again, by what became of it."
        family = CounterMetricFamily("specd_config_reloads", text, labels=["result"])
        family.add_metric(["applied"], self._reloader.successes)
        family.add_metric(["refused"], self._reloader.failures)
        yield family
        text = "When the configuration that is in force was read, in seconds since 1970."
        name = "specd_config_reload_success_timestamp_seconds"
        yield GaugeMetricFamily(name, text, value=self._reloader.read_at)


class SendCollector:
    """Time of the writes to streams: a plain count, for there is one a stream and step."""

    def __init__(self, seconds: Distribution) -> None:
        self._seconds = seconds

    def collect(self) -> Iterator[Metric]:
        text = "Time of one write to a stream, with waiting for its client to read."
        family = HistogramMetricFamily("specd_send_seconds", text)
        family.add_metric([], *_samples(self._seconds))
        yield family


class JournalCollector:
    """Whether what is accepted is written down (`server.journal`)."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def collect(self) -> Iterator[Metric]:
        journal = self._account.journal
        text = "1 where the ids of accepted requests are written into a journal, 0 where not."
        yield GaugeMetricFamily("specd_journal_enabled", text, value=float(journal is not None))
        text = "Begins and ends of requests that could not be written into the journal when they came."
        value = 0 if journal is None else journal.num_failed
        yield CounterMetricFamily("specd_journal_failed_events", text, value=value)


def _samples(distribution: Distribution) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets and the sum, as the client library wants them."""
    bounds = [*(str(bound) for bound in distribution.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(distribution.counts), strict=True)), distribution.total


def loop_lag(registry: CollectorRegistry) -> Histogram:
    """For whoever watches the event loop: delays in seconds."""
    text = "How late a timer of the event loop fired."
    return Histogram("specd_loop_lag_seconds", text, buckets=_LAG_S, registry=registry)
