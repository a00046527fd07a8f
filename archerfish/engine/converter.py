"""ModelConverter: the store's converter, which here also quantises: it knows which matrices of a model are linear
maps."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from archerfish.config import ConversionConfig
from archerfish.engine.calibration import Texts, find_texts
from archerfish.errors import InvalidOptionError, UnsupportedModelError
from archerfish.kernels.formats import INT8
from archerfish.kernels.select import choose_device, import_torch
from archerfish.kernels.stored import Floats
from archerfish.models.adapter import ENCODERS, encoder_class, find_model, is_encoder
from archerfish.models.config import Config
from archerfish.store import converter
from archerfish.store.adapters import MapShape, merged_source
from archerfish.store.checkpoint_writer import WEIGHTS_NAME, write_checkpoint
from archerfish.store.converter import fingerprint_parts
from archerfish.store.files import file_lock, new_directory, replace_file, write_errors
from archerfish.store.format import GROUP_SIZE, Quantization, dequantize
from archerfish.store.loader import WeightLoader
from archerfish.store.quantiser import quantise_source, rounded_row
from archerfish.store.source import ModelSource
from archerfish.store.sources import open_source
from archerfish.types import Progress

if TYPE_CHECKING:
    from archerfish.engine.streamed_model import StreamedModel

QUALITY_NAME = "quality.json"
IN_LAYER = re.compile(r"\.\d+\.")
EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(?:\d+\.)?(\w+)\.weight$")
QUANT_TYPES = {"int8": "INT8", "int4": "Q4_1", "fp8": "FP8"}


class ModelConverter(converter.ModelConverter):
    """Converts models, and quantises their matrices where `weights` asks for it; see ConversionConfig for the choices.

    A conversion that is stopped leaves its finished matrices beside the output directory, and goes on from there.
    """

    def convert_source(
        self, source: ModelSource, name: str, target: Path, progress: Progress
    ) -> converter.ConversionResult:
        config = self.config
        check_choices(config, source)
        if config.merge:
            values = Config(source.config)
            maps = {name: MapShape(*shape) for name, shape in find_model(values).noted(values).adapted.items()}
            source = merged_source(source, Path(config.merge).expanduser(), maps, values.model_type)
        if config.weights == "auto":
            return super().convert_source(source, name, target, progress)
        wanted = choose_matrices(source, config.weights, config.group_size, config.layout)
        with self._work_directory(source, target) as work:
            texts = self._find_texts(source, work, progress)
            quantise = rounded_row
            if config.method == "gptq" and texts is not None:
                from archerfish.engine.gptq import kept_row, quantise_by_text

                quantise_by_text(open_model(source, texts), texts.calibration, wanted, work, progress)
                quantise = partial(kept_row, work)
            elif config.method == "awq" and texts is not None:
                from archerfish.engine.awq import scale_source, weighed_row

                model = open_model(source, texts)
                source, importances = scale_source(source, model, texts.calibration, wanted, work, progress)
                quantise = partial(weighed_row, importances)
            quantised = quantise_source(source, wanted, quantise, keep_others=config.keep_quantized)
            if config.layout == "store":
                result = super().convert_source(quantised, name, target, progress)
            else:
                result = self._write_checkpoint(quantised, name, target, progress)
        if texts is None or not config.report:
            return result
        from archerfish.engine.quality import measure

        with ExitStack() as stack:
            written: dict[str, Callable[[], Floats]]
            if config.layout == "store":
                loader = stack.enter_context(WeightLoader(target))
                written = {name: partial(read_matrix, loader, name) for name in wanted}
            else:
                found = {tensor.info.name: tensor for tensor in open_source(target).tensors}
                written = {name: found[name].load for name in wanted}
            quality = {"text": texts.origin, **measure(open_model(source, texts), written, texts.held_out, progress)}
        replace_file(target / QUALITY_NAME, (json.dumps(quality, indent=1) + "\n").encode())
        return replace(result, quality=quality)

    def _write_checkpoint(
        self, source: ModelSource, name: str, target: Path, progress: Progress
    ) -> converter.ConversionResult:
        started = time.perf_counter()
        with new_directory(target) as temporary:
            write_checkpoint(temporary, source, self.config.layout, self.config.stored_dtype(), progress)
        path = target / WEIGHTS_NAME
        num_bytes = path.stat().st_size
        return converter.ConversionResult(
            success=True,
            model_name=name,
            output_dir=target,
            arrow_path=path,
            parquet_path=None,
            tokenizer_path=target,
            metadata_path=target / "config.json",
            total_parameters=sum(tensor.info.num_params for tensor in source.tensors),
            file_size_mb=num_bytes / 1e6,
            compression_ratio=source.num_bytes / num_bytes,
            conversion_time_sec=time.perf_counter() - started,
            validation_passed=True,
        )

    @contextmanager
    def _work_directory(self, source: ModelSource, target: Path) -> Iterator[Path]:
        """Where finished matrices are kept until all are. Those of another conversion are deleted."""
        target = target.absolute()
        work = target.with_name(f".{target.name}.quantising")
        key = repr(
            (fingerprint_parts(source.path), self.config.replace(overwrite=False, report=True), self._text_time())
        )
        with file_lock(work.with_name(f"{work.name}.lock"), target), write_errors(work):
            if not (work / "key").is_file() or (work / "key").read_text(encoding="utf-8") != key:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
                (work / "key").write_text(key, encoding="utf-8")
            is_done = False
            try:
                yield work
                is_done = True
            finally:
                if is_done or not any(work.glob("*.np[yz]")):
                    shutil.rmtree(work)

    def _text_time(self) -> int:
        path = Path(self.config.calibration)
        return path.stat().st_mtime_ns if self.config.calibration and path.is_file() else 0

    def _find_texts(self, source: ModelSource, work: Path, progress: Progress) -> Texts | None:
        """The calibration text; None where there is nothing to calibrate, and nothing to measure or to measure with."""
        config, is_calibrated = self.config, self.config.method != "rtn"
        embeds = is_encoder(Config(source.config))
        if Config(source.config).integer("num_experts_per_tok", 0):
            if is_calibrated:
                message = f"[convert] method {config.method}: a text reaches only some experts, and says nothing of the others."
                raise InvalidOptionError(message, hint="Leave --method out: each matrix is then rounded by itself.")
            return None
        can_measure = find_spec("torch") is not None and (bool(config.calibration) or not embeds)
        if not is_calibrated and not (config.report and can_measure):
            return None
        import_torch(f"The method {config.method}")
        if embeds and not config.calibration:
            hint = "Give a file of texts with --calibration, or leave --method out."
            raise InvalidOptionError(
                f"[convert] method {config.method}: an encoder cannot write its own text.", hint=hint
            )
        return find_texts(source, config.calibration, self.hub, work / "texts.npy", progress)


def check_choices(config: ConversionConfig, source: ModelSource) -> None:
    """Refuse options that exclude each other."""
    for name, usual in (("method", "rtn"), ("layout", "store")):
        if config.weights == "auto" and getattr(config, name) != usual:
            message = f"[convert] {name} is {getattr(config, name)}, but nothing is quantised."
            raise InvalidOptionError(message, hint="Say what to store with --weights.")
    if config.group_size % GROUP_SIZE:
        raise InvalidOptionError(f"[convert] group_size is {config.group_size}, not a multiple of {GROUP_SIZE}.")
    if config.method == "awq" and config.weights != "int4":
        raise InvalidOptionError(f"[convert] method awq is for int4, not {config.weights}.", hint="Take --method gptq.")
    if config.layout == "gptq" and config.weights != "int4":
        hint = "Take --layout compressed-tensors."
        raise InvalidOptionError(f"[convert] layout gptq holds int4, not {config.weights}.", hint=hint)
    kind = {"rwkv7": "RWKV-7", "gpt2": "GPT-2"}.get(source.config.get("model_type", ""))
    if config.layout != "store" and (config.keep_quantized or kind):
        what = "other quantised matrices" if config.keep_quantized else kind
        raise InvalidOptionError(f"[convert] layout {config.layout} cannot hold {what}.", hint="Write the store.")


def open_model(source: ModelSource, texts: Texts) -> StreamedModel:
    from archerfish.engine.streamed_model import StreamedModel

    device = "cuda" if choose_device("auto").name == "cuda" else "cpu"
    return StreamedModel(source, device, max(map(len, texts.calibration + texts.held_out)))


def read_matrix(loader: WeightLoader, name: str) -> Floats:
    return dequantize(loader.get_quantized(name))


def linear_maps(config: Config) -> set[str]:
    """Names of the matrices that may be quantised: a model that is built over no weights tells them.

    Lookup tables are left out, also those that are heads as well, matrices that the model keeps plain, and those whose
    inputs are no multiple of 32.
    """
    architecture = encoder_class(config) if config.model_type in ENCODERS else find_model(config)
    noted = architecture.noted(config, weight_format=INT8)
    sizes = {
        name: INT8.num_bytes(math.prod(shape[:-1]), shape[-1], "float32")
        for name, shape in noted.shapes.items()
        if len(shape) > 1
    }
    return {
        name for name, num_bytes in sizes.items() if noted.num_bytes[name] == num_bytes and name not in noted.tables
    }


def noted_name(name: str) -> str:
    """The name under which a model notes a matrix: that of the stack, where it is one of an expert."""
    return EXPERT.sub(
        lambda found: f"mlp.experts.{'down' if found[1] in ('down_proj', 'w2') else 'gate_up'}_proj", name
    )


def choose_matrices(
    source: ModelSource, weights: str, group_size: int, layout: str = "store"
) -> dict[str, Quantization]:
    """How each matrix of a source is to be stored: linear maps as `weights` says. All groups of a model have one size.

    Heads, which are in no layer, have at least 8 bits: their errors go straight into logits or scores. In other layouts
    than the store's they are left out, and int4 has no minima: that is what all readers take.
    """
    maps = linear_maps(Config(source.config))
    ends = {name.partition(".")[2] for name in maps}  # a checkpoint without a head has no prefix
    infos = [tensor.info for tensor in source.tensors]
    in_layers = [info for info in infos if IN_LAYER.search(f".{info.name}") and noted_name(info.name) in maps | ends]
    found = in_layers + [info for info in infos if info.name in maps and info not in in_layers]
    if not in_layers:
        hint = "Convert it without --weights."
        raise UnsupportedModelError(
            f"{source.path} has no linear map with a multiple of {GROUP_SIZE} inputs.", hint=hint
        )
    if layout != "store" and any(len(info.shape) > 2 for info in in_layers):
        hint = "Take a checkpoint with a tensor for each expert, or write the store."
        raise UnsupportedModelError(
            f"{source.path} has stacks of experts, which {layout} does not hold quantised.", hint=hint
        )
    size = math.gcd(group_size, *(info.shape[-1] for info in in_layers))
    wanted = {}
    for info in found:
        kind = "int8" if weights == "int4" and info not in in_layers else weights
        if layout == "store" or info in in_layers:
            quant_type = "Q4_0" if kind == "int4" and layout != "store" else QUANT_TYPES[kind]
            wanted[info.name] = Quantization(
                quant_type, len(info.shape) - 1, size if kind == "int4" else info.shape[-1]
            )
    return wanted
