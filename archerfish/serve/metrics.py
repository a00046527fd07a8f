"""Metrics: how processes exchange them, how those of several front ends are added up, and their text format for
Prometheus."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from archerfish.observe.metrics import GivenMetric, Kind, Metric, Sample
from archerfish.serve.wire import FrontEndState, MetricValues

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ALIVE_S = 10.0  # a front end without a message for longer has ended
MAX_SOURCES = 256  # front ends whose metrics are kept apart
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


# In messages


def metric_values(metric: Metric) -> MetricValues:
    labels, samples = metric.label_names, metric.samples()
    return MetricValues(kind=metric.kind, description=metric.description, label_names=labels, samples=samples)


def read_metrics(values: Mapping[str, Any]) -> list[Metric]:
    """The metrics of a Report about "metrics", or of a front end."""
    found = msgspec.convert(values, dict[str, MetricValues]).items()
    return [GivenMetric(one.kind, name, one.description, one.label_names, one.samples) for name, one in found]


GIVEN: dict[str, tuple[Kind, str]] = {  # of processes, by the names in `/stats`
    "engine_up": ("gauge", "Whether the engine process answers."),
    "replica_up": ("gauge", "Whether a replica takes requests."),
    "clients": ("gauge", "Clients of the engine process with requests."),
    "live_requests": ("gauge", "Requests of the engine process that have not ended."),
    "lost_clients": ("counter", "Clients that went away before their requests had ended."),
    "loaded_models": ("gauge", "Loaded models."),
    "unloaded_models": ("counter", "Models that were unloaded to make room."),
    "job_seconds": (
        "gauge",
        "Seconds for which the current job of the compute thread has been running; 0 without one.",
    ),
}


def process_metrics(values: Mapping[str, float]) -> list[Metric]:
    """The metrics of GIVEN with these values."""
    return [
        GivenMetric(GIVEN[name][0], f"archerfish_{name}", GIVEN[name][1], (), [Sample((), float(value))])
        for name, value in values.items()
    ]


# Of several front ends


class FrontEndMetrics:
    """The last metrics of every front end, and the newest options that one of them has sent. The engine process keeps
    them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, list[Metric]]] = {}  # by front end; the longest silent one is first
        self._past: list[Metric] = []  # of front ends beyond MAX_SOURCES
        self.version = 0
        self.options: dict[str, Any] = {}

    def take(self, source: str, state: FrontEndState) -> None:
        """Take over the state of a front end. Its metrics count from its start."""
        self._last.pop(source, None)
        self._last[source] = self._clock(), read_metrics(state.metrics)
        while len(self._last) > MAX_SOURCES:
            _, old = self._last.pop(next(iter(self._last)))
            self._past = merged([self._past, without_gauges(old)])
        if state.version > self.version:
            self.version, self.options = state.version, state.options

    def metrics(self) -> list[Metric]:
        """The sums over all front ends. Those that have ended still count, except in gauges."""
        since = self._clock() - ALIVE_S
        groups = (found if at >= since else without_gauges(found) for at, found in self._last.values())
        return merged([self._past, *groups])


def without_gauges(metrics: Iterable[Metric]) -> list[Metric]:
    return [metric for metric in metrics if metric.kind != "gauge"]


def merged(groups: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Add up the samples of metrics with the same name and labels."""
    found: dict[str, tuple[Metric, dict[tuple[str, ...], Sample]]] = {}
    for metric in (metric for group in groups for metric in group):
        samples = found.setdefault(metric.name, (metric, {}))[1]
        for one in metric.samples():
            before = samples.get(one.labels)
            samples[one.labels] = one if before is None else added(before, one)
    return [
        GivenMetric(metric.kind, name, metric.description, metric.label_names, list(samples.values()))
        for name, (metric, samples) in found.items()
    ]


def added(one: Sample, other: Sample) -> Sample:
    buckets = tuple((bound, a + b) for (bound, a), (_, b) in zip(one.buckets, other.buckets, strict=False))
    return Sample(one.labels, one.value + other.value, one.count + other.count, buckets)


# For Prometheus


class ObserveCollector(Collector):
    """Gives our metrics to prometheus_client."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Family]:
        return map(family_of, self.metrics)


def family_of(metric: Metric) -> Family:
    """A metric in prometheus_client's form."""
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.description, labels=metric.label_names)
        for sample in metric.samples():
            buckets = [("+Inf" if math.isinf(bound) else repr(bound), float(count)) for bound, count in sample.buckets]
            histogram.add_metric(sample.labels, buckets, sample.value)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.description, labels=metric.label_names)
    for sample in metric.samples():
        family.add_metric(sample.labels, sample.value)
    return family


def exposition(metrics: Iterable[Metric]) -> bytes:
    """The page that a Prometheus server reads."""
    return generate_latest(ObserveCollector(metrics))
