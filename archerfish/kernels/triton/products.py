"""Kernels of matrix products with few rows of activations, where reading the weights is all that takes time.

`multiply_rows_kernel` is for a handful of rows: a program multiplies the weights of some outputs with every row in
float32 and adds up at the end. It can normalise the rows on the way: the scale of a row is known when its last column
has been read, and is applied to the sums. `stream_kernel` is for one wide row: its programs are persistent, so that
they read and normalise it once.
`multiply_tiles_kernel` is for more rows: it uses the tensor cores, each warp for its own part of the columns.
`add_rows_kernel` is for a batch of rows and outputs so few that cuBLAS leaves most of a card idle, or needs a second
kernel to add up parts.

Activation, gate and residual are applied before anything is written, and the result of a row depends on no other row.
Weights may be integers with a scale for each output, which is applied to the finished sum; without scales nothing is
compiled for them. No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from archerfish.kernels import ops
from archerfish.kernels.triton.launch import fetch_early, follow

SWIGLU_LIMIT, SWIGLU_ALPHA = tl.constexpr(ops.SWIGLU_LIMIT), tl.constexpr(ops.SWIGLU_ALPHA)


@triton.jit
def activate(x, activation: tl.constexpr):
    if activation == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation == "gelu_tanh":  # (1 + tanh(y)) / 2 is the logistic function of 2 y
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif activation == "relu":
        x = tl.maximum(x, 0.0)
    elif activation == "relu_squared":
        x = tl.maximum(x, 0.0)
        x = x * x
    elif activation == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif activation == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif activation == "swiglu_oai":
        x = tl.minimum(x, SWIGLU_LIMIT, tl.PropagateNan.ALL)
        x = x / (1.0 + tl.exp(-SWIGLU_ALPHA * x))
    elif activation == "tanh":
        x = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    return x


@triton.jit
def load_addends(
    bias, residual, lines, up_lines, has_bias: tl.constexpr, has_residual: tl.constexpr, is_gated: tl.constexpr
):
    """What is added to a product, and to its upper half: loaded before the weights, so that nothing waits for it."""
    added = 0.0
    up_added = 0.0
    if has_bias:
        added += tl.load(bias + lines).to(tl.float32)
        if is_gated:
            up_added += tl.load(bias + up_lines).to(tl.float32)
    if has_residual:
        added += tl.load(residual + lines).to(tl.float32)
    return added, up_added


@triton.jit
def load_scales(scales, lines, up_lines, is_gated: tl.constexpr):
    """The scales of outputs, and of their upper half; 1 where there are none."""
    scale = 1.0
    up_scale = 1.0
    if scales is not None:
        scale = tl.load(scales + lines)
        if is_gated:
            up_scale = tl.load(scales + up_lines)
    return scale, up_scale


@triton.jit
def finish(y, up, added, up_added, activation: tl.constexpr, is_gated: tl.constexpr):
    """All that follows a product; up counts only with is_gated."""
    y = activate(y + added, activation)
    if is_gated:
        up += up_added
        if activation == "swiglu_oai":
            up = tl.clamp(up, -SWIGLU_LIMIT, SWIGLU_LIMIT, tl.PropagateNan.ALL) + 1.0
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
def load_row(x, weight, place, width: tl.constexpr, columns: tl.constexpr):
    """A piece of a row, in float32.

    The compiler spreads loads of a shape over threads by their widest vectors: a load of weights that never happens
    keeps a row in float32 from lying in other threads than those that it is multiplied in.
    """
    piece = load_piece(x, place, width, columns).to(tl.float32)
    if x.dtype.element_ty == tl.float32 and weight.dtype.element_ty.primitive_bitwidth == 16:
        piece += tl.load(weight + place, mask=place < 0, other=0.0).to(tl.float32)
    return piece


@triton.jit
def append(items, item):
    return items + (item,)  # noqa: RUF005 (Triton knows no other way)


@triton.jit
def append_group(items, group):
    """As `append`, for tuples: Triton takes functions of one name for the same if what is in their arguments is."""
    return items + (group,)  # noqa: RUF005


@triton.jit
def zeros(num: tl.constexpr, height: tl.constexpr, width: tl.constexpr):
    made = ()
    for _ in tl.static_range(num):
        made = append(made, tl.zeros((height, width), tl.float32))
    return made


@triton.jit
def load_weights(
    weight,
    up_weight,
    norm,
    start,
    width: tl.constexpr,
    columns: tl.constexpr,
    is_normed: tl.constexpr,
    is_gated: tl.constexpr,
):
    """Of the columns from start on: weights, those of the upper half, and factors of the norm; weights where there are
    none."""
    place = start + tl.arange(0, columns)[None, :]
    tile = load_piece(weight, place, width, columns)
    up_tile = load_piece(up_weight, place, width, columns) if is_gated else tile
    factors = load_piece(norm, place, width, columns) if is_normed else tile
    return tile, up_tile, factors


@triton.jit
def add_piece(
    sums,
    up_sums,
    squares,
    x,
    weight,
    weights,
    start,
    x_stride,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    is_normed: tl.constexpr,
    is_gated: tl.constexpr,
):
    """The columns from start on, of which `load_weights` has loaded the weights, taken into the sums of every row."""
    place = start + tl.arange(0, columns)[None, :]
    tile = weights[0].to(tl.float32)
    up_tile = weights[1].to(tl.float32)
    new_sums = ()
    new_up_sums = ()
    new_squares = ()
    for row in tl.static_range(rows):
        values = load_row(x + row * x_stride, weight, place, width, columns)
        if is_normed:
            new_squares = append(new_squares, squares[row] + values * values)
            values = values * weights[2]
        new_sums = append(new_sums, sums[row] + tile * values)
        if is_gated:
            new_up_sums = append(new_up_sums, up_sums[row] + up_tile * values)
    return new_sums, new_up_sums, new_squares


@triton.jit
def multiply_rows_kernel(
    x,
    norm,
    weight,
    scales,
    bias,
    residual,
    out,
    eps,
    num_outputs,
    x_stride,
    residual_stride,
    width: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    columns: tl.constexpr,
    num_pieces: tl.constexpr,
    activation: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    is_normed: tl.constexpr,
    is_gated: tl.constexpr,
    is_early: tl.constexpr,
):
    """num_pieces in flight; 1: all are, from before the kernel in front has ended."""
    own = tl.program_id(0) * outputs + tl.arange(0, outputs)
    lines = tl.minimum(own, num_outputs - 1).to(tl.int64)
    up_lines = lines + num_outputs
    tile = weight + lines[:, None] * width
    up_tile = weight + up_lines[:, None] * width
    pieces = ()
    if num_pieces == 1:
        for start in tl.static_range(0, width, columns):
            pieces = append_group(pieces, load_weights(tile, up_tile, norm, start, width, columns, is_normed, is_gated))
    output_scale, up_scale = load_scales(scales, lines, up_lines, is_gated)
    follow(is_early)
    addends = ()
    for row in tl.static_range(rows):
        row_residual = residual + row * residual_stride
        given = load_addends(bias, row_residual, lines, up_lines, has_bias, has_residual, is_gated)
        addends = append_group(addends, given)
    sums = zeros(rows, outputs, columns)
    up_sums = zeros(rows * is_gated, outputs, columns)
    squares = zeros(rows * is_normed, 1, columns)
    if num_pieces == 1:
        for piece in tl.static_range(0, (width + columns - 1) // columns):
            sums, up_sums, squares = add_piece(
                sums,
                up_sums,
                squares,
                x,
                weight,
                pieces[piece],
                piece * columns,
                x_stride,
                width,
                rows,
                columns,
                is_normed,
                is_gated,
            )
    else:
        for start in tl.range(0, width, columns, num_stages=num_pieces):
            weights = load_weights(tile, up_tile, norm, start, width, columns, is_normed, is_gated)
            sums, up_sums, squares = add_piece(
                sums, up_sums, squares, x, weight, weights, start, x_stride, width, rows, columns, is_normed, is_gated
            )
    for row in tl.static_range(rows):
        y = tl.sum(sums[row], 1)
        up = tl.sum(up_sums[row], 1) if is_gated else y
        if is_normed:
            scale = tl.rsqrt(tl.sum(tl.sum(squares[row], 1), 0) / width + eps)
            y *= scale
            up *= scale
        if scales is not None:
            y *= output_scale
            up *= up_scale
        y = finish(y, up, addends[row][0], addends[row][1], activation, is_gated)
        tl.store(out + row * num_outputs + own, y.to(out.dtype.element_ty), mask=own < num_outputs)


@triton.jit(do_not_specialize=["num_rounds"])
def stream_kernel(
    x,
    norm,
    weight,
    scales,
    bias,
    residual,
    out,
    eps,
    num_outputs,
    num_rounds,
    width: tl.constexpr,
    outputs: tl.constexpr,
    columns: tl.constexpr,
    num_pieces: tl.constexpr,
    activation: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    is_normed: tl.constexpr,
    is_gated: tl.constexpr,
    is_early: tl.constexpr,
):
    """One row of x. Programs are persistent: each reads the row once, and the weights of one tile of outputs in each
    round.

    The weights of the first rounds are on their way before the kernel in front has ended.
    """
    first = tl.program_id(0)
    place = tl.arange(0, columns)[None, :]
    values = tl.zeros((1, columns), tl.float32)
    for number in tl.range(0, num_rounds, num_stages=num_pieces):
        own = (number * tl.num_programs(0) + first) * outputs + tl.arange(0, outputs)
        own_lines = tl.minimum(own, num_outputs - 1).to(tl.int64)
        up_lines = own_lines + num_outputs
        tile = load_piece(weight + own_lines[:, None] * width, place, width, columns)
        if is_gated:
            up_tile = load_piece(weight + up_lines[:, None] * width, place, width, columns)
        if number == 0:
            follow(is_early)
            values = load_piece(x, place, width, columns).to(tl.float32)
            if is_normed:
                values = (
                    values * tl.rsqrt(tl.sum(values * values) / width + eps) * load_piece(norm, place, width, columns)
                )
        added, up_added = load_addends(bias, residual, own_lines, up_lines, has_bias, has_residual, is_gated)
        y = tl.sum(tile.to(tl.float32) * values, 1)
        up = tl.sum(up_tile.to(tl.float32) * values, 1) if is_gated else y
        if scales is not None:
            scale, up_scale = load_scales(scales, own_lines, up_lines, is_gated)
            y *= scale
            up *= up_scale
        y = finish(y, up, added, up_added, activation, is_gated)
        tl.store(out + own, y.to(out.dtype.element_ty), mask=own < num_outputs)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_tiles_kernel(
    x,
    weight,
    scales,
    bias,
    residual,
    out,
    num_rows,
    num_outputs,
    x_stride,
    residual_stride,
    width: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    columns: tl.constexpr,
    parts: tl.constexpr,
    activation: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    is_gated: tl.constexpr,
    is_early: tl.constexpr,
):
    """Rows past the last are the last again, and are not written."""
    own = tl.program_id(0) * outputs + tl.arange(0, outputs)
    lines = tl.minimum(own, num_outputs - 1).to(tl.int64)
    up_lines = lines + num_outputs
    row = tl.minimum(tl.arange(0, rows), num_rows - 1)
    follow(is_early)
    added, up_added = load_addends(
        bias,
        residual + row[None, :] * residual_stride,
        lines[:, None],
        up_lines[:, None],
        has_bias,
        has_residual,
        is_gated,
    )
    piece = tl.arange(0, parts)[:, None, None] * (columns // parts) + tl.arange(0, columns // parts)[None, None, :]
    acc = tl.zeros((parts, outputs, rows), tl.float32)  # a warp has one part
    up_acc = tl.zeros((parts, outputs, rows), tl.float32)
    for start in range(0, width, columns):
        place = start + piece
        values = tl.permute(load_piece(x + row[None, :, None] * x_stride, place, width, columns), (0, 2, 1))
        tile = load_piece(weight + lines[None, :, None] * width, place, width, columns)
        acc = tl.dot(tile.to(values.dtype), values, acc, input_precision="ieee")
        if is_gated:
            tile = load_piece(weight + up_lines[None, :, None] * width, place, width, columns)
            up_acc = tl.dot(tile.to(values.dtype), values, up_acc, input_precision="ieee")
    y = tl.sum(acc, 0)
    up = tl.sum(up_acc, 0)
    if scales is not None:
        scale, up_scale = load_scales(scales, lines[:, None], up_lines[:, None], is_gated)
        y *= scale
        up *= up_scale
    y = finish(y, up, added, up_added, activation, is_gated)
    place = tl.arange(0, rows)[None, :]
    is_inside = (place < num_rows) & (own < num_outputs)[:, None]
    tl.store(out + place * num_outputs + own[:, None], y.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def fetch_rows(lines, width: tl.constexpr, is_early: tl.constexpr):
    """lines: addresses of rows of weights, (rows, 1), that a program is going to read."""
    step: tl.constexpr = 1024 // lines.dtype.element_ty.primitive_bitwidth
    place = tl.arange(0, triton.next_power_of_2((width + step - 1) // step)) * step
    fetch_early(lines + tl.minimum(place, width - 1)[None, :], is_early)


@triton.jit
def load_batch(x, x_stride, row, place, num_rows, width: tl.constexpr):
    """Columns of some rows, zeros past the last: were they the last again, all programs would ask for it at once."""
    is_inside = (row < num_rows)[:, None] & (place < width)[None, :]
    return tl.load(x + row[:, None] * x_stride + place[None, :], mask=is_inside, other=0.0)


@triton.jit
def multiply_rows(
    x,
    x_stride,
    row,
    num_rows,
    weight,
    lines,
    width: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    columns: tl.constexpr,
    parts: tl.constexpr,
):
    """Rows of x times lines of weights, on tensor cores: (rows, outputs). parts: 1, or one for each warp."""
    if parts > 1:
        split = tl.arange(0, parts)[:, None, None] * (columns // parts) + tl.arange(0, columns // parts)[None, None, :]
        acc = tl.zeros((parts, outputs, rows), tl.float32)
        is_row = (row < num_rows)[None, :, None]
        for start in range(0, width, columns):
            place = start + split
            values = tl.load(x + row[None, :, None] * x_stride + place, mask=is_row & (place < width), other=0.0)
            tile = load_piece(weight + lines[None, :, None] * width, place, width, columns)
            acc = tl.dot(tile.to(values.dtype), tl.permute(values, (0, 2, 1)), acc, input_precision="ieee")
        y = tl.trans(tl.sum(acc, 0))
    else:
        piece = tl.arange(0, columns)
        y = tl.zeros((rows, outputs), tl.float32)
        for start in range(0, width, columns):
            values = load_batch(x, x_stride, row, start + piece, num_rows, width)
            place = (start + piece)[:, None]
            if width % columns == 0:
                tile = tl.load(weight + lines[None, :] * width + place)
            else:
                tile = tl.load(weight + lines[None, :] * width + place, mask=place < width, other=0.0)
            y = tl.dot(values, tile.to(values.dtype), y, input_precision="ieee")
    return y


@triton.jit(do_not_specialize=["num_rows"])
def add_rows_kernel(
    x,
    weight,
    scales,
    total,
    num_rows,
    num_outputs,
    x_stride,
    total_stride,
    width: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    columns: tl.constexpr,
    parts: tl.constexpr,
    is_early: tl.constexpr,
):
    """total += x @ weight.T, in tiles of some rows and outputs."""
    own = tl.program_id(0) * outputs + tl.arange(0, outputs)
    lines = tl.minimum(own, num_outputs - 1).to(tl.int64)
    fetch_rows(weight + lines[:, None] * width, width, is_early)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    place = row[:, None] * total_stride + own[None, :]
    is_inside = (row < num_rows)[:, None] & (own < num_outputs)[None, :]
    follow(is_early)
    added = tl.load(total + place, mask=is_inside, other=0.0).to(tl.float32)
    y = multiply_rows(x, x_stride, row, num_rows, weight, lines, width, rows, outputs, columns, parts)
    if scales is not None:
        y *= tl.load(scales + lines)[None, :]
    tl.store(total + place, (y + added).to(total.dtype.element_ty), mask=is_inside)
