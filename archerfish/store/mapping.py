"""weights.arrow as a mapped file: checking it, making its record for metadata.json, and making the file from Parquet."""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import zlib
from collections.abc import Iterable
from pathlib import Path

from archerfish.config import HubConfig
from archerfish.errors import CorruptFileError, WriteError
from archerfish.store.files import HashingFile, lock_or_write_error, replace_file, sha256_of, sync_directory, write_errors
from archerfish.store.format import (
    ALIGNMENT_BYTES,
    ARROW_NAME,
    ITEM_BYTES,
    LARGE_TENSOR_BYTES,
    METADATA_NAME,
    PARQUET_NAME,
    ArrowWriter,
    Row,
    RowSpans,
    TensorInfo,
    check_parquet_order,
    read_arrow_rows,
    read_parquet_rows,
)
from archerfish.store.metadata import FileRecord, StoreMetadata, encode_metadata, read_metadata
from archerfish.types import Progress, no_progress


def map_file(path: Path, record: FileRecord) -> mmap.mmap:
    """Map a weights.arrow read-only; its size and every byte that belongs to no tensor are checked, tensors are not touched."""
    memory = map_any(path)
    if len(memory) != record.num_bytes:
        raise CorruptFileError(f"{path} has {len(memory)} bytes instead of {record.num_bytes}: it was cut off or replaced.")
    if outside_crc32(memory, record.spans) != record.outside_crc32:
        raise CorruptFileError(f"{path} was altered: the checksum of its headers does not match.")
    return memory


def map_any(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writing to a tensor copies its page
    except FileNotFoundError:
        raise CorruptFileError(f"{path} is missing.") from None
    except ValueError:
        raise CorruptFileError(f"{path} is empty.") from None
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}.", hint="Check its permissions.") from error


def outside_crc32(memory: mmap.mmap, spans: Iterable[RowSpans]) -> int:
    """CRC-32 of the bytes of a mapped file that lie in no tensor's buffers."""
    inside = [
        (span.offset, span.num_bytes)
        for row in spans
        for span in (row.data, row.scales, row.zero_points)
        if span is not None and span.num_bytes
    ]
    inside.sort()
    crc = position = 0
    with memoryview(memory) as view:
        for offset, num_bytes in inside:
            crc = zlib.crc32(view[position:offset], crc)
            position = offset + num_bytes
        return zlib.crc32(view[position:], crc)


def needs_large(infos: Iterable[TensorInfo]) -> bool:
    return any(info.num_params * ITEM_BYTES[info.dtype] >= LARGE_TENSOR_BYTES for info in infos)


def finish_arrow(file: HashingFile) -> FileRecord:
    """The record of a weights.arrow that has just been written, from reading it back through Arrow."""
    memory = map_any(file.path)
    _, spans = read_arrow_rows(file.path, memory)
    for row in spans:
        if row.data.offset % ALIGNMENT_BYTES:
            raise AssertionError(f"{file.path}: a tensor lies at {row.data.offset}, which is not aligned")
    return FileRecord(file.num_bytes, file.sha256, outside_crc32(memory, spans), tuple(spans))


def write_arrow(path: Path, infos: Iterable[TensorInfo], rows: Iterable[Row]) -> FileRecord:
    """Write a whole weights.arrow; `infos` describe the rows in advance."""
    file = HashingFile(path)
    try:
        writer = ArrowWriter(file, large=needs_large(infos))
        for row in rows:
            writer.write(row)
        writer.close()
        file.sync()
    finally:
        file.close()
    return finish_arrow(file)


def has_arrow(directory: Path, metadata: StoreMetadata) -> bool:
    return ARROW_NAME in metadata.files and (directory / ARROW_NAME).is_file()


def ensure_arrow(
    directory: Path, metadata: StoreMetadata, hub: HubConfig, progress: Progress = no_progress
) -> tuple[Path, StoreMetadata]:
    """Where the weights.arrow of a converted directory is, with the metadata that describes it.

    A directory that has only Parquet gains the file once, whoever asks; if the directory cannot be written to, the file is
    made in the cache.
    """
    if has_arrow(directory, metadata):
        return directory, metadata
    if PARQUET_NAME not in metadata.files or not (directory / PARQUET_NAME).is_file():
        raise CorruptFileError(f"{directory} has neither {ARROW_NAME} nor {PARQUET_NAME}.")
    if os.access(directory, os.W_OK):
        try:
            return build_arrow(directory, directory, progress)
        except WriteError as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
    key = hashlib.sha256(metadata.files[PARQUET_NAME].sha256.encode() + encode_metadata(metadata)).hexdigest()[:32]
    return build_arrow(directory, hub.cache_path() / "mapped" / key, progress)


def build_arrow(directory: Path, target: Path, progress: Progress) -> tuple[Path, StoreMetadata]:
    """Make target/weights.arrow from directory/weights.parquet, then the metadata.json that names it."""
    with write_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        with lock_or_write_error(target / f".{ARROW_NAME}.lock", target):
            described = target if (target / METADATA_NAME).is_file() else directory
            metadata = read_metadata(described)
            if has_arrow(target, metadata):
                return target, metadata
            metadata = read_metadata(directory)
            parquet = directory / PARQUET_NAME
            check_whole_file(parquet, metadata.files[PARQUET_NAME], progress)
            for stale in target.glob(f".{ARROW_NAME}.tmp-*"):
                stale.unlink()
            temporary = target / f".{ARROW_NAME}.tmp-{secrets.token_hex(4)}"
            try:
                rows = check_parquet_order(parquet, metadata.tensors, read_parquet_rows(parquet))
                record = write_arrow(temporary, metadata.tensors, rows)
                temporary.replace(target / ARROW_NAME)
            finally:
                temporary.unlink(missing_ok=True)
            sync_directory(target)
            metadata = metadata.with_file(ARROW_NAME, record)
            replace_file(target / METADATA_NAME, encode_metadata(metadata))
            return target, metadata


def check_whole_file(path: Path, record: FileRecord, progress: Progress) -> None:
    """Compare the size and the SHA-256 of a whole file with its record."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != record.num_bytes:
            raise CorruptFileError(f"{path} has {num_bytes} bytes instead of {record.num_bytes}: it was cut off or replaced.")
        if sha256_of(path, progress, f"checking {path.name}") != record.sha256:
            raise CorruptFileError(f"{path} was altered: its SHA-256 does not match.")
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}.") from error
