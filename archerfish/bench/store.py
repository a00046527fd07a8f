"""`archerfish bench store`: opening a model by mapping against reading it, and the speed of conversion."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archerfish.bench.memory import status_bytes
from archerfish.bench.stats import Summary, summarize
from archerfish.config import ConversionConfig
from archerfish.types import Progress, no_progress


@dataclass(frozen=True)
class OpenResult:
    """One way to open the same weights."""

    name: str
    seconds: Summary
    file_bytes: int
    rss_growth_bytes: int  # of the first opening in this process

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "seconds": self.seconds.as_dict(), "file_bytes": self.file_bytes,
            "rss_growth_bytes": self.rss_growth_bytes,
        }  # fmt: skip


@dataclass(frozen=True)
class StoreReport:
    """Openings, and megabytes of source per second of conversion."""

    openings: list[OpenResult]
    source_bytes: int
    conversions: dict[str, Summary]  # by what was written: MB/s

    def as_dict(self) -> dict[str, Any]:
        return {
            "bench": "store",
            "source_bytes": self.source_bytes,
            "openings": [opening.as_dict() for opening in self.openings],
            "conversion_mb_per_s": {name: speed.as_dict() for name, speed in self.conversions.items()},
        }


def run_store_bench(source: Path, scratch: Path, rounds: int, progress: Progress = no_progress) -> StoreReport:
    """Measure one source; everything is written below `scratch` and removed again."""
    from archerfish.store.sources import open_source

    with tempfile.TemporaryDirectory(prefix="archerfish-bench-", dir=scratch) as place:
        work = Path(place)
        source_bytes = open_source(source).num_bytes
        conversions = measure_conversions(source, work, source_bytes, rounds, progress)
        openers = make_openers(source, work)
        samples: dict[str, list[float]] = {name: [] for name in openers}
        growth: dict[str, int] = {}
        for number in range(rounds + 1):  # the first round warms caches and is not counted
            for name, (opener, _) in openers.items():
                progress(number, rounds + 1, f"opening: {name}")
                before = status_bytes("VmRSS")
                began = time.perf_counter()
                held = opener()
                elapsed = time.perf_counter() - began
                growth.setdefault(name, max(0, status_bytes("VmRSS") - before))
                del held
                if number:
                    samples[name].append(elapsed)
        openings = [
            OpenResult(name, summarize(samples[name]), file_bytes, growth[name]) for name, (_, file_bytes) in openers.items()
        ]
    return StoreReport(openings, source_bytes, conversions)


def measure_conversions(
    source: Path, work: Path, source_bytes: int, rounds: int, progress: Progress
) -> dict[str, Summary]:
    from archerfish.store.converter import ModelConverter

    choices = {
        "arrow": ConversionConfig(dtype="float32", write_parquet=False, validate_output=False, overwrite=True),
        "arrow, validated": ConversionConfig(dtype="float32", write_parquet=False, overwrite=True),
        "arrow and parquet, validated": ConversionConfig(dtype="float32", overwrite=True),
    }
    speeds: dict[str, list[float]] = {name: [] for name in choices}
    for number in range(rounds + 1):
        for name, config in choices.items():
            progress(number, rounds + 1, f"converting: {name}")
            result = ModelConverter(config).convert(source, work / "converted")
            if number:
                speeds[name].append(source_bytes / 1e6 / result.conversion_time_sec)
    return {name: summarize(values) for name, values in speeds.items()}


def make_openers(source: Path, work: Path) -> dict[str, tuple[Callable[[], Any], int]]:
    """Ways to get all tensors of the same float32 weights, each with the size of its file."""
    import torch
    from safetensors.torch import load_file, save_file

    from archerfish.store.loader import WeightLoader

    converted = work / "converted"
    with WeightLoader(converted) as loader:
        tensors = {name: tensor.clone() for name, tensor in loader.load_weights().items()}
    safetensors, pickled = work / "weights.safetensors", work / "weights.pth"
    save_file(tensors, safetensors)
    torch.save(tensors, pickled)
    shutil.rmtree(converted / "tokenizer", ignore_errors=True)

    def size(path: Path) -> int:
        return path.stat().st_size

    return {
        "archerfish (mapped)": (lambda: WeightLoader(converted).load_weights(), size(converted / "weights.arrow")),
        "safetensors load_file": (lambda: load_file(safetensors), size(safetensors)),
        "torch.load": (lambda: torch.load(pickled, weights_only=True), size(pickled)),
        "torch.load mmap": (lambda: torch.load(pickled, weights_only=True, mmap=True), size(pickled)),
    }
