"""Random LoRA adapters, made and saved by PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from tests.models.adapter_files import LINEAR

FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def add_adapter(model: Any, directory: Path, *, seed: int = 0, **options: Any) -> Any:
    """A copy of a model with a random adapter, which is saved as PEFT saves it."""
    import peft  # which takes seconds

    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 7, "target_modules": list(LINEAR), **options})
    copied = copy.deepcopy(model)
    vars(copied).pop("state_dict", None)  # with the names that we have: see `make_model`
    adapted = peft.get_peft_model(copied, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # B would be zeros
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(str(directory), save_embedding_layers=False)
    return adapted.eval()
