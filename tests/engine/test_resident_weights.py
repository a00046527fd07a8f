"""What the weights of loaded models take in memory; red if originals stay beside packed copies, or matrices are widened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from archerfish import HubConfig
from archerfish.store.names import resolve_model

pytest.importorskip("archerfish.kernels.native._native")
pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")
CODE = """
import sys, time
import archerfish.engine.arrow_engine, archerfish.engine.llm_engine, archerfish.kernels.native.ops
from archerfish import ArrowEngine, LLMEngine
from archerfish.bench.engines import memory_bytes

before = memory_bytes("VmRSS")
if sys.argv[2] == "generation":
    engine = LLMEngine(sys.argv[1], device="cpu", max_cache_tokens=16)
    engine.runner.ops.runner._finish_packing()
    counted = engine.facts.weight_bytes
else:
    engine = ArrowEngine(sys.argv[1], device="cpu")
    engine._packed.result()
    # Lookup tables stay in the mapped file: their pages come as tokens need them.
    counted = sum(table.data.nbytes for table in (engine.core.encoder.words, engine.core.encoder.positions))
deadline = time.monotonic() + 10
while (used := memory_bytes("VmRSS") - before) > float(sys.argv[3]) and time.monotonic() < deadline:
    time.sleep(0.05)  # the mapped originals are being released
print(used, counted)
"""


def measure(model: Path, kind: str, bar_bytes: float) -> list[int]:
    """The growth of resident memory, and a figure of the engine."""
    command = [sys.executable, "-c", CODE, str(model), kind, str(bar_bytes)]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return list(map(int, out.stdout.split()))


def test_blocks_of_a_gguf_file_take_no_more_than_the_file() -> None:
    file = resolve_model("smollm2-135m-instruct", HubConfig())
    num_bytes = file.stat().st_size
    used, counted = measure(file, "generation", 1.1 * num_bytes)
    assert 0.9 * num_bytes < used < 1.1 * num_bytes
    assert 0.95 * num_bytes < counted < 1.02 * num_bytes  # what the engine says


def test_an_encoder_takes_half_of_its_float32_weights(minilm_source: Path) -> None:
    bar = 0.55 * (minilm_source / "model.safetensors").stat().st_size
    used, num_table_bytes = measure(minilm_source, "embedding", bar)
    assert num_table_bytes > 20e6
    assert used + num_table_bytes < bar
