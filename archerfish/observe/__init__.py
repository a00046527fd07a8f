"""Counters, histograms and comparisons of figures. Nothing here imports another part of the package."""

from archerfish.observe.metrics import (
    Counter,
    Gauge,
    Histogram,
    Metric,
    MetricRegistry,
    MetricsCollector,
    Sample,
    SamplingMetrics,
)
from archerfish.observe.regression import RegressionDetector

__all__ = [
    "Counter", "Gauge", "Histogram", "Metric", "MetricRegistry", "MetricsCollector",
    "RegressionDetector", "Sample", "SamplingMetrics",
]
