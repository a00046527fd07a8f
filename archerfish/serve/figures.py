"""What an engine process counts, and how its front ends read it. Names are vLLM's where they mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archerfish.observe.collector import MetricsCollector
from archerfish.observe.metrics import GivenMetric, Metric, Sample


class Figures(MetricsCollector):
    """What an engine process counts as things happen, for all its models."""

    def report(self, stats: Mapping[str, Mapping[str, Any]], host: Mapping[str, float]) -> dict[str, Any]:
        """All figures by name, with those that are only known when somebody asks: stats of the models, gauges of the host."""
        found = self.metrics(stats)
        for name, value in host.items():
            found.append(GivenMetric("gauge", f"archerfish_{name}", "", (), [Sample((), float(value))]))
        return {metric.name: as_values(metric) for metric in found}


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
