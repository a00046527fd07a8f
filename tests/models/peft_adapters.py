"""Random LoRA adapters, made and saved by PEFT."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file

from archerfish.store.adapters import Adapter, MapShape, read_adapter

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def add_adapter(model: Any, directory: Path, *, seed: int = 0, **options: Any) -> Any:
    """A copy of a model with a random adapter, which is saved as PEFT saves it."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 7, "target_modules": list(LINEAR), **options})
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # B would be zeros
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(str(directory), save_embedding_layers=False)
    return adapted.eval()


def save_adapter(directory: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """The files of an adapter, with any tensors and any configuration."""
    directory.mkdir(exist_ok=True)
    stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(LINEAR), **config}
    (directory / "adapter_config.json").write_text(json.dumps(stated))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")
    return directory


def fill_slots(ops: Any, paths: Sequence[Path]) -> list[Adapter]:
    """Put adapters into the slots of a backend, from 1 on."""
    adapters = getattr(ops, "inner", ops).adapters
    read = [read_adapter(path, shapes_of(adapters), max_rank=adapters.max_rank) for path in paths]
    for slot, adapter in enumerate(read, 1):
        adapters.fill(slot, adapter.matrices)
    return read


def shapes_of(adapters: Any) -> Mapping[str, MapShape]:
    return {name: MapShape(one.outputs, one.inputs, one.table.is_lookup) for name, one in adapters.maps.items()}


def with_slots(ops: Any, num_slots: int = 3, max_rank: int = 8) -> Any:
    """A backend with slots for adapters."""
    inner = getattr(ops, "inner", ops)
    inner.adapters = inner.new_adapters(num_slots, max_rank)
    return ops
