"""archerfish: one small inference engine. Names are loaded when they are first used, so importing this costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from archerfish.bench.generate import run_benchmark
    from archerfish.bench.targets import BenchmarkConfig, PerformanceTarget, TestCase
    from archerfish.cache.adaptive import AdaptiveCache
    from archerfish.cache.logits_cache import CacheKey, LogitsCache
    from archerfish.compat.batch_processor import BatchProcessor
    from archerfish.compat.batch_server import BatchInferenceServer
    from archerfish.compat.monitor import PerformanceMonitor
    from archerfish.compat.optimization import OptimizationConfig
    from archerfish.compat.streaming import InferenceRequest, PrefetchConfig, StreamingInference
    from archerfish.config import ConversionConfig, EmbedConfig, EngineConfig, HubConfig, ServeConfig
    from archerfish.engine.arrow_engine import ArrowEngine, RerankResult
    from archerfish.engine.async_engine import AsyncLLMEngine
    from archerfish.engine.inference_core import InferenceCore
    from archerfish.engine.llm import LLM
    from archerfish.engine.llm_engine import LLMEngine
    from archerfish.engine.outputs import CompletionOutput, RequestOutput, TextDelta
    from archerfish.engine.rwkv_sampler import RwkvSampler
    from archerfish.engine.tts import TTSRequest, TTSTokens
    from archerfish.errors import ArcherfishError
    from archerfish.kernels.buffers import BufferPool, PoolStats
    from archerfish.models.adapter import ModelAdapter, register_model
    from archerfish.observe.collector import MetricsCollector
    from archerfish.observe.events import MetricEvent, RealTimeMonitor
    from archerfish.observe.regression import RegressionDetector
    from archerfish.observe.sampling import SamplingMetrics
    from archerfish.params import SamplingParams, Stage
    from archerfish.runtime.logits_view import LogitsView, SamplingConfig
    from archerfish.runtime.sampler import FastSampler
    from archerfish.store.converter import ConversionResult, ModelConverter
    from archerfish.store.loader import WeightLoader
    from archerfish.text.tokenizer import FastTokenizer

_HOME = {
    "AdaptiveCache": "cache.adaptive",
    "ArcherfishError": "errors",
    "ArrowEngine": "engine.arrow_engine",
    "AsyncLLMEngine": "engine.async_engine",
    "BatchInferenceServer": "compat.batch_server",
    "BatchProcessor": "compat.batch_processor",
    "BenchmarkConfig": "bench.targets",
    "BufferPool": "kernels.buffers",
    "CacheKey": "cache.logits_cache",
    "CompletionOutput": "engine.outputs",
    "ConversionConfig": "config",
    "ConversionResult": "store.converter",
    "EmbedConfig": "config",
    "EngineConfig": "config",
    "FastSampler": "runtime.sampler",
    "FastTokenizer": "text.tokenizer",
    "HubConfig": "config",
    "InferenceCore": "engine.inference_core",
    "InferenceRequest": "compat.streaming",
    "LLM": "engine.llm",
    "LLMEngine": "engine.llm_engine",
    "LogitsCache": "cache.logits_cache",
    "LogitsView": "runtime.logits_view",
    "MetricEvent": "observe.events",
    "MetricsCollector": "observe.collector",
    "ModelAdapter": "models.adapter",
    "ModelConverter": "store.converter",
    "OptimizationConfig": "compat.optimization",
    "PerformanceMonitor": "compat.monitor",
    "PerformanceTarget": "bench.targets",
    "PoolStats": "kernels.buffers",
    "PrefetchConfig": "compat.streaming",
    "RealTimeMonitor": "observe.events",
    "RegressionDetector": "observe.regression",
    "RequestOutput": "engine.outputs",
    "RerankResult": "engine.arrow_engine",
    "RwkvSampler": "engine.rwkv_sampler",
    "SamplingConfig": "runtime.logits_view",
    "SamplingMetrics": "observe.sampling",
    "SamplingParams": "params",
    "ServeConfig": "config",
    "Stage": "params",
    "StreamingInference": "compat.streaming",
    "TTSRequest": "engine.tts",
    "TTSTokens": "engine.tts",
    "TestCase": "bench.targets",
    "TextDelta": "engine.outputs",
    "WeightLoader": "store.loader",
    "register_model": "models.adapter",
    "run_benchmark": "bench.generate",
}

__all__ = [
    "LLM", "AdaptiveCache", "ArcherfishError", "ArrowEngine", "AsyncLLMEngine", "BatchInferenceServer", "BatchProcessor",
    "BenchmarkConfig", "BufferPool", "CacheKey", "CompletionOutput", "ConversionConfig", "ConversionResult", "EmbedConfig",
    "EngineConfig", "FastSampler", "FastTokenizer", "HubConfig", "InferenceCore", "InferenceRequest", "LLMEngine",
    "LogitsCache", "LogitsView", "MetricEvent", "MetricsCollector", "ModelAdapter", "ModelConverter", "OptimizationConfig",
    "PerformanceMonitor", "PerformanceTarget", "PoolStats", "PrefetchConfig", "RealTimeMonitor", "RegressionDetector",
    "RequestOutput", "RerankResult", "RwkvSampler", "SamplingConfig", "SamplingMetrics", "SamplingParams", "ServeConfig",
    "Stage", "StreamingInference", "TTSRequest", "TTSTokens", "TestCase", "TextDelta", "WeightLoader", "register_model",
    "run_benchmark",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"archerfish.{_HOME[name]}"), name)
    raise AttributeError(f"module 'archerfish' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
