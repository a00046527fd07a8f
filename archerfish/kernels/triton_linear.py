"""Matrix products with few rows of activations, where reading the weights is all that takes time.

`multiply_rows_kernel` is for a handful of rows: a program multiplies the weights of some outputs with every row in float32 and
adds up at the end. It can normalise the rows on the way: the scale of a row is known when its last column has been read, and
is applied to the sums. `multiply_tiles_kernel` is for more rows: it uses the tensor cores, each warp for its own part of the
columns.

Activation and gate are applied before anything is written, and what a row gives depends on no other row. Starting programs
before the kernel in front has ended, with a prefetch of their weights, was measured and is slower. No
`from __future__ import annotations` here: see `triton_norm`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from archerfish.kernels.ops import Activation

Tensor = torch.Tensor
MAX_ROWS = 16  # of a product; cuBLAS is as quick with more
DIRECT_ROWS = 4  # of `multiply_rows_kernel`, unless a tile says otherwise
NORMED_WIDTH = 2048  # up to which normalising in every program costs less than a kernel for it
UNROLLED_COLUMNS = 14336  # of all rows together: what the registers hold of sums and reads on the way
COLUMNS_PER_WARP = 256  # at least, or a row and the weights are spread over threads in different ways
HOPPER_BYTES = 227 << 10  # of shared memory
SHARED_BYTES = 198_000  # of a program's stages, at most; what a Hopper has


@dataclass(frozen=True)
class LinearTile:
    """How a product is cut."""

    outputs: int  # of a program; with a gate, each is two rows of weights
    columns: int  # read at a time
    num_warps: int
    num_stages: int  # pieces of so many columns in flight; 1 without tensor cores: as many as the registers hold
    is_dot: bool = False  # on tensor cores


TUNED: dict[tuple[int, int, int], LinearTile] = {  # on an H200; by rows (a power of 2), rows and columns of the weights
    (1, 4096, 1024): LinearTile(4, 1024, 4, 1),
    (4, 4096, 1024): LinearTile(16, 256, 4, 6, is_dot=True),
    (16, 4096, 1024): LinearTile(32, 256, 4, 5, is_dot=True),
    (1, 1024, 2048): LinearTile(2, 1024, 4, 1),
    (4, 1024, 2048): LinearTile(16, 256, 4, 6, is_dot=True),
    (16, 1024, 2048): LinearTile(16, 256, 4, 6, is_dot=True),
    (1, 6144, 1024): LinearTile(2, 512, 1, 1),
    (4, 6144, 1024): LinearTile(32, 256, 4, 5, is_dot=True),
    (16, 6144, 1024): LinearTile(32, 256, 4, 5, is_dot=True),
    (1, 1024, 3072): LinearTile(2, 1024, 4, 1),
    (4, 1024, 3072): LinearTile(16, 512, 4, 4, is_dot=True),
    (16, 1024, 3072): LinearTile(16, 512, 4, 4, is_dot=True),
    (1, 151936, 1024): LinearTile(2, 1024, 4, 1),
    (4, 151936, 1024): LinearTile(32, 512, 4, 3, is_dot=True),
    (1, 6144, 4096): LinearTile(4, 2048, 8, 1),
    (4, 6144, 4096): LinearTile(16, 512, 4, 4, is_dot=True),
    (1, 4096, 4096): LinearTile(4, 512, 1, 1),
    (4, 4096, 4096): LinearTile(32, 256, 4, 5, is_dot=True),
    (16, 4096, 4096): LinearTile(32, 256, 4, 5, is_dot=True),
    (1, 28672, 4096): LinearTile(2, 1024, 4, 1),
    (4, 28672, 4096): LinearTile(16, 512, 4, 4, is_dot=True),
    (1, 4096, 14336): LinearTile(8, 1024, 4, 3),
    (4, 4096, 14336): LinearTile(16, 512, 4, 4, is_dot=True),
    (16, 4096, 14336): LinearTile(32, 512, 4, 3, is_dot=True),
    (1, 128256, 4096): LinearTile(2, 1024, 4, 1),
    (4, 128256, 4096): LinearTile(32, 256, 4, 5, is_dot=True),
    (16, 128256, 4096): LinearTile(32, 512, 4, 3, is_dot=True),
}


@triton.jit
def activate(x, activation: tl.constexpr):
    if activation == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation == "gelu_tanh":  # (1 + tanh(y)) / 2 is the logistic function of 2 y
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif activation == "relu":
        x = tl.maximum(x, 0.0)
    elif activation == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif activation == "tanh":
        x = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    return x


@triton.jit
def finish(
    y, up, bias, addend, lines, up_lines, activation: tl.constexpr, has_bias: tl.constexpr, has_addend: tl.constexpr,
    is_gated: tl.constexpr,
):
    """All that follows a product; up counts only with is_gated."""
    if has_bias:
        y += tl.load(bias + lines).to(tl.float32)
    if has_addend:
        y += tl.load(addend + lines).to(tl.float32)
    y = activate(y, activation)
    if is_gated:
        if has_bias:
            up += tl.load(bias + up_lines).to(tl.float32)
        y *= up
    return y


@triton.jit
def load_piece(pointer, place, width: tl.constexpr, columns: tl.constexpr):
    if width % columns == 0:
        piece = tl.load(pointer + place)
    else:
        piece = tl.load(pointer + place, mask=place < width, other=0.0)
    return piece


@triton.jit
def sum_rows(x, residual, total, num_rows, x_stride, residual_stride, width: tl.constexpr, block: tl.constexpr):
    columns = tl.arange(0, block)
    for row in range(num_rows):
        values = tl.load(x + row * x_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
        values += tl.load(residual + row * residual_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(total + row * width + columns, values.to(total.dtype.element_ty), mask=columns < width)


@triton.jit
def append(items, item):
    return items + (item,)  # noqa: RUF005 (Triton knows no other way)


@triton.jit
def zeros(num: tl.constexpr, height: tl.constexpr, width: tl.constexpr):
    made = ()
    for _ in tl.static_range(num):
        made = append(made, tl.zeros((height, width), tl.float32))
    return made


@triton.jit
def add_piece(
    sums, up_sums, squares, x, residual, norm, weight, up_weight, start, x_stride, residual_stride,
    width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, is_normed: tl.constexpr, has_residual: tl.constexpr,
    is_gated: tl.constexpr,
):
    """The columns from start on taken into the sums of every row."""
    place = start + tl.arange(0, columns)[None, :]
    tile = load_piece(weight, place, width, columns).to(tl.float32)
    if is_gated:
        up_tile = load_piece(up_weight, place, width, columns).to(tl.float32)
    if is_normed:
        factors = load_piece(norm, place, width, columns)
    new_sums = ()
    new_up_sums = ()
    new_squares = ()
    for row in tl.static_range(rows):
        values = load_piece(x + row * x_stride, place, width, columns)
        if has_residual:
            added = load_piece(residual + row * residual_stride, place, width, columns)
            values = (values.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        values = values.to(tl.float32)
        if is_normed:
            new_squares = append(new_squares, squares[row] + values * values)
            values = values * factors
        new_sums = append(new_sums, sums[row] + tile * values)
        if is_gated:
            new_up_sums = append(new_up_sums, up_sums[row] + up_tile * values)
    return new_sums, new_up_sums, new_squares


@triton.jit
def multiply_rows_kernel(
    x, residual, norm, weight, bias, addend, out, total, eps, num_outputs, x_stride, residual_stride, addend_stride,
    width: tl.constexpr, rows: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr, num_pieces: tl.constexpr,
    block: tl.constexpr, activation: tl.constexpr, has_bias: tl.constexpr, has_addend: tl.constexpr, is_normed: tl.constexpr,
    has_residual: tl.constexpr, is_gated: tl.constexpr,
):
    """num_pieces in flight; 1: the loop is unrolled. With a residual, the last program only writes the sum of it and x."""
    own = tl.program_id(0) * outputs + tl.arange(0, outputs)
    lines = tl.minimum(own, num_outputs - 1).to(tl.int64)
    up_lines = lines + num_outputs
    if has_residual:  # noqa: SIM102 (the compiler decides this one)
        if tl.program_id(0) == tl.num_programs(0) - 1:
            sum_rows(x, residual, total, rows, x_stride, residual_stride, width, block)
            return
    sums = zeros(rows, outputs, columns)
    up_sums = zeros(rows * is_gated, outputs, columns)
    squares = zeros(rows * is_normed, 1, columns)
    tile = weight + lines[:, None] * width
    up_tile = weight + up_lines[:, None] * width
    if num_pieces == 1:
        for start in tl.static_range(0, width, columns):
            sums, up_sums, squares = add_piece(
                sums, up_sums, squares, x, residual, norm, tile, up_tile, start, x_stride, residual_stride,
                width, rows, columns, is_normed, has_residual, is_gated,
            )
    else:
        for start in tl.range(0, width, columns, num_stages=num_pieces):
            sums, up_sums, squares = add_piece(
                sums, up_sums, squares, x, residual, norm, tile, up_tile, start, x_stride, residual_stride,
                width, rows, columns, is_normed, has_residual, is_gated,
            )
    for row in tl.static_range(rows):
        y = tl.sum(sums[row], 1)
        up = tl.sum(up_sums[row], 1) if is_gated else y
        if is_normed:
            scale = tl.rsqrt(tl.sum(tl.sum(squares[row], 1), 0) / width + eps)
            y *= scale
            up *= scale
        y = finish(y, up, bias, addend + row * addend_stride, lines, up_lines, activation, has_bias, has_addend, is_gated)
        tl.store(out + row * num_outputs + own, y.to(out.dtype.element_ty), mask=own < num_outputs)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_tiles_kernel(
    x, weight, bias, addend, out, num_rows, num_outputs, x_stride, addend_stride,
    width: tl.constexpr, rows: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr,
    activation: tl.constexpr, has_bias: tl.constexpr, has_addend: tl.constexpr, is_gated: tl.constexpr,
):
    """Rows past the last are the last again, and are not written."""
    own = tl.program_id(0) * outputs + tl.arange(0, outputs)
    lines = tl.minimum(own, num_outputs - 1).to(tl.int64)
    up_lines = lines + num_outputs
    row = tl.minimum(tl.arange(0, rows), num_rows - 1)
    piece = tl.arange(0, parts)[:, None, None] * (columns // parts) + tl.arange(0, columns // parts)[None, None, :]
    acc = tl.zeros((parts, outputs, rows), tl.float32)  # a warp has one part
    up_acc = tl.zeros((parts, outputs, rows), tl.float32)
    for start in range(0, width, columns):
        place = start + piece
        values = tl.permute(load_piece(x + row[None, :, None] * x_stride, place, width, columns), (0, 2, 1))
        tile = load_piece(weight + lines[None, :, None] * width, place, width, columns)
        acc = tl.dot(tile, values, acc, input_precision="ieee")
        if is_gated:
            tile = load_piece(weight + up_lines[None, :, None] * width, place, width, columns)
            up_acc = tl.dot(tile, values, up_acc, input_precision="ieee")
    y = finish(
        tl.sum(acc, 0), tl.sum(up_acc, 0), bias, addend + row[None, :] * addend_stride, lines[:, None], up_lines[:, None],
        activation, has_bias, has_addend, is_gated,
    )
    place = tl.arange(0, rows)[None, :]
    is_inside = (place < num_rows) & (own < num_outputs)[:, None]
    tl.store(out + place * num_outputs + own[:, None], y.to(out.dtype.element_ty), mask=is_inside)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: LinearTile, *, activation: Activation = "none",
    residual: Tensor | None = None, is_gated: bool = False, dtype: torch.dtype | None = None,
) -> Tensor:
    """`Ops.linear` for 1 to MAX_ROWS rows of the weights' type, in another type on request.

    is_gated: `Ops.gated` with the activation instead.
    """
    num_rows, width = x.shape
    num_outputs = len(weight) // 2 if is_gated else len(weight)
    if not tile.is_dot:
        return multiply_rows(
            x, weight, bias, tile, activation=activation, addend=residual, is_gated=is_gated, dtype=dtype or x.dtype
        )[0]
    out = torch.empty((num_rows, num_outputs), dtype=dtype or x.dtype, device=x.device)
    multiply_tiles_kernel[(triton.cdiv(num_outputs, tile.outputs),)](
        x, weight, x if bias is None else bias, x if residual is None else residual, out, num_rows, num_outputs, x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        width=width, rows=max(8, triton.next_power_of_2(num_rows)), outputs=tile.outputs, columns=tile.columns,
        parts=tile.num_warps, activation=activation, has_bias=bias is not None,
        has_addend=residual is not None, is_gated=is_gated, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )
    return out


def normed_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, tile: LinearTile, *,
    residual: Tensor | None = None, gate: Activation | None = None,
) -> tuple[Tensor, Tensor]:
    """`Ops.normed_linear` for few rows of at most triton_norm.MAX_WIDTH, all but the norm of one type; no is_dot tiles."""
    return multiply_rows(
        x, weight, bias, tile, activation=gate or "none", is_gated=gate is not None, norm=norm, eps=eps, residual=residual,
        dtype=x.dtype,
    )


def multiply_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: LinearTile, *, activation: Activation, is_gated: bool,
    dtype: torch.dtype, addend: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The product, and the sum of x and residual."""
    num_rows, width = x.shape
    num_outputs = len(weight) // 2 if is_gated else len(weight)
    out = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    total = x if residual is None else torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    multiply_rows_kernel[(triton.cdiv(num_outputs, tile.outputs) + (residual is not None),)](
        x, x if residual is None else residual, x if norm is None else norm, weight, x if bias is None else bias,
        x if addend is None else addend, out, total, eps, num_outputs, x.stride(0),
        x.stride(0) if residual is None else residual.stride(0), x.stride(0) if addend is None else addend.stride(0),
        width=width, rows=num_rows, outputs=tile.outputs, columns=tile.columns, num_pieces=tile.num_stages,
        block=triton.next_power_of_2(width), activation=activation, has_bias=bias is not None, has_addend=addend is not None,
        is_normed=norm is not None, has_residual=residual is not None, is_gated=is_gated, num_warps=tile.num_warps,
        num_stages=1,
    )
    return out, total


def choose_tile(x: Tensor, weight: Tensor, *, is_gated: bool = False) -> LinearTile:
    return tile_of(len(x), *weight.shape, is_gated, weight.element_size(), shared_bytes(x.device))


@cache
def shared_bytes(device: torch.device) -> int:
    """What the stages of a program may take."""
    if device.type != "cuda":
        return SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    most = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return min(SHARED_BYTES, most * 7 // 8)


@cache
def tile_of(
    num_rows: int, num_weights: int, width: int, is_gated: bool, element_bytes: int, most_bytes: int = SHARED_BYTES
) -> LinearTile:
    """The measured tile of a shape, or one that is good for most. num_weights: rows of the weights."""
    rows = triton.next_power_of_2(num_rows)
    copies = 2 if is_gated else 1
    tuned = TUNED.get((rows, num_weights, width)) if element_bytes == 2 and most_bytes == SHARED_BYTES else None
    if tuned and tuned.num_stages * (max(8, rows) + tuned.outputs * copies) * tuned.columns * element_bytes <= HOPPER_BYTES:
        return tuned
    widest = triton.next_power_of_2(width)
    if num_rows <= DIRECT_ROWS:
        outputs = 2 if num_weights <= 2048 or is_gated else 4
        columns = min(widest, 1024 if most_bytes == SHARED_BYTES else 512)
        num_stages = 1 if num_rows * width <= UNROLLED_COLUMNS else 3
        return LinearTile(outputs, columns, max(1, columns // COLUMNS_PER_WARP), num_stages)
    outputs, columns = (16 if num_weights <= 4096 else 32), max(64, min(widest, 1024 // element_bytes))
    stage_bytes = (max(8, rows) + outputs * copies) * columns * element_bytes
    return LinearTile(outputs, columns, 4, max(1, min(4, most_bytes // stage_bytes)), is_dot=True)
