"""Triton kernels over the rows of activations: lookup, RMS normalisation with the residual added on the way, gated product.

Each reads its input once and writes its output once, which is all that bounds it. No `from __future__ import annotations` in
files with kernels: Triton's interpreter knows `tl.constexpr` only as an object.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from archerfish.kernels.triton.launch import early_start, follow
from archerfish.kernels.triton.tiles import cdiv, next_power_of_2

Tensor = torch.Tensor
MAX_WIDTH = 16384  # of a row that one program normalises
GATED_BLOCK = 2048  # columns of a program


@triton.jit(do_not_specialize_on_alignment=["ids"])
def lookup_kernel(table, ids, out, scale, table_stride, width: tl.constexpr, block: tl.constexpr, is_early: tl.constexpr):
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
            table, ids, out, scale, table.stride(0), width=width, block=block, num_warps=max(1, min(16, block // 512)),
            **early_start(table.device),
        )
    return out


@triton.jit
def rms_norm_kernel(
    x, residual, weight, normed, total, eps, x_stride, residual_stride,
    width: tl.constexpr, block: tl.constexpr, has_residual: tl.constexpr, is_early: tl.constexpr,
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
    tl.store(normed + row * width + columns, (wide * scale * factors).to(normed.dtype.element_ty), mask=is_inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`Ops.rms_norm` for rows of at most MAX_WIDTH, with a result of some type."""
    num_rows, width = x.shape
    normed = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    added = x if residual is None else residual
    total = x if residual is None else torch.empty_like(normed, dtype=torch.promote_types(x.dtype, added.dtype))
    if not num_rows:
        return normed, total
    block = next_power_of_2(width)
    rms_norm_kernel[(num_rows,)](
        x, added, weight, normed, total, eps, x.stride(0), added.stride(0), width=width, block=block,
        has_residual=residual is not None, num_warps=max(1, min(16, block // 512)), **early_start(x.device),
    )
    return normed, total


@triton.jit
def gated_kernel(x, out, x_stride, width: tl.constexpr, block: tl.constexpr, is_silu: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < width
    gate = tl.load(x + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + columns, mask=is_inside, other=0.0).to(tl.float32)
    if is_silu:
        slope = gate
    else:  # gelu: (1 + tanh(y)) / 2 is the logistic function of 2 y
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * width + columns, (gate / (1.0 + tl.exp(-slope)) * up).to(out.dtype.element_ty), mask=is_inside)


def gated(x: Tensor, is_silu: bool) -> Tensor:
    """`Ops.gated` with silu, or else with gelu_tanh."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(next_power_of_2(width), GATED_BLOCK)
        gated_kernel[(num_rows, cdiv(width, block))](
            x, out, x.stride(0), width=width, block=block, is_silu=is_silu, num_warps=max(1, block // 512)
        )
    return out
