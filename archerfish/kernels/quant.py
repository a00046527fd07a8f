"""Weights in fewer bits than a backend computes in: symmetric int8 with a float32 scale for each row.

Integers up to 127 are exact in every type that backends compute in, so that a product may be taken of them as they are and its
outputs be scaled, or of the numbers that they stand for. Formats to come give `PackedWeight` what they need beside these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

Tensor = torch.Tensor
LARGEST = 127
PIECE_ELEMENTS = 1 << 20  # that are wide at a time where there is a choice


def quantize_rows(weights: Sequence[Tensor], device: str | torch.device) -> tuple[Tensor, Tensor]:
    """Matrices one below the other as int8, and the (rows,) that theirs are multiplied with. A row of zeros stays one."""
    num_rows, width = sum(len(weight) for weight in weights), weights[0].shape[1]
    matrix = torch.empty((num_rows, width), dtype=torch.int8, device=device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=device)
    begin = 0
    for weight in weights:
        for first, last in row_pieces(*weight.shape):
            rows = weight[first:last].to(device, torch.float32)
            largest = rows.abs().amax(1, keepdim=True)
            scale = torch.where(largest == 0, 1.0, largest / LARGEST)
            matrix[begin + first : begin + last] = (rows / scale).round_()
            scales[begin + first : begin + last] = scale.squeeze(1)
        begin += len(weight)
    return matrix, scales


def dequantize_rows(matrix: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that int8 rows stand for."""
    return torch.mul(matrix, scales.unsqueeze(1), out=torch.empty(matrix.shape, dtype=dtype, device=matrix.device))


def row_pieces(num_rows: int, width: int, step: int = 64) -> Iterator[tuple[int, int]]:
    """First and last row of pieces of about equal size, all but the last of a multiple of step."""
    num_pieces = max(1, -(-num_rows * width // PIECE_ELEMENTS))
    size = max(step, -(-num_rows // (num_pieces * step)) * step)
    for first in range(0, num_rows, size):
        yield first, min(first + size, num_rows)
