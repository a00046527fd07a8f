"""What `observe` counts, in the text format of Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from archerfish.observe.metrics import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class ObserveCollector(Collector):
    """Hands metrics of ours to prometheus_client, at the moment it asks."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Family]:
        return map(family_of, self.metrics)


def family_of(metric: Metric) -> Family:
    """One metric in prometheus_client's own form."""
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


def exposition(*groups: Iterable[Metric]) -> bytes:
    """The page that a Prometheus server reads."""
    collectors = CollectorRegistry(auto_describe=False)
    collectors.register(ObserveCollector([metric for group in groups for metric in group]))
    return generate_latest(collectors)
