"""What an engine process counts, and how its front ends read it. Names are vLLM's where they mean the same."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from archerfish.engine.outputs import RequestOutput
from archerfish.observe.metrics import Counter, Gauge, Histogram, Metric, MetricRegistry, Sample

LABEL = ("model_name",)
GAUGES = {  # of a generation model: what its stats call it, and what it is
    "vllm:num_requests_running": ("num_running", "Sequences that run."),
    "vllm:num_requests_waiting": ("num_waiting", "Sequences that wait."),
    "vllm:kv_cache_usage_perc": ("kv_usage", "Share of the KV blocks that running sequences hold; 1 is all."),
}
COUNTERS = {
    "vllm:num_preemptions": ("num_preemptions", "Sequences that had to give their blocks back."),
    "vllm:generation_tokens": ("total_tokens_generated", "Tokens written."),
    "vllm:prompt_tokens": ("num_prompt_tokens", "Prompt tokens of requests that were admitted."),
    "vllm:prefix_cache_queries": ("num_prompt_tokens", "Prompt tokens that were looked up."),
    "vllm:prefix_cache_hits": ("cache_hits", "Prompt tokens that the prefix cache had."),
    "archerfish_completed_requests": ("completed_requests", "Requests that ended as they should."),
    "archerfish_failed_requests": ("failed_requests", "Requests that ended with an error or at their deadline."),
    "archerfish_aborted_requests": ("aborted_requests", "Requests that were given up."),
    "archerfish_steps": ("num_steps", "Steps planned."),
}
ENCODER_COUNTERS = {
    "archerfish_encoded_texts": ("num_texts", "Texts and pairs computed."),
    "archerfish_encoded_tokens": ("num_tokens", "Their tokens."),
}
EVERY_COUNTER = {
    "archerfish_jobs": ("jobs", "Jobs of the compute thread."),
    "archerfish_busy_seconds": ("busy_s", "Seconds that the compute thread worked."),
}


class Figures:
    """Counts as things happen; safe to use from any thread."""

    def __init__(self) -> None:
        self.registry = MetricRegistry()
        histogram, counter = self.registry.histogram, self.registry.counter
        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", LABEL)
        self._gaps = histogram("vllm:inter_token_latency_seconds", "From one token of a request to the next.", LABEL)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", LABEL)
        self._parts = {
            "queue_ms": histogram("vllm:request_queue_time_seconds", "From arrival to admission.", LABEL),
            "prefill_ms": histogram("vllm:request_prefill_time_seconds", "From admission to the first token.", LABEL),
            "decode_ms": histogram("vllm:request_decode_time_seconds", "From the first token to the end.", LABEL),
        }
        self._ends = counter("vllm:request_success", "Sequences by what ended them.", (*LABEL, "finished_reason"))
        self._refusals = counter("archerfish_refused_requests", "Requests refused, by the code they got.", (*LABEL, "code"))
        self._encoded = histogram("archerfish_encode_seconds", "From the arrival of texts to their vectors.", LABEL)
        self._waiting: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def token(self, model: str, seconds: float, *, is_first: bool) -> None:
        """Tokens have come, so long after arrival or after the ones before."""
        if is_first:
            self._ttft.observe(seconds, model_name=model)
        else:
            self.gaps(model, (seconds,))

    def gaps(self, model: str, seconds: Sequence[float]) -> None:
        """Tokens have come, each so long after the one before it."""
        if seconds:
            with self._lock:
                self._waiting.setdefault(model, []).extend(seconds)

    def settle(self) -> None:
        """Take in the gaps of a step under one lock."""
        if not self._waiting:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for model, gaps in waiting.items():
            self._gaps.observe_many(gaps, model_name=model)

    def ended(self, model: str, result: RequestOutput) -> None:
        metrics = result.metrics
        self._whole.observe((metrics.queue_ms + metrics.prefill_ms + metrics.decode_ms) / 1000, model_name=model)
        for name, histogram in self._parts.items():
            histogram.observe(getattr(metrics, name) / 1000, model_name=model)
        for output in result.outputs:
            self._ends.add(model_name=model, finished_reason=str(output.finish_reason))

    def embedded(self, model: str, seconds: float) -> None:
        self._encoded.observe(seconds, model_name=model)

    def refused(self, model: str, code: str) -> None:
        self._refusals.add(model_name=model, code=code)

    def report(self, stats: Mapping[str, Mapping[str, Any]], host: Mapping[str, float]) -> dict[str, Any]:
        """All figures by name, with those that are only known when somebody asks: stats of the models, gauges of the host."""
        self.settle()
        found: list[Metric] = list(self.registry)
        for name, (key, description) in {**GAUGES, **COUNTERS, **ENCODER_COUNTERS, **EVERY_COUNTER}.items():
            kind = Gauge if name in GAUGES else Counter
            samples = [Sample((model,), float(values[key])) for model, values in stats.items() if key in values]
            found.append(GivenMetric(kind.kind, name, description, LABEL, samples))
        for name, value in host.items():
            found.append(GivenMetric("gauge", f"archerfish_{name}", "", (), [Sample((), float(value))]))
        return {metric.name: as_values(metric) for metric in found}


class GivenMetric(Metric):
    """A metric whose samples were counted elsewhere."""

    def __init__(self, kind: Any, name: str, description: str, label_names: Iterable[str], samples: list[Sample]) -> None:
        super().__init__(name, description, tuple(label_names))
        self.kind = kind  # type: ignore[misc]
        self._samples = samples

    def samples(self) -> list[Sample]:
        return self._samples


def as_values(metric: Metric) -> dict[str, Any]:
    """One metric as a message carries it."""
    return {
        "kind": metric.kind, "description": metric.description, "label_names": list(metric.label_names),
        "samples": [[list(one.labels), one.value, one.count, [list(pair) for pair in one.buckets]] for one in metric.samples()],
    }  # fmt: skip


def read_metrics(values: Mapping[str, Any]) -> list[Metric]:
    """The metrics of a Report, in a form that `serve.metrics` exposes to Prometheus."""
    found: list[Metric] = []
    for name, one in values.items():
        samples = [
            Sample(tuple(labels), value, count, tuple((bound, number) for bound, number in buckets))
            for labels, value, count, buckets in one["samples"]
        ]
        found.append(GivenMetric(one["kind"], name, one["description"], one["label_names"], samples))
    return found


__all__ = ["Figures", "GivenMetric", "Histogram", "as_values", "read_metrics"]
