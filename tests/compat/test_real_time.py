from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

import pytest

from archerfish.compat.monitor import MetricEvent, RealTimeMonitor


def test_a_listener_that_fails_disturbs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    monitor, events = RealTimeMonitor(lambda: {"a": 1.0}, clock=lambda: 0.0), list[MetricEvent]()

    def fail(event: MetricEvent) -> None:
        raise RuntimeError

    monitor.subscribe(fail)
    unsubscribe = monitor.subscribe(events.append)
    monitor.collect()
    unsubscribe()
    monitor.collect()
    assert events == [MetricEvent("a", 1.0, 0.0)] and "A listener of a failed." in caplog.text


def test_values_beyond_a_threshold_are_alerts() -> None:
    monitor = RealTimeMonitor(lambda: {"a": 1.0, "b": 9.0}, alert_thresholds={"a": 1.0, "b": 5.0}, clock=lambda: 42.0)
    events: list[MetricEvent] = []
    monitor.subscribe(events.append)
    assert monitor.collect() == events == [MetricEvent("a", 1.0, 42.0), MetricEvent("b", 9.0, 42.0, is_alert=True)]
    with pytest.raises(ValueError, match="above 0"):
        RealTimeMonitor(dict, monitoring_interval_s=0)


def test_a_rate_or_a_ratio_alerts_when_it_is_too_low() -> None:
    now = {"m/generated_tok_s": 90.0, "m/prefix_hit_ratio": 0.5, "m/e2e_p99_ms": 90.0, "memory_bytes": 90.0}
    monitor = RealTimeMonitor(lambda: now, alert_thresholds=dict.fromkeys(now, 100.0))
    assert {event.name for event in monitor.collect() if event.is_alert} == {"m/generated_tok_s", "m/prefix_hit_ratio"}
    now = dict.fromkeys(now, 101.0)
    assert {event.name for event in monitor.collect() if event.is_alert} == {"m/e2e_p99_ms", "memory_bytes"}


def test_a_failed_reading_does_not_stop_the_monitor() -> None:
    readings: queue.Queue[str] = queue.Queue()

    def read() -> Mapping[str, float]:
        if readings.qsize() == 0:
            readings.put("failed")
            raise OSError("not now")
        return {"a": 1.0}

    has_event = threading.Event()
    with RealTimeMonitor(read, monitoring_interval_s=0.001) as monitor:
        monitor.subscribe(lambda event: has_event.set())
        monitor.start_monitoring()  # again: nothing
        assert has_event.wait(30)
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
