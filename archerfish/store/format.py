"""The two files of weights of a converted model, which have the same columns.

`weights.arrow` is an uncompressed Arrow IPC file with one record batch (one row) per tensor. The bytes of every tensor
begin at a multiple of 64, so that the file can be mapped. `weights.parquet` is compressed, for interchange. Arrow has
no bfloat16:
the column `data` holds plain little-endian bytes, and `dtype` says of which type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from archerfish.errors import CorruptFileError, ValidationError
from archerfish.store.files import sync

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from archerfish.kernels.stored import Floats

ALIGNMENT_BYTES = 64
ROW_GROUP_BYTES = 64 * 2**20
PIECE_BYTES = 2**20  # of a tensor, which have one checksum
MAX_DIMENSIONS = 16
GROUP_SIZE = 32  # values that share a scale in a quantised tensor
SUPER_GROUP_SIZE = 256  # values of a block of GGUF's K types

ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
}
INFO_COLUMNS = ("layer_name", "dtype", "shape", "quant_type", "quant_axis", "group_size")
BUFFER_COLUMNS = ("data", "scales", "zero_points")
REQUIRED_COLUMNS = ("layer_name", "shape", "dtype", "data", "num_params")


class Quantization(NamedTuple):
    """How a quantised tensor is stored: groups of `group_size` values along `axis` share a scale (and a minimum)."""

    quant_type: str
    axis: int
    group_size: int = GROUP_SIZE


class TensorInfo(NamedTuple):
    """Name, type, shape and quantisation of a tensor. The `dtype` of a quantised tensor is the type after
    dequantising."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    quantization: Quantization | None = None

    @property
    def num_params(self) -> int:
        return math.prod(self.shape)


class Row(NamedTuple):
    """One tensor of a file; the three buffers hold bytes or arrays."""

    info: TensorInfo
    data: Any
    scales: Any = None
    zero_points: Any = None


class Span(NamedTuple):
    """Where a buffer lies in weights.arrow."""

    offset: int
    num_bytes: int


RowSpans = tuple[Span, ...]  # of the buffers that a row has: data, scales, zero points
PlacedTensor = tuple[TensorInfo, RowSpans]


def make_schema(*, large: bool = False) -> Any:
    """The Arrow schema of both files; `large` when a tensor has 2 GiB or more."""
    import pyarrow as pa

    types = {
        "layer_name": pa.string(),
        "shape": pa.list_(pa.int32()),
        "dtype": pa.string(),
        "data": pa.large_binary() if large else pa.binary(),
        "num_params": pa.int64(),
        "quant_type": pa.string(),
        "scales": pa.binary(),
        "zero_points": pa.binary(),
        "quant_axis": pa.int32(),
        "group_size": pa.int32(),
    }
    return pa.schema([pa.field(name, kind, nullable=name not in REQUIRED_COLUMNS) for name, kind in types.items()])


def row_batch(row: Row, schema: Any) -> Any:
    """One row as a record batch that shares the row's memory."""
    import pyarrow as pa

    info = row.info
    quant_type, axis, group_size = info.quantization or (None, None, None)
    values = (
        info.name,
        list(info.shape),
        info.dtype,
        row.data,
        info.num_params,
        quant_type,
        row.scales,
        row.zero_points,
        axis,
        group_size,
    )
    columns = []
    for field, value in zip(schema, values, strict=True):
        if field.name not in BUFFER_COLUMNS or value is None:
            columns.append(pa.array([value], field.type))
            continue
        buffer = value if isinstance(value, pa.Buffer) else pa.py_buffer(value)
        width = 8 if field.type == pa.large_binary() else 4
        offsets = b"".join(end.to_bytes(width, "little") for end in (0, buffer.size))
        columns.append(pa.Array.from_buffers(field.type, 1, [None, pa.py_buffer(offsets), buffer]))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@contextmanager
def arrow_writer(path: Path, *, large: bool = False) -> Iterator[Callable[[Row], None]]:
    """A function that adds a row to a new weights.arrow, as one aligned record batch.

    Arrow aligns buffers to 8 bytes inside a message. Each message therefore carries a custom metadata entry, whose
    length moves the tensor's bytes to a multiple of 64 in the file.
    """
    import pyarrow as pa

    schema = make_schema(large=large)
    header_bytes = 8 + schema.serialize().size  # the magic word and the schema, which are written with the first row

    def body_prefix_bytes(info: TensorInfo) -> int:
        """Bytes of a message's body before the tensor: each buffer takes a multiple of 8."""
        lengths = (len(info.name.encode()), len(info.dtype), 4 * len(info.shape))
        return sum(-(-length // 8) * 8 for length in lengths) + 3 * 8 + (16 if large else 8)

    marker = bytes(range(7, 39))
    probe = TensorInfo("x", "uint8", (32,))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(row_batch(Row(probe, marker), schema), custom_metadata={"pad": ""})
    prefix_bytes = sink.getvalue().to_pybytes().index(marker) - header_bytes - body_prefix_bytes(probe)
    with path.open("xb") as file:
        writer = pa.ipc.new_file(file, schema)

        def write(row: Row) -> None:
            before_data = (file.tell() or header_bytes) + prefix_bytes + body_prefix_bytes(row.info)
            pad = " " * (-before_data % ALIGNMENT_BYTES)
            writer.write_batch(row_batch(row, schema), custom_metadata={"pad": pad})

        yield write
        writer.close()
        sync(file)


@contextmanager
def parquet_writer(path: Path, compression: str) -> Iterator[Callable[[Row], None]]:
    """A function that adds a row to a new weights.parquet, in row groups of about 64 MiB.

    The memory of a row must not change before its row group is written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, pending_bytes = make_schema(), 0
    batches: list[Any] = []
    with path.open("xb") as file:
        writer = pq.ParquetWriter(
            file,
            schema,
            compression=compression,
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )

        def write_group() -> None:
            nonlocal pending_bytes
            writer.write_table(pa.Table.from_batches(batches, schema), row_group_size=len(batches))
            batches.clear()
            pending_bytes = 0

        def write(row: Row) -> None:
            nonlocal pending_bytes
            batches.append(row_batch(row, schema))
            pending_bytes += memoryview(row.data).nbytes
            if pending_bytes >= ROW_GROUP_BYTES:
                write_group()

        try:
            yield write
            if batches:
                write_group()
            writer.close()
            sync(file)
        finally:
            writer.is_open = False  # otherwise pyarrow writes the footer when it frees the writer


def read_parquet_rows(path: Path, infos: Iterable[TensorInfo]) -> Iterator[Row]:
    """The rows of a weights.parquet, which must be those of `infos`, with one row group in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    expected = iter(infos)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True, memory_map=False) as file:
            groups = (file.read_row_group(index) for index in range(file.num_row_groups))
            for row in (row for group in groups for batch in group.to_batches() for row in batch_rows(path, batch)):
                if row.info != next(expected, None):
                    raise CorruptFileError(
                        f"{path} has the tensor {row.info.name!r}, which its metadata does not describe so."
                    )
                yield row
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{path} is not a sound Parquet file: {first_line(error)}") from error
    missing = next(expected, None)
    if missing is not None:
        raise CorruptFileError(f"{path} has no tensor {missing.name!r}.")


def read_arrow_rows(path: Path, memory: Any) -> list[PlacedTensor]:
    """The tensors of a mapped weights.arrow, and where their buffers lie, as Arrow itself reads them."""
    import pyarrow as pa

    whole = pa.py_buffer(memory)
    found: list[PlacedTensor] = []

    def span_of(buffer: Any) -> Span:
        return Span(buffer.address - whole.address if buffer.size else 0, buffer.size)

    try:
        with pa.ipc.open_file(whole) as reader:
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                batch.validate(full=True)
                for info, *buffers in batch_rows(path, batch):
                    found.append((info, tuple(span_of(buffer) for buffer in buffers if buffer is not None)))
        if any(spans[0].offset % ALIGNMENT_BYTES for _, spans in found):
            raise CorruptFileError(f"{path} has a tensor that is not aligned to {ALIGNMENT_BYTES} bytes.")
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{path} is not a sound Arrow file: {first_line(error)}") from error
    return found


def batch_rows(path: Path, batch: Any) -> Iterator[Row]:
    """The rows of a record batch of either file, with their values checked. Buffers are slices, not copies."""
    if batch.schema not in (make_schema(), make_schema(large=True)):
        raise CorruptFileError(f"{path} has other columns than weights of archerfish: {', '.join(batch.schema.names)}.")
    for index in range(batch.num_rows):
        info = make_info(f"{path}, row {index}", *(batch.column(name)[index].as_py() for name in INFO_COLUMNS))
        data, scales, zero_points = (cell_buffer(batch.column(name), index) for name in BUFFER_COLUMNS)
        sizes = [buffer.size for buffer in (data, scales, zero_points) if buffer is not None]
        if sizes != buffer_bytes(info):
            raise CorruptFileError(
                f"{path}: {info.name!r} of shape {info.shape} and type {info.dtype} has {sizes} bytes."
            )
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
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(type(n) is int and 0 <= n < 2**31 for n in shape)
    ):
        raise CorruptFileError(f"{where}: the tensor {name!r} has the impossible shape {shape!r}.")
    if quant_type is None:
        return TensorInfo(name, dtype, tuple(shape))
    known = isinstance(quant_type, str) and type(axis) is int and type(group_size) is int
    if not known or not 0 <= axis < len(shape) or group_size < 1 or shape[axis] % group_size:
        raise CorruptFileError(f"{where}: the tensor {name!r} has impossible quantisation fields.")
    return TensorInfo(name, dtype, tuple(shape), Quantization(quant_type, axis, group_size))


def make_spans(numbers: list[int], info: TensorInfo, file_bytes: int, where: str) -> RowSpans:
    """Where a tensor lies. It must be inside the file, aligned, and as long as its shape and type say."""
    spans = tuple(Span(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True))
    is_inside = all(min(span) >= 0 and sum(span) <= file_bytes for span in spans)
    has_right_size = bool(spans) and [span.num_bytes for span in spans] == buffer_bytes(info)
    if not is_inside or not has_right_size or spans[0].offset % ALIGNMENT_BYTES:
        raise CorruptFileError(f"{where}: {info.name!r} cannot lie where its metadata say.")
    return spans


def pieces_of(spans: RowSpans) -> list[Span]:
    """The buffers of a tensor in pieces of PIECE_BYTES, each with a checksum of its own."""
    ends = [
        (at, offset + num_bytes) for offset, num_bytes in spans for at in range(offset, offset + num_bytes, PIECE_BYTES)
    ]
    return [Span(at, min(PIECE_BYTES, end - at)) for at, end in ends]


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# GGUF's simple block types, taken apart: integers, scales and minima in separate buffers. A block is 32 values along
# the last axis. `data` keeps each block's integer bytes as GGUF packs them (Q4: low nibbles are values 0-15, high
# nibbles 16-31; Q5: four bytes of high bits, then Q4; Q8: 32 int8), `scales` is one float16 per group, and
# `zero_points`, for the _1 types, one float16 minimum per group. In GGUF a group is a block; other checkpoints have
# larger ones. Of the K types, `data` keeps whole blocks of 256 values, and there are no other buffers. INT8 and FP8 are
# bytes with one float32 scale per group. MXFP4 has half of its scales, as float16.
INTEGER_BYTES = {
    "Q4_0": 16,
    "Q4_1": 16,
    "MXFP4": 16,
    "Q5_0": 20,
    "Q5_1": 20,
    "Q8_0": 32,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
    "INT8": 32,
    "FP8": 32,
}  # of one block in `data`
SUPER_SCALES = {
    "Q4_K": slice(0, 4),
    "Q5_K": slice(0, 4),
    "Q6_K": slice(208, 210),
}  # where a block has its float16 numbers
MOST_EXPONENT = 127 + 16  # of a scale of MXFP4, of which float16 holds half
GROUPED_TYPES = ("Q4_0", "Q4_1", "Q8_0", "INT8", "FP8")  # whose groups may have several blocks


def make_quantization(quant_type: str, axis: int, group_size: int = 0) -> Quantization | None:
    """How tensors of a type are kept, in groups of the usual size or another one; None for a type that is not."""
    usual = SUPER_GROUP_SIZE if quant_type in SUPER_SCALES else GROUP_SIZE
    is_known = quant_type in INTEGER_BYTES and (group_size in (0, usual) or quant_type in GROUPED_TYPES)
    return Quantization(quant_type, axis, group_size or usual) if is_known and group_size % GROUP_SIZE == 0 else None


def scale_type(quant_type: str) -> str:
    return "float32" if quant_type in ("INT8", "FP8") else "float16"


def num_scales(quant_type: str) -> int:
    """Numbers of a block that lie in buffers of their own."""
    return 0 if quant_type in SUPER_SCALES else 2 if quant_type.endswith("_1") else 1


def buffer_bytes(info: TensorInfo) -> list[int]:
    """Sizes of the buffers that a tensor has; none for an unknown quantisation."""
    if info.quantization is None:
        return [info.num_params * ITEM_BYTES[info.dtype]]
    quant_type, _, group_size = info.quantization
    if info.quantization != make_quantization(quant_type, len(info.shape) - 1, group_size):
        return []
    block_size = SUPER_GROUP_SIZE if quant_type in SUPER_SCALES else GROUP_SIZE
    scale_bytes = info.num_params // group_size * ITEM_BYTES[scale_type(quant_type)]
    return [info.num_params // block_size * INTEGER_BYTES[quant_type], *[scale_bytes] * num_scales(quant_type)]


def block_bytes(tensors: Sequence[TensorInfo]) -> int:
    """What weights take that stay in the blocks of a file; 0 if none are in blocks."""
    return sum(sum(buffer_bytes(info)) for info in tensors) if any(info.quantization for info in tensors) else 0


def split_blocks(info: TensorInfo, blocks: npt.NDArray[np.uint8]) -> Row:
    """Take GGUF's interleaved blocks (scale, minimum if any, integers) apart; those of the K types stay whole."""
    import numpy as np

    assert info.quantization is not None
    quant_type = info.quantization.quant_type
    header_bytes = 1 if quant_type == "MXFP4" else 2 * num_scales(quant_type)
    rows = np.ascontiguousarray(blocks).reshape(-1, header_bytes + INTEGER_BYTES[quant_type])
    stored = np.ascontiguousarray(rows[:, :header_bytes])
    header = mxfp4_scales(info.name, stored) if quant_type == "MXFP4" else stored.view(np.float16)
    return Row(info, np.ascontiguousarray(rows[:, header_bytes:]), *map(np.ascontiguousarray, header.T))


def mxfp4_scales(name: str, exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.float16]:
    """Half of the scales of MXFP4, which are powers of 2 with 127 added to their exponents. Those below 2 ** -23 become
    0."""
    import numpy as np

    if exponents.max(initial=0) > MOST_EXPONENT:
        raise ValidationError(
            f"The tensor {name!r} has a scale of MXFP4 that is NaN, or more than float16 can hold twice."
        )
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128).astype(np.float16)


def scales_of(row: Row) -> list[npt.NDArray[Any]]:
    """Scales and minima of a quantised tensor."""
    import numpy as np

    assert row.info.quantization is not None
    place = SUPER_SCALES.get(row.info.quantization.quant_type)
    inside = None if place is None else np.ascontiguousarray(row.data[:, place]).view(np.float16)
    return [numbers for numbers in (row.scales, row.zero_points, inside) if numbers is not None]


def dequantize(row: Row) -> Floats:
    """The float32 values of a quantised tensor in arrays."""
    from archerfish.kernels.stored import StoredTensor

    assert row.info.quantization is not None
    stored = StoredTensor(
        row.info.shape, "float32", row.data, row.info.quantization.quant_type, row.scales, row.zero_points
    )
    return stored.as_floats()
