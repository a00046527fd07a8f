"""Matrix products with few rows of activations: launches of the kernels in `triton_products`."""
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton

from archerfish.kernels.ops import Activation
from archerfish.kernels.triton_launch import early_start
from archerfish.kernels.triton_products import multiply_rows_kernel, multiply_tiles_kernel, stream_kernel
from archerfish.kernels.triton_tiles import LinearTile

Tensor = torch.Tensor
LINE_BYTES = 128  # of the card's cache
NEXT_BYTES = 16 << 20  # of weights that are fetched while the product before them ends; of more, fetching costs what it saves
NUM_FETCHERS = 1024  # programs that do, at most


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: LinearTile, *, activation: Activation = "none",
    residual: Tensor | None = None, is_gated: bool = False, norm: Tensor | None = None, eps: float = 0.0,
    dtype: torch.dtype | None = None, upcoming: Tensor | None = None,
) -> Tensor:
    """`Ops.linear` for 1 to MAX_ROWS rows of the weights' type, in another type on request.

    is_gated: `Ops.gated` with the activation follows. norm: of x, at first, by these factors; not with is_dot tiles.
    upcoming: weights that are probably used next.
    """
    num_rows, width = x.shape
    num_outputs = len(weight) // 2 if is_gated else len(weight)
    out = torch.empty((num_rows, num_outputs), dtype=dtype or x.dtype, device=x.device)
    num_tiles = triton.cdiv(num_outputs, tile.outputs)
    given: dict[str, Any] = {
        "x": x, "weight": weight, "bias": x if bias is None else bias, "residual": x if residual is None else residual,
        "out": out, "num_outputs": num_outputs, "width": width, "outputs": tile.outputs, "activation": activation,
        "has_bias": bias is not None, "has_residual": residual is not None, "is_gated": is_gated,
        "num_warps": tile.num_warps, **early_start(x.device),
    }
    if not tile.is_dot:
        given |= {"norm": x if norm is None else norm, "eps": eps, "is_normed": norm is not None}
        given |= {"num_pieces": tile.num_stages, "num_stages": 1}
    if tile.num_programs:
        num_programs = min(num_tiles, tile.num_programs)
        stream_kernel[(num_programs,)](
            num_turns=triton.cdiv(num_tiles, num_programs), columns=triton.next_power_of_2(width), **given
        )
        return out
    num_lines, lines_each = share_lines(upcoming, num_tiles)
    given |= {"upcoming": x if upcoming is None else upcoming, "num_lines": num_lines, "lines_each": lines_each}
    given |= {"x_stride": x.stride(0), "residual_stride": x.stride(0) if residual is None else residual.stride(0)}
    if tile.is_dot:
        multiply_tiles_kernel[(num_tiles,)](
            num_rows=num_rows, rows=max(8, triton.next_power_of_2(num_rows)), columns=tile.columns, parts=tile.num_warps,
            num_stages=tile.num_stages, **given,
        )
    else:
        multiply_rows_kernel[(num_tiles,)](rows=num_rows, columns=tile.columns, **given)
    return out


def share_lines(upcoming: Tensor | None, num_programs: int) -> tuple[int, int]:
    """Lines of memory to fetch for the next product, and how many each of the last programs sees to."""
    num_bytes = 0 if upcoming is None else upcoming.numel() * upcoming.element_size()
    if not LINE_BYTES <= num_bytes <= NEXT_BYTES:
        return 0, 0
    num_lines = num_bytes // LINE_BYTES
    return num_lines, max(32, triton.next_power_of_2(triton.cdiv(num_lines, min(num_programs, NUM_FETCHERS))))
