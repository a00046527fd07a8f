"""WeightLoader: the tensors of a converted directory as views of the mapped weights.arrow."""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from archerfish.config import HubConfig
from archerfish.errors import CorruptFileError, ModelNotFoundError, UnknownLayerError, WriteError, did_you_mean
from archerfish.store.files import lock_or_write_error, recover, replace_file, sha256_of, siblings, sync_directory, write_errors
from archerfish.store.format import (
    ALIGNMENT_BYTES,
    ARROW_NAME,
    METADATA_NAME,
    PARQUET_NAME,
    TOKENIZER_NAME,
    ArrowWriter,
    Row,
    RowSpans,
    Span,
    TensorInfo,
    check_parquet_order,
    needs_large,
    read_arrow_rows,
    read_parquet_rows,
)  # fmt: skip
from archerfish.store.metadata import FileRecord, StoreMetadata, encode_metadata, read_metadata
from archerfish.store.quants import QuantizedTensor, dequantize, from_buffers
from archerfish.types import Progress, no_progress

if TYPE_CHECKING:
    import torch

class WeightLoader:
    """Opens a converted directory (or its weights.arrow or weights.parquet) and gives its tensors.

    Tensors are views of the mapped weights.arrow: nothing is read before it is used, and processes that open the same model
    share its pages. A write to a tensor stays in this process. A tensor stays valid after `close`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, hub: HubConfig | None = None, progress: Progress = no_progress
    ) -> None:
        self.directory = find_directory(Path(path))
        where, self.metadata, memory = open_mapped(self.directory, hub or HubConfig(), progress)
        self.arrow_path = where / ARROW_NAME
        record = self.metadata.files[ARROW_NAME]
        self._memory: mmap.mmap | None = memory
        self._rows: dict[str, tuple[TensorInfo, RowSpans]] = {
            info.name: (info, spans) for info, spans in zip(self.metadata.tensors, record.spans, strict=True)
        }

    @property
    def tokenizer_path(self) -> Path:
        """The directory of tokenizer.json. It does not exist for a model without a tokenizer."""
        return self.directory / TOKENIZER_NAME

    @property
    def config(self) -> dict[str, Any]:
        """The source's config.json."""
        return self.metadata.config

    def get_layer_names(self) -> list[str]:
        """Names of all tensors, in file order."""
        return list(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def get_metadata(self) -> dict[str, Any]:
        """The contents of metadata.json."""
        return self.metadata.as_dict()

    def get_shape(self, name: str) -> tuple[int, ...]:
        return self._row(name)[0].shape

    def get_dtype(self, name: str) -> str:
        return self._row(name)[0].dtype

    def get_buffers(self, name: str) -> tuple[memoryview, memoryview | None, memoryview | None]:
        """The stored bytes of a tensor: data, scales and zero points."""
        spans = self._row(name)[1]
        scales, zero_points = (None if span is None else self._view(span) for span in spans[1:])
        return self._view(spans.data), scales, zero_points

    def get_quantized(self, name: str) -> QuantizedTensor:
        """Integers, scales and zero points of a tensor that is stored quantised, as views of the mapping."""
        info = self._row(name)[0]
        if info.quantization is None:
            raise UnknownLayerError(f"The tensor {name!r} of {self.directory} is not quantised.")
        return from_buffers(str(self.arrow_path), info, *self.get_buffers(name))

    def get_layer(self, name: str) -> torch.Tensor:
        """One tensor as a view of the mapping; a quantised one is dequantised to float32."""
        import torch

        info, spans = self._row(name)
        if info.quantization is not None:
            return torch.from_numpy(dequantize(self.get_quantized(name)))
        dtype: torch.dtype = getattr(torch, info.dtype)
        num_params = info.num_params
        if num_params == 0:
            return torch.empty(info.shape, dtype=dtype)
        return torch.frombuffer(self._open_memory(), dtype=dtype, count=num_params, offset=spans.data.offset).view(info.shape)

    def load_weights(self) -> dict[str, torch.Tensor]:
        """All tensors by name, as `get_layer` gives them."""
        return {name: self.get_layer(name) for name in self._rows}

    def release(self, names: Iterable[str] | None = None) -> None:
        """Free the resident pages of some tensors (of all by default), for instance after they were packed for a backend.

        The tensors stay valid: the system reads pages from the file again when they are used.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for name in self._rows if names is None else names:
            for span in self._row(name)[1]:
                if span is not None:
                    self._release_pages(span)

    def check_tokenizer(self) -> None:
        """Compare the tokenizer's files with their checksums."""
        records = {name: record for name, record in self.metadata.files.items() if name.startswith(f"{TOKENIZER_NAME}/")}
        if not records:
            raise CorruptFileError(f"{self.directory} has no tokenizer.", hint="Convert it again from a source that has one.")
        for name, record in records.items():
            check_whole_file(self.directory / name, record, no_progress)

    def verify(self, progress: Progress = no_progress) -> None:
        """Compare every file with its checksum. The CorruptFileError names the file that differs."""
        check_whole_file(self.arrow_path, self.metadata.files[ARROW_NAME], progress)
        for name, record in self.metadata.files.items():
            if name != ARROW_NAME:
                check_whole_file(self.directory / name, record, progress)
        if read_arrow_rows(self.arrow_path, self._open_memory()) != list(self._rows.values()):
            raise CorruptFileError(f"{self.arrow_path} does not hold the tensors that its {METADATA_NAME} lists.")

    def close(self) -> None:
        """Release the mapping. It ends when its last tensor is freed."""
        self._memory = None  # mmap.close() would unmap the memory of tensors: torch holds no export of the buffer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _row(self, name: str) -> tuple[TensorInfo, RowSpans]:
        try:
            return self._rows[name]
        except KeyError:
            hint = did_you_mean(name, self._rows)
            raise UnknownLayerError(f"{self.directory} has no tensor {name!r}.", hint=hint) from None

    def _release_pages(self, span: Span) -> None:
        begin = -(-span.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (span.offset + span.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._open_memory().madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _view(self, span: Span) -> memoryview:
        return memoryview(self._open_memory())[span.offset : span.offset + span.num_bytes].toreadonly()

    def _open_memory(self) -> mmap.mmap:
        if self._memory is None:
            raise ValueError("This WeightLoader is closed.")
        return self._memory


def open_mapped(directory: Path, hub: HubConfig, progress: Progress) -> tuple[Path, StoreMetadata, mmap.mmap]:
    """The directory of weights.arrow, its metadata and its mapping.

    They belong together, even when a conversion replaces the directory meanwhile.
    """
    metadata = read_metadata(directory)
    while True:
        try:
            where, described = ensure_arrow(directory, metadata, hub, progress)
            return where, described, map_file(where / ARROW_NAME, described.files[ARROW_NAME])
        except CorruptFileError:
            before, metadata = metadata, read_metadata(directory)
            if metadata == before:
                raise


def find_directory(path: Path) -> Path:
    """The converted directory that a path names: itself, or the one of a weights file."""
    if path.name in (ARROW_NAME, PARQUET_NAME, METADATA_NAME) and not path.is_dir():
        if not path.is_file():
            raise ModelNotFoundError(f"{path} does not exist.")
        return path.parent
    if not path.exists() and siblings(path.absolute(), "old"):
        with lock_or_write_error(path.absolute().with_name(f".{path.name}.lock"), path):
            recover(path.absolute())
    if not path.is_dir():
        raise ModelNotFoundError(f"{path} {'is not a directory' if path.exists() else 'does not exist'}.")
    return path


def map_file(path: Path, record: FileRecord) -> mmap.mmap:
    """Map a weights.arrow, and check its size and every byte that belongs to no tensor. Tensors are not read."""
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
    inside = sorted(span for row in spans for span in row if span is not None and span.num_bytes)
    crc = position = 0
    with memoryview(memory) as view:
        for offset, num_bytes in inside:
            crc = zlib.crc32(view[position:offset], crc)
            position = offset + num_bytes
        return zlib.crc32(view[position:], crc)


def arrow_record(path: Path) -> FileRecord:
    """The record of a new weights.arrow, which is read back through Arrow."""
    memory = map_any(path)
    spans = tuple(spans for _, spans in read_arrow_rows(path, memory))
    for row in spans:
        if row.data.offset % ALIGNMENT_BYTES:
            raise AssertionError(f"{path}: a tensor lies at {row.data.offset}, which is not aligned")
    return file_record(path)._replace(outside_crc32=outside_crc32(memory, spans), spans=spans)


def file_record(path: Path) -> FileRecord:
    return FileRecord(path.stat().st_size, sha256_of(path, no_progress, ""))


def write_arrow(path: Path, infos: Iterable[TensorInfo], rows: Iterable[Row]) -> FileRecord:
    """Write a whole weights.arrow; `infos` describe the rows in advance."""
    with ArrowWriter(path, large=needs_large(infos)) as writer:
        for row in rows:
            writer.write(row)
    return arrow_record(path)


def has_arrow(directory: Path, metadata: StoreMetadata) -> bool:
    return ARROW_NAME in metadata.files and (directory / ARROW_NAME).is_file()


def ensure_arrow(
    directory: Path, metadata: StoreMetadata, hub: HubConfig, progress: Progress = no_progress
) -> tuple[Path, StoreMetadata]:
    """The directory of a converted model's weights.arrow, and the metadata that describes it.

    If the model has only weights.parquet, weights.arrow is made once, in its directory, or in the cache when the directory is
    read-only.
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
            metadata = replace(metadata, files={**metadata.files, ARROW_NAME: record})
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
