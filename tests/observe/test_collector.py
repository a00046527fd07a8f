"""MetricsCollector, MetricEvent and RealTimeMonitor."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Mapping

import pytest

from archerfish.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from archerfish.observe import Histogram, MetricEvent, MetricsCollector, RealTimeMonitor
from archerfish.observe.collector import GAPS, TTFT, WHOLE
from archerfish.observe.events import Publisher


def test_what_happens_is_in_the_histograms_and_counters() -> None:
    now = 5.0
    collector = MetricsCollector(window=10, clock=lambda: now)
    collector.token("m", 0.2, is_first=True)
    collector.gaps("m", [0.01, 0.03])
    outputs = [CompletionOutput(0, finish_reason="stop"), CompletionOutput(1, finish_reason="length")]
    metrics = RequestMetrics(queue_ms=100, prefill_ms=200, decode_ms=300)
    collector.ended("m", RequestOutput("r", None, [1], outputs, metrics=metrics))
    collector.refused("m", "overloaded")
    histograms = collector.histograms  # gaps that wait are taken in before anybody looks
    assert histograms[GAPS].percentiles([100], model_name="m") == [0.03]
    assert histograms[TTFT].count(model_name="m") == 1
    assert histograms[WHOLE].sum(model_name="m") == pytest.approx(0.6)
    assert collector.counters["vllm:request_success"].value(model_name="m", finished_reason="length") == 1
    assert collector.counters["archerfish_refused_requests"].value(model_name="m", code="overloaded") == 1
    now = 8.0
    assert (collector.uptime_s, collector.gauges) == (3.0, {})


def test_counts_of_engines_are_read_and_not_counted_again() -> None:
    found = {metric.name: metric for metric in MetricsCollector().metrics({"m": {"num_running": 3, "num_steps": 7}})}
    assert len(found) == len(MetricsCollector().metrics())
    assert (found["vllm:num_requests_running"].kind, found["archerfish_steps"].kind) == ("gauge", "counter")
    assert [(sample.labels, sample.value) for sample in found["archerfish_steps"].samples()] == [(("m",), 7.0)]
    assert found["vllm:num_preemptions"].samples() == []


def test_percentiles_are_exact_over_the_window() -> None:
    histogram = Histogram("x", window=100)
    assert math.isnan(*histogram.percentiles([50]))
    histogram.observe_many([float(value) for value in range(1000)])
    assert histogram.percentiles([0, 1, 50, 99, 100]) == [900, 900, 949, 998, 999]
    assert histogram.count() == 1000
    with pytest.raises(ValueError, match="between 0 and 100"):
        histogram.percentiles([50, 101])
    plain = Histogram("x")
    plain.observe(1)
    assert math.isnan(*plain.percentiles([50]))


def test_subscribers_hear_until_they_leave_and_one_that_fails_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    publisher, heard = Publisher(), list[MetricEvent]()

    def fail(event: MetricEvent) -> None:
        raise RuntimeError("mine alone")

    publisher.subscribe(fail)
    leave = publisher.subscribe(heard.append)
    first = MetricEvent("a", 1.0, 0.0)
    publisher.publish(first)
    leave()
    leave()
    publisher.publish(MetricEvent("a", 2.0, 0.0))
    assert heard == [first]
    assert "A subscriber of a failed." in caplog.text


def test_the_monitor_marks_what_is_over_a_threshold() -> None:
    monitor = RealTimeMonitor(lambda: {"a": 1.0, "b": 9.0}, alert_thresholds={"a": 1.0, "b": 5.0}, clock=lambda: 42.0)
    heard: list[MetricEvent] = []
    monitor.subscribe(heard.append)
    assert monitor.collect() == heard == [MetricEvent("a", 1.0, 42.0), MetricEvent("b", 9.0, 42.0, is_alert=True)]
    with pytest.raises(ValueError, match="above 0"):
        RealTimeMonitor(dict, monitoring_interval_s=0)


def test_a_rate_or_a_ratio_alerts_when_it_is_too_low() -> None:
    now = {"m/generated_tok_s": 90.0, "m/prefix_hit_ratio": 0.5, "m/e2e_p99_ms": 90.0, "memory_bytes": 90.0}
    monitor = RealTimeMonitor(lambda: now, alert_thresholds=dict.fromkeys(now, 100.0))
    assert {event.name for event in monitor.collect() if event.is_alert} == {"m/generated_tok_s", "m/prefix_hit_ratio"}
    now = dict.fromkeys(now, 101.0)
    assert {event.name for event in monitor.collect() if event.is_alert} == {"m/e2e_p99_ms", "memory_bytes"}


def test_the_monitor_reads_on_when_a_reading_fails() -> None:
    readings: queue.Queue[str] = queue.Queue()

    def read() -> Mapping[str, float]:
        if readings.qsize() == 0:
            readings.put("failed")
            raise OSError("not now")
        return {"a": 1.0}

    heard = threading.Event()
    with RealTimeMonitor(read, monitoring_interval_s=0.001) as monitor:
        monitor.subscribe(lambda event: heard.set())
        monitor.start_monitoring()  # again: nothing
        assert heard.wait(30)
    assert not any(thread.name == "archerfish-monitor" for thread in threading.enumerate())


def test_a_subscriber_may_stop_the_monitor() -> None:
    stopped = threading.Event()
    monitor = RealTimeMonitor(lambda: {"a": 1.0}, monitoring_interval_s=0.001)

    def stop(event: MetricEvent) -> None:
        monitor.stop()
        stopped.set()

    monitor.subscribe(stop)
    monitor.start_monitoring()
    assert stopped.wait(30)
