import math
import threading

import pytest

from archerfish.observe import MetricRegistry


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
    with pytest.raises(ValueError, match="needs the label 'queue'"):
        depth.set(1)
    with pytest.raises(ValueError, match="no label 'other'"):
        depth.set(1, queue="a", other="b")


def test_histogram_buckets_are_cumulative_and_inclusive() -> None:
    sizes = MetricRegistry().histogram("sizes", buckets=(1, 2, 4))
    sizes.observe(1, 2, 2, 3, 100)
    (sample,) = sizes.samples()
    assert list(sample.buckets) == [(1, 1), (2, 3), (4, 4), (math.inf, 5)]
    assert (sample.count, sample.value) == (5, 108)
    assert (sizes.count(), sizes.sum()) == (5, 108)


def test_registry_gives_the_same_metric_and_refuses_another_shape() -> None:
    registry = MetricRegistry()
    assert registry.counter("x", label_names=("a",)) is registry.counter("x", label_names=("a",))
    assert [metric.name for metric in registry] == ["x"]
    registry.histogram("h", buckets=(1, 2))
    for wrong in (
        lambda: registry.gauge("x", label_names=("a",)),
        lambda: registry.counter("x"),
        lambda: registry.histogram("h", buckets=(1, 3)),
    ):
        with pytest.raises(ValueError, match="another kind"):
            wrong()
    with pytest.raises(ValueError, match="rising"):
        registry.histogram("bad", buckets=(2, 1))


def test_threads_lose_no_count() -> None:
    registry = MetricRegistry()

    def work() -> None:
        for _ in range(1000):
            registry.counter("n").add()
            registry.histogram("h", buckets=(1,)).observe(0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.counter("n").value() == 4000
    assert registry.histogram("h", buckets=(1,)).count() == 4000
