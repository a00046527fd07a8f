"""int8 rows: symmetric int8 numbers with a float32 scale for each output, made from a plain matrix while it is loaded.

Integers up to 127 are exact in every type that backends compute in. So a product may be taken of the integers and its outputs
scaled afterwards, or of the numbers that they stand for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from archerfish.kernels.formats.format import TensorLayout, Tensors, WeightFormat

if TYPE_CHECKING:
    import torch

LARGEST = 127
PIECE_ELEMENTS = 1 << 20  # numbers that are in a wide type at a time


class Int8Rows(WeightFormat):
    name = "int8"
    memory: ClassVar[Mapping[str, TensorLayout]] = {
        "weight": TensorLayout("int8"), "scales": TensorLayout("float32", ("outputs",)),
    }

    def load(self, tensors: Tensors) -> Tensors:
        """A row of zeros stays zero; a row with NaN becomes NaN."""
        import torch

        weight = tensors["weight"]
        matrix = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        for first, last in row_pieces(*weight.shape):
            rows = weight[first:last].float()
            largest = rows.abs().amax(1, keepdim=True)
            scale = torch.where(largest == 0, 1.0, largest / LARGEST)
            matrix[first:last] = (rows / scale).round_()
            scales[first:last] = scale.squeeze(1)
        return {"weight": matrix, "scales": scales}

    def dequantise(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        import torch

        matrix, scales = tensors["weight"], tensors["scales"]
        return torch.mul(matrix, scales.unsqueeze(1), out=torch.empty(matrix.shape, dtype=dtype, device=matrix.device))


def row_pieces(num_rows: int, width: int, step: int = 64) -> Iterator[tuple[int, int]]:
    """First and last row of pieces of about equal size; all but the last have a multiple of step rows."""
    num_pieces = max(1, -(-num_rows * width // PIECE_ELEMENTS))
    size = max(step, -(-num_rows // (num_pieces * step)) * step)
    for first in range(0, num_rows, size):
        yield first, min(first + size, num_rows)
