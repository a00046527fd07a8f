"""A tensor as a checkpoint stores it: bytes of the mapped file, and what they mean.

numpy has no bfloat16. Its bits lie in uint16, a type that no checkpoint has for anything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.kernels.ranks import Part

Floats = npt.NDArray[np.float32]
# Bits of a code in a GPU's memory.
GPU_BITS = {"Q4_0": 4, "Q4_1": 4, "MXFP4": 4, "Q4_K": 4, "Q6_K": 8, "Q8_0": 8, "INT8": 8, "FP8": 8}
GPU_TYPES = set(GPU_BITS)  # that it multiplies with
GPU_GROUPS = {"Q4_K": 32, "Q6_K": 16}  # numbers that share a scale there, where the type does not say
GPU_SCALE_BYTES = 4  # of a scale, or of a scale and a minimum
RANDOM_BYTES = 1 << 24  # of codes, which are repeated
HALF_RANGE = (2.0**-24, 65504.0)  # positive numbers of float16
LARGEST_INT8 = 127
BLOCK = 32  # numbers whose codes lie together
SUPER_BLOCK = 256  # of GGUF's K types
PIECE_SIZE = 1 << 18  # numbers that are rounded at a time, so that they stay in the processor's cache


def read_fp8(codes: npt.NDArray[np.uint8]) -> Floats:
    """Numbers of float8_e4m3fn: a sign, 4 bits of exponent, 3 of mantissa."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32) / 8
    found = np.where(exponent > 0, np.ldexp(1 + mantissa, exponent - 7), np.ldexp(mantissa, -6))
    found[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -found, found).astype(np.float32)


FP8_VALUES = read_fp8(np.arange(256, dtype=np.uint8))
FP8_LARGEST = float(np.nanmax(FP8_VALUES))
FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice float4_e2m1's


def numpy_type(dtype: str) -> np.dtype[Any]:
    return np.dtype({"bfloat16": "uint16", "float8_e4m3fn": "uint8"}.get(dtype, dtype))


def widened(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """bfloat16 as float32; other numbers as they are."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


def to_type(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Floats in another type, rounded to nearest even; the same array if they have the type already.

    What the type cannot hold becomes infinity; NaN may become another value in bfloat16.
    """
    if values.dtype == numpy_type(dtype):
        return values
    with np.errstate(over="ignore"):
        floats = widened(values).astype(np.float32, copy=False)
        return round_bfloat16(floats) if dtype == "bfloat16" else floats.astype(dtype, copy=False)


def round_bfloat16(floats: Floats) -> npt.NDArray[np.uint16]:
    bits, found = floats.ravel().view(np.uint32), np.empty(floats.size, np.uint16)
    for first in range(0, bits.size, PIECE_SIZE):
        piece = bits[first : first + PIECE_SIZE]
        found[first : first + PIECE_SIZE] = (piece + (((piece >> 16) & 1) + 0x7FFF)) >> 16
    return found.reshape(floats.shape)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """Plain numbers of `dtype`, or quantised ones (`quant_type`), whose codes, scales and minima lie apart:
    `store/format.py`.

    The K types of GGUF have scales and minima among their codes.
    """

    shape: tuple[int, ...]
    dtype: str
    data: npt.NDArray[Any]  # bfloat16: as uint16; blocks: as uint8
    quant_type: str = ""
    scales: npt.NDArray[Any] | None = None  # one for each group of numbers
    mins: npt.NDArray[np.float16] | None = None

    @property
    def cut_inputs(self) -> int:
        """The inputs of a part of this matrix are a multiple of so many, or its numbers become plain."""
        if not self.quant_type:
            return 1
        if self.scales is None:
            return SUPER_BLOCK
        group_size = math.prod(self.shape) // self.scales.size
        return (
            BLOCK if group_size == self.shape[1] else group_size
        )  # a scale for all of a row is that of any part of it

    def cut(self, outputs: Part, inputs: Part) -> StoredTensor:
        """A part of a matrix, over the same memory."""
        rows, (num_rows, num_columns) = slice(outputs.first, outputs.end), self.shape
        shape = outputs.size, inputs.size
        if not self.quant_type:
            columns = slice(inputs.first, inputs.end)
            return StoredTensor(shape, self.dtype, self.data.reshape(self.shape)[rows, columns])
        if any(place % self.cut_inputs for place in (inputs.first, inputs.end)):
            whole = self.cut(outputs, Part.of(num_columns)).as_floats()
            return StoredTensor(shape, "float32", whole[:, inputs.first : inputs.end])

        def part(array: npt.NDArray[Any] | None) -> Any:
            if array is None:
                return None
            lines = array.reshape(num_rows, -1)
            first, end = (place * lines.shape[1] // num_columns for place in (inputs.first, inputs.end))
            return lines[rows, first : max(end, first + 1)]

        return StoredTensor(shape, self.dtype, part(self.data), self.quant_type, part(self.scales), part(self.mins))

    def as_floats(self) -> Floats:
        """The numbers in float32, those of GGUF as its package has them; a view where they are float32 already."""
        found = self._scaled() if self.quant_type else widened(self.data).astype(np.float32, copy=False)
        return found.reshape(self.shape)

    def _scaled(self) -> Floats:
        kind, codes = self.quant_type, self.data
        if self.scales is None:
            import gguf

            blocks = codes.reshape(*self.shape[:-1], -1)
            return np.asarray(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]), np.float32)
        if kind == "FP8":
            values = FP8_VALUES[codes]
        elif kind in ("Q8_0", "INT8"):
            values = codes.view(np.int8).astype(np.float32)
        else:
            codes = codes.reshape(-1, 20 if kind.startswith("Q5") else 16)
            integers = np.concatenate([codes[:, -16:] & 15, codes[:, -16:] >> 4], axis=1)
            if kind.startswith("Q5"):
                integers |= np.unpackbits(np.ascontiguousarray(codes[:, :4]), axis=1, bitorder="little") << np.uint8(4)
            values = FP4_VALUES[integers] if kind == "MXFP4" else integers.astype(np.float32)
            if kind in ("Q4_0", "Q5_0"):
                values -= np.float32(8 if kind == "Q4_0" else 16)
        values = values.reshape(self.scales.size, -1)
        values *= self.scales.astype(np.float32).reshape(-1, 1)
        if self.mins is not None:
            values += self.mins.astype(np.float32).reshape(-1, 1)
        found: Floats = values
        return found


def to_int8(part: StoredTensor) -> StoredTensor:
    """Symmetric int8 with one scale for each output."""
    if part.quant_type or part.shape[1] % BLOCK:
        return part
    rows = part.as_floats()
    highest = np.abs(rows).max(axis=1, keepdims=True)
    scales = np.where(highest == 0, 1.0, np.clip(highest / LARGEST_INT8, *HALF_RANGE)).astype(np.float16)
    codes = np.rint(np.clip(rows / scales.astype(np.float32), -LARGEST_INT8, LARGEST_INT8))
    codes = np.where(np.isnan(codes), 0, codes).astype(np.int8)  # the scale of such a row is NaN
    return StoredTensor(part.shape, "float32", codes.view(np.uint8), "Q8_0", scales)


def random_stored(shape: tuple[int, ...], quant_type: str, group_size: int) -> StoredTensor:
    """Small random numbers of a type that a GPU multiplies with, always the same ones."""
    num_groups, is_packed = math.prod(shape) // group_size, GPU_BITS[quant_type] == 4
    codes = np.random.default_rng(0).integers(0, 256, min(RANDOM_BYTES, math.prod(shape)), dtype=np.uint8)
    if quant_type == "FP8":
        codes &= 0b1011_1111  # none is larger than 2
    codes = np.resize(codes, (num_groups, group_size // (2 if is_packed else 1)))
    scale, kind = 0.02 if quant_type == "FP8" else 0.005 if is_packed else 0.0003, "float16" if is_packed else "float32"
    mins = np.full(num_groups, -8 * scale, np.float16) if quant_type == "Q4_1" else None
    return StoredTensor(shape, "float32", codes, quant_type, np.full(num_groups, scale, kind), mins)
