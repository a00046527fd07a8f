import math
import threading

import pytest

from archerfish.observe.metrics import (
    MAX_TENANTS,
    SECONDS_BUCKETS,
    TTFT,
    WHOLE,
    Histogram,
    MetricRegistry,
    MetricsCollector,
)


def test_counter_counts_by_label_and_refuses_to_shrink() -> None:
    requests = MetricRegistry().counter("requests_total", "Requests.", ("route", "status"))
    requests.add(route="/a", status="200")
    requests.add(2, route="/a", status="200")
    requests.add(route="/a", status="400")
    assert requests.value(route="/a", status="200") == 3
    assert requests.value(route="/b", status="200") == 0
    with pytest.raises(ValueError, match="cannot change by -1"):
        requests.add(-1, route="/a", status="200")
    with pytest.raises(ValueError, match="nan"):
        requests.add(math.nan, route="/a", status="200")


def test_wrong_labels_are_named() -> None:
    depth = MetricRegistry().gauge("depth", label_names=("queue",))
    for wrong in ({}, {"queue": "a", "other": "b"}):
        with pytest.raises(ValueError, match=r"has the labels \('queue',\), not"):
            depth.add(1, **wrong)


def test_histogram_buckets_are_cumulative_and_inclusive() -> None:
    times = MetricRegistry().histogram("times")
    times.observe(10, 30, 30, 31, 100)
    (sample,) = times.samples()
    assert sample.buckets[-7:] == ((5, 0), (10, 1), (30, 3), (60, 4), (120, 5), (300, 5), (math.inf, 5))
    assert [bound for bound, _ in sample.buckets[:-1]] == sorted(SECONDS_BUCKETS)
    assert (sample.count, sample.value) == (5, 201) and times.count() == 5


def test_registry_returns_the_same_metric() -> None:
    registry = MetricRegistry()
    assert registry.counter("x", label_names=("a",)) is registry.counter("x", label_names=("a",))
    assert [metric.name for metric in registry] == ["x"]
    for wrong in (lambda: registry.gauge("x", label_names=("a",)), lambda: registry.counter("x")):
        with pytest.raises(ValueError, match="another kind"):
            wrong()


def test_threads_lose_no_count() -> None:
    registry = MetricRegistry()

    def work() -> None:
        for _ in range(1000):
            registry.counter("n").add()
            registry.histogram("h").observe(0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.counter("n").value() == 4000
    assert registry.histogram("h").count() == 4000


def test_what_happens_is_in_the_histograms_and_counters() -> None:
    collector = MetricsCollector(window=10)
    collector.first_token("m", 0.2)
    collector.gaps("m", [0.01, 0.03])
    collector.ended("m", 100, 200, 300, ["stop", "length"])
    collector.refused("m", "overloaded")
    histograms = collector.histograms  # gaps that wait are taken in before anybody looks
    assert histograms["archerfish_inter_token_latency_seconds"].percentiles([100], model_name="m") == [0.03]
    assert histograms[TTFT].count(model_name="m") == 1
    assert histograms[WHOLE].samples()[0].value == pytest.approx(0.6)
    assert collector.counters["archerfish_request_success"].value(model_name="m", finished_reason="length") == 1
    assert collector.counters["archerfish_refused_requests"].value(model_name="m", code="overloaded") == 1


def test_labels_that_are_not_given_may_have_any_value() -> None:
    collector = MetricsCollector(window=10)
    for model, tenant, seconds in (("m", "a", 0.2), ("m", "b", 0.4), ("n", "a", 9.0)):
        collector.first_token(model, seconds, tenant)
    histogram = collector.histograms[TTFT]
    assert (histogram.count(model_name="m"), histogram.count(model_name="m", tenant="b"), histogram.count()) == (
        2,
        1,
        3,
    )
    assert histogram.percentiles([100], model_name="m") == [0.4] and sum(histogram.counts(tenant="a")) == 2
    with pytest.raises(ValueError, match="not \\('replica',\\)"):
        histogram.count(replica="0")


def test_only_the_first_tenants_have_labels_of_their_own() -> None:
    collector = MetricsCollector()
    labels = [collector.tenant_label(f"t{number}") for number in range(MAX_TENANTS + 3)]
    assert labels == [*(f"t{number}" for number in range(MAX_TENANTS)), *["other"] * 3]
    assert collector.tenant_label("t0") == "t0" and collector.tenant_label("t40") == "other"


def test_counts_of_engines_are_read_and_not_counted_again() -> None:
    found = {metric.name: metric for metric in MetricsCollector().metrics({"m": {"num_running": 3, "num_steps": 7}})}
    assert len(found) == len(MetricsCollector().metrics())
    assert (found["archerfish_num_requests_running"].kind, found["archerfish_steps"].kind) == ("gauge", "counter")
    assert [(sample.labels, sample.value) for sample in found["archerfish_steps"].samples()] == [(("m",), 7.0)]
    assert found["archerfish_num_preemptions"].samples() == []


def test_percentiles_are_exact_over_the_window() -> None:
    histogram = Histogram("x", window=100)
    assert math.isnan(*histogram.percentiles([50]))
    histogram.observe(*range(1000))
    assert histogram.percentiles([0, 1, 50, 99, 100]) == [900, 900, 949, 998, 999]
    assert histogram.count() == 1000
    plain = Histogram("x")
    plain.observe(1)
    assert math.isnan(*plain.percentiles([50]))
