"""ModelConverter: a model of any supported kind becomes a directory of the Arrow store."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from archerfish.config import ConversionConfig, HubConfig
from archerfish.errors import InvalidOptionError, UnsupportedModelError, ValidationError, did_you_mean
from archerfish.store.files import HashingFile, check_free_space, new_directory, sha256_of, write_errors, write_file
from archerfish.store.format import (
    ARROW_NAME,
    ITEM_BYTES,
    METADATA_NAME,
    PARQUET_NAME,
    TOKENIZER_NAME,
    ArrowWriter,
    ParquetWriter,
    Row,
    TensorInfo,
    check_parquet_fits,
    check_parquet_order,
    read_parquet_rows,
)
from archerfish.store.mapping import finish_arrow, needs_large
from archerfish.store.metadata import FileRecord, StoreMetadata, encode_metadata
from archerfish.store.source import ModelSource, SourceTensor
from archerfish.store.sources import open_source
from archerfish.store.validate import cast, compare, stored_dtype_of
from archerfish.types import Progress, no_progress

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

        `model_type` is a hint that is checked against what is found. The directory appears whole, after every tensor has been
        compared with its source, or not at all.
        """
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
        """How a source tensor will be stored; the parts of a kept quantised one are known when it is read."""
        if self.config.keep_quantized and tensor.load_quantized is not None:
            return tensor.info
        dtype = stored_dtype_of(tensor.info.dtype, tensor.info.shape, self.config.stored_dtype())
        return TensorInfo(tensor.info.name, dtype, tensor.info.shape)

    def _stored_bytes(self, tensor: SourceTensor) -> int:
        """About how many bytes a tensor will take; a kept quantised one has at most 8.5 bits per value."""
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
        """Write both files in one pass over the source, one tensor in memory at a time (Parquet: one row group)."""
        files: list[HashingFile] = []
        writers: list[ArrowWriter | ParquetWriter] = []
        written: list[TensorInfo] = []
        try:
            files.append(HashingFile(directory / ARROW_NAME))
            writers.append(ArrowWriter(files[0], large=needs_large(infos)))
            if self.config.write_parquet:
                files.append(HashingFile(directory / PARQUET_NAME))
                writers.append(ParquetWriter(files[1], self.config.compression))
            for index, row in enumerate(self._rows(source)):
                progress(index, len(infos), f"writing {row.info.name}")
                for writer in writers:
                    writer.write(row)
                written.append(row.info)
            for writer in writers:
                writer.close()
            for file in files:
                file.sync()
        finally:
            for writer in writers:
                if isinstance(writer, ParquetWriter):
                    writer.abandon()
            for file in files:
                file.close()
        progress(len(infos), len(infos), "writing")
        records = {ARROW_NAME: finish_arrow(files[0])}
        if self.config.write_parquet:
            records[PARQUET_NAME] = FileRecord(files[1].num_bytes, files[1].sha256)
        return written, records

    def _rows(self, source: ModelSource) -> Iterator[Row]:
        from archerfish.store.torch_source import as_bytes

        for tensor in source.tensors:
            if self.config.keep_quantized and tensor.load_quantized is not None:
                parts = tensor.load_quantized()
                minima = None if parts.zero_points is None else parts.zero_points.view("uint8")
                yield Row(parts.info, parts.data.reshape(-1), parts.scales.view("uint8"), minima)
            else:
                info = self._stored_info(tensor)
                yield Row(info, as_bytes(cast(info.name, tensor.load(), info.dtype)))

    def _result(
        self, target: Path, metadata: StoreMetadata, source: ModelSource, seconds: float
    ) -> ConversionResult:
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
    """Refuse an output that would destroy something: a model unless `overwrite`, anything else always."""
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
    """Compare what the caller said about the model with what was found."""
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
    return {
        path.relative_to(directory).as_posix(): FileRecord(path.stat().st_size, sha256_of(path, no_progress, ""))
        for path in paths
    }


def validate_directory(directory: Path, source: ModelSource, progress: Progress) -> None:
    """Read everything back: weights.arrow against the source, weights.parquet bit for bit against weights.arrow."""
    from archerfish.store.loader import WeightLoader

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


def compare_row(loader: Any, row: Row) -> None:
    for stored, written in zip(loader.get_buffers(row.info.name), (row.data, row.scales, row.zero_points), strict=True):
        if (stored is None) != (written is None) or (stored is not None and stored != memoryview(written).cast("B")):
            raise ValidationError(f"The tensor {row.info.name!r} differs between {PARQUET_NAME} and {ARROW_NAME}.")
