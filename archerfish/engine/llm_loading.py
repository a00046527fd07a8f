"""From a model's name to an adapter with weights, a pool of blocks, and the facts that an engine needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archerfish.config import EngineConfig, HubConfig
from archerfish.errors import CorruptFileError, InvalidOptionError
from archerfish.kernels.ops import Ops
from archerfish.kernels.select import choose_device, choose_dtype, choose_ops
from archerfish.layers.weights import Weights
from archerfish.models.adapter import KVShape, ModelAdapter, model_class
from archerfish.models.config import Config
from archerfish.runtime.kv_pool import MemoryPlan, plan_memory, work_bytes
from archerfish.store.converted import ensure_converted
from archerfish.store.loader import WeightLoader
from archerfish.store.metadata import is_converted, read_metadata
from archerfish.store.names import resolve_model
from archerfish.types import DTYPE_BYTES, Progress

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 16384
DETERMINISTIC_CHUNK = 256


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before its weights are touched."""

    directory: Path
    name: str
    config: Config
    generation_config: Mapping[str, Any]
    adapter: type[ModelAdapter[Any]]
    device: str
    dtype: str
    max_len: int
    step_tokens: int  # most in one step
    memory: MemoryPlan

    @property
    def vocab_size(self) -> int:
        return self.adapter.vocab_size(self.config)

    @property
    def kv_shape(self) -> KVShape:
        return self.adapter.kv_shape(self.config)


def read_facts(config: EngineConfig, hub: HubConfig, progress: Progress) -> ModelFacts:
    """Find a model, convert it if need be, and compute what will fit. Nothing is allocated."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    source = resolve_model(config.model, hub, progress)
    if config.load_format == "dummy" and not is_converted(source):
        directory, values, generation, name = source, read_json(source / "config.json"), {}, source.name
    else:
        directory = ensure_converted(source, dtype=dtype, hub=hub, progress=progress)
        metadata = read_metadata(directory)
        values, generation, name = metadata.config, metadata.generation_config or {}, metadata.model_name
    model_config = Config(values)
    adapter = model_class(model_config)
    max_len = choose_max_len(config, adapter.max_positions(model_config), name)
    shapes = adapter.dummy_shapes(model_config).values()
    weight_bytes = sum(count(shape) for shape in shapes) * DTYPE_BYTES[dtype]
    step_tokens = choose_step_tokens(config, device)
    work = work_bytes(shapes, adapter.vocab_size(model_config), step_tokens, config.max_num_seqs, dtype)
    memory = plan_memory(config, adapter.kv_shape(model_config), device, dtype, weight_bytes, work)
    shown = name if Path(config.model).exists() else config.model
    return ModelFacts(directory, shown, model_config, generation, adapter, device, dtype, max_len, step_tokens, memory)


def load_adapter(facts: ModelFacts, config: EngineConfig) -> ModelAdapter[Any]:
    """The model with its weights, packed for the backend that this machine does fastest."""
    ops = choose_ops(facts.device, facts.dtype)
    with ops.allocating(facts.name):
        return build_adapter(facts, config, ops)


def build_adapter(facts: ModelFacts, config: EngineConfig, ops: Ops[Any]) -> ModelAdapter[Any]:
    if config.load_format == "dummy":
        weights = Weights(ops.random_weights(facts.adapter.dummy_shapes(facts.config)), ops)
        adapter = facts.adapter(weights, facts.config, facts.max_len)
        ops.prepare()
        return adapter
    loader = WeightLoader(facts.directory)
    adapter = facts.adapter(Weights(loader.load_weights(), ops), facts.config, facts.max_len)
    ops.prepare()
    loader.release()
    return adapter


def choose_step_tokens(config: EngineConfig, device: str) -> int:
    usual = CPU_STEP_TOKENS if device == "cpu" else GPU_STEP_TOKENS
    chunk = DETERMINISTIC_CHUNK if config.deterministic else 1
    return config.max_num_batched_tokens or max(usual, config.max_num_seqs + chunk)


def choose_max_len(config: EngineConfig, most: int, name: str) -> int:
    if config.max_model_len > most:
        raise InvalidOptionError(f"[engine] max_model_len is {config.max_model_len}, but {name} has {most} positions.")
    return config.max_model_len or most


def count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptFileError(f"{file} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise CorruptFileError(f"{file} does not hold a JSON object.")
    return values
