"""GGUF's simple block formats, taken apart: integers, scales and minima in separate buffers.

A block is 32 values along the last axis. `data` keeps each block's integer bytes as GGUF packs them (Q4: low nibbles are
values 0-15, high nibbles 16-31; Q5: four bytes of high bits, then Q4; Q8: 32 int8), `scales` is one float16 per block and
`zero_points`, for the _1 types, one float16 minimum per block.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from archerfish.errors import CorruptFileError
from archerfish.store.format import Quantization, TensorInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

GROUP_SIZE = 32


class BlockLayout(NamedTuple):
    """Bytes of one GGUF block: scale, minimum if any, then integers."""

    integer_bytes: int
    has_minimum: bool


LAYOUTS: dict[str, BlockLayout] = {
    "Q4_0": BlockLayout(16, False),
    "Q4_1": BlockLayout(16, True),
    "Q5_0": BlockLayout(20, False),
    "Q5_1": BlockLayout(20, True),
    "Q8_0": BlockLayout(32, False),
}


class QuantizedTensor(NamedTuple):
    """A quantised tensor in parts; the arrays may be views of a mapped file."""

    info: TensorInfo
    data: npt.NDArray[np.uint8]  # (num_blocks, integer_bytes)
    scales: npt.NDArray[np.float16]  # (num_blocks,)
    zero_points: npt.NDArray[np.float16] | None

    @property
    def quantization(self) -> Quantization:
        assert self.info.quantization is not None
        return self.info.quantization


def split_blocks(name: str, shape: tuple[int, ...], quant_type: str, blocks: npt.NDArray[np.uint8]) -> QuantizedTensor:
    """Take GGUF's interleaved blocks apart."""
    import numpy as np

    layout = LAYOUTS[quant_type]
    header_bytes = 4 if layout.has_minimum else 2
    rows = np.ascontiguousarray(blocks).reshape(-1, header_bytes + layout.integer_bytes)
    header = np.ascontiguousarray(rows[:, :header_bytes]).view(np.float16)
    info = TensorInfo(name, "float32", shape, Quantization(quant_type, len(shape) - 1, GROUP_SIZE))
    minima = np.ascontiguousarray(header[:, 1]) if layout.has_minimum else None
    return QuantizedTensor(info, np.ascontiguousarray(rows[:, header_bytes:]), np.ascontiguousarray(header[:, 0]), minima)


def from_buffers(where: str, info: TensorInfo, data: Any, scales: Any, zero_points: Any) -> QuantizedTensor:
    """View stored buffers as a quantised tensor, checking that their sizes belong together."""
    import numpy as np

    assert info.quantization is not None
    layout = LAYOUTS.get(info.quantization.quant_type)
    if layout is None or info.quantization.group_size != GROUP_SIZE or info.quantization.axis != len(info.shape) - 1:
        raise CorruptFileError(f"{where}: {info.name!r} has the unknown quantisation {info.quantization}.")
    num_blocks = math.prod(info.shape) // GROUP_SIZE
    minima_bytes = memoryview(zero_points).nbytes if zero_points is not None else None
    sizes = (memoryview(data).nbytes, memoryview(scales).nbytes if scales is not None else None, minima_bytes)
    if sizes != (num_blocks * layout.integer_bytes, num_blocks * 2, num_blocks * 2 if layout.has_minimum else None):
        raise CorruptFileError(f"{where}: the parts of the quantised tensor {info.name!r} do not fit together.")
    integers = np.frombuffer(data, np.uint8).reshape(num_blocks, layout.integer_bytes)
    minima = np.frombuffer(zero_points, np.float16) if zero_points is not None else None
    return QuantizedTensor(info, integers, np.frombuffer(scales, np.float16), minima)


def dequantize(tensor: QuantizedTensor) -> npt.NDArray[np.float32]:
    """The float32 values, bit for bit those of GGUF's own reference."""
    import numpy as np

    quant_type = tensor.quantization.quant_type
    layout = LAYOUTS[quant_type]
    if quant_type == "Q8_0":
        values = tensor.data.view(np.int8).astype(np.float32)
    else:
        nibbles = tensor.data[:, -16:]
        integers = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
        if quant_type.startswith("Q5"):
            integers |= np.unpackbits(np.ascontiguousarray(tensor.data[:, :4]), axis=1, bitorder="little") << np.uint8(4)
        values = integers.astype(np.float32)
        if not layout.has_minimum:
            values -= np.float32(8 if quant_type == "Q4_0" else 16)
    values *= tensor.scales.astype(np.float32)[:, None]
    if tensor.zero_points is not None:
        values += tensor.zero_points.astype(np.float32)[:, None]
    return values.reshape(tensor.info.shape)
