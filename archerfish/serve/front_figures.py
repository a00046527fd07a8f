"""What the front ends of a service have counted, as the engine process adds it up for all of them; see `sharing`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from archerfish.errors import InvalidInputError
from archerfish.observe.metrics import GivenMetric, Metric, Sample
from archerfish.serve.figures import read_metrics

ALIVE_S = 10.0  # a front end that was not heard of for longer runs nothing any more
MAX_SOURCES = 256  # whose figures are kept apart


class FrontFigures:
    """The last figures of every front end, and the newest options of one of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, list[Metric]]] = {}  # by source, the least recently heard first
        self._past: list[Metric] = []  # of sources that are not kept apart any more
        self.version = 0
        self.options: dict[str, Any] = {}

    def take(self, source: str, values: Mapping[str, Any]) -> None:
        """What a front end tells; its figures are all that it has counted since its start."""
        try:
            found = [checked(metric) for metric in read_metrics(values.get("metrics", {}))]
            version, options = int(values.get("version", 0)), dict(values.get("options", {}))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidInputError(f"What a front end tells cannot be read: {error}.") from None
        self._last.pop(source, None)
        self._last[source] = self._clock(), found
        while len(self._last) > MAX_SOURCES:
            _, old = self._last.pop(next(iter(self._last)))
            self._past = merged([self._past, without_gauges(old)])
        if version > self.version:
            self.version, self.options = version, options

    def metrics(self) -> list[Metric]:
        """Of all front ends together: those that are gone count with what they did, not with what they had."""
        since = self._clock() - ALIVE_S
        groups = (found if heard >= since else without_gauges(found) for heard, found in self._last.values())
        return merged([self._past, *groups])


def checked(metric: Metric) -> Metric:
    """With samples of the types that they should have."""
    samples = [
        Sample(
            tuple(map(str, one.labels)), float(one.value), int(one.count),
            tuple((float(bound), int(count)) for bound, count in one.buckets),
        ) for one in metric.samples()
    ]  # fmt: skip
    return GivenMetric(metric.kind, metric.name, metric.description, metric.label_names, samples)


def without_gauges(metrics: Iterable[Metric]) -> list[Metric]:
    return [metric for metric in metrics if metric.kind != "gauge"]


def merged(groups: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Metrics of the same name as one, whose samples of the same labels are added up."""
    found: dict[str, tuple[Metric, dict[tuple[str, ...], Sample]]] = {}
    for group in groups:
        for metric in group:
            samples = found.setdefault(metric.name, (metric, {}))[1]
            for one in metric.samples():
                before = samples.get(one.labels)
                samples[one.labels] = one if before is None else added(before, one)
    return [
        GivenMetric(metric.kind, name, metric.description, metric.label_names, list(samples.values()))
        for name, (metric, samples) in found.items()
    ]  # fmt: skip


def added(one: Sample, other: Sample) -> Sample:
    buckets = tuple((bound, a + b) for (bound, a), (_, b) in zip(one.buckets, other.buckets, strict=False))
    return Sample(one.labels, one.value + other.value, one.count + other.count, buckets)
