"""Mixtures of experts on a GPU: `route_kernel` chooses, `multiply_experts_kernel` multiplies, `add_up_kernel` adds up.

A place is a row's choice of one expert. `order_kernel` puts places in order by expert, each expert's filled up to whole
tiles of rows, so that a program has a tile of rows of one expert. Which row of its expert's tiles a place is may differ
from run to run, what is computed of it does not. All of this happens on the device in arrays whose sizes follow from
the number of rows
alone: it can be recorded. A lone row has a tile for each expert that it chose, and nothing is put in order. Programs
beyond the tiles that are needed end at once.

Weights are plain, rows with a scale each, or in groups (`group_products.py`).
No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from archerfish.kernels.experts import Routing
from archerfish.kernels.ops import Activation
from archerfish.kernels.torch.reference import TorchWeight
from archerfish.kernels.triton.adapters import TritonAdapters
from archerfish.kernels.triton.group_products import kernel_inputs, load_weights
from archerfish.kernels.triton.launch import early_start, follow
from archerfish.kernels.triton.linear import GroupsWeight, RowsWeight
from archerfish.kernels.triton.products import finish, load_addends, load_piece
from archerfish.kernels.triton.tiles import cdiv, next_power_of_2, shared_bytes

Tensor = torch.Tensor
MANY_ROWS = 1024  # of activations, beyond which tiles are the largest
ROUTED_NUMBERS, ROUTED_ROWS = 1 << 11, 16  # logits and rows of a program that chooses, at most
ORDERED, OWNED = 128, 64  # places that a program puts in order, and tiles whose experts it says
ADDED_COLUMNS = 1024


class ExpertTile(NamedTuple):
    """rows, outputs: of a program; with a gate, each output is two rows of weights. columns: taken at a time."""

    rows: int
    outputs: int
    columns: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    logits,
    bias,
    ids,
    weights,
    counts,
    nths,
    num_rows,
    logit_stride,
    scale,
    num_experts: tl.constexpr,
    experts: tl.constexpr,
    num_chosen: tl.constexpr,
    slots: tl.constexpr,
    rows: tl.constexpr,
    is_sigmoid: tl.constexpr,
    is_normed: tl.constexpr,
    has_bias: tl.constexpr,
    is_lone: tl.constexpr,
    is_early: tl.constexpr,
):
    """The experts of some rows and their weights; and of how many places of its expert each is ahead, in any order."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    expert = tl.arange(0, experts)
    slot = tl.arange(0, slots)
    known = expert < num_experts
    follow(is_early)
    held = tl.minimum(row, num_rows - 1)
    lines = logits + held[:, None] * logit_stride
    given = tl.load(lines + expert[None, :], mask=known[None, :], other=float("-inf")).to(tl.float32)
    if is_sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-given))
    else:
        scores = tl.exp(given - tl.max(given, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    compared = scores
    if has_bias:
        compared += tl.load(bias + expert, mask=known, other=0.0)[None, :]
    compared = tl.where(known[None, :], compared, float("-inf"))
    found = tl.zeros((rows, slots), tl.int32)
    chosen = tl.zeros((rows, slots), tl.float32)
    for k in tl.static_range(num_chosen):
        best = tl.minimum(tl.argmax(compared, 1), num_experts - 1)  # logits may not be numbers
        is_best = expert[None, :] == best[:, None]
        weight = tl.sum(tl.where(is_best, scores, 0.0), 1)
        found = tl.where(slot[None, :] == k, best[:, None], found)
        chosen = tl.where(slot[None, :] == k, weight[:, None], chosen)
        compared = tl.where(is_best, float("-inf"), compared)
    if is_normed:
        chosen = chosen / tl.sum(chosen, 1)[:, None]
    place = row[:, None] * num_chosen + slot[None, :]
    is_real = (row < num_rows)[:, None] & (slot < num_chosen)[None, :]
    tl.store(ids + place, found, mask=is_real)
    tl.store(weights + place, chosen * scale, mask=is_real)
    if not is_lone:
        tl.store(nths + place, tl.atomic_add(counts + found, 1, mask=is_real, sem="relaxed"), mask=is_real)


@triton.jit(do_not_specialize=["num_places", "num_tiles"])
def order_kernel(
    ids,
    nths,
    counts,
    order,
    tile_experts,
    num_places,
    num_tiles,
    num_experts: tl.constexpr,
    experts: tl.constexpr,
    places: tl.constexpr,
    tiles: tl.constexpr,
    tile_rows: tl.constexpr,
    is_early: tl.constexpr,
):
    """Put some places in order, and say of some tiles whose they are. What they have no place for is filled with
    num_places."""
    expert = tl.arange(0, experts)
    place = tl.program_id(0) * places + tl.arange(0, places)
    tile = tl.program_id(0) * tiles + tl.arange(0, tiles)
    follow(is_early)
    count = tl.load(counts + expert, mask=expert < num_experts, other=0)
    own = (count + tile_rows - 1) // tile_rows
    ends = tl.cumsum(own, 0)
    starts = (ends - own) * tile_rows
    is_place = place < num_places
    is_own = tl.load(ids + place, mask=is_place, other=experts)[:, None] == expert[None, :]
    start = tl.sum(tl.where(is_own, starts[None, :], 0), 1)
    tl.store(order + start + tl.load(nths + place, mask=is_place, other=0), place, mask=is_place)
    owner = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    is_used = (tile < num_tiles) & (owner < experts)
    end = tl.sum(tl.where(owner[:, None] == expert[None, :], (starts + count)[None, :], 0), 1)
    filled = tile[:, None] * tile_rows + tl.arange(0, tile_rows)[None, :]
    tl.store(order + filled, tl.zeros_like(filled) + num_places, mask=is_used[:, None] & (filled >= end[:, None]))
    tl.store(tile_experts + tile, tl.where(is_used, owner, -1), mask=tile < num_tiles)


@triton.jit
def load_tile(
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
    """(outputs, inputs) of weights; group_size 0: rows of numbers, whose scales come later."""
    if group_size:
        found = load_weights(
            codes, scales, lines, num_lines, start, width, group_size, size, planes, per_scale, coding, kind, in_pairs
        )
    else:
        found = load_piece(codes + lines[:, None] * width, start + tl.arange(0, size)[None, :], width, size).to(kind)
    return found


@triton.jit(do_not_specialize=["num_places"])
def multiply_experts_kernel(
    x,
    codes,
    scales,
    bias,
    tile_experts,
    order,
    out,
    num_places,
    num_outputs,
    num_lines,
    x_stride,
    width: tl.constexpr,
    group_size: tl.constexpr,
    size: tl.constexpr,
    planes: tl.constexpr,
    per_scale: tl.constexpr,
    coding: tl.constexpr,
    per_row: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    is_lone: tl.constexpr,
    in_pairs: tl.constexpr,
    is_early: tl.constexpr,
    has_bias: tl.constexpr,
):
    """A tile of rows of one expert, and of its outputs, which are written to their places. per_row: places of a row of
    x."""
    tile = tl.program_id(1)
    own = tl.program_id(0) * outputs + tl.arange(0, outputs)
    kind: tl.constexpr = x.dtype.element_ty
    span: tl.constexpr = size * planes
    follow(is_early)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert >= 0:
        if is_lone:
            place = tl.where(tl.arange(0, rows) == 0, tile, num_places)
        else:
            place = tl.load(order + tile * rows + tl.arange(0, rows))
        is_row = place < num_places
        row = (tl.minimum(place, num_places - 1) // per_row).to(tl.int64)
        lines = expert * (num_outputs * 2 if is_gated else num_outputs) + tl.minimum(own, num_outputs - 1)
        up_lines = lines + num_outputs
        acc = tl.zeros((outputs, rows), tl.float32)
        up_acc = tl.zeros((outputs, rows), tl.float32)
        for start in range(0, width, span):
            values = tl.trans(load_piece(x + row[:, None] * x_stride, start + tl.arange(0, span)[None, :], width, span))
            weights = load_tile(
                codes,
                scales,
                lines,
                num_lines,
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
            acc = tl.dot(weights, values, acc, input_precision="ieee")
            if is_gated:
                weights = load_tile(
                    codes,
                    scales,
                    up_lines,
                    num_lines,
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
                up_acc = tl.dot(weights, values, up_acc, input_precision="ieee")
        if group_size == 0 and scales is not None:
            acc *= tl.load(scales + lines)[:, None]
            if is_gated:
                up_acc *= tl.load(scales + up_lines)[:, None]
        added, up_added = load_addends(bias, bias, lines[:, None], up_lines[:, None], has_bias, False, is_gated)
        y = finish(acc, up_acc, added, up_added, activation, is_gated)
        target = out + place.to(tl.int64)[None, :] * num_outputs + own[:, None]
        tl.store(target, y.to(out.dtype.element_ty), mask=is_row[None, :] & (own < num_outputs)[:, None])


@triton.jit
def add_up_kernel(
    y,
    weights,
    shared,
    logits,
    out,
    logit_stride,
    width: tl.constexpr,
    num_chosen: tl.constexpr,
    columns: tl.constexpr,
    gate: tl.constexpr,
    has_shared: tl.constexpr,
    is_early: tl.constexpr,
):
    """The weighted sum of a row's places. gate: the logit that says how much of the shared row is added; 0: all of
    it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_inside = column < width
    follow(is_early)
    total = tl.zeros((columns,), tl.float32)
    if has_shared:
        total = tl.load(shared + row * width + column, mask=is_inside, other=0.0).to(tl.float32)
        if gate:
            total /= 1.0 + tl.exp(-tl.load(logits + row * logit_stride + gate).to(tl.float32))
    for k in tl.static_range(num_chosen):
        given = tl.load(y + (row * num_chosen + k) * width + column, mask=is_inside, other=0.0)
        total += tl.load(weights + row * num_chosen + k) * given.to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=is_inside)


def choose_tile(
    num_rows: int, routing: Routing[Tensor], element_bytes: int, *, is_gated: bool, is_packed: bool = False
) -> ExpertTile:
    """The best of a dozen on an H200. Changes only behind powers of 2."""
    usual = next_power_of_2(num_rows) * routing.num_chosen // routing.num_experts  # rows of an expert
    halves, columns = 2 if is_gated else 1, 128 // element_bytes
    if usual > 16:
        return ExpertTile(128 if num_rows > MANY_ROWS else 64, 256 // halves, columns, 8, 4)
    if num_rows == 1:
        return ExpertTile(16, 64 // halves, 2 * columns, 4, 4)
    if usual <= 4:
        return ExpertTile(16, 128, columns, 8, 4)
    return ExpertTile(32, 128, columns, 4, 5) if is_gated or is_packed else ExpertTile(32, 256, columns, 8, 5)


def multiply(
    x: Tensor,
    packed: TorchWeight,
    tile: ExpertTile,
    tile_experts: Tensor,
    order: Tensor,
    num_places: int,
    num_experts: int,
    *,
    activation: Activation = "none",
    is_gated: bool = False,
) -> Tensor:
    """(places, outputs): each place's row of x, of which several places may have the same, times its expert's
    matrix."""
    plain: dict[str, Any] = {"group_size": 0, "size": tile.columns, "planes": 1, "per_scale": 1, "coding": "signed"}
    if isinstance(packed, GroupsWeight):
        given = kernel_inputs(packed.groups, packed.tensors)
        num_lines = len(given["codes"])
    else:
        matrix, scales = (
            (packed.matrix, packed.scales) if isinstance(packed, RowsWeight) else (packed.dequantised(), None)
        )
        num_lines, width = matrix.shape
        given = {**plain, "codes": matrix, "scales": scales, "width": width, "in_pairs": x.is_cuda}
    num_outputs = num_lines // num_experts // (2 if is_gated else 1)
    out = torch.empty((num_places, num_outputs), dtype=x.dtype, device=x.device)
    stage_bytes = (
        (tile.rows + tile.outputs * (2 if is_gated else 1)) * given["size"] * given["planes"] * x.element_size()
    )
    num_tiles = len(tile_experts)
    multiply_experts_kernel[(cdiv(num_outputs, tile.outputs), num_tiles)](
        x=x,
        bias=x if packed.bias is None else packed.bias,
        has_bias=packed.bias is not None,
        tile_experts=tile_experts,
        order=order,
        out=out,
        num_places=num_places,
        num_outputs=num_outputs,
        num_lines=num_lines,
        x_stride=x.stride(0),
        per_row=num_places // len(x),
        rows=tile.rows,
        outputs=tile.outputs,
        activation=activation,
        is_gated=is_gated,
        is_lone=order is tile_experts,
        num_warps=tile.num_warps,
        num_stages=max(1, min(tile.num_stages, shared_bytes(x.device) // stage_bytes)),
        **given,
        **early_start(x.device),
    )
    return out


def route(logits: Tensor, routing: Routing[Tensor], tile_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Experts and weights of all places, and by tile: its expert, and its places. The last two are the first of a lone
    row."""
    num_rows = len(logits)
    num_chosen = routing.num_chosen
    device = logits.device
    num_places = num_rows * num_chosen
    ids = torch.empty(num_places, dtype=torch.int32, device=device)
    weights = torch.empty(num_places, dtype=torch.float32, device=device)
    experts, slots = next_power_of_2(routing.num_experts), next_power_of_2(num_chosen)
    rows = max(1, min(ROUTED_ROWS, ROUTED_NUMBERS // experts))
    is_lone = num_rows == 1
    num_tiles = num_places // tile_rows + min(num_places, routing.num_experts)
    order = ids
    tiles = ids
    nths = ids
    counts = ids
    if not is_lone:
        order = torch.empty(num_tiles * tile_rows, dtype=torch.int32, device=device)
        tiles, nths = (torch.empty(num, dtype=torch.int32, device=device) for num in (num_tiles, num_places))
        counts = torch.zeros(experts, dtype=torch.int32, device=device)
    shape: dict[str, Any] = {"num_experts": routing.num_experts, "experts": experts, **early_start(device)}
    route_kernel[(cdiv(num_rows, rows),)](
        logits,
        logits if routing.bias is None else routing.bias,
        ids,
        weights,
        counts,
        nths,
        num_rows,
        logit_stride=logits.stride(0),
        scale=routing.scale,
        num_chosen=num_chosen,
        slots=slots,
        rows=rows,
        is_sigmoid=routing.is_sigmoid,
        is_normed=routing.is_normed,
        has_bias=routing.bias is not None,
        is_lone=is_lone,
        num_warps=4,
        **shape,
    )
    if not is_lone:
        order_kernel[(max(cdiv(num_places, ORDERED), cdiv(num_tiles, OWNED)),)](
            ids,
            nths,
            counts,
            order,
            tiles,
            num_places,
            num_tiles,
            places=ORDERED,
            tiles=OWNED,
            tile_rows=tile_rows,
            num_warps=8,
            **shape,
        )
    return ids, weights, tiles, order


def compute_experts(
    x: Tensor,
    logits: Tensor,
    routing: Routing[Tensor],
    gate_up: TorchWeight,
    down: TorchWeight,
    activation: Activation,
    shared: Tensor | None,
    *,
    is_deterministic: bool,
    adapters: TritonAdapters | None,
    tables: Sequence[Any],
) -> Tensor:
    """As `Ops.experts`. is_deterministic: tiles do not follow from the number of rows. tables: what adapters add to
    both products."""
    num_rows, width = x.shape
    num_experts, num_places = routing.num_experts, num_rows * routing.num_chosen
    usual = 1 if is_deterministic else num_rows
    is_gated = adapters is None
    first, second = (
        choose_tile(usual, routing, x.element_size(), is_gated=gated, is_packed=isinstance(weight, GroupsWeight))
        for weight, gated in ((gate_up, is_gated), (down, False))
    )
    ids, weights, tiles, order = route(logits, routing, first.rows)
    gate: Activation = activation if is_gated else "none"
    hidden = multiply(x, gate_up, first, tiles, order, num_places, num_experts, activation=gate, is_gated=is_gated)
    if adapters is None:
        y = multiply(hidden, down, second, tiles, order, num_places, num_experts)
    else:
        places = adapters.places(ids.view(num_rows, -1), num_experts)
        hidden = adapters.add_gated(hidden, x, tables[0], activation, places)
        y = multiply(hidden, down, second, tiles, order, num_places, num_experts)
        y = adapters.add(y, hidden, tables[1], places=places)
    out = torch.empty_like(x)
    add_up_kernel[(num_rows, cdiv(width, ADDED_COLUMNS))](
        y,
        weights,
        x if shared is None else shared,
        logits,
        out,
        logits.stride(0),
        width=width,
        num_chosen=routing.num_chosen,
        columns=ADDED_COLUMNS,
        gate=num_experts if logits.shape[1] > num_experts else 0,
        has_shared=shared is not None,
        num_warps=4,
        **early_start(x.device),
    )
    return out
