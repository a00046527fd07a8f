"""WeightLoader: the tensors of a converted directory, mapped and not copied."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from archerfish.config import HubConfig
from archerfish.errors import CorruptFileError, ModelNotFoundError, UnknownLayerError, did_you_mean
from archerfish.store.files import lock_or_write_error, recover, siblings
from archerfish.store.format import (
    ARROW_NAME,
    METADATA_NAME,
    PARQUET_NAME,
    TOKENIZER_NAME,
    RowSpans,
    Span,
    TensorInfo,
    read_arrow_rows,
)
from archerfish.store.mapping import check_whole_file, ensure_arrow, map_file
from archerfish.store.metadata import StoreMetadata, read_metadata
from archerfish.store.quants import QuantizedTensor, dequantize, from_buffers
from archerfish.types import Progress, no_progress

if TYPE_CHECKING:
    import torch


class TensorView(NamedTuple):
    """The bytes of a tensor inside the mapping; `data` is read-only and keeps the mapping alive."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: memoryview


class WeightLoader:
    """Opens a converted directory (or its weights.arrow or weights.parquet) and hands out its tensors.

    Tensors are views of the mapped weights.arrow: nothing is read before it is used, and processes that open the same model
    share its pages. They must not be written to. A tensor stays valid after `close`.
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
        """The directory with tokenizer.json and its companions; it may be missing."""
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

    def get_info(self, name: str) -> TensorInfo:
        """Name, type, shape and quantisation of a tensor."""
        return self._row(name)[0]

    def get_shape(self, name: str) -> tuple[int, ...]:
        return self._row(name)[0].shape

    def get_dtype(self, name: str) -> str:
        return self._row(name)[0].dtype

    def get_num_bytes(self, name: str) -> int:
        """Bytes that a tensor takes in the file, scales and zero points included."""
        return sum(span.num_bytes for span in self._spans(name))

    def get_array(self, name: str) -> TensorView:
        """The stored bytes of a tensor without torch; for a quantised one use get_quantized."""
        info, spans = self._row(name)
        if info.quantization is not None:
            import numpy as np

            values = np.ascontiguousarray(dequantize(self.get_quantized(name)))
            return TensorView(name, info.shape, info.dtype, memoryview(values.tobytes()))
        return TensorView(name, info.shape, info.dtype, self._view(spans.data))

    def get_buffers(self, name: str) -> tuple[memoryview, memoryview | None, memoryview | None]:
        """The stored bytes of a tensor as they are: data, scales and zero points."""
        spans = self._row(name)[1]
        scales, zero_points = (None if span is None else self._view(span) for span in (spans.scales, spans.zero_points))
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
        """Let go of the resident pages of some tensors (all of them by default), for instance once they are repacked.

        The tensors stay valid: pages come back from the file when they are touched again.
        """
        memory = self._open_memory()
        page_bytes = mmap.PAGESIZE
        for name in self._rows if names is None else names:
            for span in self._spans(name):
                begin = -(-span.offset // page_bytes) * page_bytes
                end = (span.offset + span.num_bytes) // page_bytes * page_bytes
                if begin < end and hasattr(mmap, "MADV_DONTNEED"):
                    memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def check_tokenizer(self) -> None:
        """Compare the tokenizer's files with their checksums, so that whoever parses them later finds them whole."""
        records = {name: record for name, record in self.metadata.files.items() if name.startswith(f"{TOKENIZER_NAME}/")}
        if not records:
            raise CorruptFileError(f"{self.directory} has no tokenizer.", hint="Convert it again from a source that has one.")
        for name, record in records.items():
            check_whole_file(self.directory / name, record, no_progress)

    def verify(self, progress: Progress = no_progress) -> None:
        """Read every file completely and compare it with its checksum; CorruptFileError names the one that differs."""
        check_whole_file(self.arrow_path, self.metadata.files[ARROW_NAME], progress)
        for name, record in self.metadata.files.items():
            if name != ARROW_NAME:
                check_whole_file(self.directory / name, record, progress)
        rows, spans = read_arrow_rows(self.arrow_path, self._open_memory())
        if [(row.info, span) for row, span in zip(rows, spans, strict=True)] != list(self._rows.values()):
            raise CorruptFileError(f"{self.arrow_path} does not hold the tensors that its {METADATA_NAME} lists.")

    def close(self) -> None:
        """Drop this loader's hold on the mapping, which ends when the last tensor made from it is gone."""
        self._memory = None  # never mmap.close(): torch refers to the mapping without an export that would forbid it

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

    def _spans(self, name: str) -> list[Span]:
        spans = self._row(name)[1]
        return [span for span in (spans.data, spans.scales, spans.zero_points) if span is not None]

    def _view(self, span: Span) -> memoryview:
        return memoryview(self._open_memory())[span.offset : span.offset + span.num_bytes].toreadonly()

    def _open_memory(self) -> mmap.mmap:
        if self._memory is None:
            raise ValueError("This WeightLoader is closed.")
        return self._memory


def open_mapped(directory: Path, hub: HubConfig, progress: Progress) -> tuple[Path, StoreMetadata, mmap.mmap]:
    """Metadata and mapping that belong together, even if a conversion replaces the directory between the two."""
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
