"""archerfish: one small inference engine. Names are loaded when they are first used, so importing this costs
nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from archerfish.cache.adaptive import AdaptiveCache, CacheKey, LogitsCache
    from archerfish.compat.batch_processor import BatchProcessor
    from archerfish.compat.batch_server import BatchInferenceServer
    from archerfish.compat.benchmark import BenchmarkConfig, PerformanceTarget, TestCase, run_benchmark
    from archerfish.compat.monitor import MetricEvent, PerformanceMonitor, RealTimeMonitor
    from archerfish.compat.optimization import OptimizationConfig
    from archerfish.compat.sampling import LogitsView, SamplingConfig, sample_optimized, sample_with_cache
    from archerfish.compat.streaming import InferenceRequest, PrefetchConfig, StreamingInference
    from archerfish.config import ConversionConfig, EmbedConfig, EngineConfig, HubConfig, ServeConfig
    from archerfish.engine.adapters import LoRARequest
    from archerfish.engine.arrow_engine import ArrowEngine
    from archerfish.engine.async_engine import AsyncLLMEngine
    from archerfish.engine.beam_search import BeamSearchParams
    from archerfish.engine.converter import ModelConverter
    from archerfish.engine.inference_core import InferenceCore
    from archerfish.engine.llm import LLM
    from archerfish.engine.llm_engine import LLMEngine
    from archerfish.engine.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput, TextDelta
    from archerfish.engine.rwkv_sampler import RwkvSampler
    from archerfish.engine.sentence_transformer import CrossEncoder, SentenceTransformer
    from archerfish.engine.text_batches import RerankResult
    from archerfish.engine.token_vectors import SparseVector
    from archerfish.engine.tts import TTSRequest, TTSTokens
    from archerfish.engine.vllm_options import AsyncEngineArgs, EngineArgs
    from archerfish.errors import ArcherfishError
    from archerfish.kernels.sampling import BufferPool, PoolStats
    from archerfish.models.adapter import ModelAdapter, register_model
    from archerfish.observe.metrics import MetricsCollector, SamplingMetrics
    from archerfish.observe.regression import RegressionDetector
    from archerfish.params import SamplingParams, Stage
    from archerfish.runtime.sampler import FastSampler
    from archerfish.store.converter import ConversionResult
    from archerfish.store.loader import WeightLoader
    from archerfish.text.tokenizer import FastTokenizer
    from archerfish.util import quantize_embeddings

_HOMES = {  # the public names of each module
    "cache.adaptive": ("AdaptiveCache", "CacheKey", "LogitsCache"),
    "compat.batch_processor": ("BatchProcessor",),
    "compat.batch_server": ("BatchInferenceServer",),
    "compat.benchmark": ("BenchmarkConfig", "PerformanceTarget", "TestCase", "run_benchmark"),
    "compat.monitor": ("MetricEvent", "PerformanceMonitor", "RealTimeMonitor"),
    "compat.optimization": ("OptimizationConfig",),
    "compat.sampling": ("LogitsView", "SamplingConfig", "sample_optimized", "sample_with_cache"),
    "compat.streaming": ("InferenceRequest", "PrefetchConfig", "StreamingInference"),
    "config": ("ConversionConfig", "EmbedConfig", "EngineConfig", "HubConfig", "ServeConfig"),
    "engine.adapters": ("LoRARequest",),
    "engine.arrow_engine": ("ArrowEngine",),
    "engine.async_engine": ("AsyncLLMEngine",),
    "engine.beam_search": ("BeamSearchParams",),
    "engine.converter": ("ModelConverter",),
    "engine.inference_core": ("InferenceCore",),
    "engine.llm": ("LLM",),
    "engine.llm_engine": ("LLMEngine",),
    "engine.outputs": ("CompletionOutput", "PoolingRequestOutput", "RequestOutput", "TextDelta"),
    "engine.rwkv_sampler": ("RwkvSampler",),
    "engine.sentence_transformer": ("CrossEncoder", "SentenceTransformer"),
    "engine.text_batches": ("RerankResult",),
    "engine.token_vectors": ("SparseVector",),
    "engine.tts": ("TTSRequest", "TTSTokens"),
    "engine.vllm_options": ("AsyncEngineArgs", "EngineArgs"),
    "errors": ("ArcherfishError",),
    "kernels.sampling": ("BufferPool", "PoolStats"),
    "models.adapter": ("ModelAdapter", "register_model"),
    "observe.metrics": ("MetricsCollector", "SamplingMetrics"),
    "observe.regression": ("RegressionDetector",),
    "params": ("SamplingParams", "Stage"),
    "runtime.sampler": ("FastSampler",),
    "store.converter": ("ConversionResult",),
    "store.loader": ("WeightLoader",),
    "text.tokenizer": ("FastTokenizer",),
    "util": ("quantize_embeddings",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

# Names of the documents that this package follows, and what stands for them here.
_REPLACED = {
    "CacheAwareModel": "ModelAdapter",
    "InferenceEngine": "LLMEngine",
    "PooledVec": "BufferPool",
    "TieredObjectPool": "BufferPool",
    "TokenToKVPool": "archerfish.runtime.kv_pool.KVCachePool with block_size=1",
    "VecPool": "BufferPool",
}

__all__ = [
    "LLM",
    "AdaptiveCache",
    "ArcherfishError",
    "ArrowEngine",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BatchInferenceServer",
    "BatchProcessor",
    "BeamSearchParams",
    "BenchmarkConfig",
    "BufferPool",
    "CacheKey",
    "CompletionOutput",
    "ConversionConfig",
    "ConversionResult",
    "CrossEncoder",
    "EmbedConfig",
    "EngineArgs",
    "EngineConfig",
    "FastSampler",
    "FastTokenizer",
    "HubConfig",
    "InferenceCore",
    "InferenceRequest",
    "LLMEngine",
    "LoRARequest",
    "LogitsCache",
    "LogitsView",
    "MetricEvent",
    "MetricsCollector",
    "ModelAdapter",
    "ModelConverter",
    "OptimizationConfig",
    "PerformanceMonitor",
    "PerformanceTarget",
    "PoolStats",
    "PoolingRequestOutput",
    "PrefetchConfig",
    "RealTimeMonitor",
    "RegressionDetector",
    "RequestOutput",
    "RerankResult",
    "RwkvSampler",
    "SamplingConfig",
    "SamplingMetrics",
    "SamplingParams",
    "SentenceTransformer",
    "ServeConfig",
    "SparseVector",
    "Stage",
    "StreamingInference",
    "TTSRequest",
    "TTSTokens",
    "TestCase",
    "TextDelta",
    "WeightLoader",
    "quantize_embeddings",
    "register_model",
    "run_benchmark",
    "sample_optimized",
    "sample_with_cache",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"archerfish.{_HOME[name]}"), name)
    if name in _REPLACED:
        raise ImportError(f"archerfish has no {name}. Use {_REPLACED[name]}.")
    raise AttributeError(f"module 'archerfish' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
