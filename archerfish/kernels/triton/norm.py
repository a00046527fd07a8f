"""Triton kernels over the rows of activations: lookup, RMS normalisation with the residual added on the way, gated
product, and from the product of queries, keys and values to what attention reads (split, norm, rotate, store in
blocks).

Each reads its input once and writes its output once, which is all that bounds it. In `store_kv_kernel` one program
takes one token with all its heads, so that its row of the rotary table is read once; where tokens are few, three
programs do. A head lies as the two halves that are rotated together, and behind them the rest that is not rotated.

No `from __future__ import annotations` in files with kernels: Triton's interpreter knows `tl.constexpr` only as an
object.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from archerfish.kernels.ops import HeadShape, KVLayer, PagedBatch, Rotation
from archerfish.kernels.stored import FP8_LARGEST, LARGEST_INT8
from archerfish.kernels.triton.launch import early_start, follow
from archerfish.kernels.triton.tiles import cdiv, next_power_of_2

Tensor = torch.Tensor
MAX_WIDTH = 16384  # of a row that one program normalises
GATED_BLOCK = 2048  # columns of a program
FP8_MOST = tl.constexpr(FP8_LARGEST)
ELEMENTS_PER_WARP = 1024
FEW_TOKENS = 32  # up to which queries, keys and values have a program each


@triton.jit(do_not_specialize_on_alignment=["ids"])
def lookup_kernel(
    table, ids, out, scale, table_stride, width: tl.constexpr, block: tl.constexpr, is_early: tl.constexpr
):
    follow(is_early)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    is_inside = columns < width
    line = table + tl.load(ids + row).to(tl.int64) * table_stride
    values = tl.load(line + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, values * scale, mask=is_inside)


def lookup(table: Tensor, ids: Tensor, scale: float) -> Tensor:
    """`Ops.lookup` in float32, for rows of at most MAX_WIDTH."""
    num_rows, width = len(ids), table.shape[1]
    out = torch.empty((num_rows, width), dtype=torch.float32, device=table.device)
    if num_rows:
        block = next_power_of_2(width)
        lookup_kernel[(num_rows,)](
            table,
            ids,
            out,
            scale,
            table.stride(0),
            width=width,
            block=block,
            num_warps=max(1, min(16, block // 512)),
            **early_start(table.device),
        )
    return out


@triton.jit
def store_row(out, scales, row, columns, values, width: tl.constexpr):
    """A row in the type of out: FP8 or int8 with a scale where there are scales."""
    if scales is not None:
        most: tl.constexpr = 127.0 if out.dtype.element_ty == tl.int8 else FP8_MOST
        largest = tl.max(tl.abs(values), 0)
        scale = tl.where(largest > 0, largest / most, 1.0)
        values = values / scale
        if out.dtype.element_ty == tl.int8:
            values = tl.floor(values + 0.5)
        tl.store(scales + row, scale)
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    scales,
    total,
    eps,
    x_stride,
    residual_stride,
    width: tl.constexpr,
    block: tl.constexpr,
    has_residual: tl.constexpr,
    is_early: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    is_inside = columns < width
    factors = tl.load(weight + columns, mask=is_inside, other=0.0)
    follow(is_early)
    values = tl.load(x + row * x_stride + columns, mask=is_inside, other=0.0)
    if has_residual:
        added = tl.load(residual + row * residual_stride + columns, mask=is_inside, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * width + columns, values, mask=is_inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    store_row(normed, scales, row, columns, wide * scale * factors, width)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, dtype: torch.dtype, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`Ops.rms_norm` for rows of at most MAX_WIDTH, with a result of some type. scales: are written, for FP8 and
    int8."""
    num_rows, width = x.shape
    normed = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    added = x if residual is None else residual
    total = x if residual is None else torch.empty_like(normed, dtype=torch.promote_types(x.dtype, added.dtype))
    if not num_rows:
        return normed, total
    block = next_power_of_2(width)
    rms_norm_kernel[(num_rows,)](
        x,
        added,
        weight,
        normed,
        scales,
        total,
        eps,
        x.stride(0),
        added.stride(0),
        width=width,
        block=block,
        has_residual=residual is not None,
        num_warps=max(1, min(16, block // 512)),
        **early_start(x.device),
    )
    return normed, total


@triton.jit
def gated_kernel(x, row_scales, scales, out, x_stride, width: tl.constexpr, block: tl.constexpr, is_silu: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < width
    gate = tl.load(x + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + columns, mask=is_inside, other=0.0).to(tl.float32)
    if scales is not None:
        scale = tl.load(row_scales + row)
        gate *= scale * tl.load(scales + columns, mask=is_inside, other=0.0)
        up *= scale * tl.load(scales + width + columns, mask=is_inside, other=0.0)
    if is_silu:
        slope = gate
    else:  # gelu: (1 + tanh(y)) / 2 is the logistic function of 2 y
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * width + columns, (gate / (1.0 + tl.exp(-slope)) * up).to(out.dtype.element_ty), mask=is_inside)


def gated(
    x: Tensor,
    is_silu: bool,
    row_scales: Tensor | None = None,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`Ops.gated` with silu, or else with gelu_tanh. Scales of rows and of columns are applied to x first."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=dtype or x.dtype, device=x.device)
    if num_rows:
        block = min(next_power_of_2(width), GATED_BLOCK)
        gated_kernel[(num_rows, cdiv(width, block))](
            x,
            row_scales,
            scales,
            out,
            x.stride(0),
            width=width,
            block=block,
            is_silu=is_silu,
            num_warps=max(1, block // 512),
        )
    return out


@triton.jit
def quantise_kernel(x, out, scales, x_stride, width: tl.constexpr, block: tl.constexpr, is_early: tl.constexpr):
    follow(is_early)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    is_inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    store_row(out, scales, row, columns, values, width)


def quantise_rows(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Rows in FP8 or int8, and the (rows, 1) scale of each."""
    (num_rows, width), block = x.shape, next_power_of_2(x.shape[1])
    is_int8 = dtype == torch.int8
    if not (x.is_cuda or is_int8) or block > MAX_WIDTH:  # Triton's interpreter has no FP8
        largest = x.float().abs().amax(1, keepdim=True)
        scales = torch.where(largest > 0, largest / (LARGEST_INT8 if is_int8 else FP8_LARGEST), 1.0)
        codes = x.float() / scales
        return (codes.round() if is_int8 else codes).to(dtype), scales
    out = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    scales = new_scales(x)
    quantise_kernel[(num_rows,)](
        x,
        out,
        scales,
        x.stride(0),
        width=width,
        block=block,
        num_warps=max(1, min(16, block // 512)),
        **early_start(x.device),
    )
    return out, scales


def new_scales(x: Tensor) -> Tensor:
    """Memory for a scale of each row."""
    return torch.empty((len(x), 1), dtype=torch.float32, device=x.device)


@triton.jit
def add_scaled_kernel(
    total,
    x,
    row_scales,
    scales,
    out,
    total_stride,
    width: tl.constexpr,
    block: tl.constexpr,
    has_total: tl.constexpr,
    is_early: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < width
    factors = tl.load(scales + columns, mask=is_inside, other=0.0)
    follow(is_early)
    values = (
        tl.load(x + row * width + columns, mask=is_inside, other=0.0).to(tl.float32)
        * tl.load(row_scales + row)
        * factors
    )
    if has_total:
        values += tl.load(total + row * total_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=is_inside)


def add_scaled(total: Tensor | None, x: Tensor, row_scales: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """x with scales of rows and of columns, added to total; in a type."""
    (num_rows, width), out = x.shape, torch.empty_like(x, dtype=dtype)
    block, given = min(next_power_of_2(width), GATED_BLOCK), x if total is None else total
    add_scaled_kernel[(num_rows, cdiv(width, block))](
        given,
        x,
        row_scales,
        scales,
        out,
        given.stride(0),
        width=width,
        block=block,
        has_total=total is not None,
        num_warps=max(1, block // 512),
        **early_start(x.device),
    )
    return out


@triton.jit
def to_kv(values, kind: tl.constexpr):
    """Keys or values in the type of their memory, which may end early."""
    if kind == tl.float8e4nv:
        values = tl.minimum(tl.maximum(values, -FP8_MOST), FP8_MOST)
    return values.to(kind)


@triton.jit
def move_heads(
    source,
    target,
    target_stride,
    scales,
    norm,
    cos,
    sin,
    eps,
    is_written,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    rows: tl.constexpr,
    half_block: tl.constexpr,
    rest_block: tl.constexpr,
    is_rotated: tl.constexpr,
    norm_dim: tl.constexpr,
    is_interleaved: tl.constexpr,
):
    """Heads that lie one after the other at source, to target with a stride between them.

    norm_dim: factors of the norm, of one head or of all; 0: none.
    """
    heads = tl.arange(0, rows)[:, None]
    pair = tl.arange(0, half_block)[None, :]
    is_pair = (heads < num_heads) & (pair < half)
    first = 2 * pair if is_interleaved else pair
    second = first + 1 if is_interleaved else half + pair
    low = tl.load(source + heads * head_dim + first, mask=is_pair, other=0.0).to(tl.float32)
    high = tl.load(source + heads * head_dim + second, mask=is_pair, other=0.0).to(tl.float32)
    if rest_block > 0:
        place = 2 * half + tl.arange(0, rest_block)[None, :]
        is_rest = (heads < num_heads) & (place < head_dim)
        rest = tl.load(source + heads * head_dim + place, mask=is_rest, other=0.0).to(tl.float32)
    if norm_dim > 0:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if rest_block > 0:
            squares += tl.sum(rest * rest, 1)
        if norm_dim > head_dim:
            squares = tl.zeros((rows,), tl.float32) + tl.sum(squares, 0)
            norm += heads * head_dim
        scale = tl.rsqrt(squares / norm_dim + eps)[:, None]
        is_factor = is_pair if norm_dim > head_dim else pair < half
        low = low * scale * tl.load(norm + first, mask=is_factor, other=0.0)
        high = high * scale * tl.load(norm + second, mask=is_factor, other=0.0)
        if rest_block > 0:
            is_factor = is_rest if norm_dim > head_dim else place < head_dim
            rest = rest * scale * tl.load(norm + place, mask=is_factor, other=0.0)
    if is_rotated:
        rotated = low * cos - high * sin
        high = high * cos + low * sin
        low = rotated
    kind: tl.constexpr = target.dtype.element_ty
    if scales is not None:
        own = tl.load(scales + heads, mask=heads < num_heads, other=1.0)
        low /= own
        high /= own
        if rest_block > 0:
            rest /= own
    tl.store(target + heads * target_stride + first, to_kv(low, kind), mask=is_pair & is_written)
    tl.store(target + heads * target_stride + second, to_kv(high, kind), mask=is_pair & is_written)
    if rest_block > 0:
        tl.store(target + heads * target_stride + place, to_kv(rest, kind), mask=is_rest & is_written)


@triton.jit
def rotation_factors(cos_sin, norm, head_dim: tl.constexpr, is_rotated: tl.constexpr, is_normed: tl.constexpr):
    """What `rotate_heads` multiplies a head's values by, and those half a head away. head_dim is a power of 2."""
    half: tl.constexpr = head_dim // 2
    dims = tl.arange(0, head_dim)[None, :]
    own = tl.full((1, head_dim), 1.0, tl.float32)
    other = tl.zeros((1, head_dim), tl.float32)
    if is_normed:
        own = tl.load(norm + dims).to(tl.float32)
    if is_rotated:
        own *= tl.load(cos_sin + dims % half)
        other = tl.where(dims < half, -1.0, 1.0) * tl.load(cos_sin + half + dims % half)
        if is_normed:
            other *= tl.load(norm + (dims + half) % head_dim)
    return own, other


@triton.jit
def load_heads(source, is_inside, head_dim: tl.constexpr):
    """Rows of heads of whole width, and their values half a head away."""
    dims = tl.arange(0, head_dim)[None, :]
    values = tl.load(source + dims, mask=is_inside, other=0.0)
    return values, tl.load(source + (dims + head_dim // 2) % head_dim, mask=is_inside, other=0.0)


@triton.jit
def rotate_heads(loaded, factors, eps, head_dim: tl.constexpr, is_normed: tl.constexpr):
    """What `load_heads` gave, in float32: normalised, and all of each rotated."""
    values = loaded[0].to(tl.float32)
    rotated = values * factors[0] + loaded[1].to(tl.float32) * factors[1]
    if is_normed:
        rotated = rotated * tl.rsqrt(tl.sum(values * values, 1) / head_dim + eps)[:, None]
    return rotated


@triton.jit(do_not_specialize=["num_tokens"])
def store_kv_kernel(
    qkv,
    q,
    keys,
    values,
    kv_scales,
    slots,
    positions,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    num_tokens,
    qkv_stride,
    cos_sin_stride,
    block_stride,
    token_stride,
    head_stride,
    block_size: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    q_rows: tl.constexpr,
    kv_rows: tl.constexpr,
    half_block: tl.constexpr,
    rest_block: tl.constexpr,
    is_rotated: tl.constexpr,
    q_norm_dim: tl.constexpr,
    k_norm_dim: tl.constexpr,
    is_interleaved: tl.constexpr,
    is_early: tl.constexpr,
):
    follow(is_early)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, half_block)[None, :]
    if is_rotated:
        table = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride + pair
        cos = tl.load(table, mask=pair < half, other=0.0)
        sin = tl.load(table + half, mask=pair < half, other=0.0)
    else:
        cos = 1.0
        sin = 0.0
    source = qkv + token * qkv_stride
    part = tl.program_id(1)
    if (part == 0) | (tl.num_programs(1) == 1):
        move_heads(
            source,
            q + token * num_heads * head_dim,
            head_dim,
            None,
            q_norm,
            cos,
            sin,
            eps,
            token >= 0,
            num_heads,
            head_dim,
            half,
            q_rows,
            half_block,
            rest_block,
            is_rotated,
            q_norm_dim,
            is_interleaved,
        )
    slot = tl.load(slots + token).to(tl.int64)
    is_stored = (token < num_tokens) & (slot >= 0)
    place = slot // block_size * block_stride + slot % block_size * token_stride
    source += num_heads * head_dim
    if (part == 1) | (tl.num_programs(1) == 1):
        move_heads(
            source,
            keys + place,
            head_stride,
            kv_scales,
            k_norm,
            cos,
            sin,
            eps,
            is_stored,
            num_kv_heads,
            head_dim,
            half,
            kv_rows,
            half_block,
            rest_block,
            is_rotated,
            k_norm_dim,
            is_interleaved,
        )
    source += num_kv_heads * head_dim
    if (part == 2) | (tl.num_programs(1) == 1):
        value_scales = None if kv_scales is None else kv_scales + num_kv_heads
        move_heads(
            source,
            values + place,
            head_stride,
            value_scales,
            k_norm,
            cos,
            sin,
            eps,
            is_stored,
            num_kv_heads,
            head_dim,
            half,
            kv_rows,
            half_block,
            rest_block,
            False,
            0,
            False,
        )


def store_kv(
    qkv: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, rotation: Rotation[Tensor]
) -> Tensor:
    """`Ops.store_kv`. A token whose slot is negative is not stored: the filling of a captured graph."""
    head_dim = heads.head_dim
    rotary = rotation.rotary
    q_norm = rotation.q_norm
    k_norm = rotation.k_norm
    q = torch.empty((len(qkv), heads.num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    if not len(qkv):
        return q
    half = head_dim // 2 if rotary is None else rotary.rotary_dim // 2
    rest = head_dim - 2 * half
    block_stride, token_stride, head_stride, _ = kv.keys.stride()
    q_rows = next_power_of_2(heads.num_heads)
    table = qkv if rotary is None else rotary.cos_sin
    store_kv_kernel[(len(qkv), 3 if len(qkv) <= FEW_TOKENS else 1)](
        qkv,
        q,
        *kv,
        batch.slots,
        batch.positions,
        table,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        rotation.eps,
        batch.num_tokens,
        qkv.stride(0),
        table.stride(0),
        block_stride,
        token_stride,
        head_stride,
        block_size=batch.block_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=head_dim,
        half=half,
        q_rows=q_rows,
        kv_rows=next_power_of_2(heads.num_kv_heads),
        half_block=next_power_of_2(half),
        rest_block=next_power_of_2(rest) if rest else 0,
        is_rotated=rotary is not None,
        q_norm_dim=0 if q_norm is None else len(q_norm),
        k_norm_dim=0 if k_norm is None else len(k_norm),
        is_interleaved=rotary is not None and rotary.is_interleaved,
        num_warps=max(1, min(8, next_power_of_2(q_rows * head_dim) // ELEMENTS_PER_WARP)),
        **early_start(qkv.device),
    )
    return q


@triton.jit
def turn_kernel(
    qkv,
    positions,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    qkv_stride,
    cos_sin_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    q_rows: tl.constexpr,
    kv_rows: tl.constexpr,
    half_block: tl.constexpr,
    rest_block: tl.constexpr,
    is_rotated: tl.constexpr,
    q_norm_dim: tl.constexpr,
    k_norm_dim: tl.constexpr,
    is_interleaved: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, half_block)[None, :]
    if is_rotated:
        table = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride + pair
        cos = tl.load(table, mask=pair < half, other=0.0)
        sin = tl.load(table + half, mask=pair < half, other=0.0)
    else:
        cos = 1.0
        sin = 0.0
    source = qkv + token * qkv_stride
    move_heads(
        source,
        source,
        head_dim,
        None,
        q_norm,
        cos,
        sin,
        eps,
        token >= 0,
        num_heads,
        head_dim,
        half,
        q_rows,
        half_block,
        rest_block,
        is_rotated,
        q_norm_dim,
        is_interleaved,
    )
    source += num_heads * head_dim
    move_heads(
        source,
        source,
        head_dim,
        None,
        k_norm,
        cos,
        sin,
        eps,
        token >= 0,
        num_kv_heads,
        head_dim,
        half,
        kv_rows,
        half_block,
        rest_block,
        is_rotated,
        k_norm_dim,
        is_interleaved,
    )


def rotated(qkv: Tensor, positions: Tensor, heads: HeadShape, rotation: Rotation[Tensor]) -> Tensor:
    """`Ops.rotated`, in the memory of qkv. Rows that have no position are filling and stay as they are."""
    head_dim = heads.head_dim
    rotary = rotation.rotary
    q_norm = rotation.q_norm
    k_norm = rotation.k_norm
    half = head_dim // 2 if rotary is None else rotary.rotary_dim // 2
    rest, table = head_dim - 2 * half, qkv if rotary is None else rotary.cos_sin
    q_rows = next_power_of_2(heads.num_heads)
    turn_kernel[(len(positions),)](
        qkv,
        positions,
        table,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        rotation.eps,
        qkv.stride(0),
        table.stride(0),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=head_dim,
        half=half,
        q_rows=q_rows,
        kv_rows=next_power_of_2(heads.num_kv_heads),
        half_block=next_power_of_2(half),
        rest_block=next_power_of_2(rest) if rest else 0,
        is_rotated=rotary is not None,
        q_norm_dim=0 if q_norm is None else len(q_norm),
        k_norm_dim=0 if k_norm is None else len(k_norm),
        is_interleaved=rotary is not None and rotary.is_interleaved,
        num_warps=max(1, min(8, next_power_of_2(q_rows * head_dim) // ELEMENTS_PER_WARP)),
    )
    return qkv
