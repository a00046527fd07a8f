"""The Arrow weight store: models are converted once and mapped when they are loaded.

`sources.open_source` lists the tensors of a checkpoint, `quantised_source.py` with one for each quantised matrix;
`ModelConverter` writes them under their own names, matrices in the chosen type or quantised (`format.py` says in which
forms), and integers as they are; `WeightLoader` maps them.
"""

from archerfish.store.converter import ConversionResult, ModelConverter, ensure_converted
from archerfish.store.loader import WeightLoader

__all__ = ["ConversionResult", "ModelConverter", "WeightLoader", "ensure_converted"]
