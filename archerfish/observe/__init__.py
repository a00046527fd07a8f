"""What the engine counts and times; imports nothing of ours but types."""

from archerfish.observe.metrics import Counter, Gauge, Histogram, Metric, MetricRegistry, Sample

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "MetricRegistry", "Sample"]
