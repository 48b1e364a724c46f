"""/metrics: the engine's counters read at scrape time, and the histograms that only the server can fill.

`specd_*` are our own names; `vllm:*` are the ones that dashboards and load tools already read. With
`server.metrics_compat = "off"` what has those names gets ours, and what we have under a name of our own anyway is left
out. Label sets are closed (never a request's own words), every series exists from the start at 0 (an estimate at NaN),
and rates are left to the reader.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from specd.request import FinishReason, SequenceStats
from specd.server.load_metrics import LoadCollector, SendCollector, loop_lag
from specd.server.protocol import EngineProtocol
from specd.server.speculation_metrics import SpeculationCollector
from specd.status import Distribution, EngineInfo, EngineState, EngineStats

# `_created` series next to counters are read as values by load tools that sum everything with the counter's prefix.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SEND_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.1, 1, 10)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_N = (1, 2, 5, 10, 20)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_VLLM_TEXTS = {
    "spec_decode_num_drafts": "Sequences' steps in which at least one draft was checked.",
    "spec_decode_num_draft_tokens": "Draft tokens that the target checked.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were kept.",
    "prompt_tokens": "Prompt tokens of the choices that were scheduled, cached ones included.",
    "prompt_tokens_cached": "Prompt tokens that came from the prefix cache and were not computed.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found in the prefix cache.",
    "generation_tokens": "Tokens that were generated.",
    "num_preemptions": "Times that a sequence gave up its pages and was to be computed again.",
    "num_requests_running": "Sequences in the batch now.",
    "num_requests_waiting": "Sequences that wait for a place in the batch now.",
    "kv_cache_usage_perc": "Share of the KV pages in use now (0 to 1).",
}


def version() -> str:
    """The installed version; a source tree that was never installed has none."""
    try:
        return importlib.metadata.version("specd")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


class ServerMetrics:
    """One registry per application: tests and embedders make several in one process."""

    def __init__(self, engine: EngineProtocol, *, compat: bool = True) -> None:
        """compat: vLLM's names for what it measures too."""
        self.registry = CollectorRegistry(auto_describe=False)
        self._prefix = "vllm:" if compat else "specd_"
        self._labels = _vllm_labels(engine.info)
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token.", _TTFT_S
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Time between two deliveries of one choice (a step each).", _ITL_S
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time for each token of a finished choice, its first one left out.",
            _ITL_S,
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Time from a request's arrival to its last token.", _E2E_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Time that a choice waited before it was first scheduled.", _TTFT_S
        )
        self._prompt = self._histogram("request_prompt_tokens", "Tokens in the prompt of a finished choice.", _TOKENS)
        self._output = self._histogram("request_generation_tokens", "Tokens that a finished choice generated.", _TOKENS)
        self._add_counters()
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Time from a choice's first schedule to its first token.", _TTFT_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "Time from a choice's first token to its last.", _E2E_S
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "Time from a choice's first schedule to its last token.", _E2E_S
        )
        self.max_tokens = self._histogram(
            "request_params_max_tokens", "Largest output that a request allowed, in tokens.", _TOKENS
        )
        self.n = self._histogram("request_params_n", "Choices that a request asked for.", _N)
        self.longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", _TOKENS
        )
        self.backpressure = Histogram(
            "specd_stream_backpressure_seconds",
            "Time that a stream waited for its client to read.",
            buckets=_TTFT_S,
            registry=self.registry,
        )
        self.sends = Distribution(_SEND_S)  # seconds of each write of a stream
        self.registry.register(SendCollector(self.sends))
        self.loop_lag = loop_lag(self.registry)
        self.registry.register(_EngineCollector(engine, self._prefix))
        self.registry.register(LoadCollector(engine, self._labels, self._prefix))
        self.registry.register(SpeculationCollector(engine))

    def _add_counters(self) -> None:
        self.responses = Counter(
            "specd_http_responses",
            "HTTP responses, by endpoint and status (499: the client left before there was one).",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.ignored_fields = self._counter(
            "specd_ignored_fields", "Fields in requests that specd does not know and passed over."
        )
        self.slow_client_aborts = self._counter(
            "specd_slow_client_aborts", "Streams that were ended because their client did not read."
        )
        self.coalesced = self._counter(
            "specd_stream_joined_deltas", "Deltas that were sent together because their client read slowly."
        )
        self.client_disconnects = self._counter(
            "specd_client_disconnects", "Requests whose client closed the connection before the end."
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(self._prefix + name, text, [*self._labels], buckets=buckets, registry=self.registry)
        return family.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def observe_choice(self, stats: SequenceStats) -> None:
        """One choice that has ended."""
        self._queue.observe(stats.queue_s)
        self._prompt.observe(stats.prompt_tokens)
        self._output.observe(stats.completion_tokens)
        self._inference.observe(stats.total_s - stats.queue_s)
        if stats.completion_tokens:
            self._prefill.observe(stats.ttft_s - stats.queue_s)
            self._decode.observe(stats.total_s - stats.ttft_s)
        if stats.completion_tokens > 1:
            self._tpot.observe((stats.total_s - stats.ttft_s) / (stats.completion_tokens - 1))

    def expose(self) -> bytes:
        """The text format, version 0.0.4."""
        return generate_latest(self.registry)


class _EngineCollector:
    """Families made from `engine.stats()` and `engine.info`, one snapshot a scrape."""

    def __init__(self, engine: EngineProtocol, prefix: str) -> None:
        self._engine = engine
        self._prefix = prefix  # of vLLM's names
        self._labels = _vllm_labels(engine.info)

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._vllm(stats)
        yield from self._requests(stats)
        yield from self._speculation(stats)
        yield from self._gauges(stats)

    def _vllm(self, stats: EngineStats) -> Iterator[Metric]:
        """vLLM's names, with its labels."""
        used = stats.pages_total - stats.pages_free
        if self._prefix == "vllm:":
            yield from self._vllm_speculation(stats)
        counters = {
            "prompt_tokens": stats.prompt_tokens,
            "prompt_tokens_cached": stats.cached_tokens,
            "prefix_cache_queries": stats.prompt_tokens,
            "prefix_cache_hits": stats.cached_tokens,
            "generation_tokens": stats.generation_tokens,
            "num_preemptions": stats.preemptions,
        }
        for name, value in counters.items():
            yield self._labelled(name, _VLLM_TEXTS[name], {(): value})
        reasons: dict[tuple[str, ...], float] = {(str(r),): stats.finished_requests.get(r, 0) for r in FinishReason}
        text = "Choices that have ended, by finish reason."
        yield self._labelled("request_success", text, reasons, "finished_reason")
        gauges: dict[str, float] = {
            "num_requests_running": stats.running,
            "num_requests_waiting": stats.waiting,
            "kv_cache_usage_perc": used / stats.pages_total if stats.pages_total else 0.0,
        }
        for name, level in gauges.items():
            family = GaugeMetricFamily(self._prefix + name, _VLLM_TEXTS[name], labels=[*self._labels])
            family.add_metric([*self._labels.values()], level)
            yield family

    def _vllm_speculation(self, stats: EngineStats) -> Iterator[Metric]:
        """What `_speculation` has by source too."""
        counters = {
            "spec_decode_num_drafts": sum(stats.drafts.values()),
            "spec_decode_num_draft_tokens": sum(stats.draft_tokens.values()),
            "spec_decode_num_accepted_tokens": sum(stats.accepted_tokens.values()),
        }
        for name, value in counters.items():
            yield self._labelled(name, _VLLM_TEXTS[name], {(): value})
        positions: dict[tuple[str, ...], float] = {
            (str(i),): count for i, count in enumerate(self._padded(stats.accepted_per_position))
        }
        name = "spec_decode_num_accepted_tokens_per_pos"
        text = "Draft tokens that were kept, by their position in the draft (0 is the first)."
        yield self._labelled(name, text, positions, "position")

    def _labelled(
        self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(self._prefix + name, text, labels=[*self._labels, *labels])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value)
        return family

    def _requests(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            (
                "accepted",
                "Requests that were taken on; each ends as finished, failed or aborted.",
                stats.accepted_requests,
            ),
            ("finished", "Requests that ended with every choice complete.", stats.requests_finished),
            ("failed", "Requests that ended with an error of the engine.", stats.requests_failed),
            ("aborted", "Requests that their client, an operator or a shutdown ended.", stats.requests_aborted),
        ):
            yield _counter(f"specd_requests_{name}", text, value)
        yield _counter("specd_steps", "Steps of the pipeline: one forward of the target each.", stats.steps)

    def _speculation(self, stats: EngineStats) -> Iterator[Metric]:
        families: tuple[tuple[str, str, Mapping[str, int]], ...] = (
            (
                "specd_spec_drafts",
                "Sequences' steps in which at least one draft was checked, by who proposed it.",
                stats.drafts,
            ),
            (
                "specd_spec_draft_tokens",
                "Draft tokens that the target checked, by who proposed them.",
                stats.draft_tokens,
            ),
            ("specd_spec_accepted_tokens", "Draft tokens that were kept, by who proposed them.", stats.accepted_tokens),
        )
        for name, text, by_source in families:
            family = CounterMetricFamily(name, text, labels=["source"])
            for source, value in {**dict.fromkeys(_sources(self._engine.info), 0), **by_source}.items():
                family.add_metric([source], value)
            yield family
        yield _counter(
            "specd_spec_failed_drafts", "Steps whose drafter failed; they went on without drafts.", stats.failed_drafts
        )
        yield _counter(
            "specd_spec_failed_refills", "Steps after which the drafter could not catch up.", stats.failed_refills
        )
        for name, text, counts in (
            (
                "specd_spec_drafted_per_position",
                "Draft tokens checked, by position (0 first).",
                stats.drafted_per_position,
            ),
            (
                "specd_spec_accepted_per_position",
                "Draft tokens kept, by position (0 first).",
                stats.accepted_per_position,
            ),
        ):
            family = CounterMetricFamily(name, text, labels=["position"])
            for i, value in enumerate(self._padded(counts)):
                family.add_metric([str(i)], value)
            yield family

    def _padded(self, counts: tuple[int, ...]) -> Iterable[int]:
        """One count per draft position, present from the start."""
        return counts + (0,) * (self._engine.info.max_draft - len(counts))

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        pages = GaugeMetricFamily(
            "specd_kv_pages", "Pages of the KV pool by state; a cached page is counted as free too.", labels=["state"]
        )
        pages.add_metric(["free"], stats.pages_free)
        pages.add_metric(["used"], stats.pages_total - stats.pages_free)
        pages.add_metric(["cached"], stats.pages_cached)
        yield pages
        state = GaugeMetricFamily(
            "specd_engine_state", "1 for the state that the engine is in, 0 for the others.", labels=["state"]
        )
        for name in (*map(str, EngineState), "paused"):
            state.add_metric([name], float(stats.shown_state == name))
        yield state
        yield GaugeMetricFamily("specd_uptime_seconds", "Time since the engine was started.", value=stats.uptime_s)
        text = "Time since the last step finished; 0 while nothing is to be done."
        yield GaugeMetricFamily("specd_since_progress_seconds", text, value=stats.last_progress_s)
        info = self._engine.info
        build = GaugeMetricFamily(
            "specd_build_info",
            "Always 1; the labels say what is running.",
            labels=["version", "model", "drafter", "acceptance"],
        )
        build.add_metric([version(), info.model, info.drafter, info.acceptance], 1)
        yield build


def _vllm_labels(info: EngineInfo) -> dict[str, str]:
    """What vLLM puts on each of its series."""
    return {"model_name": info.served_names[0], "engine": "0"}


def _sources(info: EngineInfo) -> tuple[str, ...]:
    """Who proposes, by the names that the engine's counters use."""
    if info.drafter == "none":
        return ()
    return "ngram" if info.drafter == "ngram" else "drafter", "prediction", "corpus", "grammar"


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)
