"""Counters, gauges and histograms with labels, safe to use from any thread; `serve` exposes them to Prometheus.

MetricsCollector has those of engines. Their names are "archerfish_" and vLLM's name where the meaning is the same.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, TypeVar

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]

SECONDS_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0
)  # fmt: skip
TOKEN_BUCKETS = (*(float(factor * 10**power) for power in range(5) for factor in (1, 2, 5)), 100_000.0)
MAX_TENANTS = 32  # with a label of their own; later ones share OTHER_TENANTS
OTHER_TENANTS = "other"

LABEL, LABELS = ("model_name",), ("model_name", "tenant")
GAUGES = {  # the key in a model's stats, and a description
    "archerfish_num_requests_running": ("num_running", "Running sequences."),
    "archerfish_num_requests_waiting": ("num_waiting", "Waiting sequences."),
    "archerfish_kv_cache_usage_perc": ("kv_usage", "Share of the KV blocks that running sequences hold; 1 is all."),
}
COUNTERS = {
    "archerfish_num_preemptions": ("num_preemptions", "Sequences whose blocks were taken for others."),
    "archerfish_spec_decode_num_drafts": ("num_drafts", "Steps of sequences that verified proposed tokens."),
    "archerfish_spec_decode_num_draft_tokens": ("num_draft_tokens", "Proposed tokens."),
    "archerfish_spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Proposed tokens that were accepted."),
    "archerfish_generation_tokens": ("total_tokens_generated", "Generated tokens."),
    "archerfish_prompt_tokens": ("num_prompt_tokens", "Prompt tokens of admitted requests."),
    "archerfish_prefix_cache_queries": ("num_prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "archerfish_prefix_cache_hits": ("cache_hits", "Prompt tokens found in the prefix cache."),
    "archerfish_adapter_loads": ("adapter_loads", "LoRA adapters that were put into a slot of the device."),
    "archerfish_steps": ("num_steps", "Planned steps."),
    "archerfish_kernels_compiled_at_start": (
        "kernels_compiled_at_start",
        "Kernels compiled before the model was ready.",
    ),
    "archerfish_kernels_compiled_late": (
        "kernels_compiled_late",
        "Kernels compiled later, while requests may have waited.",
    ),
    "archerfish_encoded_texts": ("num_texts", "Computed texts and pairs."),
    "archerfish_encoded_tokens": ("num_tokens", "Tokens of computed texts and pairs."),
    "archerfish_jobs": ("jobs", "Jobs of the compute thread."),
    "archerfish_busy_seconds": ("busy_s", "Busy seconds of the compute thread."),
}
TTFT, GAPS = "archerfish_time_to_first_token_seconds", "archerfish_inter_token_latency_seconds"
WHOLE, QUEUE = "archerfish_e2e_request_latency_seconds", "archerfish_request_queue_time_seconds"
PREFILL, DECODE = "archerfish_request_prefill_time_seconds", "archerfish_request_decode_time_seconds"
PROMPT, OUTPUT = "archerfish_request_prompt_tokens", "archerfish_request_generation_tokens"
ENCODE, STEP = "archerfish_encode_seconds", "archerfish_iteration_tokens"
ENDS = "archerfish_request_success"
REFUSALS = "archerfish_refused_requests"
ADAPTERS = "archerfish_adapter_requests"
HISTOGRAMS = {
    TTFT: "From arrival to the first token.",
    GAPS: "From one token of a request to the next.",
    WHOLE: "From arrival to the end: queue, prefill and decode.",
    QUEUE: "From arrival to admission.",
    PREFILL: "From admission to the first token.",
    DECODE: "From the first token to the end.",
    ENCODE: "From the arrival of texts to their vectors.",
    PROMPT: "Prompt tokens of a request.",
    OUTPUT: "Generated tokens of a request.",
    STEP: "Prompt and output tokens of a step.",
}
IN_TOKENS = (PROMPT, OUTPUT, STEP)


@dataclass(frozen=True)
class Sample:
    """The state of one metric under one set of labels; `buckets` holds (upper bound, cumulative count) of a
    histogram."""

    labels: Labels
    value: float
    count: int = 0
    buckets: tuple[tuple[float, int], ...] = ()


class Metric(ABC):
    """The common part of the three kinds of metric: a name, label names, and a lock."""

    kind: ClassVar[Kind]

    def __init__(self, name: str, description: str = "", label_names: Sequence[str] = ()) -> None:
        self.name = name
        self.description = description
        self.label_names = tuple(label_names)
        self._lock = threading.Lock()

    def _key(self, labels: dict[str, str]) -> Labels:
        if labels.keys() != set(self.label_names):
            raise ValueError(f"The metric {self.name} has the labels {self.label_names}, not {tuple(labels)}.")
        return tuple(labels[name] for name in self.label_names)

    def _chooser(self, labels: dict[str, str]) -> Callable[[Labels], bool]:
        """Whether a key has these labels; those that are not given may have any value."""
        if not labels.keys() <= set(self.label_names):
            raise ValueError(f"The metric {self.name} has the labels {self.label_names}, not {tuple(labels)}.")
        wanted = [(self.label_names.index(name), value) for name, value in labels.items()]
        return lambda key: all(key[place] == value for place, value in wanted)

    @abstractmethod
    def samples(self) -> list[Sample]:
        """A consistent copy of the current state."""


class _Number(Metric):
    def __init__(self, name: str, description: str = "", label_names: Sequence[str] = ()) -> None:
        super().__init__(name, description, label_names)
        self._values: dict[Labels, float] = {}

    def value(self, **labels: str) -> float:
        """The sum over all samples with these labels."""
        has_labels = self._chooser(labels)
        with self._lock:
            return sum(value for key, value in self._values.items() if has_labels(key))

    def samples(self) -> list[Sample]:
        with self._lock:
            return [Sample(labels, value) for labels, value in self._values.items()]

    def add(self, amount: float = 1, **labels: str) -> None:
        if self.kind == "counter" and not amount >= 0:
            raise ValueError(f"The counter {self.name} cannot change by {amount}.")
        key = tuple(labels.values()) if tuple(labels) == self.label_names else self._key(labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount


class Counter(_Number):
    """A number that only grows."""

    kind = "counter"


class Gauge(_Number):
    """A number that goes up and down."""

    kind = "gauge"


class GivenMetric(Metric):
    """A metric whose samples were counted elsewhere."""

    def __init__(
        self, kind: Any, name: str, description: str, label_names: Sequence[str], samples: list[Sample]
    ) -> None:
        super().__init__(name, description, label_names)
        self.kind = kind  # type: ignore[misc]
        self._samples = samples

    def samples(self) -> list[Sample]:
        return self._samples


class _Series:
    def __init__(self, num_buckets: int, window: int) -> None:
        self.counts = [0] * (num_buckets + 1)
        self.total = 0.0
        self.recent: deque[float] = deque(maxlen=window)


class Histogram(Metric):
    """Counts of values in fixed buckets; the last bucket has no upper bound. window: values kept for `percentiles`."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        description: str = "",
        label_names: Sequence[str] = (),
        window: int = 0,
        bounds: tuple[float, ...] = SECONDS_BUCKETS,
    ) -> None:
        super().__init__(name, description, label_names)
        self.window, self.bounds = window, bounds
        self._series: dict[Labels, _Series] = {}

    def observe(self, *values: float, **labels: str) -> None:
        """Count values, all under one lock."""
        self.record(self._key(labels), values)

    def record(self, key: Labels, values: Sequence[float], times: int = 1) -> None:
        """Count values, each so many times. key: the values of the labels, in the order of label_names."""
        with self._lock:
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = _Series(len(self.bounds), self.window)
            for value in values:
                series.counts[bisect.bisect_left(self.bounds, value)] += times
                series.total += value * times
            if self.window:
                series.recent.extend([*values] * times)

    def count(self, **labels: str) -> int:
        return sum(self.counts(**labels))

    def counts(self, **labels: str) -> list[int]:
        """Values in each bucket, those above all bounds last; the sums over all series with these labels."""
        has_labels = self._chooser(labels)
        with self._lock:
            found = [series.counts for key, series in self._series.items() if has_labels(key)]
            return [sum(bucket) for bucket in zip(*found, strict=True)] if found else [0] * (len(self.bounds) + 1)

    def percentiles(self, percents: Sequence[float], **labels: str) -> list[float]:
        """Exact percentiles (nearest rank) of the values in the window of all series with these labels; nan if it is
        empty."""
        has_labels = self._chooser(labels)
        with self._lock:
            ordered = sorted(
                value for key, series in self._series.items() if has_labels(key) for value in series.recent
            )
        size = len(ordered)
        return [ordered[max(0, math.ceil(percent * size / 100) - 1)] if ordered else math.nan for percent in percents]

    def samples(self) -> list[Sample]:
        with self._lock:
            copies = [(key, list(series.counts), series.total) for key, series in self._series.items()]
        found = []
        for key, counts, total in copies:
            cumulative = list(accumulate(counts))
            found.append(
                Sample(key, total, cumulative[-1], tuple(zip((*self.bounds, math.inf), cumulative, strict=True)))
            )
        return found


M = TypeVar("M", bound=Metric)


class MetricRegistry:
    """The metrics of one service. The same name gives the same metric, so that parts can share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Metric] = {}

    def __iter__(self) -> Iterator[Metric]:
        with self._lock:
            return iter(list(self._metrics.values()))

    def counter(self, name: str, description: str = "", label_names: Sequence[str] = ()) -> Counter:
        return self._get(Counter(name, description, label_names))

    def gauge(self, name: str, description: str = "", label_names: Sequence[str] = ()) -> Gauge:
        return self._get(Gauge(name, description, label_names))

    def histogram(
        self,
        name: str,
        description: str = "",
        label_names: Sequence[str] = (),
        window: int = 0,
        bounds: tuple[float, ...] = SECONDS_BUCKETS,
    ) -> Histogram:
        return self._get(Histogram(name, description, label_names, window, bounds))

    def _get(self, wanted: M) -> M:
        with self._lock:
            known = self._metrics.setdefault(wanted.name, wanted)
        if not isinstance(known, type(wanted)) or known.label_names != wanted.label_names:
            raise ValueError(f"The metric {wanted.name} exists with another kind or labels.")
        return known


class MetricsCollector:
    """Histograms and counters by model and tenant; safe to use from any thread.

    Counts that engines keep themselves are passed to `metrics`. window: values that histograms keep for exact
    percentiles.
    tenant: "" where there are no API keys; `tenant_label` bounds how many there are.
    """

    def __init__(self, *, window: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = MetricRegistry()
        self.start_time = clock()
        self._tenants: set[str] = set()
        self._adapter_names: set[str] = set()
        self._lock = threading.Lock()
        self._histograms: dict[str, Histogram] = {}
        for name, text in HISTOGRAMS.items():
            bounds = TOKEN_BUCKETS if name in IN_TOKENS else SECONDS_BUCKETS
            self._histograms[name] = self.registry.histogram(
                name, text, LABEL if name == STEP else LABELS, window, bounds
            )
        counter = self.registry.counter
        self._ends = counter(ENDS, "Sequences by what ended them.", (*LABELS, "finished_reason"))
        self._adapters = counter(ADAPTERS, "Requests with a LoRA adapter.", ("model_name", "adapter"))
        self._refusals = counter(REFUSALS, "Requests refused, by the code they got.", (*LABELS, "code"))

    def tenant_label(self, name: str) -> str:
        """The label of a tenant: its name for the first MAX_TENANTS that are asked for, OTHER_TENANTS for later
        ones."""
        return self._label(self._tenants, name)

    def _label(self, known: set[str], name: str) -> str:
        with self._lock:
            if name not in known and len(known) >= MAX_TENANTS:
                return OTHER_TENANTS
            known.add(name)
            return name

    def adapter_request(self, model: str, adapter: str) -> None:
        """Count a request; adapters have labels as tenants have."""
        self._adapters.add(model_name=model, adapter=self._label(self._adapter_names, adapter))

    def first_token(self, model: str, seconds: float, tenant: str = "") -> None:
        """Record the time from arrival to the first token."""
        self._histograms[TTFT].record((model, tenant), (seconds,))

    def gaps(self, model: str, seconds: Sequence[float], tenant: str = "", *, times: int = 1) -> None:
        """Record times between tokens, each so many times, all under one lock."""
        if seconds:
            self._histograms[GAPS].record((model, tenant), seconds, times)

    def ended(
        self,
        model: str,
        queue_ms: float,
        prefill_ms: float,
        decode_ms: float,
        finish_reasons: Sequence[str | None],
        tenant: str = "",
        *,
        num_prompt_tokens: int = 0,
        num_output_tokens: int = 0,
    ) -> None:
        """Record the durations and tokens of an ended request and the finish reason of each output."""
        values = {
            QUEUE: queue_ms / 1000,
            PREFILL: prefill_ms / 1000,
            DECODE: decode_ms / 1000,
            WHOLE: (queue_ms + prefill_ms + decode_ms) / 1000,
            PROMPT: num_prompt_tokens,
            OUTPUT: num_output_tokens,
        }
        for name, value in values.items():
            self._histograms[name].record((model, tenant), (value,))
        for reason in finish_reasons:
            self._ends.add(model_name=model, tenant=tenant, finished_reason=str(reason))

    def step(self, model: str, num_tokens: int) -> None:
        """Record the tokens of a step."""
        self._histograms[STEP].record((model,), (num_tokens,))

    def embedded(self, model: str, seconds: float, tenant: str = "") -> None:
        self._histograms[ENCODE].record((model, tenant), (seconds,))

    def refused(self, model: str, code: str, tenant: str = "") -> None:
        self._refusals.add(model_name=model, tenant=tenant, code=code)

    @property
    def histograms(self) -> dict[str, Histogram]:
        return self._histograms

    @property
    def counters(self) -> dict[str, Counter]:
        return {metric.name: metric for metric in self.registry if isinstance(metric, Counter)}

    def metrics(self, stats: Mapping[str, Mapping[str, Any]] | None = None) -> list[Metric]:
        """All metrics, with the counts of engines: stats by model. `serve.metrics.exposition` makes the text for
        Prometheus."""
        found: list[Metric] = list(self.registry)
        for name, (key, description) in {**GAUGES, **COUNTERS}.items():
            kind = Gauge if name in GAUGES else Counter
            samples = [Sample((model,), float(values[key])) for model, values in (stats or {}).items() if key in values]
            found.append(GivenMetric(kind.kind, name, description, LABEL, samples))
        return found


@dataclass(slots=True)
class SamplingMetrics:
    """Counts since a sampler was made. One thread writes them; reading is safe from any."""

    total_samples: int = 0
    fast_path_samples: int = 0  # in batches with greedy rows only, which need no distribution
    cache_hits: int = 0  # draws from cached logits
    sample_seconds: float = 0.0  # of the host; on a GPU the time of queueing the work
    num_timed: int = 0  # samples of those seconds; recorded steps of a GPU are not timed
    memory_allocations: int = 0  # parameter tables that were made because the batch changed

    @property
    def avg_sample_time(self) -> float:
        """Seconds for one sample; 0 before the first."""
        return self.sample_seconds / self.num_timed if self.num_timed else 0.0
