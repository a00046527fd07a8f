"""The Arrow weight store: models are converted once and mapped when they are loaded.

From a checkpoint to a WeightFormat: `sources.open_source` lists the tensors of a checkpoint; `ModelConverter` writes them under
their own names, matrices in the chosen type and integers as they are; `WeightLoader.load_weights` maps them, and
`layers/weights.py` hands those that `WeightFormat.checkpoint` names to `WeightFormat.load`. A quantised kind of checkpoint
(GPTQ, AWQ, FP8) needs

- its types: `ITEM_BYTES` in `format.py`, and `DTYPE_CODES` in `source.py` for their names in safetensors;
- its scales kept as they are: `ModelConverter.stored_info` narrows every matrix of floats;
- a WeightFormat in `kernels/formats.py`, chosen from the checkpoint's config.json, which metadata.json keeps.
"""

from archerfish.store.converter import ConversionResult, ModelConverter, ensure_converted
from archerfish.store.loader import WeightLoader

__all__ = ["ConversionResult", "ModelConverter", "WeightLoader", "ensure_converted"]
