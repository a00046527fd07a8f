"""Matrix products with few rows of activations: launches of the kernels in `triton/products.py`."""
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from archerfish.kernels.ops import Activation, PackedWeight
from archerfish.kernels.triton.launch import early_start
from archerfish.kernels.triton.products import (
    add_rows_kernel,
    add_shares_kernel,
    gate_tiles_kernel,
    multiply_rows_kernel,
    multiply_shares_kernel,
    multiply_tiles_kernel,
    stream_kernel,
)
from archerfish.kernels.triton.tiles import AddTile, GateTile, LinearTile, ShareTile, cdiv, next_power_of_2

Tensor = torch.Tensor
SUMS_BLOCK = 512  # sums of a program that adds shares to them
ROW_TILES = 8  # that programs of `gate_tiles_kernel` have in common


def linear(
    x: Tensor, packed: PackedWeight[Tensor], tile: LinearTile, *, activation: Activation = "none",
    residual: Tensor | None = None, is_gated: bool = False, norm: Tensor | None = None, eps: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`Ops.linear` for 1 to MAX_ROWS rows of the weights' type, or any with int8 weights; in another type on request.

    is_gated: `Ops.gated` with the activation follows. norm: of x, at first, by these factors; not with is_dot tiles, without
    which x may also be float32.
    residual: not what the kernel right in front writes, which x may be; it is read before that has ended.
    """
    weight, bias, (num_rows, width) = packed.matrix, packed.bias, x.shape
    num_outputs = len(weight) // 2 if is_gated else len(weight)
    out = torch.empty((num_rows, num_outputs), dtype=dtype or x.dtype, device=x.device)
    num_tiles = cdiv(num_outputs, tile.outputs)
    given: dict[str, Any] = {
        "x": x, "weight": weight, "scales": packed.scales, "bias": x if bias is None else bias,
        "residual": x if residual is None else residual, "out": out, "num_outputs": num_outputs, "width": width,
        "outputs": tile.outputs, "activation": activation, "has_bias": bias is not None, "has_residual": residual is not None,
        "is_gated": is_gated, "num_warps": tile.num_warps, **early_start(x.device),
    }
    if not tile.is_dot:
        given |= {"norm": x if norm is None else norm, "eps": eps, "is_normed": norm is not None}
        given |= {"num_pieces": tile.num_stages, "num_stages": 1}
    if tile.num_programs:
        num_programs = min(num_tiles, tile.num_programs)
        stream_kernel[(num_programs,)](
            num_turns=cdiv(num_tiles, num_programs), columns=next_power_of_2(width), **given
        )
        return out
    given |= {"x_stride": x.stride(0), "residual_stride": x.stride(0) if residual is None else residual.stride(0)}
    if tile.is_dot:
        multiply_tiles_kernel[(num_tiles,)](
            num_rows=num_rows, rows=max(8, next_power_of_2(num_rows)), columns=tile.columns, parts=tile.num_warps,
            num_stages=tile.num_stages, **given,
        )
    else:
        multiply_rows_kernel[(num_tiles,)](rows=num_rows, columns=tile.columns, **given)
    return out


def add_rows(total: Tensor, x: Tensor, packed: PackedWeight[Tensor], tile: AddTile) -> Tensor:
    """total + x @ matrix.T, in total's memory."""
    (num_rows, width), num_outputs = x.shape, len(packed.matrix)
    add_rows_kernel[(cdiv(num_outputs, tile.outputs), cdiv(num_rows, tile.rows))](
        x, packed.matrix, packed.scales, total, num_rows, num_outputs, x.stride(0), total.stride(0), width=width,
        rows=tile.rows, outputs=tile.outputs, columns=tile.columns, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **early_start(x.device),
    )
    return total


def multiply_shares(x: Tensor, packed: PackedWeight[Tensor], tile: ShareTile) -> Tensor:
    """(shares, rows, outputs) that add up to x @ matrix.T."""
    (num_rows, width), num_outputs = x.shape, len(packed.matrix)
    num_shares = cdiv(width, tile.span)
    out = torch.empty((num_shares, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    multiply_shares_kernel[(cdiv(num_outputs, tile.outputs), num_shares, cdiv(num_rows, tile.rows))](
        x, packed.matrix, packed.scales, out, num_rows, num_outputs, x.stride(0), width=width, span=tile.span, rows=tile.rows,
        outputs=tile.outputs, columns=tile.columns, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **early_start(x.device),
    )
    return out


def add_shares(sums: Tensor, shares: Tensor) -> Tensor:
    """Contiguous sums with all shares added."""
    out = torch.empty_like(sums)
    add_shares_kernel[(cdiv(sums.numel(), SUMS_BLOCK),)](
        sums, shares, out, sums.numel(), num_shares=len(shares), block=SUMS_BLOCK, num_warps=4
    )
    return out


def gate_tiles(x: Tensor, matrix: Tensor, tile: GateTile, activation: Activation) -> Tensor:
    """`Ops.gated` of x @ matrix.T."""
    (num_rows, width), num_outputs = x.shape, len(matrix) // 2
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    gate_tiles_kernel[(cdiv(num_rows, tile.rows) * cdiv(num_outputs, tile.outputs),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.columns]),
        TensorDescriptor.from_tensor(matrix, [tile.outputs, tile.columns]),
        TensorDescriptor.from_tensor(out, [tile.rows, tile.outputs]), num_rows, num_outputs, width=width, rows=tile.rows,
        outputs=tile.outputs, columns=tile.columns, row_tiles=ROW_TILES, activation=activation, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
