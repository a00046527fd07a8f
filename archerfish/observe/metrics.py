"""Counters, gauges and histograms with labels, safe to use from any thread; `serve` exposes them to Prometheus."""

from __future__ import annotations

import bisect
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class Sample:
    """The state of one metric under one set of labels; `buckets` holds (upper bound, cumulative count) of a histogram."""

    labels: Labels
    value: float
    count: int = 0
    buckets: tuple[tuple[float, int], ...] = ()


class Metric(ABC):
    """The common part of the three kinds of metric: a name, label names, and a lock."""

    kind: ClassVar[Kind]

    def __init__(self, name: str, description: str = "", label_names: Sequence[str] = ()) -> None:
        self.name = name
        self.description = description
        self.label_names = tuple(label_names)
        self._lock = threading.Lock()

    def _key(self, labels: dict[str, str]) -> Labels:
        try:
            key = tuple(labels[name] for name in self.label_names)
        except KeyError as error:
            raise ValueError(f"The metric {self.name} needs the label {error}.") from None
        if len(labels) != len(key):
            unknown = sorted(set(labels) - set(self.label_names))
            raise ValueError(f"The metric {self.name} has no label {unknown[0]!r}.")
        return key

    @abstractmethod
    def samples(self) -> list[Sample]:
        """A consistent copy of the current state."""


class _Number(Metric):
    def __init__(self, name: str, description: str = "", label_names: Sequence[str] = ()) -> None:
        super().__init__(name, description, label_names)
        self._values: dict[Labels, float] = {}

    def value(self, **labels: str) -> float:
        key = self._key(labels)
        with self._lock:
            return self._values.get(key, 0.0)

    def samples(self) -> list[Sample]:
        with self._lock:
            return [Sample(labels, value) for labels, value in self._values.items()]

    def add(self, amount: float = 1, **labels: str) -> None:
        if self.kind == "counter" and not amount >= 0:
            raise ValueError(f"The counter {self.name} cannot change by {amount}.")
        key = tuple(labels.values()) if tuple(labels) == self.label_names else self._key(labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount


class Counter(_Number):
    """A number that only grows."""

    kind = "counter"


class Gauge(_Number):
    """A number that goes up and down."""

    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        key = self._key(labels)
        with self._lock:
            self._values[key] = value


class GivenMetric(Metric):
    """A metric whose samples were counted elsewhere."""

    def __init__(self, kind: Any, name: str, description: str, label_names: Sequence[str], samples: list[Sample]) -> None:
        super().__init__(name, description, label_names)
        self.kind = kind  # type: ignore[misc]
        self._samples = samples

    def samples(self) -> list[Sample]:
        return self._samples


class _Series:
    def __init__(self, num_buckets: int, window: int) -> None:
        self.counts = [0] * (num_buckets + 1)
        self.total = 0.0
        self.recent: deque[float] = deque(maxlen=window)


class Histogram(Metric):
    """Counts of values in fixed buckets; the last bucket has no upper bound. window: values kept for `percentiles`."""

    kind = "histogram"

    def __init__(
        self, name: str, description: str = "", label_names: Sequence[str] = (), buckets: Sequence[float] = SECONDS_BUCKETS,
        window: int = 0,
    ) -> None:
        super().__init__(name, description, label_names)
        self.window = window
        if not buckets or list(buckets) != sorted(set(buckets)):
            raise ValueError(f"The buckets of {name} must be rising and not empty.")
        self.buckets = tuple(float(bound) for bound in buckets)
        self._series: dict[Labels, _Series] = {}

    def observe(self, *values: float, **labels: str) -> None:
        """Count values, all under one lock."""
        key = tuple(labels.values()) if tuple(labels) == self.label_names else self._key(labels)
        with self._lock:
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = _Series(len(self.buckets), self.window)
            for value in values:
                series.counts[bisect.bisect_left(self.buckets, value)] += 1
                series.total += value
            if self.window:
                series.recent.extend(values)

    def count(self, **labels: str) -> int:
        key = self._key(labels)
        with self._lock:
            return sum(self._series[key].counts) if key in self._series else 0

    def sum(self, **labels: str) -> float:
        key = self._key(labels)
        with self._lock:
            return self._series[key].total if key in self._series else 0.0

    def percentiles(self, percents: Sequence[float], **labels: str) -> list[float]:
        """Exact percentiles (nearest rank) of the values in the window; nan if it is empty."""
        for percent in percents:
            if not 0 <= percent <= 100:
                raise ValueError(f"A percentile lies between 0 and 100, not at {percent}.")
        key = self._key(labels)
        with self._lock:
            ordered = list(self._series[key].recent) if key in self._series else []
        ordered.sort()
        size = len(ordered)
        return [ordered[max(0, math.ceil(percent * size / 100) - 1)] if ordered else math.nan for percent in percents]

    def samples(self) -> list[Sample]:
        with self._lock:
            copies = [(key, list(series.counts), series.total) for key, series in self._series.items()]
        found = []
        for key, counts, total in copies:
            running, cumulative = 0, []
            for bound, count in zip((*self.buckets, math.inf), counts, strict=True):
                running += count
                cumulative.append((bound, running))
            found.append(Sample(key, total, running, tuple(cumulative)))
        return found


M = TypeVar("M", bound=Metric)


class MetricRegistry:
    """The metrics of one service. The same name gives the same metric, so that parts can share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Metric] = {}

    def __iter__(self) -> Iterator[Metric]:
        with self._lock:
            return iter(list(self._metrics.values()))

    def counter(self, name: str, description: str = "", label_names: Sequence[str] = ()) -> Counter:
        return self._get(Counter(name, description, label_names))

    def gauge(self, name: str, description: str = "", label_names: Sequence[str] = ()) -> Gauge:
        return self._get(Gauge(name, description, label_names))

    def histogram(
        self, name: str, description: str = "", label_names: Sequence[str] = (), buckets: Sequence[float] = SECONDS_BUCKETS,
        window: int = 0,
    ) -> Histogram:
        return self._get(Histogram(name, description, label_names, buckets, window))

    def _get(self, wanted: M) -> M:
        with self._lock:
            known = self._metrics.setdefault(wanted.name, wanted)
        same = type(known) is type(wanted) and known.label_names == wanted.label_names
        if isinstance(known, Histogram) and isinstance(wanted, Histogram):
            same = same and known.buckets == wanted.buckets and known.window == wanted.window
        if not same:
            raise ValueError(f"The metric {wanted.name} exists with another kind, labels, buckets or window.")
        assert isinstance(known, type(wanted))
        return known
