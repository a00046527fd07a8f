"""WeightLoader: the tensors of a converted directory as views of the mapped weights.arrow."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from archerfish.config import HubConfig
from archerfish.errors import CorruptFileError, ModelNotFoundError, OutOfMemoryError, UnknownLayerError, did_you_mean
from archerfish.store.files import file_lock, recover, replace_file, sha256_of, siblings, sync_directory, write_errors
from archerfish.store.format import (
    PlacedTensor,
    Row,
    arrow_writer,
    dequantize,
    pieces_of,
    read_arrow_rows,
    read_parquet_rows,
    scale_type,
)
from archerfish.store.metadata import (
    ARROW_NAME,
    METADATA_NAME,
    PARQUET_NAME,
    TOKENIZER_NAME,
    FileRecord,
    StoreMetadata,
    read_metadata,
)
from archerfish.types import Closing, Progress, no_progress

if TYPE_CHECKING:
    import torch

    from archerfish.kernels.stored import StoredTensor

SAMPLE_BYTES = 16 * 2**20  # of the tensors, checked when they are loaded: 10 to 20 ms


class WeightLoader(Closing):
    """Opens a converted directory (or its weights.arrow or weights.parquet) and gives its tensors.

    Tensors are views of the mapped weights.arrow: nothing is read before it is used, and processes that open the same
    model share its pages. A write to a tensor stays in this process. A tensor stays valid after `close`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, hub: HubConfig | None = None, progress: Progress = no_progress
    ) -> None:
        self.directory = find_directory(Path(path))
        self.metadata = read_metadata(self.directory)
        while True:
            try:
                where, described = ensure_arrow(self.directory, self.metadata, hub or HubConfig(), progress)
                record = described.files[ARROW_NAME]
                self._memory: mmap.mmap | None = map_file(where / ARROW_NAME, record)
                break
            except CorruptFileError:  # raised as well when a conversion replaces the directory meanwhile
                before, self.metadata = self.metadata, read_metadata(self.directory)
                if self.metadata == before:
                    raise
        self.metadata, self.arrow_path, self._record = described, where / ARROW_NAME, record
        self.config = described.config
        self.tokenizer_path = self.directory / TOKENIZER_NAME  # does not exist for a model without a tokenizer
        self._rows = {info.name: (info, spans) for info, spans in zip(described.tensors, record.spans, strict=True)}

    def get_layer_names(self) -> list[str]:
        """Names of all tensors, in file order."""
        return list(self._rows)

    def get_metadata(self) -> dict[str, Any]:
        """The contents of metadata.json."""
        return self.metadata.as_dict()

    def get_buffers(self, name: str) -> list[Any]:
        """The stored bytes of a tensor: memoryviews of data, scales and zero points, or None."""
        view, (_, spans) = memoryview(self._open_memory()).toreadonly(), self._row(name)
        return [*(view[offset : offset + num_bytes] for offset, num_bytes in spans), *[None] * (3 - len(spans))]

    def get_quantized(self, name: str) -> Row:
        """Integers, scales and zero points of a tensor that is stored quantised, as arrays over the mapping."""
        import numpy as np

        info, spans = self._row(name)
        if info.quantization is None:
            raise UnknownLayerError(f"The tensor {name!r} of {self.directory} is not quantised.")
        data, *scales = (np.frombuffer(self._open_memory(), np.uint8, span.num_bytes, span.offset) for span in spans)
        num_groups, kind = info.num_params // info.quantization.group_size, scale_type(info.quantization.quant_type)
        return Row(info, data.reshape(num_groups, -1), *(each.view(kind) for each in scales))

    def get_layer(self, name: str) -> torch.Tensor:
        """One tensor as a view of the mapping; a quantised one is dequantised to float32."""
        import torch

        stored = self.get_stored(name)
        if stored.quant_type:
            return torch.from_numpy(dequantize(self.get_quantized(name)))
        tensor = torch.from_numpy(stored.data)
        return tensor.view(torch.bfloat16) if stored.dtype == "bfloat16" else tensor

    def get_stored(self, name: str) -> StoredTensor:
        """One tensor as it is stored, over the mapping."""
        import numpy as np

        from archerfish.kernels.stored import StoredTensor, numpy_type

        info, spans = self._row(name)
        if info.quantization is not None:
            row = self.get_quantized(name)
            return StoredTensor(
                info.shape, info.dtype, row.data, info.quantization.quant_type, row.scales, row.zero_points
            )
        if not info.num_params:
            return StoredTensor(info.shape, info.dtype, np.empty(info.shape, numpy_type(info.dtype)))
        data = np.frombuffer(self._open_memory(), numpy_type(info.dtype), info.num_params, spans[0].offset)
        return StoredTensor(info.shape, info.dtype, data.reshape(info.shape))

    def load_stored(self) -> dict[str, StoredTensor]:
        """All tensors by name, as `get_stored` gives them. A sample of their bytes is compared with its checksums."""
        self.check_tensors(SAMPLE_BYTES)
        return {name: self.get_stored(name) for name in self._rows}

    def load_weights(self, *, keeps_quantised: bool = False) -> dict[str, Any]:
        """All tensors by name, as `get_layer` gives them; keeps_quantised: quantised ones as `get_stored` does. A sample
        of their bytes is compared with its checksums."""
        self.check_tensors(SAMPLE_BYTES)
        return {
            name: self.get_stored(name) if keeps_quantised and info.quantization is not None else self.get_layer(name)
            for name, (info, _) in self._rows.items()
        }

    def release(self, names: Iterable[str] | None = None) -> None:
        """Free the resident pages of some tensors (of all by default), for instance after they were packed for a
        backend.

        The tensors stay valid: the system reads pages from the file again when they are used.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        if names is None:
            self._open_memory().madvise(mmap.MADV_DONTNEED)
        for name in names or ():
            for offset, num_bytes in self._row(name)[1]:
                begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
                if begin < end:
                    self._open_memory().madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def check_tokenizer(self) -> None:
        """Compare the tokenizer's files with their checksums."""
        records = {
            name: record for name, record in self.metadata.files.items() if name.startswith(f"{TOKENIZER_NAME}/")
        }
        if not records:
            raise CorruptFileError(
                f"{self.directory} has no tokenizer.", hint="Convert it again from a source that has one."
            )
        for name, record in records.items():
            check_whole_file(self.directory / name, record, no_progress)

    def verify(self, progress: Progress = no_progress) -> None:
        """Compare every file with its checksum. The CorruptFileError names the file and the tensor that differ."""
        for name, record in self.metadata.files.items():
            try:
                check_whole_file(self.arrow_path if name == ARROW_NAME else self.directory / name, record, progress)
            except CorruptFileError:
                self.check_tensors(self._record.num_bytes)
                raise
        if read_arrow_rows(self.arrow_path, self._open_memory()) != list(self._rows.values()):
            raise CorruptFileError(f"{self.arrow_path} does not hold the tensors that its {METADATA_NAME} lists.")

    def check_tensors(self, most_bytes: int) -> None:
        """Compare random pieces of the tensors, `most_bytes` together, with their checksums."""
        pieces = [
            (name, piece, crc)
            for (name, (_, spans)), crcs in zip(self._rows.items(), self._record.crc32s, strict=False)
            for piece, crc in zip(pieces_of(spans), crcs, strict=True)
        ]
        Random().shuffle(pieces)  # not the user's generator
        for name, (offset, num_bytes), crc in pieces:
            most_bytes -= num_bytes
            if most_bytes < 0:
                return
            if crc32_at(self._open_memory(), offset, num_bytes) != crc:
                raise CorruptFileError(
                    f"{self.arrow_path} was altered: the checksum of the tensor {name!r} does not match.",
                    hint=f"Convert the model again. If {self.directory} is in the cache, delete it.",
                )

    def close(self) -> None:
        """Release the mapping. It ends when its last tensor is freed."""
        self._memory = None  # mmap.close() would unmap the memory of tensors: torch holds no export of the buffer

    def _row(self, name: str) -> PlacedTensor:
        try:
            return self._rows[name]
        except KeyError:
            hint = did_you_mean(name, self._rows)
            raise UnknownLayerError(f"{self.directory} has no tensor {name!r}.", hint=hint) from None

    def _open_memory(self) -> mmap.mmap:
        if self._memory is None:
            raise ValueError("This WeightLoader is closed.")
        return self._memory


def find_directory(path: Path) -> Path:
    """The converted directory that a path names: itself, or the one of a weights file."""
    if path.name in (ARROW_NAME, PARQUET_NAME) and not path.is_dir():
        if not path.is_file():
            raise ModelNotFoundError(f"{path} does not exist.")
        return path.parent
    if not path.exists() and siblings(path.absolute(), "old"):
        with file_lock(path.absolute().with_name(f".{path.name}.lock"), path):
            recover(path.absolute())
    if not path.is_dir():
        raise ModelNotFoundError(f"{path} {'is not a directory' if path.exists() else 'does not exist'}.")
    return path


def map_file(path: Path, record: FileRecord) -> mmap.mmap:
    """Map a weights.arrow, and check its size and every byte that belongs to no tensor. Tensors are not read."""
    memory = map_any(path)
    if len(memory) != record.num_bytes:
        raise CorruptFileError(
            f"{path} has {len(memory)} bytes instead of {record.num_bytes}: it was cut off or replaced."
        )
    if outside_crc32(memory, record.spans) != record.outside_crc32:
        raise CorruptFileError(f"{path} was altered: the checksum of its headers does not match.")
    return memory


def map_any(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writing to a tensor copies its page
    except ValueError:
        raise CorruptFileError(f"{path} is empty.") from None
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise OutOfMemoryError(f"{path} cannot be mapped: {error.strerror}.") from error
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}.", hint="Check its permissions.") from error


def outside_crc32(memory: mmap.mmap, spans: Iterable[Iterable[tuple[int, int]]]) -> int:
    """CRC-32 of the bytes of a mapped file that lie in no tensor's buffers."""
    inside = sorted(span for row in spans for span in row if span[1])
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
    crc32s = tuple(tuple(crc32_at(memory, *piece) for piece in pieces_of(row)) for row in spans)
    return file_record(path)._replace(outside_crc32=outside_crc32(memory, spans), spans=spans, crc32s=crc32s)


def crc32_at(memory: mmap.mmap, offset: int, num_bytes: int) -> int:
    with memoryview(memory) as view:
        return zlib.crc32(view[offset : offset + num_bytes])


def file_record(path: Path) -> FileRecord:
    return FileRecord(path.stat().st_size, sha256_of(path))


def has_arrow(directory: Path, metadata: StoreMetadata) -> bool:
    return ARROW_NAME in metadata.files and (directory / ARROW_NAME).is_file()


def ensure_arrow(
    directory: Path, metadata: StoreMetadata, hub: HubConfig, progress: Progress
) -> tuple[Path, StoreMetadata]:
    """The directory of a converted model's weights.arrow, and the metadata that describes it.

    If the model has only weights.parquet, weights.arrow is made once, in its directory, or in the cache when the
    directory is read-only. The metadata.json that describes it is written last.
    """
    if has_arrow(directory, metadata):
        return directory, metadata
    parquet, target = directory / PARQUET_NAME, directory
    if PARQUET_NAME not in metadata.files or not parquet.is_file():
        raise CorruptFileError(f"{directory} has neither {ARROW_NAME} nor {PARQUET_NAME}.")
    if not os.access(directory, os.W_OK):
        key = hashlib.sha256(metadata.files[PARQUET_NAME].sha256.encode() + metadata.encode()).hexdigest()[:32]
        target = hub.cache_path() / "mapped" / key
    with file_lock(target / f".{ARROW_NAME}.lock", target), write_errors(target):
        metadata = read_metadata(target if (target / METADATA_NAME).is_file() else directory)
        if has_arrow(target, metadata):
            return target, metadata
        metadata = read_metadata(directory)
        check_whole_file(parquet, metadata.files[PARQUET_NAME], progress)
        temporary = target / f".{ARROW_NAME}.tmp"
        temporary.unlink(missing_ok=True)  # of a process that was killed
        try:
            with arrow_writer(temporary) as write:
                for row in read_parquet_rows(parquet, metadata.tensors):
                    write(row)
            record = arrow_record(temporary)
            temporary.replace(target / ARROW_NAME)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(target)
        metadata = replace(metadata, files={**metadata.files, ARROW_NAME: record})
        replace_file(target / METADATA_NAME, metadata.encode())
        return target, metadata


def check_whole_file(path: Path, record: FileRecord, progress: Progress) -> None:
    """Compare the size and the SHA-256 of a whole file with its record."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != record.num_bytes:
            raise CorruptFileError(
                f"{path} has {num_bytes} bytes instead of {record.num_bytes}: it was cut off or replaced."
            )
        if sha256_of(path, progress, f"checking {path.name}") != record.sha256:
            raise CorruptFileError(f"{path} was altered: its SHA-256 does not match.")
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}.") from error
