"""The two files of weights of a converted model, which have the same columns.

`weights.arrow` is an uncompressed Arrow IPC file with one record batch (one row) per tensor. The bytes of every tensor begin at
a multiple of 64, so that the file can be mapped. `weights.parquet` is compressed, for interchange. Arrow has no bfloat16:
the column `data` holds plain little-endian bytes, and `dtype` says of which type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from archerfish.errors import CorruptFileError, UnsupportedModelError
from archerfish.store.files import sync

if TYPE_CHECKING:
    import torch

ARROW_NAME = "weights.arrow"
PARQUET_NAME = "weights.parquet"
METADATA_NAME = "metadata.json"
TOKENIZER_NAME = "tokenizer"

ALIGNMENT_BYTES = 64
LARGE_TENSOR_BYTES = 2**31  # a cell of an Arrow `binary` column, whose offsets are int32, must be smaller
ROW_GROUP_BYTES = 64 * 2**20
MAX_DIMENSIONS = 16

ITEM_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
INFO_COLUMNS = ("layer_name", "dtype", "shape", "quant_type", "quant_axis", "group_size")
BUFFER_COLUMNS = ("data", "scales", "zero_points")


class Quantization(NamedTuple):
    """How a quantised tensor is stored: groups of `group_size` values along `axis` share a scale (and a minimum)."""

    quant_type: str
    axis: int
    group_size: int


class TensorInfo(NamedTuple):
    """Name, type, shape and quantisation of a tensor. The `dtype` of a quantised tensor is the type after dequantising."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    quantization: Quantization | None = None

    @property
    def num_params(self) -> int:
        return math.prod(self.shape)


class Row(NamedTuple):
    """One tensor that is written to a file; the three buffers hold plain bytes."""

    info: TensorInfo
    data: Any
    scales: Any = None
    zero_points: Any = None


class Span(NamedTuple):
    """Where a buffer lies in weights.arrow."""

    offset: int
    num_bytes: int


class RowSpans(NamedTuple):
    """Where the buffers of one row lie in weights.arrow."""

    data: Span
    scales: Span | None = None
    zero_points: Span | None = None


def make_schema(*, large: bool) -> Any:
    """The Arrow schema of both files; `large` when a tensor has 2 GiB or more."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("layer_name", pa.string(), nullable=False),
            pa.field("shape", pa.list_(pa.int32()), nullable=False),
            pa.field("dtype", pa.string(), nullable=False),
            pa.field("data", pa.large_binary() if large else pa.binary(), nullable=False),
            pa.field("num_params", pa.int64(), nullable=False),
            pa.field("quant_type", pa.string()),
            pa.field("scales", pa.binary()),
            pa.field("zero_points", pa.binary()),
            pa.field("quant_axis", pa.int32()),
            pa.field("group_size", pa.int32()),
        ]
    )


def binary_array(value: Any, kind: Any) -> Any:
    """A one-row binary array over the memory of `value`, without a copy."""
    import pyarrow as pa

    if value is None:
        return pa.array([None], kind)
    buffer = value if isinstance(value, pa.Buffer) else pa.py_buffer(value)
    width = 8 if kind == pa.large_binary() else 4
    offsets = b"".join(end.to_bytes(width, "little") for end in (0, buffer.size))
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(offsets), buffer])


def as_bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor in C order, sharing its memory when it is contiguous."""
    import torch

    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def row_batch(row: Row, schema: Any) -> Any:
    """One row as a record batch that shares the row's memory."""
    import pyarrow as pa

    info, quantization = row.info, row.info.quantization
    columns = [
        pa.array([info.name], pa.string()),
        pa.array([list(info.shape)], schema.field("shape").type),
        pa.array([info.dtype], pa.string()),
        binary_array(row.data, schema.field("data").type),
        pa.array([info.num_params], pa.int64()),
        pa.array([quantization and quantization.quant_type], pa.string()),
        binary_array(row.scales, pa.binary()),
        binary_array(row.zero_points, pa.binary()),
        pa.array([quantization and quantization.axis], pa.int32()),
        pa.array([quantization and quantization.group_size], pa.int32()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class ArrowWriter:
    """Writes a new weights.arrow, one aligned record batch per row; use it in a `with` block.

    Arrow aligns buffers to 8 bytes inside a message. Each message therefore carries a custom metadata entry, whose length moves
    the tensor's bytes to a multiple of 64 in the file.
    """

    def __init__(self, path: Path, *, large: bool) -> None:
        import pyarrow as pa

        self._schema = make_schema(large=large)
        self._offsets_bytes = 16 if large else 8
        self._header_bytes, self._prefix_bytes = self._measure(pa)
        self._file = path.open("xb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
        self._is_first = True

    def write(self, row: Row) -> None:
        start = self._header_bytes if self._is_first else self._file.tell()
        self._is_first = False
        before_data = start + self._body_prefix_bytes(row.info)
        for pad, prefix_bytes in self._prefix_bytes.items():
            if (before_data + prefix_bytes) % ALIGNMENT_BYTES == 0:
                self._writer.write_batch(row_batch(row, self._schema), custom_metadata={"pad": " " * pad})
                return
        raise AssertionError("no padding aligns this batch")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                self._writer.close()
                sync(self._file)

    def _body_prefix_bytes(self, info: TensorInfo) -> int:
        texts = padded(len(info.name.encode())) + padded(len(info.dtype.encode()))
        return texts + padded(4 * len(info.shape)) + 3 * 8 + self._offsets_bytes

    def _measure(self, pa: Any) -> tuple[int, dict[int, int]]:
        """Bytes before the first message, and for each padding the bytes from a message's start to its body."""
        marker = bytes(range(7, 39))
        info = TensorInfo("x", "uint8", (32,))
        batch = row_batch(Row(info, marker), self._schema)
        tail_bytes = pa.ipc.read_message(batch.serialize()).body.size - self._body_prefix_bytes(info)
        prefixes: dict[int, int] = {}
        header_bytes = 0
        for pad in range(0, ALIGNMENT_BYTES, 8):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, self._schema) as writer:
                for _ in range(2):
                    writer.write_batch(batch, custom_metadata={"pad": " " * pad})
            written = sink.getvalue().to_pybytes()
            first = written.index(marker)
            before_data = written.index(marker, first + 1) - first - tail_bytes
            prefixes[pad] = before_data - self._body_prefix_bytes(info)
            header_bytes = first - before_data
        return header_bytes, prefixes


def padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


class ParquetWriter:
    """Writes a new weights.parquet in row groups of about 64 MiB; use it in a `with` block."""

    def __init__(self, path: Path, compression: str) -> None:
        import pyarrow.parquet as pq

        self._schema = make_schema(large=False)
        self._file = path.open("xb")
        self._writer = pq.ParquetWriter(
            self._file, self._schema, compression=compression, use_dictionary=False, write_statistics=False,
            write_page_checksum=True,
        )  # fmt: skip
        self._batches: list[Any] = []
        self._pending_bytes = 0

    def write(self, row: Row) -> None:
        """Add one row. Its memory must not change before its row group is written."""
        self._batches.append(row_batch(row, self._schema))
        self._pending_bytes += memoryview(row.data).nbytes
        if self._pending_bytes >= ROW_GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow as pa

        table = pa.Table.from_batches(self._batches, self._schema)
        self._writer.write_table(table, row_group_size=max(len(self._batches), 1))
        self._batches, self._pending_bytes = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                if self._batches:
                    self._write_group()
                self._writer.close()
                sync(self._file)
            else:
                self._writer.is_open = False  # otherwise pyarrow writes the footer when it frees the writer


def needs_large(infos: Iterable[TensorInfo]) -> bool:
    """Whether the `data` column must be large_binary."""
    return any(info.num_params * ITEM_BYTES[info.dtype] >= LARGE_TENSOR_BYTES for info in infos)


def check_parquet_fits(stored_bytes: Mapping[str, int]) -> None:
    """Raise an error for a tensor that a Parquet page cannot hold, given the stored bytes of each tensor."""
    for name, num_bytes in stored_bytes.items():
        if num_bytes >= LARGE_TENSOR_BYTES:
            hint = "Convert with write_parquet=False: weights.arrow has no such limit."
            raise UnsupportedModelError(f"Parquet cannot hold the tensor {name!r}: it has 2 GiB or more.", hint=hint)


def read_parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a weights.parquet, with one row group in memory at a time. Page checksums are verified."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True, memory_map=False) as file:
            check_columns(path, file.schema_arrow)
            for index in range(file.num_row_groups):
                for batch in file.read_row_group(index).to_batches():
                    yield from batch_rows(path, batch)
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{path} is not a sound Parquet file: {first_line(error)}") from error


def check_parquet_order(path: Path, infos: Sequence[TensorInfo], rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows, and raise an error when they are not the expected tensors in their order."""
    expected = iter(infos)
    for row in rows:
        if row.info != next(expected, None):
            raise CorruptFileError(f"{path} has the tensor {row.info.name!r}, which its metadata does not describe so.")
        yield row
    missing = next(expected, None)
    if missing is not None:
        raise CorruptFileError(f"{path} has no tensor {missing.name!r}.")


def check_columns(path: Path, schema: Any) -> None:
    for field, large in zip(make_schema(large=False), make_schema(large=True), strict=True):
        if field.name not in schema.names:
            raise CorruptFileError(f"{path} has no column {field.name!r}.")
        found = schema.field(field.name).type
        if found not in (field.type, large.type):
            raise CorruptFileError(f"{path} has the column {field.name!r} of type {found}, not {field.type}.")


def batch_rows(path: Path, batch: Any) -> Iterator[Row]:
    """The rows of a record batch of either file, with their values checked. Buffers are slices, not copies."""
    for index in range(batch.num_rows):
        fields = [batch.column(name)[index].as_py() for name in INFO_COLUMNS]
        info = make_info(f"{path}, row {index}", *fields)
        if batch.column("num_params")[index].as_py() != info.num_params:
            raise CorruptFileError(f"{path}: {info.name!r} has shape {info.shape}, which is not its num_params.")
        data, scales, zero_points = (cell_buffer(batch.column(name), index) for name in BUFFER_COLUMNS)
        if data is None:
            raise CorruptFileError(f"{path}: {info.name!r} has no data.")
        if info.quantization is None and data.size != info.num_params * ITEM_BYTES[info.dtype]:
            raise CorruptFileError(f"{path}: {info.name!r} of shape {info.shape} and type {info.dtype} has {data.size} bytes.")
        yield Row(info, data, scales, zero_points)


def cell_buffer(array: Any, index: int) -> Any:
    """The bytes of one cell of a binary array as a slice of the array's own memory (`Scalar.as_buffer` would copy)."""
    import pyarrow as pa

    if not array[index].is_valid:
        return None
    _, offsets, data = array.buffers()
    width = 8 if array.type == pa.large_binary() else 4
    position = (array.offset + index) * width
    begin, end = (int.from_bytes(offsets[at : at + width], "little") for at in (position, position + width))
    return data[begin:end] if data is not None else pa.py_buffer(b"")


def make_info(
    where: str, name: Any, dtype: Any, shape: Any, quant_type: Any = None, axis: Any = None, group_size: Any = None
) -> TensorInfo:
    """A TensorInfo from values of a file, which are checked."""
    if not isinstance(name, str) or not name:
        raise CorruptFileError(f"{where}: {name!r} is not the name of a tensor.")
    if dtype not in ITEM_BYTES:
        raise CorruptFileError(f"{where}: the tensor {name!r} has the unknown type {dtype!r}.")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
        raise CorruptFileError(f"{where}: the tensor {name!r} has the impossible shape {shape!r}.")
    if quant_type is None:
        return TensorInfo(name, dtype, tuple(shape))
    known = isinstance(quant_type, str) and type(axis) is int and type(group_size) is int
    if not known or not 0 <= axis < len(shape) or group_size < 1 or shape[axis] % group_size:
        raise CorruptFileError(f"{where}: the tensor {name!r} has impossible quantisation fields.")
    return TensorInfo(name, dtype, tuple(shape), Quantization(quant_type, axis, group_size))


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def read_arrow_rows(path: Path, memory: Any) -> list[tuple[TensorInfo, RowSpans]]:
    """The tensors of a mapped weights.arrow, and where their buffers lie, as Arrow itself reads them."""
    import pyarrow as pa

    whole = pa.py_buffer(memory)
    rows: list[Row] = []
    try:
        with pa.ipc.open_file(whole) as reader:
            check_columns(path, reader.schema)
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                batch.validate(full=True)
                rows.extend(batch_rows(path, batch))
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{path} is not a sound Arrow file: {first_line(error)}") from error
    return [(row.info, RowSpans(*(span_of(buffer, whole.address) for buffer in row[1:]))) for row in rows]


def span_of(buffer: Any, base: int) -> Any:
    """Where a buffer lies, as a Span; None for no buffer."""
    if buffer is None:
        return None
    return Span(buffer.address - base if buffer.size else 0, buffer.size)
