"""A tiny Llama, of which only config.json exists: load_format="dummy" gives it weights, the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from archerfish.config import EngineConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.outputs import RequestOutput
from archerfish.params import SamplingParams
from tests.cache.invariants import check_cache

VOCAB = 96
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def save_tiny_llama(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**TINY, **changes}))
    return directory


def tiny_config(directory: Path, **options: Any) -> EngineConfig:
    usual = {
        "dtype": "float32",
        "load_format": "dummy",
        "max_cache_tokens": 4096,
        "max_num_seqs": 32,
        "seed": 7,
        "num_threads": 1,  # two are slower with tensors this small, and much slower on a busy machine
    }
    return EngineConfig(model=str(directory), **{**usual, **options})


def prompts(num: int, seed: int = 0, least: int = 1, most: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, rng.integers(least, most + 1)).tolist() for _ in range(num)]


def greedy(num_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def check_memory(engine: LLMEngine) -> None:
    """No block may be in use when nothing runs."""
    check_cache(engine.scheduler.cache, [])
    blocks = engine.scheduler.blocks
    assert blocks.num_free + engine.scheduler.cache.num_evictable == blocks.num_total
