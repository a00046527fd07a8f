"""What the engine counts and times; imports nothing of ours but types."""

from archerfish.observe.collector import MetricsCollector
from archerfish.observe.events import MetricEvent, RealTimeMonitor
from archerfish.observe.metrics import Counter, Gauge, Histogram, Metric, MetricRegistry, Sample
from archerfish.observe.regression import RegressionDetector
from archerfish.observe.sampling import SamplingMetrics

__all__ = [
    "Counter", "Gauge", "Histogram", "Metric", "MetricEvent", "MetricRegistry", "MetricsCollector", "RealTimeMonitor",
    "RegressionDetector", "Sample", "SamplingMetrics",
]
