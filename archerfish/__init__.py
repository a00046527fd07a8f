"""archerfish: one small inference engine. Names are loaded when they are first used, so importing this costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from archerfish.config import ConversionConfig, EmbedConfig, HubConfig, ServeConfig
    from archerfish.engine.arrow_engine import ArrowEngine, RerankResult
    from archerfish.engine.batch_processor import BatchProcessor
    from archerfish.engine.batch_server import BatchInferenceServer
    from archerfish.engine.inference_core import InferenceCore
    from archerfish.engine.tokenizer import FastTokenizer
    from archerfish.errors import ArcherfishError
    from archerfish.store.converter import ConversionResult, ModelConverter
    from archerfish.store.loader import WeightLoader

_HOME = {
    "ArcherfishError": "errors",
    "ArrowEngine": "engine.arrow_engine",
    "BatchInferenceServer": "engine.batch_server",
    "BatchProcessor": "engine.batch_processor",
    "ConversionConfig": "config",
    "ConversionResult": "store.converter",
    "EmbedConfig": "config",
    "FastTokenizer": "engine.tokenizer",
    "HubConfig": "config",
    "InferenceCore": "engine.inference_core",
    "ModelConverter": "store.converter",
    "RerankResult": "engine.arrow_engine",
    "ServeConfig": "config",
    "WeightLoader": "store.loader",
}

__all__ = [
    "ArcherfishError", "ArrowEngine", "BatchInferenceServer", "BatchProcessor", "ConversionConfig", "ConversionResult",
    "EmbedConfig", "FastTokenizer", "HubConfig", "InferenceCore", "ModelConverter", "RerankResult", "ServeConfig",
    "WeightLoader",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"archerfish.{_HOME[name]}"), name)
    raise AttributeError(f"module 'archerfish' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
