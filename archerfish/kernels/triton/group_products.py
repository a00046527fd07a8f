"""Products of activations with weights in groups (`formats.Groups`), on tensor cores.

For few rows, a program has some outputs, and each of its warps some of the inputs. Sums are scaled, not weights: codes
are whole numbers that every type holds exactly. For more rows, a program has a tile of rows and outputs, and weights
are scaled before they are multiplied. For very many, `dequantise` makes a plain matrix.

Codes of 4 bits are laid out anew for the card (`pack`): of 128 inputs, a word of 16 bits has those that are 32 apart.
So a tile of words goes into the registers of the tensor cores as one of floats would, and there it becomes four tiles,
its planes, two codes at a time and without a conversion: codes are put into the lowest bits of a large number, which is
subtracted again.

No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from archerfish.kernels.formats import Groups, Tensors
from archerfish.kernels.ops import Activation
from archerfish.kernels.stored import BLOCK
from archerfish.kernels.triton.launch import early_start, follow
from archerfish.kernels.triton.products import append, finish, load_addends
from archerfish.kernels.triton.tiles import cdiv, next_power_of_2, shared_bytes

Tensor = torch.Tensor
PLANES = 4  # codes in a word
SPAN = PLANES * BLOCK  # inputs that 32 words stand for
FEW_ROWS = 16  # of activations
PROCESSORS = 132  # of the card that tiles are chosen for
ENOUGH_PROGRAMS = 96
DEQUANTISED_OUTPUTS = 32


class FewTile(NamedTuple):
    """outputs: of a program. parts: of inputs that a program takes at a time."""

    outputs: int
    parts: int
    num_warps: int
    num_stages: int


class ManyTile(NamedTuple):
    """rows, outputs: of a program."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


MANY_TILES = (
    ManyTile(256, 128, 8, 3),
    ManyTile(128, 128, 8, 3),
    ManyTile(128, 64, 4, 4),
    ManyTile(64, 128, 4, 3),
    ManyTile(64, 64, 4, 4),
    ManyTile(32, 64, 4, 4),
    ManyTile(16, 64, 4, 5),
)


@triton.constexpr_function
def pairs_code(plane, coding, is_bfloat):
    """Two codes of a plane, in 16 bits each, as two floats less a zero.

    They are put into the lowest bits of 128 in bfloat16 (0x4300), or of 1024 in float16 (0x6400), which has room for
    codes that are 16 times as large, too: these need not be moved. Those of MXFP4 are moved to where a float has its
    sign, the lowest bits of its exponent and the highest of its mantissa.
    """
    zero = coding == "signed"
    if coding == "mxfp4":
        place, mask, factor = (6, "01c0", "7f00") if is_bfloat else (9, "0e00", "7800")
        move = f"shl.b32 t, $1, {place - 4 * plane}" if place >= 4 * plane else f"shr.u32 t, $1, {4 * plane - place}"
        return f"""{{
            .reg .b32 t, sign, factor, less;
            mov.b32 factor, 0x{factor}{factor};
            mov.b32 less, 0;
            {move};
            shl.b32 sign, $1, {12 - 4 * plane};
            and.b32 t, t, 0x{mask}{mask};
            lop3.b32 t, sign, 0x80008000, t, 0xea;
            fma.rn.{"bf16x2" if is_bfloat else "f16x2"} $0, t, factor, less;
        }}"""
    shift = 4 * plane
    mask = "000f"
    high = "4300"
    factor = "3f80"
    less = "c308" if zero else "c300"
    if not is_bfloat:
        shift, high = plane // 2 * 8, "6400"
        mask, factor = ("00f0", "2c00") if plane % 2 else ("000f", "3c00")
        less = ("d480" if zero else "d400") if plane % 2 else ("e408" if zero else "e400")
    name = "bf16x2" if is_bfloat else "f16x2"
    return f"""{{
        .reg .b32 t, factor, less;
        mov.b32 factor, 0x{factor}{factor};
        mov.b32 less, 0x{less}{less};
        shr.u32 t, $1, {shift};
        lop3.b32 t, t, 0x{mask}{mask}, 0x{high}{high}, 0xea;
        fma.rn.{name} $0, t, factor, less;
    }}"""


@triton.jit
def to_floats(
    given, plane: tl.constexpr, planes: tl.constexpr, coding: tl.constexpr, kind: tl.constexpr, in_pairs: tl.constexpr
):
    """Codes, or the numbers of those of a plane of words. coding: as in `Groups`."""
    if planes == 1:
        found = given.to(kind)
    elif in_pairs and kind == tl.bfloat16:
        code: tl.constexpr = pairs_code(plane, coding, True)
        found = tl.inline_asm_elementwise(code, "=r,r", [given], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif in_pairs and kind == tl.float16:
        half_code: tl.constexpr = pairs_code(plane, coding, False)
        found = tl.inline_asm_elementwise(half_code, "=r,r", [given], dtype=tl.float16, is_pure=True, pack=2)
    else:
        found = given >> (4 * plane) & 15
        if coding == "mxfp4":
            low = found & 7
            low = tl.where(low < 2, low, (2 + (low & 1)) << tl.maximum((low >> 1) - 1, 0))
            found = tl.where(found < 8, low, -low)
        elif coding == "signed":
            found = found - 8
        found = found.to(kind)
    return found


@triton.jit
def load_rows(
    x, first, row, num_rows, x_stride, width: tl.constexpr, size: tl.constexpr, planes: tl.constexpr, step: tl.constexpr
):
    """Of each part of the inputs, those of every plane as (parts, inputs, rows); zeros past the last row and input."""
    made = ()
    for plane in tl.static_range(planes):
        place = first[:, None] + plane * size + tl.arange(0, size)[None, :]
        mask = (row < num_rows)[None, None, :]
        if width % step:
            mask = mask & (place < width)[:, :, None]
        made = append(made, tl.load(x + row[None, None, :] * x_stride + place[:, :, None], mask=mask, other=0.0))
    return made


@triton.jit
def load_scales(
    scales,
    lines,
    num_lines,
    first,
    width: tl.constexpr,
    group_size: tl.constexpr,
    size: tl.constexpr,
    planes: tl.constexpr,
    per_scale: tl.constexpr,
):
    """The scales of lines for parts of the inputs as in memory: one tile for every per_scale planes, which share it."""
    made = ()
    for plane in tl.static_range(0, planes, per_scale):
        group = tl.minimum((first + plane * size) // group_size, width // group_size - 1)
        made = append(made, tl.load(scales + group * num_lines + lines))
    return made


@triton.jit
def split_scales(given, coding: tl.constexpr):
    """Scales and minima in float32; no minima are zeros."""
    if coding == "mins":
        scale = (given & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        least = (given >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale, least = given, tl.zeros_like(given)
    return scale, least


@triton.jit
def add_parts(
    acc,
    codes,
    scales,
    lines,
    first,
    values,
    width: tl.constexpr,
    size: tl.constexpr,
    planes: tl.constexpr,
    per_scale: tl.constexpr,
    coding: tl.constexpr,
    in_pairs: tl.constexpr,
):
    """Parts of the inputs taken into the sums of (parts, outputs, rows). scales: from `load_scales`."""
    num_parts: tl.constexpr = (width + planes * size - 1) // (planes * size)
    part = tl.minimum(first // (planes * size), num_parts - 1)  # past the end, rows are zeros
    item = part[:, None, None] * size + tl.arange(0, size)[None, None, :]
    given = tl.load(codes + lines[None, :, None] * (num_parts * size) + item)
    found = acc
    for plane in tl.static_range(planes):
        weights = to_floats(given, plane, planes, coding, values[plane].dtype, in_pairs)
        if plane % per_scale == 0:
            found = tl.dot(weights, values[plane], input_precision="ieee")
        else:
            found = tl.dot(weights, values[plane], found, input_precision="ieee")
        scale, least = split_scales(scales[plane // per_scale], coding)
        if plane % per_scale == per_scale - 1:
            acc += found * scale[:, :, None]
        if coding == "mins":
            acc += least[:, :, None] * tl.sum(values[plane].to(tl.float32), 1)[:, None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def multiply_few_kernel(
    x,
    codes,
    scales,
    bias,
    residual,
    out,
    num_rows,
    num_outputs,
    x_stride,
    residual_stride,
    width: tl.constexpr,
    group_size: tl.constexpr,
    size: tl.constexpr,
    planes: tl.constexpr,
    per_scale: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    parts: tl.constexpr,
    coding: tl.constexpr,
    activation: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    is_gated: tl.constexpr,
    in_pairs: tl.constexpr,
    is_early: tl.constexpr,
):
    own = tl.program_id(0) * outputs + tl.arange(0, outputs)
    lines = tl.minimum(own, num_outputs - 1).to(tl.int64)
    up_lines = lines + num_outputs
    num_lines = num_outputs * 2 if is_gated else num_outputs
    row = tl.arange(0, rows)
    follow(is_early)
    added, up_added = load_addends(
        bias,
        residual + tl.minimum(row, num_rows - 1)[None, :] * residual_stride,
        lines[:, None],
        up_lines[:, None],
        has_bias,
        has_residual,
        is_gated,
    )
    acc = tl.zeros((parts, outputs, rows), tl.float32)
    up_acc = tl.zeros((parts, outputs, rows), tl.float32)
    span: tl.constexpr = planes * size
    part = tl.arange(0, parts) * span
    # Scales are loaded one round ahead: unlike codes and rows, they are not fetched in the background.
    scale = load_scales(scales, lines[None, :], num_lines, part[:, None], width, group_size, size, planes, per_scale)
    up_scale = scale
    if is_gated:
        up_scale = load_scales(
            scales, up_lines[None, :], num_lines, part[:, None], width, group_size, size, planes, per_scale
        )
    for start in range(0, width, span * parts):
        first = start + part
        later = first[:, None] + span * parts
        values = load_rows(x, first, row, num_rows, x_stride, width, size, planes, span * parts)
        new = load_scales(scales, lines[None, :], num_lines, later, width, group_size, size, planes, per_scale)
        acc = add_parts(acc, codes, scale, lines, first, values, width, size, planes, per_scale, coding, in_pairs)
        scale = new
        if is_gated:
            new = load_scales(scales, up_lines[None, :], num_lines, later, width, group_size, size, planes, per_scale)
            up_acc = add_parts(
                up_acc, codes, up_scale, up_lines, first, values, width, size, planes, per_scale, coding, in_pairs
            )
            up_scale = new
    y = finish(tl.sum(acc, 0), tl.sum(up_acc, 0), added, up_added, activation, is_gated)
    mask = (row < num_rows)[None, :] & (own < num_outputs)[:, None]
    tl.store(out + row[None, :] * num_outputs + own[:, None], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def scaled(
    given,
    scales,
    plane: tl.constexpr,
    planes: tl.constexpr,
    coding: tl.constexpr,
    kind: tl.constexpr,
    in_pairs: tl.constexpr,
):
    """Weights of (outputs, inputs) from a tile of codes, or from a plane of words."""
    scale, least = split_scales(scales, coding)
    found = to_floats(given, plane, planes, coding, kind, in_pairs) * scale.to(kind)[:, None]
    if coding == "mins":
        found += least.to(kind)[:, None]
    return found.to(kind)


@triton.jit
def load_weights(
    codes,
    scales,
    lines,
    num_lines,
    start,
    width: tl.constexpr,
    group_size: tl.constexpr,
    size: tl.constexpr,
    planes: tl.constexpr,
    per_scale: tl.constexpr,
    coding: tl.constexpr,
    kind: tl.constexpr,
    in_pairs: tl.constexpr,
):
    """Weights of (outputs, inputs) for the inputs from start on. Planes follow one another without leaving their
    registers."""
    line_items: tl.constexpr = (width + planes * size - 1) // (planes * size) * size
    given = tl.load(codes + lines[:, None] * line_items + start // planes + tl.arange(0, size)[None, :])
    scale = load_scales(scales, lines, num_lines, start, width, group_size, size, planes, per_scale)
    found = scaled(given, scale[0], 0, planes, coding, kind, in_pairs)
    if planes == 4:
        second = scaled(given, scale[1 // per_scale], 1, planes, coding, kind, in_pairs)
        third = scaled(given, scale[2 // per_scale], 2, planes, coding, kind, in_pairs)
        fourth = scaled(given, scale[3 // per_scale], 3, planes, coding, kind, in_pairs)
        joined = tl.permute(tl.join(tl.join(found, third), tl.join(second, fourth)), (0, 2, 3, 1))
        found = tl.reshape(joined, (lines.shape[0], planes * size))
    return found


@triton.jit(do_not_specialize=["num_rows"])
def multiply_many_kernel(
    x,
    codes,
    scales,
    bias,
    residual,
    out,
    num_rows,
    num_outputs,
    x_stride,
    residual_stride,
    width: tl.constexpr,
    group_size: tl.constexpr,
    size: tl.constexpr,
    planes: tl.constexpr,
    per_scale: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    coding: tl.constexpr,
    activation: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    in_pairs: tl.constexpr,
    is_early: tl.constexpr,
):
    """A tile of rows and outputs. Rows past the last are the last again, and are not written."""
    own = tl.program_id(0) * outputs + tl.arange(0, outputs)
    lines = tl.minimum(own, num_outputs - 1).to(tl.int64)
    place = tl.program_id(1) * rows + tl.arange(0, rows)
    row = tl.minimum(place, num_rows - 1).to(tl.int64)
    span: tl.constexpr = planes * size
    is_whole: tl.constexpr = group_size == width and planes == 1  # one scale for each output
    kind: tl.constexpr = x.dtype.element_ty
    follow(is_early)
    acc = tl.zeros((outputs, rows), tl.float32)
    for start in range(0, width, span):
        if is_whole:
            weights = tl.load(codes + lines[:, None] * width + start + tl.arange(0, span)[None, :]).to(kind)
        else:
            weights = load_weights(
                codes,
                scales,
                lines,
                num_outputs,
                start,
                width,
                group_size,
                size,
                planes,
                per_scale,
                coding,
                kind,
                in_pairs,
            )
        column = start + tl.arange(0, span)[:, None]
        if width % span:
            values = tl.load(x + row[None, :] * x_stride + column, mask=column < width, other=0.0)
        else:
            values = tl.load(x + row[None, :] * x_stride + column)
        acc = tl.dot(weights, values, acc, input_precision="ieee")
    if is_whole:
        acc *= tl.load(scales + lines)[:, None]
    added, _ = load_addends(
        bias, residual + row[None, :] * residual_stride, lines[:, None], lines[:, None], has_bias, has_residual, False
    )
    y = finish(acc, acc, added, 0.0, activation, False)
    mask = (place < num_rows)[None, :] & (own < num_outputs)[:, None]
    tl.store(out + place[None, :].to(tl.int64) * num_outputs + own[:, None], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def dequantise_kernel(
    codes,
    scales,
    out,
    num_outputs,
    width: tl.constexpr,
    group_size: tl.constexpr,
    size: tl.constexpr,
    planes: tl.constexpr,
    per_scale: tl.constexpr,
    outputs: tl.constexpr,
    coding: tl.constexpr,
    in_pairs: tl.constexpr,
):
    lines = tl.minimum(tl.program_id(0) * outputs + tl.arange(0, outputs), num_outputs - 1).to(tl.int64)
    start = tl.program_id(1) * planes * size
    weights = load_weights(
        codes,
        scales,
        lines,
        num_outputs,
        start,
        width,
        group_size,
        size,
        planes,
        per_scale,
        coding,
        out.dtype.element_ty,
        in_pairs,
    )
    column = start + tl.arange(0, planes * size)[None, :]
    tl.store(out + lines[:, None] * width + column, weights, mask=column < width)


def pack(weight_format: Groups, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors of a format as kernels read them: scales of a group together, in 32 bits, and codes of 4 bits in
    words."""
    codes, scales = tensors["weight"], tensors["scales"].t().float().contiguous()
    if weight_format.coding == "mins":  # both in float16
        pairs = torch.stack((scales, tensors["mins"].t()), 2).half()
        scales = pairs.contiguous().view(torch.int32).squeeze(2)
    if weight_format.is_packed:
        halves = codes.view(len(codes), -1, BLOCK // 2)
        blocks = torch.cat((halves & 15, halves >> 4), 2)
        blocks = torch.nn.functional.pad(blocks, (0, 0, 0, -blocks.shape[1] % PLANES)).view(
            len(codes), -1, PLANES, BLOCK
        )
        words = blocks[:, :, 0].short()
        for plane in range(1, PLANES):
            words |= blocks[:, :, plane].short() << 4 * plane
        codes = words.flatten(1)
    return {"weight": codes.contiguous(), "scales": scales}


def kernel_inputs(weight_format: Groups, tensors: Tensors) -> dict[str, Any]:
    """What all kernels take. tensors: from `pack`."""
    group_size = weight_format.group_size
    size, planes = (BLOCK, PLANES) if weight_format.is_packed else (math.gcd(group_size, SPAN), 1)
    return {
        "codes": tensors["weight"],
        "scales": tensors["scales"],
        "width": len(tensors["scales"]) * group_size,
        "group_size": group_size,
        "size": size,
        "planes": planes,
        "per_scale": math.gcd(group_size, size * planes) // size,
        "coding": weight_format.coding,
        "in_pairs": tensors["weight"].is_cuda,
    }


def dequantise(weight_format: Groups, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    """As `Groups.dequantise`, in one pass."""
    given, num_outputs = kernel_inputs(weight_format, tensors), len(tensors["weight"])
    out = torch.empty((num_outputs, given["width"]), dtype=dtype, device=tensors["weight"].device)
    num_parts = cdiv(given["width"], given["planes"] * given["size"])
    dequantise_kernel[(cdiv(num_outputs, DEQUANTISED_OUTPUTS), num_parts)](
        **given, out=out, num_outputs=num_outputs, outputs=DEQUANTISED_OUTPUTS, num_warps=4
    )
    return out


def few_tile(
    num_rows: int, num_outputs: int, span: int, item_bytes: int, most_bytes: int, *, is_gated: bool
) -> FewTile:
    """Few programs have many warps, each with a part of the inputs, so that every processor has enough to read.

    span: inputs of a part. item_bytes: of an activation. most_bytes: of two stages.
    """
    num_tiles = cdiv(num_outputs, 32)
    num_warps = 8 if num_tiles <= PROCESSORS else 4 if num_tiles <= 2 * PROCESSORS else 2
    outputs = 16 if num_warps == 4 and num_rows == 1 else 32
    column_bytes = few_rows(num_rows) * item_bytes + outputs * (2 if is_gated else 1)
    while num_warps > 1 and 2 * num_warps * SPAN * column_bytes > most_bytes:
        num_warps //= 2
    return FewTile(outputs, max(1, num_warps * SPAN // span), num_warps, 3)


def few_rows(num_rows: int) -> int:
    """Rows of a tile."""
    return max(8, next_power_of_2(num_rows))


def many_tile(num_rows: int, num_outputs: int, row_bytes: int, most_bytes: int) -> ManyTile:
    """The largest tile of which there are enough. row_bytes: of activations and codes that a program has at a time."""
    for tile in MANY_TILES:
        num_programs = cdiv(num_rows, tile.rows) * cdiv(num_outputs, tile.outputs)
        fits = tile.num_stages * tile.rows * row_bytes <= most_bytes
        if tile.rows < 2 * num_rows and num_programs >= ENOUGH_PROGRAMS and fits:
            return tile
    return MANY_TILES[-1]


def multiply_groups(
    x: Tensor,
    weight_format: Groups,
    tensors: Tensors,
    bias: Tensor | None,
    *,
    activation: Activation,
    residual: Tensor | None,
    is_gated: bool = False,
    dtype: torch.dtype,
) -> Tensor:
    """As `triton.linear.linear`; is_gated only for few rows. tensors: from `pack`."""
    num_rows, num_lines = len(x), len(tensors["weight"])
    num_outputs = num_lines // 2 if is_gated else num_lines
    out = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    given = kernel_inputs(weight_format, tensors) | {
        "x": x,
        "bias": x if bias is None else bias,
        "residual": x if residual is None else residual,
        "out": out,
        "num_rows": num_rows,
        "num_outputs": num_outputs,
        "x_stride": x.stride(0),
        "activation": activation,
        "residual_stride": x.stride(0) if residual is None else residual.stride(0),
        "has_bias": bias is not None,
        "has_residual": residual is not None,
        **early_start(x.device),
    }
    if num_rows > FEW_ROWS:
        row_bytes = given["size"] * (given["planes"] * x.element_size() + (given["planes"] == 1))
        tile = many_tile(num_rows, num_outputs, row_bytes, shared_bytes(x.device))
        multiply_many_kernel[(cdiv(num_outputs, tile.outputs), cdiv(num_rows, tile.rows))](**given, **tile._asdict())
        return out
    span, most_bytes = given["size"] * given["planes"], shared_bytes(x.device)
    few = few_tile(num_rows, num_outputs, span, x.element_size(), most_bytes, is_gated=is_gated)
    multiply_few_kernel[(cdiv(num_outputs, few.outputs),)](
        **given, rows=few_rows(num_rows), **few._asdict(), is_gated=is_gated
    )
    return out
