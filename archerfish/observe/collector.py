"""MetricsCollector: histograms and counters of engines, by the names that a server exposes (vLLM's where it has them)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from archerfish.observe.metrics import Counter, Gauge, GivenMetric, Histogram, Metric, MetricRegistry, Sample

LABEL = ("model_name",)
GAUGES = {  # of a generation model: the key in its stats, and a description
    "vllm:num_requests_running": ("num_running", "Running sequences."),
    "vllm:num_requests_waiting": ("num_waiting", "Waiting sequences."),
    "vllm:kv_cache_usage_perc": ("kv_usage", "Share of the KV blocks that running sequences hold; 1 is all."),
}
COUNTERS = {
    "vllm:num_preemptions": ("num_preemptions", "Sequences whose blocks were taken for others."),
    "vllm:generation_tokens": ("total_tokens_generated", "Generated tokens."),
    "vllm:prompt_tokens": ("num_prompt_tokens", "Prompt tokens of admitted requests."),
    "vllm:prefix_cache_queries": ("num_prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("cache_hits", "Prompt tokens found in the prefix cache."),
    "archerfish_completed_requests": ("completed_requests", "Requests that ended without an error."),
    "archerfish_failed_requests": ("failed_requests", "Requests that ended with an error or at their deadline."),
    "archerfish_aborted_requests": ("aborted_requests", "Requests that were aborted."),
    "archerfish_steps": ("num_steps", "Planned steps."),
}
ENCODER_COUNTERS = {
    "archerfish_encoded_texts": ("num_texts", "Computed texts and pairs."),
    "archerfish_encoded_tokens": ("num_tokens", "Tokens of computed texts and pairs."),
}
EVERY_COUNTER = {
    "archerfish_jobs": ("jobs", "Jobs of the compute thread."),
    "archerfish_busy_seconds": ("busy_s", "Busy seconds of the compute thread."),
}
TTFT, GAPS, WHOLE = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"
QUEUE, PREFILL = "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds"
DECODE, ENCODE = "vllm:request_decode_time_seconds", "archerfish_encode_seconds"


class RequestTimes(Protocol):
    """Durations of a request."""

    @property
    def queue_ms(self) -> float: ...

    @property
    def prefill_ms(self) -> float: ...

    @property
    def decode_ms(self) -> float: ...


class EndedOutput(Protocol):
    """One output of a request."""

    @property
    def finish_reason(self) -> str | None: ...


class EndedRequest(Protocol):
    """The result of a request, as far as a collector reads it; RequestOutput is one."""

    @property
    def metrics(self) -> RequestTimes: ...

    @property
    def outputs(self) -> Sequence[EndedOutput]: ...


class MetricsCollector:
    """Histograms and counters by model; safe to use from any thread.

    Counts that engines keep themselves are passed to `metrics`. window: values that histograms keep for exact percentiles.
    """

    def __init__(self, *, window: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = MetricRegistry()
        self.start_time = clock()

        def histogram(name: str, description: str) -> Histogram:
            return self.registry.histogram(name, description, LABEL, window=window)

        self._ttft = histogram(TTFT, "From arrival to the first token.")
        self._gaps = histogram(GAPS, "From one token of a request to the next.")
        self._whole = histogram(WHOLE, "From arrival to the end.")
        self._queue = histogram(QUEUE, "From arrival to admission.")
        self._prefill = histogram(PREFILL, "From admission to the first token.")
        self._decode = histogram(DECODE, "From the first token to the end.")
        self._encoded = histogram(ENCODE, "From the arrival of texts to their vectors.")
        counter = self.registry.counter
        self._ends = counter("vllm:request_success", "Sequences by what ended them.", (*LABEL, "finished_reason"))
        self._refusals = counter("archerfish_refused_requests", "Requests refused, by the code they got.", (*LABEL, "code"))
        self._waiting: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def token(self, model: str, seconds: float, *, is_first: bool) -> None:
        """Record the time from arrival to the first token, or from the tokens before to these."""
        if is_first:
            self._ttft.observe(seconds, model_name=model)
        else:
            self.gaps(model, (seconds,))

    def gaps(self, model: str, seconds: Sequence[float]) -> None:
        """Record times between tokens. `settle` adds them to the histogram."""
        if seconds:
            with self._lock:
                self._waiting.setdefault(model, []).extend(seconds)

    def settle(self) -> None:
        """Add the recorded gaps to the histogram, all under one lock."""
        if not self._waiting:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for model, gaps in waiting.items():
            self._gaps.observe(*gaps, model_name=model)

    def ended(self, model: str, result: EndedRequest) -> None:
        """Record the durations of an ended request and the finish reason of each output."""
        metrics = result.metrics
        self._whole.observe((metrics.queue_ms + metrics.prefill_ms + metrics.decode_ms) / 1000, model_name=model)
        self._queue.observe(metrics.queue_ms / 1000, model_name=model)
        self._prefill.observe(metrics.prefill_ms / 1000, model_name=model)
        self._decode.observe(metrics.decode_ms / 1000, model_name=model)
        for output in result.outputs:
            self._ends.add(model_name=model, finished_reason=str(output.finish_reason))

    def embedded(self, model: str, seconds: float) -> None:
        self._encoded.observe(seconds, model_name=model)

    def refused(self, model: str, code: str) -> None:
        self._refusals.add(model_name=model, code=code)

    @property
    def histograms(self) -> dict[str, Histogram]:
        self.settle()
        return {metric.name: metric for metric in self.registry if isinstance(metric, Histogram)}

    @property
    def counters(self) -> dict[str, Counter]:
        return {metric.name: metric for metric in self.registry if isinstance(metric, Counter)}

    @property
    def gauges(self) -> dict[str, Gauge]:
        return {metric.name: metric for metric in self.registry if isinstance(metric, Gauge)}

    def metrics(self, stats: Mapping[str, Mapping[str, Any]] | None = None) -> list[Metric]:
        """All metrics, with the counts of engines: stats by model. `serve.metrics.exposition` makes the text for Prometheus."""
        self.settle()
        found: list[Metric] = list(self.registry)
        for name, (key, description) in {**GAUGES, **COUNTERS, **ENCODER_COUNTERS, **EVERY_COUNTER}.items():
            kind = Gauge if name in GAUGES else Counter
            samples = [Sample((model,), float(values[key])) for model, values in (stats or {}).items() if key in values]
            found.append(GivenMetric(kind.kind, name, description, LABEL, samples))
        return found
