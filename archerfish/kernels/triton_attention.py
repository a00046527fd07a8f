"""Attention over KV blocks in Triton: one kernel for sequences with one new token, one for those with several.

In both, the query heads that share a KV head are rows of one tile, so that a key is read once for all of them, and blocks are
found through the table as keys are loaded.

A decode is split along its keys into parts that run side by side, and a second kernel joins them. What the grid is depends
on the number of sequences alone and lengths are read on the device, so that a captured graph serves any context.

Keys that all decodes share are read once for many of them: a kernel of its own gives parts over those keys, its tiles being of
the heads of many sequences, and a decode begins with what these parts come to.

Several new tokens are cut into tiles that the host lists, the longest first. Where most keys are new, they are first laid side
by side: the card's copy engine then brings them, which is worth more than laying them out costs.

Under a block mask, keys are left out that no query of a tile sees (`triton_attend`).

Scores are kept as base-2 logarithms. No `from __future__ import annotations` here: see `triton_norm`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from archerfish.kernels.ops import BlockMask, HeadShape, KVLayer, PagedBatch
from archerfish.kernels.triton_attend import attend
from archerfish.kernels.triton_launch import early_start, follow
from archerfish.kernels.triton_places import (
    GATHER_STEP,
    Gathering,
    choose_shared_parts,
    decode_tile,
    lay_mask,
    list_tiles,
    plan_gathering,
    prefill_tile,
    shared_tile,
)
from archerfish.kernels.triton_places import PLACES as PLACES
from archerfish.kernels.triton_places import Places as Places
from archerfish.kernels.triton_places import Tile as Tile
from archerfish.kernels.triton_places import choose_splits as choose_splits
from archerfish.kernels.triton_places import find_places as find_places
from archerfish.kernels.triton_places import to_device as to_device

Tensor = torch.Tensor
LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
FIXED_SPLITS = 16  # where a sequence's numbers must not depend on the batch
PARTS_AT_ONCE = 4  # of shared keys that a decode loads
GATHER_ROWS = 4  # of a program that gathers; divides GATHER_STEP
GATHERED_DIMS = (64, 128)  # of heads that the copy engine takes whole
MASK_NUMBERS = ("num_mask_rows", "num_mask_columns")


@triton.jit
def first_key(context_len, shared_len, window, step: tl.constexpr, has_window: tl.constexpr, is_shared: tl.constexpr):
    """First key that the parts of a decode take in."""
    first = context_len * 0
    if has_window:
        first = tl.maximum(context_len - window, 0) // step * step
    if is_shared:
        first = tl.load(shared_len).to(tl.int32)
    return first


@triton.jit
def part_len(num_keys, num_parts, step: tl.constexpr):
    """How many keys a part takes."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, step), num_parts), 1) * step


@triton.jit(do_not_specialize=["num_sequences", "num_parts"])
def shared_kernel(
    q, keys, values, table, context_lens, shared_len, partials, levels, scale, cap, num_sequences, num_parts,
    q_stride, block_stride, token_stride, head_stride,
    block_size: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    step: tl.constexpr, has_cap: tl.constexpr, is_early: tl.constexpr,
):
    """One part of the keys that all decodes share, for heads of many sequences."""
    follow(is_early)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    num_shared = tl.load(shared_len).to(tl.int32)
    num_keys = part_len(num_shared, num_parts, step)
    begin = part * num_keys
    end = tl.minimum(begin + num_keys, num_shared)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    sequence = (row // group).to(tl.int64)
    is_row = tl.load(context_lens + sequence, mask=sequence < num_sequences, other=0) > 0
    if (begin >= end) | (tl.max(is_row.to(tl.int32), 0) == 0):
        return

    dims = tl.arange(0, width)
    is_inside = is_row[:, None] & (dims < head_dim)[None, :]
    heads = kv_head * group + row % group
    query = tl.load(q + (sequence * q_stride + heads * head_dim)[:, None] + dims[None, :], mask=is_inside, other=0.0)
    acc = tl.zeros((rows, width), tl.float32)
    top = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    query_positions = tl.zeros((rows,), tl.int32) + end
    keys += kv_head * head_stride
    values += kv_head * head_stride
    middle = begin + (end - begin) // step * step  # whole steps need no mask
    acc, top, total = attend(
        query, acc, top, total, query_positions, keys, values, table, 0, 0, begin, middle, 0, scale, cap, block_stride,
        token_stride, table, 0, 0, 0, 0, block_size, head_dim, width, step, 0, 0, 0, False, False, False, has_cap,
    )
    acc, top, total = attend(
        query, acc, top, total, query_positions, keys, values, table, 0, 0, middle, end, 0, scale, cap, block_stride,
        token_stride, table, 0, 0, 0, 0, block_size, head_dim, width, step, 0, 0, 0, False, True, False, has_cap,
    )
    place = (sequence * tl.num_programs(1) * group + heads) * num_parts + part
    tl.store(partials + place[:, None] * head_dim + dims[None, :], acc / total[:, None], mask=is_inside)
    tl.store(levels + place, top + tl.log2(total), mask=is_row)


@triton.jit
def take_parts(
    acc, top, total, partials, levels, place, is_row, num_used, head_dim: tl.constexpr, width: tl.constexpr,
    at_once: tl.constexpr,
):
    """The first parts from a place on taken into the running softmax, with the loads of so many on their way at once."""
    dims = tl.arange(0, width)
    for first in range(0, num_used, at_once):
        for offset in tl.static_range(at_once):
            part = first + offset
            is_used = is_row & (part < num_used)
            level = tl.load(levels + place + part, mask=is_used, other=float("-inf"))
            is_inside = is_used[:, None] & (dims < head_dim)[None, :]
            result = tl.load(partials + (place + part)[:, None] * head_dim + dims[None, :], mask=is_inside, other=0.0)
            new_top = tl.maximum(top, level)
            base = tl.where(is_row, new_top, 0.0)
            shrink = tl.exp2(top - base)
            weight = tl.exp2(level - base)
            acc = acc * shrink[:, None] + result * weight[:, None]
            total = total * shrink + weight
            top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["num_splits", "num_shared_parts", "window", "table_stride", *MASK_NUMBERS])
def decode_kernel(
    q, keys, values, tables, context_lens, shared_len, out, partials, levels, shared_partials, shared_levels, scale, cap,
    num_splits, num_shared_parts, window, q_stride, table_stride, block_stride, token_stride, head_stride,
    mask, num_mask_rows, num_mask_columns,
    block_size: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    step: tl.constexpr, sinks: tl.constexpr, mask_size: tl.constexpr, mask_span: tl.constexpr, shared_step: tl.constexpr,
    parts_at_once: tl.constexpr, has_window: tl.constexpr, has_cap: tl.constexpr, is_split: tl.constexpr,
    is_shared: tl.constexpr, is_early: tl.constexpr,
):
    follow(is_early)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens + sequence)
    first = first_key(context_len, shared_len, window, step, has_window, is_shared)
    num_keys = part_len(context_len - first, num_splits, step)
    begin = first + split * num_keys
    end = tl.minimum(begin + num_keys, context_len)

    members = tl.arange(0, rows)
    dims = tl.arange(0, width)
    is_inside = (members < group)[:, None] & (dims < head_dim)[None, :]
    heads = kv_head * group + members
    query = tl.load(q + sequence * q_stride + heads[:, None] * head_dim + dims[None, :], mask=is_inside, other=0.0)
    acc = tl.zeros((rows, width), tl.float32)
    top = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    position = context_len - 1
    query_positions = tl.zeros((rows,), tl.int32) + position
    head_row = sequence * tl.num_programs(0) * group + heads
    keys += kv_head * head_stride
    values += kv_head * head_stride
    table = tables + sequence * table_stride
    if is_shared:  # a decode's first part begins with what the shared keys gave
        num_used = tl.cdiv(first, part_len(first, num_shared_parts, shared_step))
        num_used = tl.where((split == 0) & (begin < end), num_used, 0)
        acc, top, total = take_parts(
            acc, top, total, shared_partials, shared_levels, head_row * num_shared_parts, members < group, num_used,
            head_dim, width, parts_at_once,
        )
    if sinks > 0:
        last_sink = tl.where(split == 0, tl.minimum(first, sinks), 0)
        acc, top, total = attend(
            query, acc, top, total, query_positions, keys, values, table, 0, 0, 0, last_sink, window, scale, cap,
            block_stride, token_stride, mask, num_mask_rows, num_mask_columns, position, position, block_size,
            head_dim, width, step, sinks, mask_size, mask_span, False, True, has_window, has_cap,
        )
    acc, top, total = attend(
        query, acc, top, total, query_positions, keys, values, table, 0, 0, begin, end, window, scale, cap,
        block_stride, token_stride, mask, num_mask_rows, num_mask_columns, position, position, block_size,
        head_dim, width, step, sinks, mask_size, mask_span, False, True, has_window, has_cap,
    )
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if is_split:
        place = head_row * num_splits + split
        is_used = begin < end
        tl.store(partials + place[:, None] * head_dim + dims[None, :], result, mask=is_inside & is_used)
        tl.store(levels + place, top + tl.log2(total), mask=(members < group) & is_used)
    else:
        tl.store(out + head_row[:, None] * head_dim + dims[None, :], result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_splits", "window"])
def join_kernel(
    partials, levels, context_lens, shared_len, out, num_splits, window,
    head_dim: tl.constexpr, width: tl.constexpr, step: tl.constexpr, most_splits: tl.constexpr, has_window: tl.constexpr,
    is_shared: tl.constexpr, is_early: tl.constexpr,
):
    """The parts of one decode and one head, each weighed by its share of the softmax."""
    follow(is_early)
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    context_len = tl.load(context_lens + sequence)
    first = first_key(context_len, shared_len, window, step, has_window, is_shared)
    num_keys = part_len(context_len - first, num_splits, step)
    splits = tl.arange(0, most_splits)
    is_used = first + splits * num_keys < context_len
    row = sequence * tl.num_programs(0) + head
    place = row * num_splits + splits
    level = tl.load(levels + place, mask=is_used, other=float("-inf"))
    weights = tl.exp2(level - tl.where(context_len > 0, tl.max(level, 0), 0.0))
    dims = tl.arange(0, width)
    is_inside = is_used[:, None] & (dims < head_dim)[None, :]
    parts = tl.load(partials + place[:, None] * head_dim + dims[None, :], mask=is_inside, other=0.0)
    total = tl.sum(weights, 0)
    joined = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * head_dim + dims, joined.to(out.dtype.element_ty), mask=dims < head_dim)


@triton.jit(do_not_specialize=["window", "table_stride", *MASK_NUMBERS])
def prefill_kernel(
    q, keys, values, tables, tile_sequences, tile_firsts, context_lens, query_starts, query_lens, key_starts, out,
    scale, cap, window, q_stride, table_stride, block_stride, token_stride, head_stride,
    mask, num_mask_rows, num_mask_columns,
    block_size: tl.constexpr, num_kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, rows: tl.constexpr,
    width: tl.constexpr, step: tl.constexpr, sinks: tl.constexpr, mask_size: tl.constexpr, mask_span: tl.constexpr,
    is_gathered: tl.constexpr, has_window: tl.constexpr, has_cap: tl.constexpr,
):
    tile = tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) % num_kv_heads
    sequence = tl.load(tile_sequences + tile).to(tl.int64)
    first_query = tl.load(tile_firsts + tile)
    context_len = tl.load(context_lens + sequence)
    query_len = tl.load(query_lens + sequence)
    first_position = context_len - query_len + first_query

    members = tl.arange(0, rows)
    dims = tl.arange(0, width)
    query_index = first_query + members // group
    is_row = (members < rows // group * group) & (query_index < query_len)
    is_inside = is_row[:, None] & (dims < head_dim)[None, :]
    token = tl.load(query_starts + sequence).to(tl.int64) + query_index
    column = (kv_head * group + members % group) * head_dim
    query = tl.load(q + (token * q_stride + column)[:, None] + dims[None, :], mask=is_inside, other=0.0)
    query_positions = first_position + members // group

    acc = tl.zeros((rows, width), tl.float32)
    top = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    end = tl.minimum(first_position + rows // group, context_len)
    last_position = end - 1
    key_row = tl.load(key_starts + sequence)
    if not is_gathered:
        keys += kv_head * head_stride
        values += kv_head * head_stride
    table = tables + sequence * table_stride
    if has_window:
        begin = tl.maximum(first_position - window + 1, 0) // step * step
        if sinks > 0:
            acc, top, total = attend(
                query, acc, top, total, query_positions, keys, values, table, key_row, kv_head * head_dim, 0,
                tl.minimum(begin, sinks), window, scale, cap, block_stride, token_stride, mask, num_mask_rows,
                num_mask_columns, first_position, last_position, block_size, head_dim, width, step, sinks, mask_size,
                mask_span, is_gathered, True, True, has_cap,
            )
    else:  # what all queries of the tile see needs no mask
        begin = (first_position + 1) // step * step
        acc, top, total = attend(
            query, acc, top, total, query_positions, keys, values, table, key_row, kv_head * head_dim, 0, begin, window,
            scale, cap, block_stride, token_stride, mask, num_mask_rows, num_mask_columns, first_position,
            last_position, block_size, head_dim, width, step, 0, mask_size, mask_span, is_gathered, False, False, has_cap,
        )
    acc, top, total = attend(
        query, acc, top, total, query_positions, keys, values, table, key_row, kv_head * head_dim, begin, end, window, scale,
        cap, block_stride, token_stride, mask, num_mask_rows, num_mask_columns, first_position, last_position,
        block_size, head_dim, width, step, sinks, mask_size, mask_span, is_gathered, True, has_window, has_cap,
    )
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = (token * (num_kv_heads * group * head_dim) + column)[:, None] + dims[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["table_stride"])
def gather_kernel(
    keys, values, tables, tile_sequences, tile_firsts, context_lens, key_starts, key_rows, value_rows,
    table_stride, block_stride, token_stride,
    block_size: tl.constexpr, row_width: tl.constexpr, width: tl.constexpr, many: tl.constexpr,
):
    """Keys and values of sequences, one token per row; rows that fill up a tile become zeros."""
    tile = tl.program_id(0)
    sequence = tl.load(tile_sequences + tile).to(tl.int64)
    positions = tl.load(tile_firsts + tile) + tl.program_id(1) * many + tl.arange(0, many)
    is_key = positions < tl.load(context_lens + sequence)
    blocks = tl.load(tables + sequence * table_stride + positions // block_size, mask=is_key, other=0).to(tl.int64)
    columns = tl.arange(0, width)[None, :]
    is_inside = columns < row_width
    places = (blocks * block_stride + (positions % block_size) * token_stride)[:, None] + columns
    rows = (tl.load(key_starts + sequence) + positions).to(tl.int64)[:, None] * row_width + columns
    key = tl.load(keys + places, mask=is_key[:, None] & is_inside, other=0.0)
    value = tl.load(values + places, mask=is_key[:, None] & is_inside, other=0.0)
    tl.store(key_rows + rows, key, mask=is_inside)
    tl.store(value_rows + rows, value, mask=is_inside)


def count_sinks(heads: HeadShape) -> int:
    """Leading tokens that a window does not hide."""
    return heads.sinks if heads.window else 0


def score_scale(heads: HeadShape) -> tuple[float, float]:
    """Factor of the products and cap for `attend`."""
    if heads.softcap:
        return 2 * LOG2_E * heads.scale / heads.softcap, LOG2_E * heads.softcap
    return LOG2_E * heads.scale, 0.0


@dataclass(frozen=True)
class SharedParts:
    """What the keys that all decodes share came to, in parts."""

    partials: Tensor  # (decodes, heads, parts, head_dim)
    levels: Tensor  # (decodes, heads, parts)
    num_parts: int
    step: int


def attend_shared(
    q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, places: Places, num_processors: int
) -> SharedParts | None:
    """The decodes over the keys that they share; None where each must see to all of its own."""
    if places.shared_len is None or heads.window or batch.is_deterministic:
        return None
    num, head_dim, group = batch.num_decodes, heads.head_dim, heads.num_heads // heads.num_kv_heads
    tile = shared_tile(heads, q.dtype, num * group)
    num_tiles = triton.cdiv(num * group, tile.rows)
    num_parts = choose_shared_parts(num_tiles * heads.num_kv_heads, num_processors)
    shape = (num, heads.num_heads, num_parts)
    partials, levels = places.pair("shared parts", (*shape, head_dim), shape, torch.float32)
    scale, cap = score_scale(heads)
    shared_kernel[(num_tiles, heads.num_kv_heads, num_parts)](
        q, kv.keys, kv.values, batch.block_tables, places.context_lens, places.shared_len, partials, levels, scale, cap, num,
        num_parts, q.stride(0), *kv.keys.stride()[:3], block_size=batch.block_size, group=group, head_dim=head_dim,
        rows=tile.rows, width=triton.next_power_of_2(head_dim), step=tile.step, has_cap=heads.softcap > 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **early_start(q.device),
    )
    return SharedParts(partials, levels, num_parts, tile.step)


def attend_decodes(
    q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, out: Tensor, num_processors: int,
    tile: Tile | None = None, mask: BlockMask[Tensor] | None = None,
) -> None:
    """Rows of out for the sequences with one new token."""
    places = find_places(batch, q.device)
    num, num_heads, head_dim = batch.num_decodes, heads.num_heads, heads.head_dim
    num_splits = places.num_splits or choose_splits(num, heads.num_kv_heads, num_processors)
    if batch.is_deterministic:
        num_splits = FIXED_SPLITS
    is_split = num_splits > 1
    tile, laid = lay_mask(mask, tile or decode_tile(heads, q.dtype, num, is_split), 1, places.context_lens)
    shape = (num, num_heads, num_splits) if is_split else (1, 1, 1)
    partials, levels = places.pair("parts", (*shape, head_dim), shape, torch.float32)
    shared = None if mask is not None else attend_shared(q, kv, batch, heads, places, num_processors)
    shared_len = places.context_lens if shared is None or places.shared_len is None else places.shared_len
    parts = shared or SharedParts(partials, levels, num_parts=0, step=tile.step)
    scale, cap = score_scale(heads)
    width = triton.next_power_of_2(head_dim)
    decode_kernel[(heads.num_kv_heads, num_splits, num)](
        q, kv.keys, kv.values, batch.block_tables, places.context_lens, shared_len, out, partials, levels, parts.partials,
        parts.levels, scale, cap, num_splits, parts.num_parts, heads.window, q.stride(0), batch.block_tables.stride(0),
        *kv.keys.stride()[:3], laid.visible, laid.num_rows, laid.num_columns, block_size=batch.block_size,
        group=num_heads // heads.num_kv_heads, head_dim=head_dim, rows=tile.rows, width=width, step=tile.step,
        sinks=count_sinks(heads), mask_size=laid.size, mask_span=laid.span, shared_step=parts.step,
        parts_at_once=PARTS_AT_ONCE, has_window=heads.window > 0, has_cap=heads.softcap > 0, is_split=is_split,
        is_shared=shared is not None, num_warps=tile.num_warps, num_stages=tile.num_stages, **early_start(q.device),
    )
    if is_split:
        join_kernel[(num_heads, num)](
            partials, levels, places.context_lens, shared_len, out, num_splits, heads.window, head_dim=head_dim, width=width,
            step=tile.step, most_splits=triton.next_power_of_2(num_splits), has_window=heads.window > 0,
            is_shared=shared is not None, num_warps=4, **early_start(q.device),
        )


def gather(
    kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, places: Places, step: int
) -> tuple[Gathering, TensorDescriptor, TensorDescriptor]:
    """Keys and values of the sequences with several new tokens, side by side, for loads of step keys of one head."""
    gathering = places.gathering
    if gathering is None:
        gathering = places.gathering = plan_gathering(batch, kv.keys.device)
    row_width = heads.num_kv_heads * heads.head_dim
    shape = (gathering.num_rows, row_width)
    keys, values = places.pair("gathered", shape, shape, kv.keys.dtype)
    gather_kernel[(len(gathering.sequences), GATHER_STEP // GATHER_ROWS)](
        kv.keys, kv.values, batch.block_tables, gathering.sequences, gathering.firsts, places.context_lens, gathering.starts,
        keys, values, batch.block_tables.stride(0), *kv.keys.stride()[:2], block_size=batch.block_size, row_width=row_width,
        width=triton.next_power_of_2(row_width), many=GATHER_ROWS, num_warps=4,
    )
    block = [step, heads.head_dim]
    return gathering, TensorDescriptor.from_tensor(keys, block), TensorDescriptor.from_tensor(values, block)


def attend_prefills(
    q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, out: Tensor, tile: Tile | None = None,
    mask: BlockMask[Tensor] | None = None,
) -> None:
    """Rows of out for the sequences with several new tokens."""
    places = find_places(batch, q.device)
    group = heads.num_heads // heads.num_kv_heads
    is_gathered = places.is_gathered and q.dtype != torch.float32 and heads.head_dim in GATHERED_DIMS
    is_short = mask is not None or group <= places.num_short_heads
    tile = tile or prefill_tile(heads, q.dtype, is_gathered, is_short)
    num_queries = tile.rows // group
    tile, laid = lay_mask(mask, tile, num_queries, places.context_lens)
    if num_queries not in places.tiles:
        places.tiles[num_queries] = list_tiles(batch, num_queries, q.device)
    sequences, firsts = places.tiles[num_queries]
    keys, values, key_starts = kv.keys, kv.values, places.query_starts
    if is_gathered:
        gathering, keys, values = gather(kv, batch, heads, places, tile.step)
        key_starts = gathering.starts
    scale, cap = score_scale(heads)
    prefill_kernel[(len(sequences) * heads.num_kv_heads,)](
        q, keys, values, batch.block_tables, sequences, firsts, places.context_lens, places.query_starts, places.query_lens,
        key_starts, out, scale, cap, heads.window, q.stride(0), batch.block_tables.stride(0), *kv.keys.stride()[:3],
        laid.visible, laid.num_rows, laid.num_columns, block_size=batch.block_size, num_kv_heads=heads.num_kv_heads,
        group=group, head_dim=heads.head_dim, rows=tile.rows, width=triton.next_power_of_2(heads.head_dim), step=tile.step,
        sinks=count_sinks(heads), mask_size=laid.size, mask_span=laid.span, is_gathered=is_gathered,
        has_window=heads.window > 0, has_cap=heads.softcap > 0, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )
