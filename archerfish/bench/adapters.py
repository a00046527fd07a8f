"""`archerfish bench adapters`: requests spread over many LoRA adapters, against the same without one, and against
vLLM."""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from archerfish.bench.gpu import VLLM, model_directory, open_vllm, vllm_peers
from archerfish.bench.report import OURS, Found, Measurement
from archerfish.bench.worker import EngineGroup
from archerfish.engine.llm_engine import LLMEngine
from archerfish.kernels.machine import free_memory
from archerfish.params import SamplingParams

LAYERS = ".layers."  # what adapters change: all linear maps but the head
WITHOUT = "without slots"
NONE = "slots, no adapter"
SPREAD = "spread over adapters"
GAP, LOADING = "longest gap between steps, ms", "longest gap while adapters are loaded, ms"


def measure(options: Namespace) -> Found:
    """The engine without slots for adapters first, then one with slots; then vLLM, which needs the card for itself."""
    peers = vllm_peers(options)
    with ExitStack() as stack:
        if options.shape:
            model = str(stack.enter_context(model_directory(options.shape)))
            options.engine = options.engine.replace(model=model, load_format="dummy")
        config = options.engine.replace(enable_prefix_caching=False)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="archerfish-adapters-")))
        with LLMEngine(config) as engine:
            yield from throughput(partial(own_seconds, engine, []), options, WITHOUT)
        slots = {"enable_lora": True, "max_loras": options.adapters, "max_lora_rank": options.rank}
        with LLMEngine(config.replace(**slots)) as engine:
            names = write_adapters(engine, place, options.adapters, options.rank)
            yield from throughput(partial(own_seconds, engine, []), options, NONE)
            yield from throughput(partial(own_seconds, engine, names), options, SPREAD)
        with LLMEngine(config.replace(**slots | {"max_loras": 2})) as engine:
            names = write_adapters(engine, place, min(8, options.adapters), options.rank)
            for metric, loads in ((GAP, False), (LOADING, True)):
                yield Measurement(metric, 1000 * longest_gap(engine, names if loads else []))
        del engine
        free_memory()
        given = {"model": config.model, "load_format": config.load_format, "enable_prefix_caching": False}
        folders = [str(place / f"{i}-{options.rank}") for i in range(options.adapters)]
        if peers:
            with EngineGroup() as group:
                open_vllm(group, options, {**given, **slots})
                yield from throughput(partial(group.call, VLLM, "generate", adapters=folders), options, SPREAD, VLLM)
                yield from group.notes


def write_adapters(engine: LLMEngine, place: Path, number: int, rank: int) -> list[str]:
    """Random adapters of all linear maps of the model's layers, loaded under names."""
    from safetensors.numpy import save_file

    assert engine.adapters is not None and engine.runner.ops.adapters is not None
    maps = {name: one for name, [one] in engine.runner.ops.adapters.maps.items() if LAYERS in f".{name}"}
    targets = sorted({name.rpartition(".")[2] for name in maps})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    for i in range(number):
        draw = np.random.default_rng(i)
        folder = place / f"{i}-{rank}"
        tensors = dict[str, Any]()
        if not folder.exists():
            for name, one in maps.items():
                for side, shape in (("A", (rank, one.inputs.total)), ("B", (one.outputs.total, rank))):
                    values = draw.standard_normal(shape, np.float32) / 64
                    tensors[f"base_model.model.{name}.lora_{side}.weight"] = values.astype(np.float16)
            folder.mkdir()
            save_file(tensors, folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        engine.adapters.load(f"adapter-{i}", folder)
    return [f"adapter-{i}" for i in range(number)]


def own_seconds(engine: LLMEngine, names: list[str], *, prompts: list[list[int]], outputs: list[int]) -> float:
    """The seconds that prompts take, with the adapters in turns."""
    params = [SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0) for count in outputs]
    adapters = [names[i % len(names)] if names else None for i in range(len(prompts))]
    began = time.perf_counter()
    engine.generate(prompts, params, lora_request=adapters)
    return time.perf_counter() - began


def throughput(
    seconds: Callable[..., float | None], options: Namespace, what: str, engine: str = OURS
) -> Iterator[Measurement]:
    draw = np.random.default_rng(0)
    outputs = [options.output_tokens] * options.requests
    prompts = [draw.integers(3, 1000, options.prompt_tokens).tolist() for _ in outputs]
    for number in range(options.rounds + 1):
        taken = seconds(prompts=prompts, outputs=outputs)
        if number and taken:  # the first one puts adapters into slots, and compiles
            yield Measurement(f"{what}, tokens/s", sum(outputs) / taken, engine)


def longest_gap(engine: LLMEngine, names: list[str], num_steps: int = 200) -> float:
    """Seconds between two tokens of one request, at most, while adapters take each other's slots."""
    params = SamplingParams(max_tokens=num_steps, ignore_eos=True, temperature=0.0)
    last = 0.0
    gaps = list[float]()
    for number, _ in enumerate(engine.stream([5, 6, 7], params)):
        now = time.perf_counter()
        if number > 10:
            gaps.append(now - last)
        last = now
        if names and number % 5 == 0 and engine.adapters is not None:
            engine.adapters.preload(names[number // 5 % len(names)])
    return max(gaps)
