"""archerfish: one small inference engine. Names are loaded when they are first used, so importing this costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from archerfish.config import ConversionConfig, EmbedConfig, EngineConfig, HubConfig, ServeConfig
    from archerfish.engine.arrow_engine import ArrowEngine, RerankResult
    from archerfish.engine.async_engine import AsyncLLMEngine
    from archerfish.engine.batch_processor import BatchProcessor
    from archerfish.engine.batch_server import BatchInferenceServer
    from archerfish.engine.inference_core import InferenceCore
    from archerfish.engine.llm import LLM
    from archerfish.engine.llm_engine import LLMEngine
    from archerfish.engine.monitor import PerformanceMonitor
    from archerfish.engine.outputs import CompletionOutput, RequestOutput, TextDelta
    from archerfish.engine.rwkv_sampler import RwkvSampler
    from archerfish.engine.streaming import PrefetchConfig, StreamingInference
    from archerfish.engine.tokenizer import FastTokenizer
    from archerfish.engine.tts import TTSRequest, TTSTokens
    from archerfish.errors import ArcherfishError
    from archerfish.models.adapter import ModelAdapter, register_model
    from archerfish.observe.collector import MetricsCollector
    from archerfish.observe.events import MetricEvent, RealTimeMonitor
    from archerfish.observe.regression import RegressionDetector
    from archerfish.observe.sampling import SamplingMetrics
    from archerfish.params import SamplingParams, Stage
    from archerfish.store.converter import ConversionResult, ModelConverter
    from archerfish.store.loader import WeightLoader

_HOME = {
    "ArcherfishError": "errors",
    "ArrowEngine": "engine.arrow_engine",
    "AsyncLLMEngine": "engine.async_engine",
    "BatchInferenceServer": "engine.batch_server",
    "BatchProcessor": "engine.batch_processor",
    "CompletionOutput": "engine.outputs",
    "ConversionConfig": "config",
    "ConversionResult": "store.converter",
    "EmbedConfig": "config",
    "EngineConfig": "config",
    "FastTokenizer": "engine.tokenizer",
    "HubConfig": "config",
    "InferenceCore": "engine.inference_core",
    "LLM": "engine.llm",
    "LLMEngine": "engine.llm_engine",
    "MetricEvent": "observe.events",
    "MetricsCollector": "observe.collector",
    "ModelAdapter": "models.adapter",
    "ModelConverter": "store.converter",
    "PerformanceMonitor": "engine.monitor",
    "PrefetchConfig": "engine.streaming",
    "RealTimeMonitor": "observe.events",
    "RegressionDetector": "observe.regression",
    "RequestOutput": "engine.outputs",
    "RerankResult": "engine.arrow_engine",
    "RwkvSampler": "engine.rwkv_sampler",
    "SamplingMetrics": "observe.sampling",
    "SamplingParams": "params",
    "ServeConfig": "config",
    "Stage": "params",
    "StreamingInference": "engine.streaming",
    "TTSRequest": "engine.tts",
    "TTSTokens": "engine.tts",
    "TextDelta": "engine.outputs",
    "WeightLoader": "store.loader",
    "register_model": "models.adapter",
}

__all__ = [
    "LLM", "ArcherfishError", "ArrowEngine", "AsyncLLMEngine", "BatchInferenceServer", "BatchProcessor", "CompletionOutput",
    "ConversionConfig", "ConversionResult", "EmbedConfig", "EngineConfig", "FastTokenizer", "HubConfig", "InferenceCore",
    "LLMEngine", "MetricEvent", "MetricsCollector", "ModelAdapter", "ModelConverter", "PerformanceMonitor", "PrefetchConfig",
    "RealTimeMonitor", "RegressionDetector", "RequestOutput", "RerankResult", "RwkvSampler", "SamplingMetrics",
    "SamplingParams", "ServeConfig", "Stage", "StreamingInference", "TTSRequest", "TTSTokens", "TextDelta", "WeightLoader",
    "register_model",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"archerfish.{_HOME[name]}"), name)
    raise AttributeError(f"module 'archerfish' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
