"""From samples to a table: one row per metric, ratios to the best sentence-transformers and to OpenVINO, and the bars."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from archerfish.bench.embed import WORKLOAD_NAMES, WORKLOADS, EngineResult
from archerfish.bench.stats import Summary, gain
from archerfish.bench.targets import Bar, Judged
from archerfish.kernels.machine import cpu

Results = dict[str, EngineResult]
SENTENCE_TRANSFORMERS = ("st-float32", "st-bfloat16")
MILLION = 1e6
MIN_ROUNDS = 5  # fewer do not settle anything on a CPU with neighbours


@dataclass(frozen=True)
class Metric:
    """A row of the table."""

    key: str
    title: str
    higher_is_better: bool = False
    scale: float = 1.0
    digits: int = 0
    is_compared: bool = True


METRICS = (
    Metric("import_s", "imports, s", digits=2),
    Metric("load_s", "load after imports, ms", scale=1000),
    Metric("first_vector_s", "load and first text, ms", scale=1000),
    Metric("latency_p50_ms", "one text p50, ms", digits=2),
    Metric("latency_p99_ms", "one text p99, ms", digits=2),
    *(Metric(key, f"texts/s, {WORKLOAD_NAMES[key]}", higher_is_better=True) for key in WORKLOADS),
    Metric("documents_s", "documents in one call, s", digits=2),
    Metric("documents_growth_bytes", "… peak growth, MB", scale=1 / MILLION, is_compared=False),
)
MEMORY_ROWS = (("rss_loaded", "RSS after load, MB"), ("rss_after_work", "RSS after work, MB"), ("weights", "weights, MB"))


def value_of(result: EngineResult, metric: Metric) -> Summary | None:
    """The samples of a metric; for a throughput those of the engine's best batch size."""
    if metric.key not in WORKLOADS:
        return result.summary(metric.key)
    best = result.best(metric.key)
    return best[1] if best else None


def best_of(results: Results, keys: tuple[str, ...], metric: Metric) -> Summary | None:
    """The best median of a metric among some engines."""
    found = [value for key in keys if key in results and (value := value_of(results[key], metric)) is not None]
    pick = max if metric.higher_is_better else min
    return pick(found, key=lambda value: value.median) if found else None


def ratio(results: Results, ours: str, theirs: tuple[str, ...], metric: Metric) -> float | None:
    """How many times better our median is than the best of theirs."""
    own, other = best_of(results, (ours,), metric), best_of(results, theirs, metric)
    if own is None or other is None or min(own.median, other.median) <= 0:
        return None
    return gain(own.median, other.median, higher_is_better=metric.higher_is_better)


def ratios(results: Results, ours: str) -> dict[str, dict[str, float | None]]:
    return {
        metric.key: {
            "sentence-transformers": ratio(results, ours, SENTENCE_TRANSFORMERS, metric),
            "openvino": ratio(results, ours, ("openvino",), metric),
        }
        for metric in METRICS
        if metric.is_compared
    }


def bars(results: Results, ours: str, float32_bytes: int, dtype: str) -> list[Judged]:
    """The bars, as far as this run has measured what they need."""
    found: list[Judged] = []
    if ours not in results:
        return found
    by_key = {metric.key: metric for metric in METRICS}
    for key, name, target in (
        ("load_s", "load, times faster than sentence-transformers", 10.0),
        ("import_s", "imports, times faster", 2.0),
        ("short", "texts/s at 10 tokens, times", 2.0),
        ("fixed", "texts/s at 128 tokens, times", 2.0),
        ("mixed", "texts/s at 5-256 tokens, times", 3.0),
    ):
        value = ratio(results, ours, SENTENCE_TRANSFORMERS, by_key[key])
        if value is not None:
            found.append(Bar(name, target, at_least=True).judged(value))
    own = results[ours]
    for key, name, scale, target in (
        ("load_s", "load after imports, ms", 1000.0, 100.0),
        ("latency_p50_ms", "one short text, ms", 1.0, 5.0),
        ("documents_growth_bytes", "documents: peak growth of RSS, MB", 1 / MILLION, 200.0),
    ):
        summary = own.summary(key)
        if summary is not None:
            found.append(Bar(name, target).judged(summary.median * scale))
    if own.memory.get("weights") and float32_bytes:
        share = Bar("weights' memory, share of float32", 0.5)
        found.append(share.judged(own.memory["weights"] / float32_bytes))
    if own.min_cosine is not None:
        least = 0.999999 if dtype == "float32" else 0.9999
        target_cosine = Bar("smallest cosine with sentence-transformers fp32", least, at_least=True)
        found.append(target_cosine.judged(own.min_cosine))
    return found


def caveats(results: Results, ours: str) -> list[str]:
    """What keeps this run from deciding the bars: a configuration that is missing, or too few rounds."""
    found = [f"without {key}" for key in SENTENCE_TRANSFORMERS if key not in results or results[key].state != "ok"]
    rounds = [len(values) for metric, values in results[ours].samples.items() if "@" in metric] if ours in results else []
    if rounds and min(rounds) < MIN_ROUNDS:
        found.append(f"{min(rounds)} of {MIN_ROUNDS} rounds")
    return found


def cell(summary: Summary | None, metric: Metric) -> str:
    if summary is None:
        return "-"
    median, low, high = (f"{value * metric.scale:,.{metric.digits}f}" for value in (summary.median, summary.low, summary.high))
    return f"{median} ({low}-{high})" if summary.rounds > 1 else median


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def table(results: Results, ours: str) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: medians with their range, then how many times better ours is."""
    shown = {key: result for key, result in results.items() if result.state != "skipped"}
    columns = ["median (range)", *shown, "vs best st", "vs openvino"]
    compared = ratios(results, ours)
    rows = [
        [metric.title, *(cell(value_of(result, metric), metric) for result in shown.values()),
         *(times(compared.get(metric.key, {}).get(peer)) for peer in ("sentence-transformers", "openvino"))]
        for metric in METRICS
    ]  # fmt: skip
    for key, title in MEMORY_ROWS:
        cells = [f"{result.memory[key] / MILLION:,.0f}" if key in result.memory else "-" for result in shown.values()]
        rows.append([title, *cells, "", ""])
    cosines = ["-" if result.min_cosine is None else f"{result.min_cosine:.6f}" for result in shown.values()]
    rows.append(["smallest cosine with st-float32", *cosines, "", ""])
    batches = [", ".join(str(best[0]) if (best := result.best(key)) else "-" for key in WORKLOADS) for result in shown.values()]
    rows.append(["best batch size", *batches, "", ""])
    return columns, rows


def machine() -> dict[str, Any]:
    """What this run was measured on."""
    processor = cpu()
    return {
        "cpu": processor.model,
        "cores": processor.num_cores,
        "amx": processor.has_amx,
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def as_json(results: Results, ours: str, float32_bytes: int, dtype: str, model: str) -> dict[str, Any]:
    """The whole run for machines."""
    return {
        "bench": "embed",
        "model": model,
        "machine": machine(),
        "float32_bytes": float32_bytes,
        "engines": {key: result.as_dict() for key, result in results.items()},
        "ratios": ratios(results, ours),
        "bars": [bar.as_dict() for bar in bars(results, ours, float32_bytes, dtype)],
        "caveats": caveats(results, ours),
    }
