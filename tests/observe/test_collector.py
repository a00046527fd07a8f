from __future__ import annotations

import math

import pytest

from archerfish.observe import Histogram, MetricsCollector
from archerfish.observe.metrics import GAPS, TTFT, WHOLE


def test_what_happens_is_in_the_histograms_and_counters() -> None:
    collector = MetricsCollector(window=10)
    collector.token("m", 0.2, is_first=True)
    collector.gaps("m", [0.01, 0.03])
    collector.ended("m", 100, 200, 300, ["stop", "length"])
    collector.refused("m", "overloaded")
    histograms = collector.histograms  # gaps that wait are taken in before anybody looks
    assert histograms[GAPS].percentiles([100], model_name="m") == [0.03]
    assert histograms[TTFT].count(model_name="m") == 1
    assert histograms[WHOLE].sum(model_name="m") == pytest.approx(0.6)
    assert collector.counters["vllm:request_success"].value(model_name="m", finished_reason="length") == 1
    assert collector.counters["archerfish_refused_requests"].value(model_name="m", code="overloaded") == 1


def test_counts_of_engines_are_read_and_not_counted_again() -> None:
    found = {metric.name: metric for metric in MetricsCollector().metrics({"m": {"num_running": 3, "num_steps": 7}})}
    assert len(found) == len(MetricsCollector().metrics())
    assert (found["vllm:num_requests_running"].kind, found["archerfish_steps"].kind) == ("gauge", "counter")
    assert [(sample.labels, sample.value) for sample in found["archerfish_steps"].samples()] == [(("m",), 7.0)]
    assert found["vllm:num_preemptions"].samples() == []


def test_percentiles_are_exact_over_the_window() -> None:
    histogram = Histogram("x", window=100)
    assert math.isnan(*histogram.percentiles([50]))
    histogram.observe(*range(1000))
    assert histogram.percentiles([0, 1, 50, 99, 100]) == [900, 900, 949, 998, 999]
    assert histogram.count() == 1000
    with pytest.raises(ValueError, match="between 0 and 100"):
        histogram.percentiles([50, 101])
    plain = Histogram("x")
    plain.observe(1)
    assert math.isnan(*plain.percentiles([50]))
