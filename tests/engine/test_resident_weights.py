"""What the weights of loaded models take in memory: red if originals stay beside packed copies, or matrices are widened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from archerfish.store.names import resolve_model

pytest.importorskip("archerfish.kernels.native._native")
CODE = """
import sys, threading
import archerfish.engine.arrow_engine, archerfish.engine.llm_engine, archerfish.kernels.native.ops
from archerfish import ArrowEngine, LLMEngine
from archerfish.bench.engines import memory_bytes

before, model = memory_bytes("VmRSS"), sys.argv[1]
if "minilm" in model:
    engine = ArrowEngine(model, device="cpu")
    engine._packed.result()
    tables = engine.core.encoder.words, engine.core.encoder.positions  # of the mapped file: their pages come when used
    counted = sum(table.data.nbytes for table in tables)
else:
    engine = LLMEngine(model, device="cpu", max_cache_tokens=16)
    for thread in threading.enumerate():
        if thread.name == "archerfish-packing":  # it releases the mapped originals at last
            thread.join()
    counted = engine.facts.weight_bytes
print(memory_bytes("VmRSS") - before, counted)
"""


def measure(model: Path) -> list[int]:
    """The growth of resident memory, and what the engine counts. A first process converts the model where nothing has yet."""
    command = [sys.executable, "-c", CODE, str(model)]
    subprocess.check_output(command)
    return list(map(int, subprocess.check_output(command).split()))


def test_a_gguf_model_takes_no_more_than_its_file() -> None:
    file = resolve_model("smollm2-135m-instruct")
    num_bytes = file.stat().st_size
    used, counted = measure(file)
    assert used < 1.1 * num_bytes
    assert 0.95 * num_bytes < counted < used


def test_an_encoder_takes_half_of_its_float32_weights(minilm_source: Path) -> None:
    most = 0.55 * (minilm_source / "model.safetensors").stat().st_size
    used, num_table_bytes = measure(minilm_source)
    assert used + num_table_bytes < most
