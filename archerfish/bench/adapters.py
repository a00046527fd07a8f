"""`archerfish bench adapters`: requests spread over many LoRA adapters, against the same requests without one."""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from archerfish.bench.gpu import model_directory
from archerfish.bench.report import Found, Measurement
from archerfish.engine.llm_engine import LLMEngine
from archerfish.params import SamplingParams

LAYERS = ".layers."  # what adapters change: all linear maps but the head
WITHOUT, NONE, SPREAD = "without slots", "slots, no adapter", "spread over adapters"
GAP, LOADING = "longest gap between steps, ms", "longest gap while adapters are loaded, ms"


def measure(options: Namespace) -> Found:
    """The engine without slots for adapters first, then one with slots."""
    with ExitStack() as stack:
        config = options.engine
        if options.shape:
            config = config.replace(model=str(stack.enter_context(model_directory(options.shape))), load_format="dummy")
        config = config.replace(enable_prefix_caching=False)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="archerfish-adapters-")))
        with LLMEngine(config) as engine:
            yield from throughput(engine, options, WITHOUT, [])
        with LLMEngine(config.replace(enable_lora=True, max_loras=options.adapters, max_lora_rank=options.rank)) as engine:
            names = write_adapters(engine, place, options.adapters, options.rank)
            yield from throughput(engine, options, NONE, [])
            yield from throughput(engine, options, SPREAD, names)
        with LLMEngine(config.replace(enable_lora=True, max_loras=2, max_lora_rank=options.rank)) as engine:
            names = write_adapters(engine, place, min(8, options.adapters), options.rank)
            for metric, loads in ((GAP, False), (LOADING, True)):
                yield Measurement(metric, 1000 * longest_gap(engine, names if loads else []))


def write_adapters(engine: LLMEngine, place: Path, number: int, rank: int) -> list[str]:
    """Random adapters of all linear maps of the model's layers, loaded under names."""
    from safetensors.numpy import save_file

    assert engine.adapters is not None and engine.runner.ops.adapters is not None
    maps = {name: one for name, one in engine.runner.ops.adapters.maps.items() if LAYERS in f".{name}"}
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(maps)}
    for i in range(number):
        draw, folder, tensors = np.random.default_rng(i), place / f"{i}-{rank}", dict[str, Any]()
        if not folder.exists():
            for name, one in maps.items():
                for side, shape in (("A", (rank, one.inputs)), ("B", (one.outputs, rank))):
                    values = draw.standard_normal(shape, np.float32) / 64
                    tensors[f"base_model.model.{name}.lora_{side}.weight"] = values.astype(np.float16)
            folder.mkdir()
            save_file(tensors, folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        engine.adapters.load(f"adapter-{i}", folder)
    return [f"adapter-{i}" for i in range(number)]


def throughput(engine: LLMEngine, options: Namespace, what: str, names: list[str]) -> Iterator[Measurement]:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 1000, options.prompt_tokens).tolist() for _ in range(options.requests)]
    chosen = [names[i % len(names)] if names else None for i in range(options.requests)]
    params = SamplingParams(max_tokens=options.output_tokens, ignore_eos=True, temperature=0.0)
    for number in range(options.rounds + 1):
        began = time.perf_counter()
        engine.generate(prompts, params, lora_request=chosen)
        seconds = time.perf_counter() - began
        if number:  # the first one puts adapters into slots, and compiles
            yield Measurement(f"{what}, tokens/s", options.requests * options.output_tokens / seconds)


def longest_gap(engine: LLMEngine, names: list[str], num_steps: int = 200) -> float:
    """Seconds between two tokens of one request, at most, while adapters take each other's slots."""
    params, last, gaps = SamplingParams(max_tokens=num_steps, ignore_eos=True, temperature=0.0), 0.0, list[float]()
    for number, _ in enumerate(engine.stream([5, 6, 7], params)):
        now = time.perf_counter()
        if number > 10:
            gaps.append(now - last)
        last = now
        if names and number % 5 == 0 and engine.adapters is not None:
            engine.adapters.preload(names[number // 5 % len(names)])
    return max(gaps)

