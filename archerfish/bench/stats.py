"""Medians, percentiles and ratios of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Summary:
    """The middle of several rounds, and how far they spread."""

    median: float
    low: float
    high: float
    rounds: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def summarize(samples: Sequence[float]) -> Summary:
    return Summary(statistics.median(samples), min(samples), max(samples), len(samples))


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least this share of them does not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


def gain(ours: float, theirs: float, *, higher_is_better: bool) -> float:
    """How many times better ours is."""
    return ours / theirs if higher_is_better else theirs / ours
