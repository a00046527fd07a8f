"""ModelConverter: a model of any supported kind becomes a directory of the Arrow store."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from archerfish.config import ConversionConfig, HubConfig
from archerfish.errors import InvalidOptionError, ModelNotFoundError, UnsupportedModelError, ValidationError, did_you_mean
from archerfish.store.files import check_free_space, lock_or_write_error, new_directory, write_errors, write_file
from archerfish.store.format import (
    ARROW_NAME,
    FLOAT_DTYPES,
    ITEM_BYTES,
    METADATA_NAME,
    PARQUET_NAME,
    TOKENIZER_NAME,
    ArrowWriter,
    ParquetWriter,
    Row,
    TensorInfo,
    as_bytes,
    check_parquet_fits,
    check_parquet_order,
    needs_large,
    read_parquet_rows,
)  # fmt: skip
from archerfish.store.loader import WeightLoader, arrow_record, file_record
from archerfish.store.metadata import FileRecord, StoreMetadata, encode_metadata, is_converted
from archerfish.types import Progress, no_progress

if TYPE_CHECKING:
    import torch

    from archerfish.store.source import ModelSource, SourceTensor

__all__ = ["ConversionResult", "ModelConverter"]

MODEL_TYPES = ("auto", "sentence-transformers", "transformers", "cross-encoder", "gguf", "safetensors", "torch")
SPARE_BYTES = 16 * 2**20
HEADER_BYTES = 2048  # of one record batch, generously


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

        Raises an error when `model_type` is not "auto" and differs from the kind of the model. The directory appears only after
        every tensor has been compared with its source.
        """
        from archerfish.store.sources import open_source

        started = time.perf_counter()
        if model_type not in MODEL_TYPES:
            raise InvalidOptionError(f"Unknown model_type {model_type!r}.", hint=did_you_mean(model_type, MODEL_TYPES))
        path = Path(model_name_or_path)
        if not path.exists():
            from archerfish.store.names import resolve_model

            path = resolve_model(str(model_name_or_path), self.hub, progress)
        target = Path(output_dir)
        check_output(target, overwrite=self.config.overwrite)
        source = open_source(path)
        check_hint(source, model_type)
        infos = [self._stored_info(tensor) for tensor in source.tensors]
        stored_bytes = {tensor.info.name: self._stored_bytes(tensor) for tensor in source.tensors}
        if self.config.write_parquet:
            check_parquet_fits(stored_bytes)
        weights_bytes = sum(stored_bytes.values()) + HEADER_BYTES * len(stored_bytes)
        check_free_space(target, (2 if self.config.write_parquet else 1) * weights_bytes + SPARE_BYTES)
        name = model_name(model_name_or_path, path)
        with new_directory(target) as temporary, write_errors(target):
            metadata = self._write(source, infos, temporary, name, progress)
        return self._result(target, metadata, source, time.perf_counter() - started)

    def _stored_info(self, tensor: SourceTensor) -> TensorInfo:
        """How a source tensor will be stored. For a kept quantised tensor, the details are known when it is read."""
        if self.config.keep_quantized and tensor.load_quantized is not None:
            return tensor.info
        dtype = stored_dtype_of(tensor.info.dtype, tensor.info.shape, self.config.stored_dtype())
        return TensorInfo(tensor.info.name, dtype, tensor.info.shape)

    def _stored_bytes(self, tensor: SourceTensor) -> int:
        """About how many bytes a tensor will take. A kept quantised tensor has at most 8.5 bits per value."""
        info = self._stored_info(tensor)
        if self.config.keep_quantized and tensor.load_quantized is not None:
            return info.num_params * 17 // 16
        return info.num_params * ITEM_BYTES[info.dtype]

    def _write(
        self, source: ModelSource, infos: list[TensorInfo], directory: Path, name: str, progress: Progress
    ) -> StoreMetadata:
        source.write_tokenizer(directory / TOKENIZER_NAME)
        written, records = self._write_weights(source, infos, directory, progress)
        metadata = StoreMetadata(
            model_name=name,
            dtype=self.config.stored_dtype(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            source=source.describe(),
            config=source.config,
            tensors=tuple(written),
            embedding=source.embedding,
            generation_config=source.generation_config,
            files={**records, **tokenizer_records(directory)},
        )
        write_file(directory / METADATA_NAME, encode_metadata(metadata))
        if self.config.validate_output:
            validate_directory(directory, source, progress)
        return metadata

    def _write_weights(
        self, source: ModelSource, infos: list[TensorInfo], directory: Path, progress: Progress
    ) -> tuple[list[TensorInfo], dict[str, FileRecord]]:
        """Write both files in one pass over the source, with one tensor (of Parquet: one row group) in memory at a time."""
        arrow, parquet = directory / ARROW_NAME, directory / PARQUET_NAME
        written: list[TensorInfo] = []
        with ExitStack() as stack:
            writers: list[ArrowWriter | ParquetWriter] = [stack.enter_context(ArrowWriter(arrow, large=needs_large(infos)))]
            if self.config.write_parquet:
                writers.append(stack.enter_context(ParquetWriter(parquet, self.config.compression)))
            for index, row in enumerate(self._rows(source)):
                progress(index, len(infos), f"writing {row.info.name}")
                for writer in writers:
                    writer.write(row)
                written.append(row.info)
        progress(len(infos), len(infos), "writing")
        records = {ARROW_NAME: arrow_record(arrow)}
        if self.config.write_parquet:
            records[PARQUET_NAME] = file_record(parquet)
        return written, records

    def _rows(self, source: ModelSource) -> Iterator[Row]:
        for tensor in source.tensors:
            if self.config.keep_quantized and tensor.load_quantized is not None:
                parts = tensor.load_quantized()
                minima = None if parts.zero_points is None else parts.zero_points.view("uint8")
                info = parts.info._replace(name=tensor.info.name)
                yield Row(info, parts.data.reshape(-1), parts.scales.view("uint8"), minima)
            else:
                info = self._stored_info(tensor)
                yield Row(info, as_bytes(cast(info.name, tensor.load(), info.dtype)))

    def _result(self, target: Path, metadata: StoreMetadata, source: ModelSource, seconds: float) -> ConversionResult:
        main_name = PARQUET_NAME if self.config.write_parquet else ARROW_NAME
        num_bytes = metadata.files[main_name].num_bytes
        return ConversionResult(
            success=True,
            model_name=metadata.model_name,
            output_dir=target,
            arrow_path=target / ARROW_NAME,
            parquet_path=target / PARQUET_NAME if self.config.write_parquet else None,
            tokenizer_path=target / TOKENIZER_NAME if (target / TOKENIZER_NAME).is_dir() else None,
            metadata_path=target / METADATA_NAME,
            total_parameters=metadata.total_parameters,
            file_size_mb=num_bytes / 1e6,
            compression_ratio=source.num_bytes / num_bytes,
            conversion_time_sec=seconds,
            validation_passed=self.config.validate_output,
        )


def model_name(given: str | os.PathLike[str], path: Path) -> str:
    if path == Path(given):
        return path.resolve().stem if path.is_file() else path.resolve().name
    return str(given)


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
    architectures = source.config.get("architectures") or []
    is_classifier = any("ForSequenceClassification" in str(name) for name in architectures)
    holds = {
        "auto": True,
        "transformers": source.kind != "gguf",
        "sentence-transformers": source.embedding is not None,
        "cross-encoder": is_classifier,
        "gguf": source.kind == "gguf",
        "safetensors": source.kind == "safetensors",
        "torch": source.kind == "torch",
    }
    if not holds[model_type]:
        found = "a sentence-transformers model" if source.embedding is not None else f"a {source.kind} source"
        hint = "Leave model_type at 'auto'."
        raise UnsupportedModelError(f"{source.path} is {found}, not what model_type={model_type!r} says.", hint=hint)


def tokenizer_records(directory: Path) -> dict[str, FileRecord]:
    folder = directory / TOKENIZER_NAME
    paths = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    return {path.relative_to(directory).as_posix(): file_record(path) for path in paths}


def validate_directory(directory: Path, source: ModelSource, progress: Progress) -> None:
    """Compare weights.arrow with the source, and weights.parquet bit for bit with weights.arrow."""
    with WeightLoader(directory) as loader:
        names = loader.get_layer_names()
        if names != [tensor.info.name for tensor in source.tensors]:
            raise ValidationError("The tensors that were written are not those of the source.")
        for index, tensor in enumerate(source.tensors):
            progress(index, len(names), f"validating {tensor.info.name}")
            compare(tensor.info.name, tensor.load(), loader.get_layer(tensor.info.name))
            loader.release([tensor.info.name])
        parquet = directory / PARQUET_NAME
        if parquet.is_file():
            for row in check_parquet_order(parquet, loader.metadata.tensors, read_parquet_rows(parquet)):
                compare_row(loader, row)
        progress(len(names), len(names), "validating")


def compare_row(loader: WeightLoader, row: Row) -> None:
    for stored, written in zip(loader.get_buffers(row.info.name), row[1:], strict=True):
        if (stored is None) != (written is None) or (stored is not None and stored != memoryview(written).cast("B")):
            raise ValidationError(f"The tensor {row.info.name!r} differs between {PARQUET_NAME} and {ARROW_NAME}.")


CONVERSION_VERSION = 2  # raise this when the result of a conversion changes, so that cached models are converted again


def ensure_converted(
    source: Path, *, dtype: str, hub: HubConfig | None = None, progress: Progress = no_progress, keep_quantized: bool = False
) -> Path:
    """The converted directory of a source: the source itself if it is converted, else one in the cache, made once.

    `dtype` is float32, bfloat16 or float16, or auto for the default of ConversionConfig. The name of the cached directory
    depends on the names, sizes and times of the source's files, so that a changed source is converted again.
    """
    if is_converted(source):
        return source
    if source.name in (ARROW_NAME, PARQUET_NAME) and is_converted(source.parent):
        return source.parent
    if not source.exists():
        raise ModelNotFoundError(f"{source} does not exist.")
    hub = hub or HubConfig()
    config = ConversionConfig(dtype=dtype, write_parquet=False, keep_quantized=keep_quantized)
    target = hub.cache_path() / "converted" / cached_name(source, config)
    if (target / METADATA_NAME).is_file():
        return target
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with lock_or_write_error(target.with_name(f"{target.name}.lock"), target):
        if not (target / METADATA_NAME).is_file():
            ModelConverter(config, hub=hub).convert(source, target, progress=progress)
    return target


def cached_name(source: Path, config: ConversionConfig) -> str:
    kind = config.stored_dtype() + ("-quantized" if config.keep_quantized else "")
    parts = repr((CONVERSION_VERSION, str(source.absolute()), fingerprint_parts(source)))
    fingerprint = hashlib.sha256(parts.encode()).hexdigest()[:16]
    stem = source.stem if source.is_file() else source.resolve().name
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', stem).strip('.-') or 'model'}-{kind}-{fingerprint}"


def fingerprint_parts(source: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and modification times of the files that a conversion depends on."""
    root, paths = source.parent, [source]
    if source.suffix != ".gguf" or source.is_dir():
        root = source if source.is_dir() else source.parent
        paths = [path for path in (*root.glob("*"), *root.glob("[!.]*/*")) if path.is_file()]
    stats = [(path.relative_to(root).as_posix(), path.stat()) for path in paths]
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


CHUNK_PARAMS = 1 << 24


def stored_dtype_of(source_dtype: str, shape: tuple[int, ...], target_dtype: str) -> str:
    """The type in which a source tensor is stored: matrices in the chosen type, integers as they are.

    Vectors (norms, biases) stay float32: they take next to no room, and rounding them costs a third of the accuracy.
    """
    if source_dtype not in FLOAT_DTYPES:
        return source_dtype
    return target_dtype if len(shape) > 1 else "float32"


# The next functions compare stored tensors with their sources. Rounding to a type with p bits of significand is off by at most
# 2^-p of the value, or near zero by half of the smallest subnormal number. A type that holds every value of the source's type
# must hold it exactly.
def cast(name: str, source: torch.Tensor, dtype: str) -> torch.Tensor:
    """The tensor in its stored type. NaN in the source and overflow are errors that name the tensor."""
    import torch

    result = source.to(getattr(torch, dtype)).contiguous()
    if not result.is_floating_point() or is_finite(result):
        return result
    before, after = source.reshape(-1), result.view(-1)
    is_nan = torch.isnan(before)
    if bool(is_nan.any()):
        position = int(is_nan.nonzero()[0])
        raise ValidationError(f"The tensor {name!r} of the source holds NaN (first at position {position}).")
    is_overflown = torch.isinf(after) & torch.isfinite(before)
    if bool(is_overflown.any()):
        value = float(before[is_overflown][0])
        raise ValidationError(f"The tensor {name!r} holds {value:g}, which {dtype} cannot hold.")
    return result


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite, in one pass without temporaries."""
    import torch

    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def compare(name: str, source: torch.Tensor, stored: torch.Tensor) -> None:
    """Raise a ValidationError when a stored tensor differs from its source by more than the rounding of its type."""
    import torch

    if source.shape != stored.shape:
        raise ValidationError(f"The tensor {name!r} was written with shape {tuple(stored.shape)}, not {tuple(source.shape)}.")
    is_exact = torch.promote_types(source.dtype, stored.dtype) == stored.dtype or not source.is_floating_point()
    relative = absolute = 0.0
    if not is_exact:
        limits = torch.finfo(stored.dtype)
        relative, absolute = limits.eps / 2, limits.smallest_normal * limits.eps / 2
    is_double = source.dtype == torch.float64 or (not is_exact and stored.dtype == torch.float32)
    wide = torch.float64 if is_double else torch.float32
    for start in range(0, source.numel(), CHUNK_PARAMS):
        before = source.reshape(-1)[start : start + CHUNK_PARAMS]
        after = stored.reshape(-1)[start : start + CHUNK_PARAMS]
        if is_exact and torch.equal(before, after.to(before.dtype)):
            continue
        check_chunk(name, before.to(wide), after.to(wide), start, relative, absolute)


def check_chunk(
    name: str, before: torch.Tensor, after: torch.Tensor, start: int, relative: float, absolute: float
) -> None:
    """Raise a ValidationError when two chunks, which begin at the position `start`, differ by more than the bounds."""
    is_close = (after - before).abs() <= before.abs().mul(relative).clamp(min=absolute)
    is_wrong = ~(is_close | (before == after))
    if bool(is_wrong.any()):
        position = int(is_wrong.nonzero()[0])
        raise ValidationError(
            f"The tensor {name!r} was written as {float(after[position]):g} at position {start + position}, "
            f"where the source has {float(before[position]):g}."
        )
