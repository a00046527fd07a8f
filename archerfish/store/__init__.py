"""The Arrow weight store: models are converted once and mapped when they are loaded."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archerfish.store.converter import ConversionResult, ModelConverter, ensure_converted
    from archerfish.store.loader import TensorView, WeightLoader

__all__ = ["ConversionResult", "ModelConverter", "TensorView", "WeightLoader", "ensure_converted"]

HOMES = {
    "ConversionResult": "converter",
    "ModelConverter": "converter",
    "TensorView": "loader",
    "WeightLoader": "loader",
    "ensure_converted": "converter",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
