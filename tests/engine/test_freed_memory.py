"""Memory of engines: what they take, and what they give back."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archerfish import ArrowEngine, AsyncLLMEngine, HubConfig, LLMEngine
from archerfish.engine.inference_core import InferenceCore
from archerfish.errors import StoppedError
from archerfish.store.names import resolve_model
from tests.engine.tiny_llama import greedy, tiny_config

CHILD = """if True:
    import platform, sys, time
    import torch
    from archerfish import LLMEngine
    from archerfish.bench.engines import memory_bytes

    def memory_left(most):
        # On ARM torch's allocator returns freed memory when it is next used, a tenth of a second later or more.
        deadline = time.monotonic() + 10 * (platform.machine() == "aarch64")
        while memory_bytes("VmRSS") > most and time.monotonic() < deadline:
            time.sleep(0.15)
            torch.empty(1 << 23)
        return memory_bytes("VmRSS")

    def use(how, most):
        engine = LLMEngine(sys.argv[1], load_format="dummy", dtype="float32", max_cache_tokens=512)
        engine.generate([[1, 2, 3]])
        used = memory_bytes("VmRSS")
        if how == "close":
            engine.close()
            return used, memory_left(most)
        del engine
        return used, memory_left(most)

    before = memory_bytes("VmRSS") + 300e6
    before = use("del", before)[1]  # loads all libraries
    for how in ("del", "close"):
        used, after = use(how, before + 45e6)
        print(how, used - before, after - before)
"""


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def refs(*things: object) -> Callable[[], list[str]]:
    """A function that waits until these objects are gone, and names those that stay."""
    kept = [weakref.ref(thing) for thing in things]

    def left() -> list[str]:
        deadline = time.monotonic() + 10
        while any(ref() is not None for ref in kept) and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread may still be ending
        return [type(ref()).__name__ for ref in kept if ref() is not None]

    return left


def test_deleted_engine_is_freed(llama: Path) -> None:
    engine = LLMEngine(tiny_config(llama))
    [output] = engine.generate([[5, 6, 7]], greedy(4))
    for _ in engine.stream([5, 6], greedy(2)):
        pass
    left = refs(engine, engine.runner, engine.runner.model, engine.runner.pool, engine.scheduler, engine.grammars)
    del engine
    assert left() == []
    assert len(output.token_ids) == 4
    assert gc.get_freeze_count() == 0


def test_closed_engine_frees_weights_and_still_shows_its_statistics(llama: Path) -> None:
    engine = LLMEngine(tiny_config(llama))
    engine.generate([[5, 6, 7]], greedy(4))
    left = refs(engine.runner.model)
    engine.close()
    assert left() == []
    assert engine.engine_stats().completed_requests == 1
    assert engine.pool_stats() is not None
    with pytest.raises(StoppedError):
        engine.generate([[5, 6, 7]])


def test_deleted_async_engine_ends_its_thread_and_frees_the_engine(llama: Path) -> None:
    engine = AsyncLLMEngine(tiny_config(llama))
    left, thread = refs(engine.engine, engine), engine._thread
    del engine
    thread.join(10)
    assert not thread.is_alive()
    assert left() == []


@pytest.mark.parametrize("is_closed", [True, False])
def test_closed_or_deleted_encoder_frees_its_weights(tiny_model: Any, hub: HubConfig, is_closed: bool) -> None:
    engine = ArrowEngine(tiny_model("Bert"), hub=hub)
    engine.encode(["a", "b"])
    engine._packed.result()
    core: InferenceCore | None = engine.core
    assert core is not None
    left, dimension = refs(core.encoder), core.dimension
    if is_closed:
        engine.close()
        assert engine.get_embedding_dimension() == dimension
        with pytest.raises(StoppedError):
            core.run(None)  # type: ignore[arg-type]
    else:
        core = None
        del engine
    assert left() == []


def test_memory_goes_back_to_the_system(tmp_path: Path) -> None:
    size = '"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 12, "vocab_size": 99'
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "max_position_embeddings": 512, {size}}}')
    printed = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], check=True, capture_output=True, text=True
    ).stdout
    rows = [line.split() for line in printed.splitlines()]
    assert [row[0] for row in rows] == ["del", "close"]
    for _, used, left in rows:
        assert int(used) > 90e6  # the weights take 113 MB
        assert int(left) < 45e6


# What the weights of loaded models take in memory: red if originals stay beside packed copies, or matrices are widened


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
    """The growth of resident memory, and what the engine counts. The model is converted before, if it has not been
    yet."""
    if "minilm" in str(model):
        ArrowEngine(model, device="cpu").close()
    else:
        LLMEngine(str(model), device="cpu", max_cache_tokens=16).close()
    return list(map(int, subprocess.check_output([sys.executable, "-c", CODE, str(model)]).split()))


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
