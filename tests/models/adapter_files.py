"""Files of LoRA adapters with any content, and backends with slots for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from archerfish.store.adapters import Adapter, MapShape, read_adapter

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(directory: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """The files of an adapter, with any tensors and any configuration."""
    directory.mkdir(exist_ok=True)
    stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(LINEAR), **config}
    (directory / "adapter_config.json").write_text(json.dumps(stated))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")
    return directory


def fill_slots(ops: Any, paths: Sequence[Path], kind: str = "") -> list[Adapter]:
    """Put adapters into the slots of a backend, from 1 on."""
    adapters = getattr(ops, "inner", ops).adapters
    read = [read_adapter(path, shapes_of(adapters), max_rank=adapters.max_rank, kind=kind) for path in paths]
    for slot, adapter in enumerate(read, 1):
        adapters.fill(slot, adapter.matrices)
    return read


def shapes_of(adapters: Any) -> Mapping[str, MapShape]:
    found = ((name, one) for name, [one, *_] in adapters.maps.items())
    return {name: MapShape(one.outputs.total, one.inputs.total, one.table.is_lookup) for name, one in found}


def with_slots(ops: Any, num_slots: int = 3, max_rank: int = 8) -> Any:
    """A backend with slots for adapters."""
    inner = getattr(ops, "inner", ops)
    inner.adapters = inner.new_adapters(num_slots, max_rank)
    inner.adapters.takes_experts = True
    return ops


def random_adapter(
    directory: Path, shapes: Mapping[str, tuple[int, int]], seed: int = 0, std: float = 0.3, **config: Any
) -> Path:
    """An adapter for linear maps of these names, with outputs and inputs."""
    random = torch.Generator().manual_seed(seed)
    rank = config.get("r", 4)
    tensors = dict[str, torch.Tensor]()
    for name, (outputs, inputs) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * std
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * std
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    return save_adapter(directory, tensors, **{"target_modules": targets, **config})
