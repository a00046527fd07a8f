"""ModelConverter: the store's converter, which here also quantises: it knows which matrices of a model are linear maps."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, cast

from archerfish.errors import InvalidOptionError, UnsupportedModelError
from archerfish.kernels.formats import INT8
from archerfish.kernels.ops import Ops
from archerfish.layers.weights import NotedWeights
from archerfish.models.adapter import ENCODERS, NoOps, encoder_class, model_class
from archerfish.models.config import Config
from archerfish.store import converter
from archerfish.store.format import GROUP_SIZE, Quantization
from archerfish.store.quantiser import quantise_source
from archerfish.store.source import ModelSource
from archerfish.types import Progress

IN_LAYER = re.compile(r"\.\d+\.")
QUANT_TYPES = {"int8": "INT8", "int4": "Q4_1", "fp8": "FP8"}


class ModelConverter(converter.ModelConverter):
    """Converts models, and quantises their matrices where `weights` asks for it; see ConversionConfig for the choices."""

    def convert_source(
        self, source: ModelSource, name: str, target: Path, progress: Progress
    ) -> converter.ConversionResult:
        config = self.config
        if config.weights == "auto":
            return super().convert_source(source, name, target, progress)
        if config.group_size % GROUP_SIZE:
            raise InvalidOptionError(f"[convert] group_size is {config.group_size}, not a multiple of {GROUP_SIZE}.")
        wanted = choose_matrices(source, config.weights, config.group_size)
        quantised = quantise_source(source, wanted, keep_others=config.keep_quantized)
        return super().convert_source(quantised, name, target, progress)


def linear_maps(config: Config) -> set[str]:
    """Names of the matrices that may be quantised: a model that is built over no weights tells them.

    Lookup tables are left out, also those that are heads as well, matrices that the model keeps plain, and those whose inputs
    are no multiple of 32.
    """
    noted = NotedWeights({}, cast(Ops[Any], NoOps()), weight_format=INT8)
    if config.model_type in ENCODERS:
        encoder = encoder_class(config)
        encoder(noted.scope(encoder.prefix), config)
        if config.is_classifier:
            encoder.head(noted, config)
    else:
        model_class(config)(noted, config, max_len=1)
    sizes = {name: INT8.num_bytes(*shape, "float32") for name, shape in noted.shapes.items() if len(shape) == 2}
    return {name for name, num_bytes in sizes.items() if noted.num_bytes[name] == num_bytes and name not in noted.tables}


def choose_matrices(source: ModelSource, weights: str, group_size: int) -> dict[str, Quantization]:
    """How each matrix of a source is to be stored: linear maps as `weights` says. All groups of a model have one size.

    Heads, which are in no layer, have at least 8 bits: their errors go straight into logits or scores.
    """
    maps = linear_maps(Config(source.config))
    ends = {name.partition(".")[2] for name in maps}  # a checkpoint without a head has no prefix
    infos = [tensor.info for tensor in source.tensors]
    in_layers = [info for info in infos if IN_LAYER.search(f".{info.name}") and info.name in maps | ends]
    found = in_layers + [info for info in infos if info.name in maps and info not in in_layers]
    if not in_layers:
        hint = "Convert it without --weights."
        raise UnsupportedModelError(f"{source.path} has no linear map with a multiple of {GROUP_SIZE} inputs.", hint=hint)
    size = math.gcd(group_size, *(info.shape[1] for info in in_layers))
    wanted = {}
    for info in found:
        kind = "int8" if weights == "int4" and info not in in_layers else weights
        wanted[info.name] = Quantization(QUANT_TYPES[kind], 1, size if kind == "int4" else info.shape[1])
    return wanted
