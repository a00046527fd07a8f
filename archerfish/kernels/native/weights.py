"""Matrices in the native backend: packed from a checkpoint's tensors in the format that these are stored in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.errors import TensorError
from archerfish.kernels.int4 import quantise_int4
from archerfish.kernels.native._native import Matrix
from archerfish.kernels.native.recorder import Handle, Recorder, TapeRunner
from archerfish.kernels.ops import Activation, LinearWeight, PackedWeight
from archerfish.kernels.stored import BLOCK, HALF_RANGE, StoredTensor, to_int8, to_type

INT8_ROWS = "int8 rows"  # one scale for each output; rows of activations become bytes when they are multiplied
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
FORMATS = TYPES | {
    "Q4_0": 3,
    "Q4_1": 4,
    "Q5_0": 5,
    "Q5_1": 6,
    "Q8_0": 7,
    "Q4_K": 8,
    "Q5_K": 9,
    "Q6_K": 10,
    INT8_ROWS: 11,
    "MXFP4": 12,
}
FORMAT_NAMES = {number: name for name, number in FORMATS.items()}
ACTIVATIONS: dict[Activation, int] = {
    "none": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "relu_squared": 4,
    "sigmoid": 5,
    "silu": 6,
    "tanh": 7,
    "swiglu_oai": 8,
}
GROUP = 16  # outputs that lie side by side
LEAST_SCALE = 2.0**-14  # that float16 holds with all its digits


class Table:
    """A lookup table that is packed as a matrix, since it is stored in blocks."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.shape = (matrix.num_outputs, matrix.num_inputs)


class NativeWeight(PackedWeight[Any]):
    """Packed matrices with their biases, one below the other: one for each format that the parts are stored in."""

    def __init__(self, runner: TapeRunner, matrices: Sequence[Matrix], *, is_deterministic: bool = False) -> None:
        self.runner = runner
        self.matrices = matrices
        self.is_deterministic = is_deterministic
        self.num_outputs = sum(matrix.num_outputs for matrix in matrices)
        self.can_gate = len(matrices) == 1 and self.num_outputs % (2 * GROUP) == 0

    @property
    def format_name(self) -> str:
        return joined_formats(FORMAT_NAMES[matrix.format] for matrix in self.matrices)

    def _add(self, recorder: Recorder, x: Handle, out: Handle, **options: Any) -> None:
        first = 0
        for matrix in self.matrices:
            recorder.tape.linear(
                matrix,
                recorder(x),
                recorder(out),
                first,
                out.shape[1],
                is_deterministic=self.is_deterministic,
                **options,
            )
            first += matrix.num_outputs
        self.runner.finish(recorder)

    def multiply(self, x: Handle, activation: Activation, residual: Handle | None, *, softcap: float = 0.0) -> Handle:
        recorder = self.runner.current()
        out = recorder.like(x, self.num_outputs)
        self._add(recorder, x, out, activation=ACTIVATIONS[activation], residual=recorder(residual), softcap=softcap)
        return out

    def multiply_normed(
        self, x: Handle, norm: Handle, eps: float, before: Handle | None, gate: Activation | None
    ) -> tuple[Handle, Handle]:
        """The product with the RMS norm of x + before, gated where it can be; and the sum."""
        recorder, is_gated = self.runner.current(), gate is not None and self.can_gate
        out = recorder.like(x, self.num_outputs // 2 if is_gated else self.num_outputs)
        total = x if before is None else recorder.like(x, x.shape[1])
        self._add(
            recorder,
            x,
            out,
            activation=ACTIVATIONS[(gate if is_gated else None) or "none"],
            is_gated=is_gated,
            norm=norm,
            eps=eps,
            before=recorder(before),
            total=-1 if before is None else recorder(total),
        )
        return out, total


def expert_matrix(weight: LinearWeight[Any]) -> Matrix:
    """The matrices of all experts, which have one format."""
    packed = weight.get()
    assert isinstance(packed, NativeWeight)
    if len(packed.matrices) > 1:
        raise TensorError(
            f"The matrices of experts are stored in several formats ({packed.format_name}), but one product has one format.",
            hint="Convert the model again without --keep-quantized, or take a file whose experts have one type.",
        )
    return packed.matrices[0]


def packed_format(stored: str, dtype: str) -> str:
    """The format in which rows are multiplied that are stored in another; dtype: what float32 becomes."""
    return dtype if stored == "float32" else stored


def joined_formats(kinds: Iterable[str]) -> str:
    """What people read of the formats of a product."""
    return " + ".join(dict.fromkeys(kinds))


def stack_parts(
    parts: Sequence[Handle], runner: TapeRunner, dtype: str, weight_format: str = "plain", *, rounds_rows: bool = False
) -> list[Matrix]:
    """Parts one below the other, a matrix for each run of equal formats.

    dtype: as in `packed_format`; weight_format: what parts without blocks become.
    """
    stored = [as_blocks(as_stored(part), dtype) for part in parts]
    is_widened = any(made.data is not part.data for made, part in zip(stored, map(as_stored, parts), strict=True))
    has_int8_rows = rounds_rows and weight_format == "int8" and not any(part.quant_type for part in stored)
    is_made = weight_format in MAKERS and not has_int8_rows
    if is_made:
        stored = [MAKERS[weight_format](part) for part in stored]
    num_inputs = stored[0].shape[1]
    if any(part.shape[1] != num_inputs for part in stored):
        raise TensorError("Matrices that are stacked have different numbers of inputs.")
    matrices = []
    kinds = [INT8_ROWS if has_int8_rows else packed_format(part.quant_type or part.dtype, dtype) for part in stored]
    for kind, run in groupby(zip(kinds, stored, strict=True), itemgetter(0)):
        same = [part for _, part in run]
        matrix, first = Matrix(FORMATS[kind], sum(part.shape[0] for part in same), num_inputs), 0
        for part in same:
            add_part(matrix, part, first)
            first += part.shape[0]
        # Other formats were made here.
        matrices.append(runner.pack(matrix, is_copy=is_widened or (weight_format != "plain" and not has_int8_rows)))
    return matrices


def as_stored(tensor: Any) -> StoredTensor:
    """A tensor of the store, of NumPy or of torch."""
    if isinstance(tensor, StoredTensor):
        return tensor
    if isinstance(tensor, np.ndarray):
        return StoredTensor(tensor.shape, str(tensor.dtype), np.ascontiguousarray(tensor))
    import torch

    name, held = str(tensor.dtype).removeprefix("torch."), tensor.detach().cpu().contiguous()
    array = held.view(torch.uint16).numpy() if name == "bfloat16" else held.numpy()
    return StoredTensor(tuple(tensor.shape), name, array)


def add_part(matrix: Matrix, part: StoredTensor, first: int) -> None:
    """Add the rows of a part from output `first` on."""
    if part.quant_type:
        given = (
            None if each is None else np.ascontiguousarray(spread(each, part)) for each in (part.scales, part.mins)
        )
        halves = [None if each is None else each.view(np.uint16) for each in given]
        matrix.add_rows(np.ascontiguousarray(part.data), first, part.shape[0], scales=halves[0], mins=halves[1])
    else:
        matrix.add_rows(np.ascontiguousarray(part.data), first, part.shape[0], TYPES[part.dtype])


def spread(halves: npt.NDArray[np.float16], part: StoredTensor) -> npt.NDArray[np.float16]:
    """Scales or minima of groups, one for each block."""
    num_blocks = math.prod(part.shape) // BLOCK
    return np.repeat(halves, num_blocks // halves.size) if 0 < halves.size < num_blocks else halves


def as_blocks(part: StoredTensor, dtype: str) -> StoredTensor:
    """A tensor in a format that there are products for: FP8 is widened to `dtype`, the scales of int8 become
    float16."""
    if part.quant_type not in ("FP8", "INT8") or part.scales is None:
        return part
    is_half = part.scales.min(initial=1.0) >= LEAST_SCALE and part.scales.max(initial=0.0) <= HALF_RANGE[1]
    if part.quant_type == "INT8" and is_half:
        return replace(part, quant_type="Q8_0", scales=part.scales.astype(np.float16))
    return StoredTensor(part.shape, dtype, to_type(part.as_floats(), dtype))


def to_int4(part: StoredTensor) -> StoredTensor:
    """As `quantise_int4`."""
    if part.quant_type or part.shape[1] % BLOCK:
        return part
    codes, scales, mins = quantise_int4(part.data.reshape(part.shape))
    return StoredTensor(part.shape, "float32", codes, "Q4_1", scales, mins)


MAKERS: dict[str, Callable[[StoredTensor], StoredTensor]] = {
    "int8": to_int8,
    "int4": to_int4,
}  # by the name of a format
