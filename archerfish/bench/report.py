"""The report of a bench: medians of samples by metric and engine, ratios to peers, targets, and the machine.

The name of a metric ends with its unit ("first token, ms", "one stream, tokens/s"); the unit says which direction is worse.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from archerfish.kernels.machine import cpu
from archerfish.observe.regression import Direction, worse_when
from archerfish.observe.summary import Summary, Target, TargetResult, summarize

OURS = "archerfish"
DIRECTIONS: dict[str, Direction] = {
    "copy rate, *": "neither", "*/s": "lower", "*, ms": "higher", "*, us": "higher", "*, ns": "higher", "*, s": "higher",
    "*, MB": "higher", "*, hit rate": "lower", "*, utilisation": "lower", "*, share of the limit": "lower",
    "*, times as fast as PyTorch": "lower",
    "*, real-time factor": "higher", "*, streams in real time": "lower", "*unanswered": "higher",
    "*not answered": "higher", "*": "neither",
}  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """One measured value of one round."""

    metric: str
    value: float
    engine: str = OURS


Found = Iterator[Measurement | str]  # what a bench yields; a string is a note, such as a peer that could not be measured


@dataclass(frozen=True)
class Goal:
    """A target of a bench.

    The value is the median of our metric; with `over`, divided by that of another metric of ours; with `peers`, how many
    times better it is than the best of these engines. A pattern in `metric` stands for every metric that it fits.
    """

    metric: str
    wanted: float
    at_least: bool = False
    over: str = ""
    peers: Sequence[str] = ()

    @property
    def title(self) -> str:
        if self.over:
            return f"{self.metric} / {self.over}"
        return f"{self.metric}: times {self.peers[0]}" if self.peers else self.metric


@dataclass
class BenchReport:
    """All samples of one run of a bench."""

    bench: str
    model: str = ""
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # by metric, then by engine
    notes: list[str] = field(default_factory=list)

    def add(self, found: Measurement | str) -> None:
        if isinstance(found, str):
            self.notes.append(found)
        else:
            self.samples.setdefault(found.metric, {}).setdefault(found.engine, []).append(found.value)

    @property
    def engines(self) -> list[str]:
        """Every engine that has a sample, ours first. "Ours" is the first engine where none has our name."""
        found = dict.fromkeys(engine for by_engine in self.samples.values() for engine in by_engine)
        return sorted(found, key=lambda engine: engine != OURS)

    def summary(self, metric: str, engine: str = "") -> Summary | None:
        """Of one engine; of ours where none is named."""
        values = self.samples.get(metric, {}).get(engine or self.engines[0])
        return summarize(values) if values else None

    def own_summaries(self) -> dict[str, Summary]:
        return {metric: found for metric in self.samples if (found := self.summary(metric)) is not None}

    def gain(self, metric: str, peers: Iterable[str]) -> float | None:
        """How many times better we are than the best of some peers; None where that is not known."""
        direction, own = worse_when(metric, DIRECTIONS), self.summary(metric)
        others = [found.median for peer in peers if (found := self.summary(metric, peer)) is not None]
        if own is None or not others or direction == "neither":
            return None
        best = max(others) if direction == "lower" else min(others)
        if min(own.median, best) <= 0:
            return None
        return own.median / best if direction == "lower" else best / own.median

    def judge(self, goals: Iterable[Goal]) -> list[TargetResult]:
        """The goals of all metrics that were measured."""
        found = []
        for goal in goals:
            for metric in self.samples:
                if not fnmatchcase(metric, goal.metric):
                    continue
                named = Goal(metric, goal.wanted, goal.at_least, goal.over, goal.peers)
                value = self._value(named)
                if value is not None:
                    found.append(Target(named.title, goal.wanted, goal.at_least).judge(value))
        return found

    def _value(self, goal: Goal) -> float | None:
        if goal.peers:
            return self.gain(goal.metric, goal.peers)
        own, other = self.summary(goal.metric), self.summary(goal.over) if goal.over else None
        if own is None or (goal.over and (other is None or not other.median)):
            return None
        return own.median / other.median if other else own.median

    def table(self) -> tuple[list[str], list[list[str]]]:
        """A row for every metric: each engine's median and range, then how many times better ours is than each peer."""
        engines, peers = self.engines, self.engines[1:]
        rows = []
        for metric in self.samples:
            cells = [format_summary(self.summary(metric, engine)) for engine in engines]
            gains = [self.gain(metric, [peer]) for peer in peers]
            rows.append([metric, *cells, *("" if gain is None else f"{gain:.2f} x" for gain in gains)])
        return ["median (range)", *engines, *(f"to {peer}" for peer in peers)], rows

    def as_dict(self, goals: Iterable[Goal] = ()) -> dict[str, Any]:
        figures = {
            metric: {engine: {**summarize(values).as_dict(), "samples": values} for engine, values in by_engine.items()}
            for metric, by_engine in self.samples.items()
        }
        return {
            "bench": self.bench, "model": self.model, "machine": machine(), "figures": figures, "notes": self.notes,
            "targets": [result.as_dict() for result in self.judge(goals)],
        }  # fmt: skip


def format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_summary(summary: Summary | None) -> str:
    """The median, and the range where there are several rounds."""
    if summary is None:
        return "-"
    median, low, high = (format_number(value) for value in (summary.median, summary.low, summary.high))
    return f"{median} ({low}-{high})" if summary.rounds > 1 else median


def machine() -> dict[str, Any]:
    """The machine that a run was measured on."""
    import torch

    processor = cpu()
    return {
        "cpu": processor.model,
        "cores": processor.num_cores,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
