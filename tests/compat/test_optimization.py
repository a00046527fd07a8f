"""OptimizationConfig: read, compared, and put in force on an engine that runs, which must not change a single token."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from archerfish.compat.optimization import OptimizationConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import InvalidOptionError, TooManyRequestsError, UnknownOptionError
from archerfish.serve.result_cache import ResultCache
from tests.cache.invariants import check_cache, owned_blocks
from tests.engine.tiny_llama import greedy, prompts, tiny_config, tokens


def check_memory(engine: LLMEngine) -> None:
    scheduler = engine.scheduler
    check_cache(scheduler.cache, owned_blocks(scheduler))
    assert scheduler.blocks.num_free + scheduler.cache.num_evictable <= scheduler.blocks.num_total


# Reading


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"cache_size": 8}, "cache_size_mb"),
        ({"pool_max_objects": 8}, "max_num_seqs"),
        ({"enable_object_pool": "off"}, "reused"),
        ({"enable_simd_sampling": False}, "vectorised"),
        ({"enable_object_pool": 3}, "true or false"),
        ({"enable_prefetch": []}, "true or false"),
        ({"logits_cache_mib": 8, "cache_size_mb": 9}, "two values for logits_cache_mib: 8 and 9"),
        ({"logits_cache_mib": -1}, "-1"),
        ({"logits_cache_mib": 1.5}, "must be int"),
        ({"logits_cache_mib": "many"}, "many"),
        ({"eviction_policy": "lro"}, "lru"),
        ({"eviction_policy": []}, "must be str"),
        ({"pipeline_depth": 2}, "from 0 to 1"),
        ({"max_queue_size": 0}, "at least 1"),
        ({"logits_cache_ttl_s": 0.0}, "at least 0.001"),
        ({1: 2}, "Unknown option"),
        ([("a", 1)], "not list"),
        (None, "not None"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_with_a_hint(values: Any, told: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        OptimizationConfig().updated(values)
    assert told in str(caught.value)
    if isinstance(values, dict) and all(isinstance(name, str) for name in values):
        with pytest.raises(InvalidOptionError, match=re.escape(told)):
            OptimizationConfig(**values)


def test_changes() -> None:
    one, other = OptimizationConfig(), OptimizationConfig(logits_cache_mib=1, eviction_policy="lfu")
    assert one.changes(other) == {"logits_cache_mib": (64, 1), "eviction_policy": ("lru", "lfu")}
    assert other.changes(one) == {"logits_cache_mib": (1, 64), "eviction_policy": ("lfu", "lru")}
    assert one.changes(OptimizationConfig()) == {}
    with pytest.raises(UnknownOptionError, match="logits_cache_mib"):
        OptimizationConfig(logits_cach_mib=1)


def test_second_names_in_the_constructor() -> None:
    seeds = {
        "enable_logits_cache": True,
        "enable_object_pool": True,
        "enable_simd_sampling": True,
        "enable_prefetch": False,
        "cache_size_mb": 256,
    }
    config = OptimizationConfig(**seeds)
    assert config == OptimizationConfig(logits_cache_mib=256, pipeline_depth=0) == OptimizationConfig().updated(seeds)
    assert {name: getattr(config, name) for name in seeds} == seeds
    assert config.replace(cache_size_mb=9, enable_prefetch=True) == OptimizationConfig(logits_cache_mib=9)
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config)) and hash(config) == hash(
        config.replace()
    )


# Putting in force


def test_every_option_reaches_the_engine(engine: LLMEngine) -> None:
    cache = ResultCache(0, 600.0)
    wanted = OptimizationConfig(
        logits_cache_mib=3,
        logits_cache_ttl_s=9.0,
        enable_prefix_caching=False,
        eviction_policy="fifo",
        max_queue_size=7,
        pipeline_depth=0,
        result_cache_mib=2,
        result_cache_ttl_s=5.0,
    )
    before = OptimizationConfig.of(engine, cache)
    assert wanted.apply(engine, cache) == before.changes(wanted)
    assert OptimizationConfig.of(engine, cache) == wanted and wanted.apply(engine, cache) == {}
    logits = engine.scheduler._live._logits_cache
    assert logits is not None and (logits.max_bytes, logits.ttl_seconds) == (3 << 20, 9.0)
    assert type(engine.scheduler.cache.order).__name__ == "FIFO" and not engine.scheduler.cache.is_enabled
    assert engine.scheduler.max_queue_size == engine.queue_status()["capacity"] == 7
    assert (cache.max_bytes, cache.ttl_seconds) == (2 << 20, 5.0)
    before.apply(engine, cache)
    assert OptimizationConfig.of(engine, cache) == before and type(engine.scheduler.cache.order).__name__ == "LRU"


def test_logits_cache_off_and_on(engine: LLMEngine) -> None:
    prompt = prompts(1, 3, 40, 40)[0]
    on = OptimizationConfig.of(engine)
    off = on.updated({"enable_logits_cache": False})
    answers, passes = [], []
    for config in (on, on, off, off, on, on):
        config.apply(engine)
        before = engine.runner.num_forward_passes
        answers.append(engine.generate([prompt], greedy(1))[0].token_ids)
        passes.append(engine.runner.num_forward_passes - before)
    assert passes == [1, 0, 1, 1, 1, 0] and answers == [answers[0]] * 6
    off.apply(engine)
    assert OptimizationConfig.of(engine).enable_logits_cache is False
    logits = engine.scheduler._live._logits_cache
    assert logits is not None and len(logits) == 0


def test_prefix_caching_can_be_turned_on_later(llama: Path) -> None:
    prompt = prompts(1, 3, 40, 40)[0]
    with LLMEngine(tiny_config(llama), enable_prefix_caching=False) as engine:
        engine.generate([prompt], greedy())
        assert engine.generate([prompt], greedy())[0].num_cached_tokens == 0
        OptimizationConfig.of(engine).updated({"enable_prefix_caching": True}).apply(engine)
        engine.generate([prompt], greedy())
        before = engine.runner.num_forward_passes
        assert engine.generate([prompt], greedy(1))[0].num_cached_tokens == 40
        assert engine.runner.num_forward_passes == before, "its logits are kept as well"
        check_memory(engine)


def test_shorter_queue_keeps_waiting_requests(engine: LLMEngine) -> None:
    many = prompts(8)
    names = [engine.add_request(prompt, greedy()) for prompt in many]
    OptimizationConfig.of(engine).updated({"max_queue_size": 2}).apply(engine)
    with pytest.raises(TooManyRequestsError, match="2 requests"):
        engine.add_request(many[0], greedy())
    while engine.has_work:
        engine.step()
    results = [engine.get_output(name) for name in names]
    assert all(result is not None and len(result.token_ids) == 12 for result in results)


def test_refused_change_changes_nothing(engine: LLMEngine) -> None:
    before, order = OptimizationConfig.of(engine), engine.scheduler.cache.order
    for wrong in (
        {"logits_cache_ttl_s": 0.0, "max_queue_size": 9},
        {"eviction_policy": "best", "max_queue_size": 9},
        {"max_num_batched_tokens": 1, "logits_cache_mib": 1},
        {"block_size": 4},
    ):
        with pytest.raises(InvalidOptionError):
            engine.configure(**wrong)
    with pytest.raises(InvalidOptionError, match="no result cache"):
        OptimizationConfig(result_cache_mib=1, max_queue_size=9).apply(engine)
    assert OptimizationConfig.of(engine) == before and engine.scheduler.cache.order is order
    assert engine.scheduler.max_queue_size == before.max_queue_size


SETTINGS: list[dict[str, Any]] = [
    {"pipeline_depth": 0},
    {"eviction_policy": "lfu"},
    {"enable_prefix_caching": False},
    {"enable_logits_cache": False},
    {"pipeline_depth": 1},
    {"enable_prefix_caching": True},
    {"cache_size_mb": 1, "enable_logits_cache": True},
    {"eviction_policy": "fifo"},
    {"max_queue_size": 1},
    {"logits_cache_ttl_s": 0.001},
    {"eviction_policy": "lru"},
]


@pytest.mark.parametrize("steps_between", [1, 3])
def test_running_requests_survive_every_change(llama: Path, steps_between: int) -> None:
    """In a pool so small that it evicts and preempts: the tokens are those of an engine that nobody touched."""
    shared = prompts(1, 5, 30, 30)[0]
    many = [*prompts(10), *(shared + prompt for prompt in prompts(10, 1, 1, 20))]
    with LLMEngine(tiny_config(llama)) as engine:
        expected = tokens(engine.generate(many, greedy(20)))
    with LLMEngine(tiny_config(llama), max_cache_tokens=320, max_num_seqs=6) as engine:
        names = [engine.add_request(prompt, greedy(20)) for prompt in many]
        num_changes = 0
        while engine.has_work:
            changes = SETTINGS[num_changes % len(SETTINGS)]
            OptimizationConfig.of(engine).updated(changes).apply(engine)
            check_memory(engine)
            num_changes += 1
            for _ in range(steps_between):
                engine.step()
        results = [engine.get_output(name) for name in names]
        assert [result.token_ids for result in results if result is not None] == expected
        assert num_changes > len(SETTINGS)
        check_cache(engine.scheduler.cache, [])


def test_options_change_while_another_thread_computes(engine: LLMEngine) -> None:
    many = prompts(40, 9)
    expected = tokens(engine.generate(many, greedy(16)))
    is_done = threading.Event()

    def change() -> int:
        count = 0
        while not is_done.is_set():
            changes = SETTINGS[count % len(SETTINGS)] | {"max_queue_size": 64}
            OptimizationConfig.of(engine).updated(changes).apply(engine)
            count += 1
        return count

    with ThreadPoolExecutor(1) as thread:
        changing = thread.submit(change)
        try:
            found = tokens(engine.generate(many, greedy(16)))
        finally:
            is_done.set()
    assert found == expected and changing.result() > 0
    check_cache(engine.scheduler.cache, [])
