"""Metrics for Prometheus, under vLLM's names where they mean the same.

Times of requests are observed as they end. All else is what the engine counts anyway, read when
Prometheus asks. Labels have few values: graph modes, reasons, routes, statuses.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ostinato.serving.records import EngineStats, RequestRecord

_TIMES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_SIZES = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_GAUGES = {
    "num_requests_running": ("num_running", "Sequences that are in steps."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait for room in a step."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Fraction of KV cache blocks held by requests."),
    "spec_decode_acceptance_length": (
        "acceptance_length",
        "Mean tokens of a request in a step with drafts.",
    ),
    "graph_memory_bytes": ("graph_bytes", "Memory of the graphs."),
    "quarantined_graphs": ("quarantined_graphs", "Graphs that differed from eager (verify)."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that have begun to answer."),
    "generation_tokens": ("generation_tokens", "Generated tokens."),
    "num_preemptions": ("num_preemptions", "Sequences that had to give up their blocks."),
    "prefix_cache_queries": ("prefix_query_tokens", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hit_tokens", "Tokens found in the prefix cache."),
    "spec_decode_num_drafts": ("draft_runs", "Runs of drafts, one per request and step."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Tokens that were drafted."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafted tokens that were right."),
    "graph_replayed_tokens": ("replayed_tokens", "Tokens of steps through graphs."),
    "graph_padding_tokens": ("padding_tokens", "Padding beside these."),
    "verified_steps": ("verified_steps", "Graphs and steps compared with eager (verify)."),
    "structured_output_steps": ("masked_steps", "Steps with a constrained request."),
}
_BY_LABEL = {
    "graph_replays": ("replays", "mode", "Steps through graphs, by mode."),
    "eager_steps": ("eager", "reason", "Steps without a graph, by reason."),
}


class Metrics:
    """The metrics of one server. ``paths``: its routes; requests to others count as one."""

    def __init__(self, model_name: str, paths: Iterable[str]) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCounts(model_name)
        self._registry.register(self._engine)
        self._name = model_name
        self._paths = frozenset(paths)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _TIMES
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first.", _STEPS
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", _TIMES
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step.", _TIMES
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _TIMES
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the end.", _TIMES
        )
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _SIZES)
        self._generated = self._histogram(
            "request_generation_tokens", "Tokens of an answer.", _SIZES
        )
        self._ended = self._counter("request_success", "Requests that ended.", "finished_reason")
        self._answers = self._counter("http_requests", "Answers.", "path", "status")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(
            f"ostinato:{name}", text, ["model_name"], buckets=buckets, registry=self._registry
        )
        return metric.labels(self._name)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ostinato:{name}", text, ["model_name", *labels], registry=self._registry)

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended. Called in the engine's thread."""
        self._ended.labels(self._name, record.finish_reason).inc()
        self._latency.observe(record.ended - record.arrived)
        self._prompt.observe(record.num_prompt_tokens)
        self._generated.observe(record.num_generated_tokens)
        if record.scheduled is not None:
            self._queue.observe(record.scheduled - record.arrived)
        if record.first_token is not None:
            self._decode.observe(record.ended - record.first_token)
            if record.scheduled is not None:
                self._prefill.observe(record.first_token - record.scheduled)
            self._first_token.observe(record.first_token - record.arrived)
            if record.time_per_token is not None:
                self._per_token.observe(record.time_per_token)

    def count_answer(self, path: str, status: int) -> None:
        """Count an HTTP answer; status 0: the client left before there was one."""
        path = path if path in self._paths else "other"
        self._answers.labels(self._name, path, str(status or 499)).inc()

    def text(self, stats: EngineStats) -> bytes:
        """All metrics, with the engine's ``stats``, in Prometheus' text format."""
        self._engine.stats = stats
        return generate_latest(self._registry)


class _EngineCounts(Collector):
    """Turns ``stats`` into metrics."""

    def __init__(self, model_name: str) -> None:
        self.stats = EngineStats()
        self._name = model_name

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        for name, (attribute, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"ostinato:{name}", text, labels=["model_name"])
            gauge.add_metric([self._name], getattr(self.stats, attribute))
            yield gauge
        for name, (attribute, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"ostinato:{name}", text, labels=["model_name"])
            counter.add_metric([self._name], getattr(self.stats, attribute))
            yield counter
        for name, (attribute, label, text) in _BY_LABEL.items():
            labels = ["model_name", label]
            counter = CounterMetricFamily(f"ostinato:{name}", text, labels=labels)
            for value, count in sorted(getattr(self.stats, attribute).items()):
                counter.add_metric([self._name, value], count)
            yield counter
