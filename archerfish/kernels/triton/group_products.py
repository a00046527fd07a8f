"""Products of activations with weights in groups (`formats.Groups`), on tensor cores.

For few rows, a program has some outputs. It reads a part of the inputs at a time, of which all share a scale, and scales the
sums of a part, not the weights: codes are whole numbers that every type holds exactly. For more rows, a program has a tile of
rows and outputs, and weights are scaled before they are multiplied. For very many, `dequantise` makes a plain matrix.

Codes of 4 bits become floats without a conversion, which would take longer than reading them: they are put into the lowest bits
of a large number that is subtracted again.

No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math
from typing import Any

import torch
import triton
import triton.language as tl

from archerfish.kernels.formats import Groups, Tensors
from archerfish.kernels.ops import Activation
from archerfish.kernels.triton.launch import early_start, follow
from archerfish.kernels.triton.products import finish, load_addends
from archerfish.kernels.triton.tiles import cdiv, next_power_of_2

Tensor = torch.Tensor
COLUMNS = 512  # of a program's inputs at a time
WIDEST_PART = 128  # of them that share a scale
NUM_WARPS, NUM_STAGES = 4, 4
FEW_ROWS = 64  # of activations
MANY_TILE, MANY_WARPS, MANY_STAGES = (128, 128), 8, 3  # rows and outputs of a program
DEQUANTISED_OUTPUTS = 32
FEW_OUTPUTS = 4096  # of a product, up to which programs have 16 of them, and else 32


@triton.jit
def to_floats(codes, zero: tl.constexpr, kind: tl.constexpr):
    """Codes from 0 to 15, less the one that stands for zero."""
    if kind == tl.bfloat16:
        found = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128.0 + zero)
    elif kind == tl.float16:
        found = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + zero)
    else:
        found = codes.to(tl.float32) - zero
    return found.to(kind)


@triton.jit
def add_part(
    acc, codes, scales, mins, lines, place, group, low, high, sums, line_bytes, num_groups,
    is_packed: tl.constexpr, has_mins: tl.constexpr,
):
    """Parts of the inputs taken into the sums of (parts, outputs, rows)."""
    given = tl.load(codes + lines[None, :, None] * line_bytes + place)
    kind: tl.constexpr = low.dtype
    if is_packed:
        zero: tl.constexpr = 0.0 if has_mins else 8.0
        found = tl.dot(to_floats(given & 15, zero, kind), low, input_precision="ieee")
        found = tl.dot(to_floats(given >> 4, zero, kind), high, found, input_precision="ieee")
    else:
        found = tl.dot(given.to(kind), low, input_precision="ieee")
    at = lines[None, :] * num_groups + group[:, None]
    acc += found * tl.load(scales + at).to(tl.float32)[:, :, None]
    if has_mins:
        acc += tl.load(mins + at).to(tl.float32)[:, :, None] * sums[:, None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def multiply_groups_kernel(
    x, codes, scales, mins, bias, residual, out, num_rows, num_outputs, x_stride, residual_stride,
    width: tl.constexpr, group_size: tl.constexpr, rows: tl.constexpr, outputs: tl.constexpr, part: tl.constexpr,
    parts: tl.constexpr, is_packed: tl.constexpr, has_mins: tl.constexpr, activation: tl.constexpr, has_bias: tl.constexpr,
    has_residual: tl.constexpr, is_gated: tl.constexpr, is_early: tl.constexpr,
):
    """Rows past the last are the last again, and are not written."""
    own = tl.program_id(0) * outputs + tl.arange(0, outputs)
    lines = tl.minimum(own, num_outputs - 1).to(tl.int64)
    up_lines = lines + num_outputs
    row = tl.minimum(tl.arange(0, rows), num_rows - 1)
    halves: tl.constexpr = 2 if is_packed else 1
    item = tl.arange(0, part // halves)
    column = item // 16 * 32 + item % 16 if is_packed else item  # the upper half of a byte stands for the input 16 further on
    follow(is_early)
    added, up_added = load_addends(
        bias, residual + row[None, :] * residual_stride, lines[:, None], up_lines[:, None], has_bias, has_residual, is_gated
    )
    acc = tl.zeros((parts, outputs, rows), tl.float32)
    up_acc = tl.zeros((parts, outputs, rows), tl.float32)
    num_groups: tl.constexpr = width // group_size
    for start in range(0, width, part * parts):
        first = start + tl.arange(0, parts) * part
        is_inside = first < width
        at = x + row[None, :, None] * x_stride + first[:, None, None] + column[None, None, :]
        low = tl.load(at, mask=is_inside[:, None, None], other=0.0)
        high = tl.load(at + 16, mask=is_inside[:, None, None], other=0.0) if is_packed else low
        sums = tl.zeros((parts, rows), tl.float32)
        if has_mins:
            sums += tl.sum(low.to(tl.float32), 2)
            if is_packed:
                sums += tl.sum(high.to(tl.float32), 2)
        low, high = tl.permute(low, (0, 2, 1)), tl.permute(high, (0, 2, 1))
        first = tl.minimum(first, width - part)  # past the end, rows are zeros
        place, group = first[:, None, None] // halves + item[None, None, :], first // group_size
        acc = add_part(
            acc, codes, scales, mins, lines, place, group, low, high, sums, width // halves, num_groups,
            is_packed, has_mins,
        )
        if is_gated:
            up_acc = add_part(
                up_acc, codes, scales, mins, up_lines, place, group, low, high, sums, width // halves, num_groups,
                is_packed, has_mins,
            )
    y = finish(tl.sum(acc, 0), tl.sum(up_acc, 0), added, up_added, activation, is_gated)
    place = tl.arange(0, rows)[None, :]
    mask = (place < num_rows) & (own < num_outputs)[:, None]
    tl.store(out + place * num_outputs + own[:, None], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def load_scaled(
    codes, scales, mins, lines, place, group, line_bytes, num_groups, is_packed: tl.constexpr, has_mins: tl.constexpr,
    kind: tl.constexpr,
):
    """Weights of (outputs, items): those of the lower and of the upper halves of bytes."""
    given = tl.load(codes + lines[:, None] * line_bytes + place[None, :])
    scale = tl.load(scales + lines * num_groups + group).to(tl.float32).to(kind)[:, None]
    if is_packed:
        zero: tl.constexpr = 0.0 if has_mins else 8.0
        low = to_floats(given & 15, zero, kind) * scale
        high = to_floats(given >> 4, zero, kind) * scale
    else:
        low = given.to(kind) * scale
        high = low
    if has_mins:
        least = tl.load(mins + lines * num_groups + group).to(tl.float32).to(kind)[:, None]
        low += least
        high += least
    return low.to(kind), high.to(kind)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_many_kernel(
    x, codes, scales, mins, bias, residual, out, num_rows, num_outputs, x_stride, residual_stride,
    width: tl.constexpr, group_size: tl.constexpr, rows: tl.constexpr, outputs: tl.constexpr, part: tl.constexpr,
    is_packed: tl.constexpr, has_mins: tl.constexpr, activation: tl.constexpr, has_bias: tl.constexpr,
    has_residual: tl.constexpr, is_early: tl.constexpr,
):
    """A tile of rows and outputs. Rows past the last are the last again, and are not written."""
    own = tl.program_id(0) * outputs + tl.arange(0, outputs)
    lines = tl.minimum(own, num_outputs - 1).to(tl.int64)
    place = tl.program_id(1) * rows + tl.arange(0, rows)
    row = tl.minimum(place, num_rows - 1).to(tl.int64)
    halves: tl.constexpr = 2 if is_packed else 1
    item = tl.arange(0, part // halves)
    column = item // 16 * 32 + item % 16 if is_packed else item
    num_groups: tl.constexpr = width // group_size
    follow(is_early)
    acc = tl.zeros((outputs, rows), tl.float32)
    for start in range(0, width, part):
        at = x + row[None, :] * x_stride + start + column[:, None]
        low, high = load_scaled(
            codes, scales, mins, lines, start // halves + item, start // group_size, width // halves, num_groups, is_packed,
            has_mins, x.dtype.element_ty,
        )
        acc = tl.dot(low, tl.load(at), acc, input_precision="ieee")
        if is_packed:
            acc = tl.dot(high, tl.load(at + 16), acc, input_precision="ieee")
    added, _ = load_addends(
        bias, residual + row[None, :] * residual_stride, lines[:, None], lines[:, None], has_bias, has_residual, False
    )
    y = finish(acc, acc, added, 0.0, activation, False)
    mask = (place < num_rows)[None, :] & (own < num_outputs)[:, None]
    tl.store(out + place[None, :].to(tl.int64) * num_outputs + own[:, None], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def dequantise_kernel(
    codes, scales, mins, out, num_outputs, width: tl.constexpr, group_size: tl.constexpr, outputs: tl.constexpr,
    part: tl.constexpr, is_packed: tl.constexpr, has_mins: tl.constexpr,
):
    lines = tl.minimum(tl.program_id(0) * outputs + tl.arange(0, outputs), num_outputs - 1).to(tl.int64)
    start = tl.program_id(1) * part
    halves: tl.constexpr = 2 if is_packed else 1
    item = tl.arange(0, part // halves)
    column = item // 16 * 32 + item % 16 if is_packed else item
    low, high = load_scaled(
        codes, scales, mins, lines, start // halves + item, start // group_size, width // halves, width // group_size,
        is_packed, has_mins, out.dtype.element_ty,
    )
    at = out + lines[:, None] * width + start + column[None, :]
    tl.store(at, low)
    if is_packed:
        tl.store(at + 16, high)


def kernel_inputs(weight_format: Groups, tensors: Tensors) -> dict[str, Any]:
    """What all kernels take."""
    return {
        "codes": tensors["weight"], "scales": tensors["scales"], "mins": tensors.get("mins", tensors["scales"]),
        "group_size": weight_format.group_size, "part": math.gcd(weight_format.group_size, WIDEST_PART),
        "is_packed": weight_format.is_packed, "has_mins": weight_format.has_mins,
    }


def dequantise(weight_format: Groups, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    """As `Groups.dequantise`, in one pass."""
    given, num_outputs = kernel_inputs(weight_format, tensors), len(tensors["weight"])
    width = tensors["scales"].shape[1] * weight_format.group_size
    out = torch.empty((num_outputs, width), dtype=dtype, device=tensors["weight"].device)
    dequantise_kernel[(cdiv(num_outputs, DEQUANTISED_OUTPUTS), width // given["part"])](
        **given, out=out, num_outputs=num_outputs, width=width, outputs=DEQUANTISED_OUTPUTS, num_warps=NUM_WARPS
    )
    return out


def multiply_groups(
    x: Tensor, weight_format: Groups, tensors: Tensors, bias: Tensor | None, *, activation: Activation, residual: Tensor | None,
    is_gated: bool = False, dtype: torch.dtype,
) -> Tensor:
    """As `triton.linear.linear`; is_gated only for few rows."""
    codes, (num_rows, width) = tensors["weight"], x.shape
    num_outputs = len(codes) // 2 if is_gated else len(codes)
    out = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    given = kernel_inputs(weight_format, tensors) | {
        "x": x, "bias": x if bias is None else bias, "residual": x if residual is None else residual, "out": out,
        "num_rows": num_rows, "num_outputs": num_outputs, "x_stride": x.stride(0), "width": width, "activation": activation,
        "residual_stride": x.stride(0) if residual is None else residual.stride(0), "has_bias": bias is not None,
        "has_residual": residual is not None, **early_start(x.device),
    }
    if num_rows > FEW_ROWS:
        rows, outputs = MANY_TILE
        multiply_many_kernel[(cdiv(num_outputs, outputs), cdiv(num_rows, rows))](
            **given, rows=rows, outputs=outputs, num_warps=MANY_WARPS, num_stages=MANY_STAGES
        )
        return out
    outputs = 16 if num_outputs <= FEW_OUTPUTS else 32
    multiply_groups_kernel[(cdiv(num_outputs, outputs),)](
        **given, rows=max(8, next_power_of_2(num_rows)), outputs=outputs, parts=COLUMNS // given["part"], is_gated=is_gated,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )
    return out
