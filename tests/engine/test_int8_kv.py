"""Engines with int8 keys and values: reuse and copies of blocks, memory, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archerfish.config import EngineConfig, HubConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import InvalidOptionError
from archerfish.kernels import select
from archerfish.kernels.recurrent import StateShape
from archerfish.models.adapter import KVShape
from archerfish.runtime.kv_pool import plan_memory
from tests.engine.tiny_llama import check_memory, greedy, prompts, tiny_config, tokens

SHAPE = KVShape(2, 2, 8)  # as the tiny Llama has it


def make(model: Path, hub: HubConfig, **options: Any) -> LLMEngine:
    return LLMEngine(tiny_config(model, kv_dtype="int8", **options), hub=hub)


def test_tokens_do_not_depend_on_what_is_cached_or_beside(llama: Path, hub: HubConfig) -> None:
    """Red if scales are not copied with their block: prompts end inside of blocks that others go on from."""
    long, many = prompts(1, least=60)[0], prompts(6, seed=1)
    forked = [[*long[:num], 5, 6, 7] for num in (37, 40, 51)]
    with make(llama, hub, enable_prefix_caching=False) as engine:
        expected = tokens(engine.generate([long, *forked, *many], greedy()))
    with make(llama, hub) as engine:
        found = [engine.generate([prompt], greedy())[0] for prompt in [long, *forked]]
        assert [output.num_cached_tokens for output in found] == [0, 37, 40, 51]
        assert tokens(found) + tokens(engine.generate(many, greedy())) == expected
        check_memory(engine)
    with make(llama, hub, max_cache_tokens=160, max_num_seqs=6) as engine:
        assert tokens(engine.generate(many, greedy())) == expected[4:]
        assert engine.scheduler.stats().num_preemptions > 0


def test_blocks_take_what_was_planned(llama: Path, hub: HubConfig) -> None:
    with make(llama, hub) as engine:
        memory, layers = engine.facts.memory, engine.runner.pool.layers
        assert memory.block_bytes == 2 * 2 * 2 * (8 + 4) * 16
        assert sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) == memory.num_bytes


def test_what_has_no_int8_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(kv_dtype="int8")
    with pytest.raises(InvalidOptionError, match="this model has states"):
        plan_memory(config, StateShape(2, 2, 16), "cpu", "float32", 0)
    with pytest.raises(InvalidOptionError, match=r"'torch \+ Triton' does not have") as caught:
        plan_memory(config, SHAPE, "cuda", "bfloat16", 0)
    assert "device=cpu" in str(caught.value.hint)
    monkeypatch.setattr(select, "native_error", lambda: "it was not compiled")
    with pytest.raises(InvalidOptionError, match="'torch reference' does not have"):
        plan_memory(config, SHAPE, "cpu", "float32", 0)
