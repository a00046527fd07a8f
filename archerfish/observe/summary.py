"""The middle of several measurements, and targets that a measurement is held to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Summary:
    """The median of several rounds and their range."""

    median: float
    low: float
    high: float
    rounds: int


def summarize(samples: Sequence[float]) -> Summary:
    return Summary(statistics.median(samples), min(samples), max(samples), len(samples))


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least this share of all samples does not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1))]


@dataclass(frozen=True)
class Target:
    """A figure that must be at most `wanted`, or at least."""

    name: str
    wanted: float
    at_least: bool = False

    def judge(self, value: float | None) -> TargetResult:
        return TargetResult(self, None if value is None or math.isnan(value) else value)

    def __str__(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.wanted:g}"


@dataclass(frozen=True)
class TargetResult:
    """A target and the value that was measured; the value is None where nothing was measured."""

    target: Target
    value: float | None

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def is_met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.target.wanted if self.target.at_least else self.value <= self.target.wanted

    @property
    def verdict(self) -> str:
        return "not measured" if self.is_met is None else "met" if self.is_met else "not met"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self.target), "value": self.value, "is_met": self.is_met}
