"""Baselines: our medians of one run in a file, which later runs are compared with.

A second file, FILE.breaches, counts how often in a row each metric was worse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from archerfish.bench.report import DIRECTIONS, BenchReport, machine
from archerfish.errors import InvalidInputError, InvalidOptionError, NotFoundError
from archerfish.observe.regression import Comparison, RegressionDetector
from archerfish.observe.summary import Summary
from archerfish.store.files import replace_file, write_errors

MACHINE_KEYS = ("cpu", "cores", "gpu")  # figures of different ones are not comparable
READ_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class Baseline:
    """Medians and ranges of one bench on one machine. words: the arguments of the command that measured them."""

    bench: str
    model: str
    machine: Mapping[str, Any]
    metrics: Mapping[str, Summary]
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, report: BenchReport, words: tuple[str, ...] = ()) -> Baseline:
        return cls(report.bench, report.model, machine(), report.own_summaries(), words)

    @classmethod
    def read(cls, path: Path) -> Baseline:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            metrics = {name: Summary(**summary) for name, summary in values["metrics"].items()}
            if not all(isinstance(value, int | float) for summary in metrics.values() for value in asdict(summary).values()):
                raise TypeError("a figure is not a number")
            return cls(values["bench"], values["model"], dict(values["machine"]), metrics, tuple(map(str, values["words"])))
        except FileNotFoundError:
            raise NotFoundError(f"There is no baseline {path}.", hint="--save-baseline writes one.") from None
        except READ_ERRORS as error:
            raise InvalidInputError(f"{path} is not a baseline: {error!r}.", hint="--save-baseline writes one.") from None

    def write(self, path: Path) -> None:
        if not self.metrics:
            raise InvalidInputError("The run measured nothing that a baseline could keep.")
        write_json(path, asdict(self))
        breaches_path(path).unlink(missing_ok=True)  # a new baseline starts a new count

    def check_comparable(self, other: Baseline) -> None:
        """Raise an error that names the difference where the figures of two runs are not comparable."""
        pairs = {key: (self.machine.get(key), other.machine.get(key)) for key in MACHINE_KEYS}
        for what, (own, others) in {"bench": (self.bench, other.bench), "model": (self.model, other.model), **pairs}.items():
            if own != others:
                hint = "Save a baseline of this run (--save-baseline)."
                raise InvalidOptionError(f"The {what} of the baseline is {own!r}, that of this run {others!r}.", hint=hint)


@dataclass(frozen=True)
class BaselineComparison:
    """A run compared with a baseline. missing: metrics of the baseline that the run did not measure."""

    comparisons: list[Comparison]
    missing: list[str]

    @property
    def breaches(self) -> list[Comparison]:
        return [one for one in self.comparisons if one.is_breach]

    @property
    def is_regression(self) -> bool:
        return any(one.is_confirmed for one in self.comparisons)

    def as_dict(self) -> dict[str, Any]:
        breaches = [{**asdict(one), "change": one.change if math.isfinite(one.change) else None} for one in self.breaches]
        found = {"breaches": breaches, "num_compared": len(self.comparisons), "missing": self.missing}
        return {**found, "is_regression": self.is_regression}


def compare(path: Path, now: Baseline, tolerance_percent: float) -> BaselineComparison:
    """Compare a run with the baseline in a file, and count its breaches in the file beside it."""
    before = Baseline.read(path)
    before.check_comparable(now)
    detector = RegressionDetector(
        before.metrics, tolerance_percent=tolerance_percent, directions=DIRECTIONS, consecutive_failures=read_breaches(path)
    )
    detector.check_regression(now.metrics)
    write_json(breaches_path(path), detector.consecutive_failures)
    return BaselineComparison(detector.comparisons, sorted(before.metrics.keys() - now.metrics.keys()))


def breaches_path(baseline: Path) -> Path:
    return baseline.with_name(f"{baseline.name}.breaches")


def read_breaches(baseline: Path) -> dict[str, int]:
    """Breaches in a row of every metric."""
    path = breaches_path(baseline)
    try:
        return {str(name): int(number) for name, number in json.loads(path.read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        return {}
    except READ_ERRORS as error:
        raise InvalidInputError(f"{path} cannot be read: {error!r}.", hint="Remove it to start anew.") from None


def write_json(path: Path, values: Any) -> None:
    with write_errors(path):
        replace_file(path, (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode())
