"""ModelConverter: the store's converter, which here also quantises: it knows which matrices of a model are linear maps."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from archerfish.engine.calibration import Texts, find_texts
from archerfish.errors import InvalidOptionError, UnsupportedModelError
from archerfish.kernels.formats import INT8
from archerfish.kernels.ops import Ops
from archerfish.kernels.select import choose_device, import_torch
from archerfish.kernels.stored import Floats
from archerfish.layers.weights import NotedWeights
from archerfish.models.adapter import ENCODERS, NoOps, encoder_class, model_class
from archerfish.models.config import Config
from archerfish.store import converter
from archerfish.store.converter import fingerprint_parts
from archerfish.store.files import file_lock, replace_file, write_errors
from archerfish.store.format import GROUP_SIZE, Quantization, dequantize
from archerfish.store.loader import WeightLoader
from archerfish.store.quantiser import quantise_source, rounded_row
from archerfish.store.source import ModelSource
from archerfish.types import Progress

if TYPE_CHECKING:
    from archerfish.engine.streamed_model import StreamedModel

QUALITY_NAME = "quality.json"
IN_LAYER = re.compile(r"\.\d+\.")
QUANT_TYPES = {"int8": "INT8", "int4": "Q4_1", "fp8": "FP8"}


class ModelConverter(converter.ModelConverter):
    """Converts models, and quantises their matrices where `weights` asks for it; see ConversionConfig for the choices.

    A conversion that is stopped leaves its finished matrices beside the output directory, and goes on from there.
    """

    def convert_source(self, source: ModelSource, name: str, target: Path, progress: Progress) -> converter.ConversionResult:
        config = self.config
        if config.weights == "auto":
            if config.method != "rtn":
                raise InvalidOptionError(f"[convert] method is {config.method}, but nothing is quantised.", hint="Set weights.")
            return super().convert_source(source, name, target, progress)
        if config.group_size % GROUP_SIZE:
            raise InvalidOptionError(f"[convert] group_size is {config.group_size}, not a multiple of {GROUP_SIZE}.")
        wanted = choose_matrices(source, config.weights, config.group_size)
        with self._work_directory(source, target) as work:
            texts = self._find_texts(source, work, progress)
            quantise = rounded_row
            if config.method == "gptq" and texts is not None:
                from archerfish.engine.gptq import kept_row, quantise_by_text

                quantise_by_text(open_model(source, texts), texts.calibration, wanted, work, progress)
                quantise = partial(kept_row, work)
            quantised = quantise_source(source, wanted, quantise, keep_others=config.keep_quantized)
            result = super().convert_source(quantised, name, target, progress)
        if texts is None or not config.report:
            return result
        from archerfish.engine.quality import measure

        with WeightLoader(target) as loader:
            written = {name: partial(read_matrix, loader, name) for name in wanted}
            quality = {"text": texts.origin, **measure(open_model(source, texts), written, texts.held_out, progress)}
        replace_file(target / QUALITY_NAME, (json.dumps(quality, indent=1) + "\n").encode())
        return replace(result, quality=quality)

    @contextmanager
    def _work_directory(self, source: ModelSource, target: Path) -> Iterator[Path]:
        """Where finished matrices are kept until all are. Those of another conversion are deleted."""
        target = target.absolute()
        work = target.with_name(f".{target.name}.quantising")
        key = repr((fingerprint_parts(source.path), self.config.replace(overwrite=False, report=True), self._text_size()))
        with file_lock(work.with_name(f"{work.name}.lock"), target), write_errors(work):
            if not (work / "key").is_file() or (work / "key").read_text(encoding="utf-8") != key:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
                (work / "key").write_text(key, encoding="utf-8")
            yield work
            shutil.rmtree(work)

    def _text_size(self) -> int:
        path = Path(self.config.calibration)
        return path.stat().st_size if self.config.calibration and path.is_file() else 0

    def _find_texts(self, source: ModelSource, work: Path, progress: Progress) -> Texts | None:
        """The calibration text; None where there is nothing to calibrate, and nothing to measure or to measure with."""
        config, is_calibrated = self.config, self.config.method != "rtn"
        is_encoder = Config(source.config).model_type in ENCODERS
        can_measure = find_spec("torch") is not None and (bool(config.calibration) or not is_encoder)
        if not is_calibrated and not (config.report and can_measure):
            return None
        import_torch(f"The method {config.method}")
        if is_encoder and not config.calibration:
            hint = "Give a file of texts with --calibration, or leave --method out."
            raise InvalidOptionError(f"[convert] method {config.method}: an encoder cannot write its own text.", hint=hint)
        return find_texts(source, config.calibration, self.hub, work / "texts.npy", progress)


def open_model(source: ModelSource, texts: Texts) -> StreamedModel:
    from archerfish.engine.streamed_model import StreamedModel

    device = "cuda" if choose_device("auto").name == "cuda" else "cpu"
    return StreamedModel(source, device, max(map(len, texts.calibration + texts.held_out)))


def read_matrix(loader: WeightLoader, name: str) -> Floats:
    return dequantize(loader.get_quantized(name))


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
