"""RegressionDetector: whether measurements are worse than a baseline, beyond their spread, several times in a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from archerfish.observe.summary import Summary, summarize

Direction = Literal["lower", "higher", "neither"]  # the direction in which a metric is worse
ENDINGS: tuple[tuple[str, Direction], ...] = (  # the first match counts, so rates stand before durations
    ("_tok_s", "lower"),
    ("_req_s", "lower"),
    ("tokens/s", "lower"),
    ("requests/s", "lower"),
    ("texts/s", "lower"),
    ("ratio", "lower"),
    ("_ms", "higher"),
    (", ms", "higher"),
    ("_us", "higher"),
    ("_s", "higher"),
    ("_bytes", "higher"),
)
NUM_IN_A_ROW = 3


@dataclass(frozen=True)
class Comparison:
    """One metric compared with its baseline. change: how much worse, as a share of the baseline; negative is better."""

    metric: str
    worse_when: Direction
    before: float
    now: float
    change: float
    is_breach: bool  # worse by more than the tolerance and outside of both spreads
    num_in_a_row: int  # consecutive breaches, this one included
    is_confirmed: bool

    def __str__(self) -> str:
        how = "worse" if self.change > 0 else "better"
        share = "from nothing" if math.isinf(self.change) else f"{abs(self.change):.1%} {how}"
        return f"{self.metric}: {self.before:,.4g} -> {self.now:,.4g} ({share}, {self.num_in_a_row} in a row)"


class RegressionDetector:
    """Compares runs with a baseline. A metric that breaches in three runs in a row is a regression.

    Metrics are summaries of several rounds, or plain numbers such as PerformanceMonitor's figures of a model. The keys
    of `directions` are metrics or patterns such as "static *"; the first match counts. A metric is refused if neither
    `directions` nor its ending says in which direction it is worse.
    """

    def __init__(
        self,
        baseline_metrics: Mapping[str, Summary | float],
        *,
        tolerance_percent: float = 5.0,
        directions: Mapping[str, Direction] | None = None,
        consecutive_failures: Mapping[str, int] | None = None,
        num_in_a_row: int = NUM_IN_A_ROW,
    ) -> None:
        """consecutive_failures: the breaches in a row of each metric, from an earlier detector."""
        if not 0 <= tolerance_percent < math.inf or num_in_a_row < 1:
            raise ValueError("tolerance_percent must be at least 0, and num_in_a_row at least 1.")
        self.tolerance_percent = tolerance_percent
        self.baseline_metrics = {metric: measured(metric, value) for metric, value in baseline_metrics.items()}
        self.directions = dict(directions or {})
        self.num_in_a_row = num_in_a_row
        self.comparisons: list[Comparison] = []  # of the last check
        self.consecutive_failures: dict[str, int] = dict(consecutive_failures or {})
        for metric in self.baseline_metrics:
            worse_when(metric, self.directions)

    def check_regression(self, current_metrics: Mapping[str, Summary | float]) -> list[Comparison]:
        """Compare one run; gives the confirmed regressions. Metrics that were not measured keep their count."""
        self.comparisons = []
        for metric, value in current_metrics.items():
            now, direction = measured(metric, value), worse_when(metric, self.directions)
            before = self.baseline_metrics.get(metric)
            if before is None or direction == "neither" or math.isnan(now.median) or math.isnan(before.median):
                continue
            change = worsening(before.median, now.median, direction)
            is_breach = change > self.tolerance_percent / 100 and is_apart(before, now, direction)
            earlier = self.consecutive_failures.pop(metric, 0)
            number = earlier + 1 if is_breach else 0
            if is_breach:
                self.consecutive_failures[metric] = number
            is_confirmed = number >= self.num_in_a_row
            self.comparisons.append(
                Comparison(metric, direction, before.median, now.median, change, is_breach, number, is_confirmed)
            )
        return [one for one in self.comparisons if one.is_confirmed]


def measured(metric: str, value: Summary | float) -> Summary:
    """A plain number counts as one round without a spread."""
    found = summarize([value]) if isinstance(value, int | float) else value
    if not isinstance(found, Summary):
        raise TypeError(f"The value of {metric!r} must be a number or a Summary, not {value!r}.")
    return found


def is_beyond(metric: str, value: float, threshold: float) -> bool:
    """Whether a figure is below its threshold, if its ending says that less is worse, else whether it is above."""
    with suppress(ValueError):
        if worse_when(metric, {}) == "lower":
            return value < threshold
    return value > threshold


def worse_when(metric: str, stated: Mapping[str, Direction]) -> Direction:
    """The direction in which a metric is worse: of the first pattern that matches, else by its ending."""
    for pattern, direction in stated.items():
        if fnmatchcase(metric, pattern):
            return direction
    for ending, direction in ENDINGS:
        if metric.endswith(ending):
            return direction
    raise ValueError(f"The direction in which {metric!r} is worse is unknown: add it to the directions.")


def worsening(before: float, now: float, direction: Direction) -> float:
    """By how much it is worse, as a share of the value before; infinite if that was 0."""
    difference = now - before if direction == "higher" else before - now
    if not before:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / abs(before)


def is_apart(before: Summary, now: Summary, direction: Direction) -> bool:
    """Whether each median lies outside of the other one's spread, on the worse side."""
    if direction == "higher":
        return now.median > before.high and before.median < now.low
    return now.median < before.low and before.median > now.high
