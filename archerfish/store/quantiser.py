"""Floats in the quantised forms of the store (`format.py`): grids of numbers that a matrix can hold, and codes on them.

A grid is found from the matrix alone. Rounding puts every number on the nearest point of its grid; GPTQ
(`engine/gptq.py`) chooses other points of the same grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from archerfish.errors import ValidationError
from archerfish.kernels.int4 import LARGEST, find_lines
from archerfish.kernels.stored import FP8_LARGEST, LARGEST_INT8, Floats, widened
from archerfish.store.format import GROUP_SIZE, Quantization, Row, TensorInfo, dequantize
from archerfish.store.source import ModelSource, SourceTensor

Codes = npt.NDArray[np.uint8]
LEAST_NORMAL_FP8 = 2.0**-6
HALF_RANGE = (2.0**-14, 65504.0)  # scales that float16 holds with all its digits
# Symmetric grids of 4 bits: the code that a group's largest number gets. A smaller step clips it and rounds the others
# less.
TOP_CODES = (7.0, 7.5, 8.0, 8.5, 9.0, 10.0)
PIECE_NUMBERS = 1 << 18  # at a time, so that they stay in the processor's cache
ZERO_CODES = {"Q4_0": 8, "Q4_1": 0, "INT8": 0, "FP8": 0}
CODE_RANGES = {"Q4_0": (0, LARGEST), "Q4_1": (0, LARGEST), "INT8": (-LARGEST_INT8, LARGEST_INT8)}


class Grid(NamedTuple):
    """The numbers of each group of inputs: (code - zero code) * scale + minimum. (outputs * groups,) float32 each."""

    kind: Quantization
    scales: Floats
    mins: Floats

    def nearest(self, matrix: Floats) -> Codes:
        """The code of each number, (outputs * groups, group size); of int8 and FP8 its byte."""
        with np.errstate(all="ignore"):
            steps = (matrix.reshape(len(self.scales), -1) - self.mins[:, None]) / self.scales[:, None]
        if self.kind.quant_type == "FP8":
            return to_fp8(steps)
        codes = np.clip(np.rint(steps) + ZERO_CODES[self.kind.quant_type], *CODE_RANGES[self.kind.quant_type])
        found: Codes = np.nan_to_num(codes).astype(np.int8).view(np.uint8)
        return found


def find_grid(matrix: Floats, kind: Quantization, importance: Floats | None = None) -> Grid:
    """The grid of 4 bits with the least squared error that was found; of 8 bits one that ends at the largest number.

    importance: (inputs,), how much errors of each input weigh; None: all alike.
    """
    groups = matrix.reshape(-1, kind.group_size)
    scales, mins = (np.zeros(len(groups), np.float32) for _ in range(2))
    weighed = None if importance is None else importance.astype(np.float32).reshape(-1, kind.group_size)
    size = max(1, PIECE_NUMBERS // kind.group_size)
    for first in range(0, len(groups), size):
        piece = slice(first, first + size)
        own = None if weighed is None else weighed[np.arange(first, first + len(groups[piece])) % len(weighed)]
        with np.errstate(all="ignore"):
            if kind.quant_type == "Q4_1":
                columns = np.ascontiguousarray(groups[piece].T)
                scales[piece], mins[piece] = find_lines(columns, None if own is None else np.ascontiguousarray(own.T))
            else:
                scales[piece] = find_scales(groups[piece], kind.quant_type, own)
    return Grid(kind, np.where(scales == 0, np.float32(1), scales), mins)  # a group of equal numbers has no steps


def find_scales(groups: Floats, quant_type: str, importance: Floats | None = None) -> Floats:
    largest = np.abs(groups).max(1)
    if quant_type == "FP8":
        return np.asarray(largest / FP8_LARGEST, np.float32)
    if quant_type == "INT8":
        scales = np.asarray(largest / LARGEST_INT8, np.float32)
        is_half = (scales >= HALF_RANGE[0]) & (scales <= HALF_RANGE[1])
        return np.where(
            is_half, scales.astype(np.float16).astype(np.float32), scales
        )  # CPUs multiply with float16 ones
    best, found = np.full(len(groups), np.inf, np.float32), np.asarray(largest, np.float32)
    for top in TOP_CODES:
        scales = (largest / top).astype(np.float16).astype(np.float32)
        codes = np.clip(np.rint(groups / np.where(scales == 0, 1, scales)[:, None]), -8, 7)
        errors = np.square(codes * scales[:, None] - groups)
        error = (errors if importance is None else errors * importance).sum(1)
        best, found = np.minimum(best, error), np.where(error < best, scales, found)
    return found


def to_fp8(numbers: Floats) -> Codes:
    """The nearest numbers of float8_e4m3fn, ties to even."""
    sizes = np.abs(numbers).clip(0, FP8_LARGEST)
    bits = sizes.view(np.uint32)
    normal = ((bits + ((bits >> 20 & 1) + 0x7FFFF)) >> 20) - (
        120 << 3
    )  # 3 bits of mantissa; exponents count from 7, not 127
    codes = np.where(sizes < LEAST_NORMAL_FP8, np.rint(sizes / LEAST_NORMAL_FP8 * 8), normal)
    return np.nan_to_num(codes).astype(np.uint8) | np.where(np.signbit(numbers), np.uint8(128), np.uint8(0))


def make_row(info: TensorInfo, matrix: Floats, grid: Grid) -> Row:
    """A matrix as it is stored, every number at the nearest point of the grid."""
    codes, is_int4 = grid.nearest(matrix), grid.kind.quant_type.startswith("Q4")
    with np.errstate(over="ignore"):
        scales, mins = (each.astype(np.float16) if is_int4 else each for each in (grid.scales, grid.mins))
    if not (np.isfinite(scales).all() and np.isfinite(mins).all()):
        raise ValidationError(
            f"The tensor {info.name!r} has numbers that {grid.kind.quant_type} cannot hold: NaN, infinite or too large."
        )
    if not is_int4:
        return Row(info, codes, scales)
    blocks = codes.reshape(-1, GROUP_SIZE)
    packed = blocks[:, : GROUP_SIZE // 2] | blocks[:, GROUP_SIZE // 2 :] << 4
    return Row(info, packed.reshape(len(scales), -1), scales, mins if grid.kind.quant_type == "Q4_1" else None)


def read_floats(tensor: SourceTensor) -> Floats:
    found: Floats = widened(tensor.load()).astype(np.float32, copy=False)
    return found


def rounded_row(tensor: SourceTensor, info: TensorInfo) -> Row:
    """A tensor of a source rounded to its own grid."""
    assert info.quantization is not None
    matrix = read_floats(tensor)
    return make_row(info, matrix, find_grid(matrix, info.quantization))


def load_dequantised(row: Callable[[], Row]) -> Floats:
    return dequantize(row())


def quantise_source(
    source: ModelSource,
    wanted: Mapping[str, Quantization],
    quantise: Callable[[SourceTensor, TensorInfo], Row] = rounded_row,
    *,
    keep_others: bool = False,
) -> ModelSource:
    """The source with some of its matrices quantised. keep_others: as its file has them; else they are plain floats."""
    tensors = []
    for tensor in source.tensors:
        info = tensor.info
        if info.name in wanted:
            made = TensorInfo(info.name, "float32", info.shape, wanted[info.name])
            row = partial(quantise, tensor, made)
            tensors.append(SourceTensor(made, partial(load_dequantised, row), row))
        else:
            tensors.append(tensor if keep_others else SourceTensor(info._replace(quantization=None), tensor.load))
    config = {
        name: value
        for name, value in source.config.items()
        if name not in ("quantization_config", "compression_config")
    }
    return source._replace(tensors=tuple(tensors), config=config)
