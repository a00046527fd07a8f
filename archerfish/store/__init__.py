"""The Arrow weight store: converting models, and mapping them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archerfish.store.converted import ensure_converted
    from archerfish.store.converter import ConversionResult, ModelConverter
    from archerfish.store.loader import TensorView, WeightLoader

__all__ = ["ConversionResult", "ModelConverter", "TensorView", "WeightLoader", "ensure_converted"]

HOMES = {
    "ConversionResult": "converter",
    "ModelConverter": "converter",
    "TensorView": "loader",
    "WeightLoader": "loader",
    "ensure_converted": "converted",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
