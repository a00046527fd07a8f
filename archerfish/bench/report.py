"""The report of a bench: medians of samples by metric and engine, ratios to peers, and the machine; and baselines.

The name of a metric ends with its unit ("first token, ms", "one stream, tokens/s"); the unit says which direction is
worse. A baseline is a file with our medians of one run, which later runs are compared with. A second file,
FILE.breaches, counts how often in a row each metric was worse.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from archerfish.errors import InvalidInputError, InvalidOptionError, NotFoundError
from archerfish.kernels.machine import cpu
from archerfish.observe.regression import Direction, RegressionDetector, worse_when
from archerfish.observe.summary import Summary, summarize
from archerfish.store.files import replace_file, write_errors

OURS = "archerfish"
DIRECTIONS: dict[str, Direction] = {
    "copy rate, *": "neither",
    "machine: *": "neither",
    "*/s": "lower",
    "*, ms": "higher",
    "*, us": "higher",
    "*, ns": "higher",
    "*, s": "higher",
    "*, MB": "higher",
    "*, hit rate": "lower",
    "*, utilisation": "lower",
    "*, share of the limit": "lower",
    "*, times as fast as PyTorch": "lower",
    "*, real-time factor": "higher",
    "*, streams in real time": "lower",
    "*unanswered": "higher",
    "*not answered": "higher",
    "*": "neither",
}
MACHINE_KEYS = ("cpu", "cores", "gpu")  # figures of different ones are not comparable
READ_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class Measurement:
    """One measured value of one round."""

    metric: str
    value: float
    engine: str = OURS


Found = Generator[Measurement | str, None, None]  # a string is a note, such as a peer that could not be measured


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
        values = self.samples.get(metric, {}).get(engine or next(iter(self.engines), OURS))
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

    def table(self) -> tuple[list[str], list[list[str]]]:
        """A row for every metric: each engine's median and range, then how many times better ours is than each peer."""
        engines, peers = self.engines, self.engines[1:]
        rows = []
        for metric in self.samples:
            cells = [format_summary(self.summary(metric, engine)) for engine in engines]
            gains = [self.gain(metric, [peer]) for peer in peers]
            rows.append([metric, *cells, *("" if gain is None else f"{gain:.2f} x" for gain in gains)])
        return ["median (range)", *engines, *(f"to {peer}" for peer in peers)], rows

    def as_dict(self) -> dict[str, Any]:
        figures = {
            metric: {engine: {**asdict(summarize(values)), "samples": values} for engine, values in by_engine.items()}
            for metric, by_engine in self.samples.items()
        }
        return {
            "bench": self.bench,
            "model": self.model,
            "machine": machine(),
            "figures": figures,
            "notes": self.notes,
        }


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
            if not all(
                isinstance(value, int | float) for summary in metrics.values() for value in asdict(summary).values()
            ):
                raise TypeError("a figure is not a number")
            return cls(
                values["bench"], values["model"], dict(values["machine"]), metrics, tuple(map(str, values["words"]))
            )
        except FileNotFoundError:
            raise NotFoundError(f"There is no baseline {path}.", hint="--save-baseline writes one.") from None
        except READ_ERRORS as error:
            raise InvalidInputError(
                f"{path} is not a baseline: {error!r}.", hint="--save-baseline writes one."
            ) from None

    def write(self, path: Path) -> None:
        if not self.metrics:
            raise InvalidInputError("The run measured nothing that a baseline could keep.")
        write_json(path, asdict(self))
        breaches_path(path).unlink(missing_ok=True)  # a new baseline starts a new count


def compare(path: Path, now: Baseline, tolerance_percent: float) -> dict[str, Any]:
    """Compare a run with the baseline in a file, and count its breaches in the file beside it.

    missing: metrics of the baseline that the run did not measure. A change is None where the value before was 0.
    """
    before = Baseline.read(path)
    pairs = {key: (before.machine.get(key), now.machine.get(key)) for key in MACHINE_KEYS}
    for what, (own, others) in {
        "bench": (before.bench, now.bench),
        "model": (before.model, now.model),
        **pairs,
    }.items():
        if own != others:
            hint = "Save a baseline of this run (--save-baseline)."
            raise InvalidOptionError(f"The {what} of the baseline is {own!r}, that of this run {others!r}.", hint=hint)
    detector = RegressionDetector(
        before.metrics,
        tolerance_percent=tolerance_percent,
        directions=DIRECTIONS,
        consecutive_failures=read_breaches(path),
    )
    regressions = detector.check_regression(now.metrics)
    write_json(breaches_path(path), detector.consecutive_failures)
    breaches = [one for one in detector.comparisons if one.is_breach]
    return {
        "breaches": [asdict(one) | {"change": one.change if math.isfinite(one.change) else None} for one in breaches],
        "num_compared": len(detector.comparisons),
        "missing": sorted(before.metrics.keys() - now.metrics.keys()),
        "is_regression": bool(regressions),
    }


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
