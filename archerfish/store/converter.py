"""ModelConverter: a model of any supported kind becomes a directory of the Arrow store."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.config import ConversionConfig, HubConfig
from archerfish.errors import (
    InvalidOptionError,
    ModelNotFoundError,
    UnsupportedModelError,
    ValidationError,
    refuse_unknown,
)
from archerfish.store.files import check_free_space, file_lock, new_directory, shown_name, write_file
from archerfish.store.format import (
    Row,
    TensorInfo,
    arrow_writer,
    buffer_bytes,
    parquet_writer,
    read_parquet_rows,
    scales_of,
)
from archerfish.store.loader import WeightLoader, arrow_record, file_record
from archerfish.store.metadata import (
    ARROW_NAME,
    METADATA_NAME,
    PARQUET_NAME,
    TOKENIZER_NAME,
    StoreMetadata,
    is_converted,
)
from archerfish.types import Progress, no_progress

if TYPE_CHECKING:
    import numpy.typing as npt

    from archerfish.store.source import ModelSource, SourceTensor

MODEL_TYPES = ("auto", "sentence-transformers", "transformers", "cross-encoder", "gguf", "safetensors", "torch")
FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
LARGE_TENSOR_BYTES = 2**31  # a cell of an Arrow `binary` column, whose offsets are int32, must be smaller
SPARE_BYTES = 16 * 2**20
HEADER_BYTES = 2048  # of one record batch, generously
CONVERSION_VERSION = 4  # raise this when the result of a conversion changes, so that cached models are converted again


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion wrote. A conversion that fails raises instead."""

    success: bool
    model_name: str
    output_dir: Path
    arrow_path: Path
    parquet_path: Path | None
    tokenizer_path: Path | None
    metadata_path: Path
    total_parameters: int
    file_size_mb: float  # of weights.parquet, or of weights.arrow where no Parquet was written
    compression_ratio: float  # bytes of the source's weight files per byte of that file
    conversion_time_sec: float
    validation_passed: bool  # false only when validation was switched off
    error_message: str | None = None
    quality: dict[str, Any] | None = None  # what quantising cost, where it was measured


class ModelConverter:
    """Converts models; see ConversionConfig for the choices."""

    def __init__(self, config: ConversionConfig | None = None, *, hub: HubConfig | None = None) -> None:
        self.config = config or ConversionConfig()
        self.hub = hub or HubConfig()

    def convert(
        self,
        model_name_or_path: str | os.PathLike[str],
        output_dir: str | os.PathLike[str],
        model_type: str = "auto",
        progress: Progress = no_progress,
    ) -> ConversionResult:
        """Write `output_dir` from a directory, a file, a built-in name or a Hugging Face id.

        Raises an error when `model_type` is not "auto" and differs from the kind of the model. The directory appears
        only after every tensor has been compared with its source.
        """
        from archerfish.store.sources import open_source

        started = time.perf_counter()
        refuse_unknown([model_type], MODEL_TYPES, "model_type")
        path = Path(model_name_or_path)
        target = Path(output_dir)
        name = str(model_name_or_path)
        if path.exists():
            name = shown_name(path)
        else:
            from archerfish.store.names import resolve_model

            path = resolve_model(name, self.hub, progress)
        check_output(target, overwrite=self.config.overwrite)
        source = open_source(path)
        check_hint(source, model_type)
        result = self.convert_source(source, name, target, progress)
        return replace(result, conversion_time_sec=time.perf_counter() - started)

    def convert_source(self, source: ModelSource, name: str, target: Path, progress: Progress) -> ConversionResult:
        """Write a source that is open. Quantising is for `engine/converter.py`, which knows the linear maps of
        models."""
        started, config = time.perf_counter(), self.config
        infos = [self.stored_info(tensor) for tensor in source.tensors]
        if config.weights != "auto" and not any(info.quantization for info in infos):
            raise InvalidOptionError("This converter does not quantise.", hint="Use archerfish.ModelConverter.")
        largest = max(infos, key=lambda info: sum(buffer_bytes(info)))
        is_large = sum(buffer_bytes(largest)) >= LARGE_TENSOR_BYTES
        if is_large and config.write_parquet:
            hint = "Convert with write_parquet=False: weights.arrow has no such limit."
            raise UnsupportedModelError(
                f"Parquet cannot hold the tensor {largest.name!r}: it has 2 GiB or more.", hint=hint
            )
        weights_bytes = sum(sum(buffer_bytes(info)) + HEADER_BYTES for info in infos)
        check_free_space(target, (2 if config.write_parquet else 1) * weights_bytes + SPARE_BYTES)
        with new_directory(target) as temporary:
            metadata = self._write(source, infos, temporary, name, progress, is_large=is_large)
        num_bytes = metadata.files[PARQUET_NAME if config.write_parquet else ARROW_NAME].num_bytes
        return ConversionResult(
            success=True,
            model_name=name,
            output_dir=target,
            arrow_path=target / ARROW_NAME,
            parquet_path=target / PARQUET_NAME if config.write_parquet else None,
            tokenizer_path=target / TOKENIZER_NAME if (target / TOKENIZER_NAME).is_dir() else None,
            metadata_path=target / METADATA_NAME,
            total_parameters=metadata.total_parameters,
            file_size_mb=num_bytes / 1e6,
            compression_ratio=source.num_bytes / num_bytes,
            conversion_time_sec=time.perf_counter() - started,
            validation_passed=config.validate_output,
        )

    def stored_info(self, tensor: SourceTensor) -> TensorInfo:
        """How a source tensor will be stored: matrices in the chosen type, integers as they are.

        Vectors (norms, biases) stay float32: they take next to no room, and rounding them costs a third of the
        accuracy.
        """
        info, is_matrix = tensor.info, len(tensor.info.shape) > 1
        is_kept = self.config.keep_quantized or self.config.weights != "auto"
        if info.dtype not in FLOAT_DTYPES or (is_kept and info.quantization is not None and is_matrix):
            return info
        return TensorInfo(info.name, self.config.stored_dtype() if is_matrix else "float32", info.shape)

    def _write(
        self,
        source: ModelSource,
        infos: list[TensorInfo],
        directory: Path,
        name: str,
        progress: Progress,
        *,
        is_large: bool,
    ) -> StoreMetadata:
        """Fill a new directory. One tensor (of Parquet: one row group) is in memory at a time."""
        source.write_tokenizer(directory / TOKENIZER_NAME)
        with ExitStack() as stack:
            writers = [stack.enter_context(arrow_writer(directory / ARROW_NAME, large=is_large))]
            if self.config.write_parquet:
                writers.append(stack.enter_context(parquet_writer(directory / PARQUET_NAME, self.config.compression)))
            for index, (tensor, info) in enumerate(zip(source.tensors, infos, strict=True)):
                progress(index, len(infos), f"writing {info.name}")
                row = make_row(tensor, info)
                for write in writers:
                    write(row)
        progress(len(infos), len(infos), "writing")
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        records = {
            path.relative_to(directory).as_posix(): file_record(path) for path in paths if path.name != ARROW_NAME
        }
        metadata = StoreMetadata(
            model_name=name,
            dtype=self.config.stored_dtype(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            source=source.describe(),
            config=source.config,
            tensors=tuple(infos),
            embedding=source.embedding,
            generation_config=source.generation_config,
            files={**records, ARROW_NAME: arrow_record(directory / ARROW_NAME)},
        )
        write_file(directory / METADATA_NAME, metadata.encode())
        if self.config.validate_output:
            validate_directory(directory, source, progress)
        return metadata


def check_output(target: Path, *, overwrite: bool) -> None:
    """Raise an error when the conversion would destroy other files, or a model without `overwrite`."""
    if target.exists() and not target.is_dir():
        raise InvalidOptionError(f"The output {target} is a file.", hint="Choose a directory.")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not (target / METADATA_NAME).is_file():
        raise InvalidOptionError(f"The output {target} holds other files.", hint="Choose an empty or a new directory.")
    if not overwrite:
        hint = "Choose another, or replace it with --overwrite (overwrite=True)."
        raise InvalidOptionError(f"The output {target} already holds a model.", hint=hint)


def check_hint(source: ModelSource, model_type: str) -> None:
    """Raise an error when the source is not of the kind that the caller expects."""
    kinds = {"auto", source.kind} if source.kind == "gguf" else {"auto", source.kind, "transformers"}
    if source.embedding is not None:
        kinds.add("sentence-transformers")
    if any("ForSequenceClassification" in str(name) for name in source.config.get("architectures") or []):
        kinds.add("cross-encoder")
    if model_type not in kinds:
        found = "a sentence-transformers model" if source.embedding is not None else f"a {source.kind} source"
        hint = "Leave model_type at 'auto'."
        raise UnsupportedModelError(f"{source.path} is {found}, not what model_type={model_type!r} says.", hint=hint)


def validate_directory(directory: Path, source: ModelSource, progress: Progress) -> None:
    """Compare weights.arrow with the source, and weights.parquet bit for bit with weights.arrow."""
    with WeightLoader(directory) as loader:
        for index, (tensor, info) in enumerate(zip(source.tensors, loader.metadata.tensors, strict=True)):
            progress(index, len(source.tensors), f"validating {info.name}")
            compare(make_row(tensor, info), loader, "was written with other values than its source has")
            loader.release([info.name])
        parquet = directory / PARQUET_NAME
        for row in read_parquet_rows(parquet, loader.metadata.tensors) if parquet.is_file() else ():
            compare(row, loader, f"differs between {PARQUET_NAME} and {ARROW_NAME}")
        progress(len(source.tensors), len(source.tensors), "validating")


def compare(row: Row, stored: WeightLoader, message: str) -> None:
    """Raise a ValidationError when a row is not, bit for bit, the one that weights.arrow has."""
    import pyarrow as pa

    found = [pa.py_buffer(buffer) for buffer in row[1:] if buffer is not None]
    if found != [
        buffer for buffer in stored.get_buffers(row.info.name) if buffer is not None
    ]:  # pyarrow compares any buffers
        raise ValidationError(f"The tensor {row.info.name!r} {message}.")


def make_row(tensor: SourceTensor, info: TensorInfo) -> Row:
    """A source's tensor as it is stored."""
    import numpy as np

    if info.quantization is None or tensor.load_quantized is None:
        return Row(info, np.ascontiguousarray(cast(info.name, tensor.load(), info.dtype)))
    row = tensor.load_quantized()._replace(info=info)
    if any(not is_finite(scales) and np.isnan(scales).any() for scales in scales_of(row)):
        raise ValidationError(f"The tensor {info.name!r} of the source holds NaN.")
    return row


def cast(name: str, source: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """The tensor in its stored type. NaN in the source and overflow are errors that name the tensor."""
    import numpy as np

    from archerfish.kernels.stored import to_type, widened

    if dtype not in FLOAT_DTYPES:
        return source
    result = to_type(source, dtype)
    if is_finite(source) and (result is source or is_finite(result)):
        return result
    source = widened(source)
    if np.isnan(source).any():
        raise ValidationError(f"The tensor {name!r} of the source holds NaN.")
    is_overflown = np.isinf(widened(result)) & np.isfinite(source)
    if is_overflown.any():
        raise ValidationError(
            f"The tensor {name!r} holds {float(source[is_overflown][0]):g}, which {dtype} cannot hold."
        )
    return result


def is_finite(values: npt.NDArray[Any]) -> bool:
    """Whether all floats are finite, from their bits: numpy compares float16 slowly."""
    import numpy as np

    num_bytes = values.dtype.itemsize
    infinity = 0x7F80 if values.dtype == np.uint16 else int(np.array(np.inf, values.dtype).view(f"u{num_bytes}"))
    highest = [
        int(values.view(f"{kind}{num_bytes}").max(initial=0)) for kind in "iu"
    ]  # of positive, of negative numbers
    return highest[0] < infinity and highest[1] < infinity + (1 << (8 * num_bytes - 1))


def ensure_converted(
    source: Path,
    *,
    dtype: str,
    hub: HubConfig | None = None,
    progress: Progress = no_progress,
    check: Callable[[Mapping[str, Any], list[TensorInfo]], None] | None = None,
    keep_quantized: bool = False,
) -> Path:
    """The converted directory of a source: the source itself if it is converted, else one in the cache, made once.

    `dtype` is float32, bfloat16 or float16, or auto for the default of ConversionConfig. The name of the cached
    directory depends on the names, sizes and times of the source's files, so that a changed source is converted again.
    check: called with the model's configuration and its tensors as they will be stored, before a conversion; its error
    refuses the model.
    keep_quantized: as in ConversionConfig; such a copy of a GGUF file has a directory of its own.
    """
    if is_converted(source):
        return source
    if source.name in (ARROW_NAME, PARQUET_NAME) and is_converted(source.parent):
        return source.parent
    if not source.exists():
        raise ModelNotFoundError(f"{source} does not exist.")
    hub = hub or HubConfig()
    config = ConversionConfig(dtype=dtype, write_parquet=False, keep_quantized=keep_quantized)
    files = fingerprint_parts(source)
    parts = repr((CONVERSION_VERSION, str(source.absolute()), files))
    fingerprint = hashlib.sha256(parts.encode()).hexdigest()[:16]
    has_blocks = keep_quantized and is_quantised(source, [name for name, _, _ in files])
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", shown_name(source)).strip(".-") or "model"
    name = f"{stem}-{config.stored_dtype()}{'-blocks' if has_blocks else ''}-{fingerprint}"
    target = hub.cache_path() / "converted" / name
    if (target / METADATA_NAME).is_file():
        with suppress(OSError):
            os.utime(target / METADATA_NAME)  # the time of its last use, which `archerfish list` shows
        return target
    with file_lock(target.with_name(f"{target.name}.lock"), target):
        if not (target / METADATA_NAME).is_file():
            converter = ModelConverter(config, hub=hub)
            if check is not None:
                from archerfish.store.sources import open_source

                opened = open_source(source)
                check(opened.config, [converter.stored_info(tensor) for tensor in opened.tensors])
            converter.convert(source, target, progress=progress)
    return target


def is_quantised(source: Path, names: Iterable[str]) -> bool:
    """Whether a source may have quantised matrices."""
    from archerfish.store.source import optional_json

    settings = optional_json((source if source.is_dir() else source.parent) / "config.json") or {}
    is_stated = bool(settings.get("quantization_config") or settings.get("compression_config"))
    return is_stated or any(name.endswith(".gguf") for name in names)


def fingerprint_parts(source: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and modification times of the files that a conversion depends on."""
    root, paths = source.parent, [source]
    if source.suffix != ".gguf" or source.is_dir():
        root = source if source.is_dir() else source.parent
        paths = [path for path in (*root.glob("*"), *root.glob("[!.]*/*")) if path.is_file()]
    stats = [(path.relative_to(root).as_posix(), path.stat()) for path in paths]
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
