"""The Arrow weight store: models are converted once and mapped when they are loaded."""

from archerfish.store.converter import ConversionResult, ModelConverter, ensure_converted
from archerfish.store.loader import WeightLoader

__all__ = ["ConversionResult", "ModelConverter", "WeightLoader", "ensure_converted"]
