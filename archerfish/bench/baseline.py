"""Figures of a bench that later runs are held against, in a file; breaches in a row are kept in another one beside it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from archerfish.bench.stats import Summary, summarize
from archerfish.errors import InvalidInputError, InvalidOptionError, NotFoundError
from archerfish.observe.regression import Comparison, Direction, RegressionDetector, worse_when
from archerfish.store.files import replace_file, write_errors

OURS = "archerfish"
Named = Iterator[tuple[str, Summary]]
MACHINE_KEYS = ("cpu", "cores", "gpu")  # runs on others are not comparable
# Which way a figure is bad where its ending does not say so, by bench; the first pattern that fits counts.
DIRECTIONS: dict[str, dict[str, Direction]] = {
    "embed": {"*@*": "lower"},  # texts/s of a workload and a batch size
    "throughput": {"continuous *": "lower", "kv utilisation *": "lower", "*": "neither"},  # the rest are those beside us
    "latency": {f"{OURS}: tokens/s *": "lower", f"{OURS}: CPU, %": "neither", f"{OURS}: *": "higher", "*": "neither"},
    "prefix": {"requests/s, cache on": "lower", "requests/s, cache off": "neither", "hit rate, *": "lower",
               "first token, *": "higher", "forward passes *": "higher"},
    "tts": {"tokens/s, *, package rwkv": "neither", "tokens/s, *": "lower", "share of the copy rate, *": "lower",
            "real-time factor, *": "higher", "streams in real time, *": "lower", "copy rate, *": "neither"},
    "rwkv": {"tokens/s, *": "lower", "requests/s, without": "neither", "requests/s, *": "lower", "prompt tokens/s, *": "lower",
             "requests with the same tokens, share": "lower", "MB *": "higher"},
    "store": {"conversion/*": "lower", "opening/*": "higher"},
    "serve": {
        **{f"*/{key}": "neither" for key in (
            "client_lag_p99_ms", "sent_late_p99_ms", "window_s", "memory_early_bytes", "kv_late_bytes", "memory_growth",
            "num_*", "prompt_tokens", "mean_in_flight", "little_*", "all_cores", "core_wait_share", "tokens_read", "steps",
            "*, MB/min",
        )},
        **{f"*/{key}": "lower" for key in (
            "requests_s", "tokens_s", "prompt_tokens_s", "goodput_s", "good_share", "steps_s", "read_tokens_s",
        )},
        "*_us_token": "higher",
    },
}  # fmt: skip


def of_embed(whole: Mapping[str, Any]) -> Named:
    for engine, result in whole["engines"].items():
        if engine.startswith(OURS):
            yield from ((f"{engine}/{name}", Summary(**values)) for name, values in result["metrics"].items())


def of_generate(whole: Mapping[str, Any]) -> Named:
    yield from ((name, Summary(**values)) for name, values in whole["samples"].items())
    yield from ((name, summarize([value])) for name, value in whole["figures"].items())


def of_scheduler(whole: Mapping[str, Any]) -> Named:
    yield from ((name, summarize([value])) for name, value in whole["steps"].items() if name.endswith("_us"))


def of_gpu(whole: Mapping[str, Any]) -> Named:
    for shape, runs in whole["shapes"].items():
        for name, values in runs.get(OURS, {}).items():
            if name.endswith("_all") and values:
                yield f"{shape}/{name.removesuffix('_all')}", summarize(values)


def of_startup(whole: Mapping[str, Any]) -> Named:
    for start in whole["starts"]:
        if start["engine"] == OURS:
            where = f"{start['shape']}/{start['start']} start"
            yield from ((f"{where}/{name}", summarize([value])) for name, value in start.items() if name.endswith("_s"))


def of_serve(whole: Mapping[str, Any]) -> Named:
    """Of our own server: the one of that name, or else the first."""
    servers = list(dict.fromkeys(point["server"] for point in whole["points"]))
    ours = [server for server in servers if server.startswith(OURS)] or servers[:1]
    for point in whole["points"]:
        if point["server"] in ours:
            where = f"{point['scenario']}, {point['server']}, {point['load']}"
            yield from ((f"{where}/{name}", Summary(**values)) for name, values in point["summary"].items())


def of_store(whole: Mapping[str, Any]) -> Named:
    for opening in whole["openings"]:
        if opening["name"].startswith(OURS):
            yield f"opening/{opening['name']}", Summary(**opening["seconds"])
    yield from ((f"conversion/{name}", Summary(**values)) for name, values in whole["conversion_mb_per_s"].items())


READERS: dict[str, Callable[[Mapping[str, Any]], Named]] = {
    "embed": of_embed, "throughput": of_generate, "latency": of_generate, "prefix": of_generate, "rwkv": of_generate,
    "tts": of_generate,
    "scheduler": of_scheduler, "gpu": of_gpu, "startup": of_startup, "serve": of_serve, "store": of_store,
}  # fmt: skip


@dataclass(frozen=True)
class Baseline:
    """Medians and spreads of one bench on one machine."""

    bench: str
    model: str  # "" where a bench has none of its own
    machine: dict[str, Any]
    metrics: dict[str, Summary]
    words: tuple[str, ...] = ()  # behind the command that measured them

    @classmethod
    def of(cls, whole: Mapping[str, Any], words: Sequence[str] = ()) -> Baseline:
        """Those of a report, as benches write it."""
        metrics = dict(READERS[whole["bench"]](whole))
        return cls(whole["bench"], whole.get("model", ""), dict(whole["machine"]), metrics, tuple(words))

    @classmethod
    def read(cls, path: Path) -> Baseline:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            metrics = {name: Summary(**{key: read_number(number) for key, number in summary.items()})
                       for name, summary in values["metrics"].items()}  # fmt: skip
            words = tuple(str(word) for word in values.get("words", ()))
            return cls(str(values["bench"]), str(values["model"]), dict(values["machine"]), metrics, words)
        except FileNotFoundError:
            raise NotFoundError(f"There is no baseline {path}.", hint="--save-baseline writes one.") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInputError(f"{path} is no baseline: {error!r}.", hint="--save-baseline writes one.") from None

    def write(self, path: Path) -> None:
        if not self.metrics:
            raise InvalidInputError("Nothing was measured that a baseline could keep.")
        metrics = {name: summary.as_dict() for name, summary in self.metrics.items()}
        write_text(path, json.dumps({**asdict(self), "metrics": metrics}, indent=1, ensure_ascii=False) + "\n")

    def check_comparable(self, other: Baseline) -> None:
        """An error that says what is different where figures of another run cannot be held against these."""
        for what in ("bench", "model"):
            own, others = getattr(self, what), getattr(other, what)
            if own != others:
                raise InvalidOptionError(f"The baseline is of the {what} {own!r}, not of {others!r}.")
        for key in MACHINE_KEYS:
            if self.machine.get(key) != other.machine.get(key):
                raise InvalidOptionError(
                    f"The baseline was measured on a machine whose {key} is {self.machine.get(key)!r}; here it is "
                    f"{other.machine.get(key)!r}.", hint="Save a baseline on this machine (--save-baseline).",
                )  # fmt: skip


def write_text(path: Path, text: str) -> None:
    with write_errors(path):
        replace_file(path, text.encode())


def read_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value


@dataclass(frozen=True)
class Compared:
    """A run beside a baseline."""

    comparisons: list[Comparison]
    missing: list[str]  # in the baseline, and not measured now
    unjudged: list[str]  # nothing says which way they are bad

    @property
    def regressions(self) -> list[Comparison]:
        return [one for one in self.comparisons if one.is_confirmed]

    @property
    def breaches(self) -> list[Comparison]:
        return [one for one in self.comparisons if one.is_breach]

    def as_dict(self) -> dict[str, Any]:
        return {
            "breaches": [{**asdict(one), "change": one.change if math.isfinite(one.change) else None} for one in self.breaches],
            "num_compared": len(self.comparisons),
            "missing": self.missing, "unjudged": self.unjudged, "is_regression": bool(self.regressions),
        }  # fmt: skip


def compare(path: Path, now: Baseline, tolerance_percent: float) -> Compared:
    """Hold a run against the baseline in a file, and note beside it what was worse, for the runs to come."""
    before = Baseline.read(path)
    before.check_comparable(now)
    directions = DIRECTIONS.get(now.bench, {})
    judged = {name: summary for name, summary in before.metrics.items() if is_judged(name, directions)}
    history = History(path)
    detector = RegressionDetector(
        judged, tolerance_percent=tolerance_percent, directions=directions, consecutive_failures=history.read()
    )
    detector.check_regression({name: summary for name, summary in now.metrics.items() if is_judged(name, directions)})
    history.write(detector.consecutive_failures)
    unjudged = sorted(name for name in before.metrics.keys() | now.metrics.keys() if not is_judged(name, directions))
    return Compared(detector.comparisons, sorted(judged.keys() - now.metrics.keys()), unjudged)


def is_judged(name: str, directions: Mapping[str, Direction]) -> bool:
    try:
        worse_when(name, directions)
    except ValueError:
        return False
    return True


class History:
    """Breaches in a row of every metric, in a file beside a baseline; a new baseline begins anew."""

    def __init__(self, baseline: Path) -> None:
        self.path = baseline.with_name(f"{baseline.name}.breaches")
        self._digest = hashlib.sha256(baseline.read_bytes()).hexdigest()

    def read(self) -> dict[str, int]:
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(name): int(number) for name, number in values["breaches"].items()} if self._is_of(values) else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInputError(f"{self.path} cannot be read: {error!r}.", hint="Remove it to begin anew.") from None

    def _is_of(self, values: Mapping[str, Any]) -> bool:
        return bool(values["baseline"] == self._digest)

    def write(self, breaches: Mapping[str, int]) -> None:
        write_text(self.path, json.dumps({"baseline": self._digest, "breaches": dict(breaches)}, indent=1) + "\n")
