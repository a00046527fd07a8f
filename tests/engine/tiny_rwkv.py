"""Tiny RWKV-7 models: a checkpoint of random weights, and a configuration for which load_format="dummy" makes some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from archerfish.config import EngineConfig

TINY = {
    "architectures": ["RWKV7ForCausalLM"],
    "model_type": "rwkv7",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "norm_eps": 1e-5,
    "vocab_size": 96,
    "decay_low_rank_dim": 8,
    "a_low_rank_dim": 8,
    "v_low_rank_dim": 8,
    "gate_low_rank_dim": 8,
    "eos_token_id": 0,
    "max_position_embeddings": 4096,
}

DTYPES = ["float32", "bfloat16"]


def save_tiny_rwkv(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**TINY, **changes}))
    return directory


def rwkv_config(model: Path, **options: Any) -> EngineConfig:
    usual = {
        "dtype": "float32",
        "memory_budget_gib": 0.05,
        "max_num_seqs": 32,
        "seed": 7,
        "num_threads": 1,
        "block_size": 16,
    }
    return EngineConfig(model=str(model), **{**usual, **options})


def prompts(num: int, vocab_size: int, seed: int = 0, least: int = 1, most: int = 60) -> list[list[int]]:
    random = np.random.RandomState(seed)
    return [random.randint(1, vocab_size, random.randint(least, most + 1)).tolist() for _ in range(num)]
