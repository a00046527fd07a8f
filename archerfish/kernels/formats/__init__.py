"""The weight formats by name, and which one a model is loaded in.

A format is one file of this folder. A format that is made while a model is loaded has a name for the option `weights`; a format
that a checkpoint is stored in will be found from the checkpoint's config.json, under `weights="auto"`.
"""

from __future__ import annotations

from archerfish.errors import InvalidOptionError, did_you_mean
from archerfish.kernels.formats.format import TensorLayout as TensorLayout
from archerfish.kernels.formats.format import Tensors as Tensors
from archerfish.kernels.formats.format import WeightFormat as WeightFormat
from archerfish.kernels.formats.int8_rows import Int8Rows
from archerfish.kernels.formats.plain import PLAIN as PLAIN

AUTO = "auto"
FORMATS: dict[str, WeightFormat] = {}


def register_format(weight_format: WeightFormat) -> None:
    """Add a format, or replace the one of the same name."""
    FORMATS[weight_format.name] = weight_format


def choose_format(name: str) -> WeightFormat:
    """The format that the option `weights` names; "auto" is the plain one."""
    if name == AUTO:
        return PLAIN
    if name not in FORMATS:
        known = (AUTO, *FORMATS)
        hint = did_you_mean(name, known) or f"Known: {', '.join(known)}."
        raise InvalidOptionError(f"There is no weight format {name!r} (option weights).", hint=hint)
    return FORMATS[name]


register_format(Int8Rows())
