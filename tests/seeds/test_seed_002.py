"""Seed 002, InferEngine: its Rust snippets in their Python meaning. InferenceEngine is LLMEngine here."""

from __future__ import annotations

from pathlib import Path

import pytest

from archerfish import EngineConfig, LLMEngine, SamplingParams
from archerfish.errors import UnknownOptionError
from archerfish.sequence import RadixKey
from tests.engine.tiny_llama import prompts


def test_shape_options_are_refused_with_what_to_write() -> None:
    for name in ("num_layers", "kv_dim"):
        with pytest.raises(
            UnknownOptionError, match=rf"option of \[engine\]: '{name}'\. Leave it out.*max_cache_tokens"
        ):
            EngineConfig(max_batch_size=32, **{name: 28})  # type: ignore[arg-type]


def test_an_engine_and_its_statistics(llama: Path) -> None:
    # num_layers and kv_dim are read from the model.
    config = EngineConfig(
        model=str(llama),
        load_format="dummy",
        dtype="float32",
        num_threads=1,
        max_batch_size=32,
        max_concurrent_requests=64,
        max_queue_size=256,
        schedule_interval_ms=1,
        max_cache_tokens=65536,
    )
    with LLMEngine(config) as engine:
        for _ in range(2):
            engine.generate(prompts(2, least=20), SamplingParams(max_tokens=4, ignore_eos=True))
        stats = engine.engine_stats()
        assert (stats.total_requests, stats.completed_requests) == (4, 4)
        assert 0 < stats.cache_hits / (stats.cache_hits + stats.cache_misses) < 1


def test_namespaces_do_not_share_a_cache(engine: LLMEngine) -> None:
    key1 = RadixKey.with_namespace([1, 2, 3], "tenant-1")
    key2 = RadixKey.with_namespace([1, 2, 3], "tenant-2")
    assert key1 != key2
    prompt, params = prompts(1, least=40)[0], SamplingParams(max_tokens=2, ignore_eos=True)
    tenants = ("tenant-1", "tenant-1", "tenant-2")
    found = [engine.generate(prompt, params, namespace=tenant)[0].num_cached_tokens for tenant in tenants]
    assert found[0] == found[2] == 0 and found[1] > 0
