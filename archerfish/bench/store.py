"""`archerfish bench store`: opening all tensors of the same float32 weights, and converting a model."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archerfish.bench.engines import memory_bytes, timed
from archerfish.bench.report import OURS, Found, Measurement

CONVERSIONS: dict[str, dict[str, Any]] = {
    "arrow": {"write_parquet": False, "validate_output": False},
    "arrow, validated": {"write_parquet": False},
    "arrow and parquet, validated": {},
}


def measure(options: Namespace) -> Found:
    """Everything is written to a scratch directory below the cache; the first round warms up and is not counted."""
    from archerfish import ConversionConfig, ModelConverter
    from archerfish.store.names import resolve_model

    source = resolve_model(options.model, options.hub)
    options.hub.cache_path().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="archerfish-bench-", dir=options.hub.cache_path()) as scratch:
        work = Path(scratch)
        for number in range(options.rounds + 1):
            for name, wanted in CONVERSIONS.items():
                config = ConversionConfig(dtype="float32", overwrite=True, **wanted)
                result = ModelConverter(config).convert(source, work / "converted")
                if number:
                    num_bytes = (work / "converted" / "weights.arrow").stat().st_size
                    yield Measurement(f"converting to {name}, MB/s", num_bytes / 1e6 / result.conversion_time_sec)
        openers = make_openers(work)
        for number in range(options.rounds + 1):
            for name, opener in openers.items():
                before = memory_bytes("VmRSS")
                seconds, tensors = timed(opener)
                if number:
                    yield Measurement("opening all tensors, ms", seconds * 1000, name)
                else:
                    yield Measurement(
                        "growth of resident memory, MB", max(0, memory_bytes("VmRSS") - before) / 1e6, name
                    )
                del tensors


def make_openers(work: Path) -> dict[str, Callable[[], Any]]:
    """Ways to get all tensors of the same float32 weights, by engine."""
    import torch
    from safetensors.torch import load_file, save_file

    from archerfish import WeightLoader

    with WeightLoader(work / "converted") as loader:
        tensors = {name: tensor.clone() for name, tensor in loader.load_weights().items()}
    safetensors, pickled = work / "weights.safetensors", work / "weights.pth"
    save_file(tensors, safetensors)
    torch.save(tensors, pickled)
    return {
        OURS: lambda: WeightLoader(work / "converted").load_weights(),
        "safetensors": lambda: load_file(safetensors),
        "torch.load": lambda: torch.load(pickled, weights_only=True),
        "torch.load mmap": lambda: torch.load(pickled, weights_only=True, mmap=True),
    }
