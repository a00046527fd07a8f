"""Counters, histograms and comparisons of figures. Nothing here imports another part of the package."""

from archerfish.observe.collector import MetricsCollector
from archerfish.observe.metrics import Counter, Gauge, Histogram, Metric, MetricRegistry, Sample
from archerfish.observe.regression import RegressionDetector
from archerfish.observe.sampling import SamplingMetrics

__all__ = [
    "Counter", "Gauge", "Histogram", "Metric", "MetricRegistry", "MetricsCollector",
    "RegressionDetector", "Sample", "SamplingMetrics",
]
