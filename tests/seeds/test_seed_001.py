"""Seed 001, the optimised RWKV sampler: its Rust snippets in their Python meaning. Comments say what differs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

import archerfish
from archerfish import (
    AdaptiveCache,
    BenchmarkConfig,
    BufferPool,
    CacheKey,
    InferenceRequest,
    LogitsCache,
    LogitsView,
    MetricsCollector,
    OptimizationConfig,
    PerformanceMonitor,
    PerformanceTarget,
    PrefetchConfig,
    RegressionDetector,
    RwkvSampler,
    SamplingConfig,
    SamplingParams,
    StreamingInference,
    TestCase,
    run_benchmark,
    sample_optimized,
    sample_with_cache,
)
from archerfish.engine.tts import VOCAB_SIZE
from archerfish.errors import InvalidOptionError, UnknownOptionError
from tests.engine.tiny_rwkv import rwkv_config, save_tiny_rwkv

LOGITS = np.random.default_rng(0).normal(size=500).astype(np.float32)
CONFIG = SamplingConfig(temperature=0.8, top_k=40, top_p=0.9)


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RwkvSampler]:
    directory = save_tiny_rwkv(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, hidden_size=32)
    with RwkvSampler.new(rwkv_config(directory, load_format="dummy", max_num_seqs=8)) as made:
        yield made


def test_rwkv_sampler(sampler: RwkvSampler) -> None:
    global_tokens, semantic_tokens = sampler.generate_tts_tokens("Hello.", seed=1, max_tokens=5)
    assert len(global_tokens) == 32 and len(semantic_tokens) <= 5
    assert len(sampler.generate_tts_tokens_batch(["One.", "Two."], max_tokens=5)) == 2
    assert 0 <= sampler.sample_logits(LOGITS, temperature=0.8, top_k=40, seed=1) < 500
    sampler.reset()


def test_logits_cache() -> None:
    cache = LogitsCache(max_bytes=1 << 20, ttl_seconds=600)
    key = CacheKey(context_tokens=[1, 2, 3], position=3, model_state_hash="model")
    assert cache.get(key) is None
    cache.insert(key, LOGITS)
    assert cache.get(key) is LOGITS
    assert cache.evict_expired(max_age_s=0) == 1 and cache.get_stats().hits == 1


def test_object_pool() -> None:
    pool = BufferPool(lambda size: np.empty(size, np.float32))  # VecPool
    array = pool.borrow(1000)  # get_vec(min_capacity)
    pool.give_back(array)  # return_vec
    assert pool.borrow(900) is array
    stats = pool.pool_stats()
    assert (stats.total_gets, stats.total_returns, stats.cache_hits, stats.cache_misses) == (2, 1, 1, 1)


def test_fast_sampler() -> None:
    # A seed and a position stand for the random generator: the same two give the same token.
    tokens = [sample_optimized(LOGITS, CONFIG, seed=1, position=position) for position in range(20)]
    assert len(set(tokens)) > 5 and tokens[3] == sample_optimized(LOGITS, CONFIG, seed=1, position=3)
    cache = LogitsCache(max_bytes=1 << 20, ttl_seconds=600)
    key = CacheKey([1], 1, "model")
    cached = [
        sample_with_cache(lambda: LOGITS, CONFIG, cache=cache, cache_key=key, seed=1, position=i) for i in range(20)
    ]
    assert cached == tokens and cache.get_stats().hits == 19
    for name in ("use_simd", "fast_path_threshold"):
        with pytest.raises(UnknownOptionError, match="Leave it out"):
            SamplingConfig(**{name: 1})


def test_logits_view() -> None:
    view = LogitsView(LOGITS, 100, 200, masked=[150])  # vocab_start, vocab_end, masked_tokens
    assert view.effective_logit(150) == -np.inf and view.effective_logit(151) == LOGITS[151]
    assert [token_id for token_id, _ in view.iter_valid()] == [i for i in range(100, 200) if i != 150]
    assert np.shares_memory(view.values, LOGITS)


def test_streaming_inference(sampler: RwkvSampler) -> None:
    async def main() -> None:
        async with StreamingInference(sampler.engine, PrefetchConfig(max_prefetch=1)) as inference:
            logits = await inference.get_logits_with_prefetch([1, 2, 3])
            assert logits.shape == (VOCAB_SIZE,)
            outputs = await inference.batch_infer([InferenceRequest([1, 2, 3], SamplingParams(max_tokens=2))])
            assert len(outputs[0].token_ids) == 2

    asyncio.run(main())
    for name in ("window_size", "prefetch_threshold"):
        with pytest.raises(UnknownOptionError, match="before the token is drawn"):
            PrefetchConfig(**{name: 1})


def test_adaptive_cache() -> None:
    cache: AdaptiveCache[str, str] = AdaptiveCache(100, ttl_seconds=60, window_size=4, min_hit_rate=0.5)
    assert cache.should_cache("a") and cache.insert("a", "value", 60)
    for _ in range(4):
        cache.get("missing")
    assert cache.hit_rate == 0 and not cache.should_cache("b")  # a low hit rate: cache less
    assert cache.adaptive_eviction(num_bytes=60) == 1


def test_metrics_collector() -> None:
    collector = MetricsCollector()
    collector.first_token("model", 0.5)
    collector.refused("model", "overloaded")
    assert collector.histograms["archerfish_time_to_first_token_seconds"].count(model_name="model") == 1
    assert collector.counters["archerfish_refused_requests"].value(model_name="model", code="overloaded") == 1


def test_benchmark(sampler: RwkvSampler) -> None:
    target = PerformanceTarget(max_latency_ms=1e6, min_throughput_tps=1e-6, max_memory_mb=1e6, max_cpu_percent=1e6)
    arguments = SamplingParams(max_tokens=2, ignore_eos=True)
    case = TestCase(name="short", input_tokens=[1, 2, 3], sampling_args=arguments, expected_performance=target)
    config = BenchmarkConfig(test_cases=(case,), warmup_iterations=1, measurement_iterations=1)
    _, judged = run_benchmark(sampler.engine.config, config)
    assert {one.verdict for one in judged} == {"met"}


def test_regression_detector() -> None:
    detector = RegressionDetector({"e2e_p99_ms": 100.0}, tolerance_percent=5.0)
    found = [bool(detector.check_regression({"e2e_p99_ms": 120.0})) for _ in range(3)]
    assert found == [False, False, True]  # three failures in a row


def test_optimization_config(sampler: RwkvSampler) -> None:
    config = OptimizationConfig.of(sampler.engine)
    sampler.update_config(config.updated({"enable_logits_cache": True, "cache_size_mb": 16, "enable_prefetch": True}))
    assert sampler.engine.config.logits_cache_mib == 16
    with pytest.raises((InvalidOptionError, UnknownOptionError), match="pool_max_objects"):
        config.updated({"pool_max_objects": 5})


def test_real_time_monitor(sampler: RwkvSampler) -> None:
    name = sampler.engine.model_name
    with PerformanceMonitor(sampler) as monitor:
        real_time = monitor.real_time(monitoring_interval_s=1.0, alert_thresholds={f"{name}/e2e_p99_ms": 1e-6})
        alerts: list[str] = []
        real_time.subscribe(lambda event: alerts.append(event.name) if event.is_alert else None)
        sampler.generate_tts_tokens("Hello.", max_tokens=2)
        real_time.collect()  # start_monitoring() calls this once in every interval
    assert alerts == [f"{name}/e2e_p99_ms"]
    assert monitor.sampling().total_samples > 30


def test_replaced_names_say_what_to_use() -> None:
    for name, replacement in (
        ("InferenceEngine", "LLMEngine"),
        ("TokenToKVPool", "KVCachePool"),
        ("PooledVec", "BufferPool"),
    ):
        with pytest.raises(ImportError, match=replacement):
            getattr(archerfish, name)
