"""Attention over KV blocks in Triton: one kernel for sequences with one new token, one for those with several.

In both, the query heads that share a KV head are rows of one tile, so that a key is read once for all of them, and blocks are
found through the table as keys are loaded.

A decode is split along its keys into parts that run side by side, and a second kernel joins them. What the grid is depends
on the number of sequences alone and lengths are read on the device, so that a captured graph serves any context.

Several new tokens are cut into tiles that the host lists, the longest first. Where most keys are new, they are first laid side
by side: the card's copy engine then brings them, which is worth more than laying them out costs.

Scores are kept as base-2 logarithms. No `from __future__ import annotations` here: see `triton_norm`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from archerfish.kernels.ops import HeadShape, Ids, KVLayer, PagedBatch

Tensor = torch.Tensor
PLACES = "triton places"  # key in PagedBatch.derived
LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
MAX_SPLITS = 64
FIXED_SPLITS = 16  # where a sequence's numbers must not depend on the batch
PROGRAMS_PER_PROCESSOR = 4  # that the parts of decodes should come to
GATHER_STEP, GATHER_ROWS = 128, 4  # rows of a piece of gathered keys, and of a program that gathers; steps divide the former
GATHER_RATIO = 2  # keys to new tokens up to which gathering pays
GATHERED_DIMS = (64, 128)  # of heads that the copy engine takes whole
MIN_ROWS, SHORT_ROWS = 16, 64  # of a tile that tl.dot takes; of the smallest for several new tokens


@triton.jit
def attend(
    query, acc, top, total, query_positions, keys, values, table, row, column, begin, end, window, scale, cap, block_stride,
    token_stride, block_size: tl.constexpr, head_dim: tl.constexpr, width: tl.constexpr, step: tl.constexpr,
    is_gathered: tl.constexpr, is_masked: tl.constexpr, has_window: tl.constexpr, has_cap: tl.constexpr,
):
    """Keys from begin to end (a multiple of step after begin unless is_masked) taken into the running softmax.

    They lie in blocks of the table, or with is_gathered from a row and a column on in what keys and values describe.
    """
    dims = tl.arange(0, width)
    for start in range(begin, end, step):
        positions = start + tl.arange(0, step)
        is_key = positions < end
        if is_gathered:
            key = keys.load([row + start, column])
        else:
            if is_masked:
                blocks = tl.load(table + positions // block_size, mask=is_key, other=0).to(tl.int64)
                is_loaded = is_key[:, None] & (dims < head_dim)[None, :]
            else:
                blocks = tl.load(table + positions // block_size).to(tl.int64)
                is_loaded = (dims < head_dim)[None, :]
            places = (blocks * block_stride + (positions % block_size) * token_stride)[:, None] + dims[None, :]
            if is_masked or width > head_dim:
                key = tl.load(keys + places, mask=is_loaded, other=0.0)
                value = tl.load(values + places, mask=is_loaded, other=0.0)
            else:
                key = tl.load(keys + places)
                value = tl.load(values + places)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if has_cap:  # cap * tanh(x), scale having brought 2 x log2(e)
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0))
            factor = 1.0
        else:
            factor = scale
        if is_masked:
            is_seen = is_key[None, :] & (positions[None, :] <= query_positions[:, None])
            if has_window:
                is_seen = is_seen & (positions[None, :] > query_positions[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        level = new_top
        if has_window:  # a row may see none of the first keys
            level = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * factor - level[:, None])
        shrink = tl.exp2(top - level)
        total = total * shrink + tl.sum(weights, 1)
        if is_gathered:
            value = values.load([row + start, column])
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def split_keys(context_len, num_splits, window, step: tl.constexpr, has_window: tl.constexpr):
    """First key that a decode reads, and how many a part takes."""
    first = context_len * 0
    if has_window:
        first = tl.maximum(context_len - window, 0) // step * step
    num_steps = tl.cdiv(context_len - first, step)
    return first, tl.maximum(tl.cdiv(num_steps, num_splits), 1) * step


@triton.jit(do_not_specialize=["num_splits", "window"])
def decode_kernel(
    q, keys, values, tables, context_lens, out, partials, levels, scale, cap, num_splits, window,
    q_stride, table_stride, block_stride, token_stride, head_stride,
    block_size: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    step: tl.constexpr, has_window: tl.constexpr, has_cap: tl.constexpr, is_split: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens + sequence)
    first, num_keys = split_keys(context_len, num_splits, window, step, has_window)
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
    query_positions = tl.zeros((rows,), tl.int32) + (context_len - 1)
    acc, top, total = attend(
        query, acc, top, total, query_positions, keys + kv_head * head_stride, values + kv_head * head_stride,
        tables + sequence * table_stride, 0, 0, begin, end, window, scale, cap, block_stride, token_stride,
        block_size, head_dim, width, step, False, True, has_window, has_cap,
    )
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if is_split:
        place = (sequence * tl.num_programs(0) * group + heads) * num_splits + split
        is_used = begin < end
        tl.store(partials + place[:, None] * head_dim + dims[None, :], result, mask=is_inside & is_used)
        tl.store(levels + place, top + tl.log2(total), mask=(members < group) & is_used)
    else:
        offset = sequence * tl.num_programs(0) * group * head_dim
        tl.store(out + offset + heads[:, None] * head_dim + dims[None, :], result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_splits", "window"])
def join_kernel(
    partials, levels, context_lens, out, num_splits, window,
    head_dim: tl.constexpr, width: tl.constexpr, step: tl.constexpr, most_splits: tl.constexpr, has_window: tl.constexpr,
):
    """The parts of one decode and one head, each weighed by its share of the softmax."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    context_len = tl.load(context_lens + sequence)
    first, num_keys = split_keys(context_len, num_splits, window, step, has_window)
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


@triton.jit(do_not_specialize=["window"])
def prefill_kernel(
    q, keys, values, tables, tile_sequences, tile_firsts, context_lens, query_starts, query_lens, key_starts, out,
    scale, cap, window, q_stride, table_stride, block_stride, token_stride, head_stride,
    block_size: tl.constexpr, num_kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, rows: tl.constexpr,
    width: tl.constexpr, step: tl.constexpr, is_gathered: tl.constexpr, has_window: tl.constexpr, has_cap: tl.constexpr,
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
    key_row = tl.load(key_starts + sequence)
    if not is_gathered:
        keys += kv_head * head_stride
        values += kv_head * head_stride
    table = tables + sequence * table_stride
    if has_window:
        begin = tl.maximum(first_position - window + 1, 0) // step * step
    else:  # what all queries of the tile see needs no mask
        begin = (first_position + 1) // step * step
        acc, top, total = attend(
            query, acc, top, total, query_positions, keys, values, table, key_row, kv_head * head_dim, 0, begin, window,
            scale, cap, block_stride, token_stride, block_size, head_dim, width, step, is_gathered, False, False, has_cap,
        )
    acc, top, total = attend(
        query, acc, top, total, query_positions, keys, values, table, key_row, kv_head * head_dim, begin, end, window,
        scale, cap, block_stride, token_stride, block_size, head_dim, width, step, is_gathered, True, has_window, has_cap,
    )
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = (token * (num_kv_heads * group * head_dim) + column)[:, None] + dims[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
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


@dataclass(frozen=True)
class Tile:
    """Shape of the work of one program and how it is compiled."""

    rows: int  # of queries times the heads that share a KV head
    step: int  # keys taken at a time
    num_warps: int
    num_stages: int


def decode_tile(heads: HeadShape, dtype: torch.dtype, is_split: bool) -> Tile:
    rows = max(MIN_ROWS, triton.next_power_of_2(heads.num_heads // heads.num_kv_heads))
    if dtype == torch.float32 or heads.head_dim > 128:
        return Tile(rows, 32, 4, 2)
    return Tile(rows, 64, 4, 3) if is_split else Tile(rows, 128, 4, 2)


def prefill_tile(heads: HeadShape, dtype: torch.dtype, is_gathered: bool, is_short: bool) -> Tile:
    """is_short: most sequences have no more rows than the smallest tile."""
    least = triton.next_power_of_2(heads.num_heads // heads.num_kv_heads)
    if dtype == torch.float32:
        return Tile(max(32, least), 32, 4, 2)
    if is_gathered:
        return Tile(max(SHORT_ROWS, least), 64, 4, 3)
    if heads.head_dim > 128:
        return Tile(max(128, least), 64, 8, 2)
    if is_short:
        return Tile(max(SHORT_ROWS, least), 64, 4, 2)
    return Tile(max(256, least), 64, 8, 3) if heads.head_dim > 64 else Tile(max(128, least), 64, 4, 3)


@dataclass(frozen=True)
class Gathering:
    """Where keys go that are laid side by side for prefills: of each sequence from a multiple of GATHER_STEP on."""

    starts: Tensor  # (sequences,) first row
    sequences: Tensor  # (tiles,) of GATHER_STEP rows: their sequence
    firsts: Tensor  # (tiles,) their first key
    num_rows: int


@dataclass
class Places:
    """What the kernels ask of a batch, on the device; lengths as int32. Kept in `PagedBatch.derived` for all layers.

    A captured graph puts its own there, over buffers that it refills: of a batch of decodes only context_lens is read, and
    a context of 0 gives a row of zeros.
    """

    context_lens: Tensor  # (sequences,)
    query_starts: Tensor  # (sequences,) row of the first new token
    query_lens: Tensor  # (sequences,)
    num_splits: int = 0  # parts of each decode; 0: as many as keep the device busy
    is_gathered: bool = False  # laying keys side by side costs little beside attending to them
    num_short_heads: int = 0  # that share a KV head, up to which several new tokens are few rows
    tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by queries per tile: sequence, first query
    gathering: Gathering | None = None
    scratch: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)  # by shape and type

    def pair(self, key: tuple[int, ...], value: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two tensors that every layer writes anew."""
        if (key, value, dtype) not in self.scratch:
            device = self.context_lens.device
            made = torch.empty(key, dtype=dtype, device=device), torch.empty(value, dtype=dtype, device=device)
            self.scratch[key, value, dtype] = made
        return self.scratch[key, value, dtype]


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def find_places(batch: PagedBatch[Tensor], device: torch.device) -> Places:
    if PLACES not in batch.derived:
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        lengths = np.stack((batch.context_lens, starts, batch.query_lens)).astype(np.int32)
        num_new, num_keys = batch.num_tokens - batch.num_decodes, int(batch.context_lens[batch.num_decodes :].sum())
        places = batch.derived[PLACES] = Places(*to_device(lengths, device))
        if num_new and not batch.is_deterministic:
            places.is_gathered = num_keys <= GATHER_RATIO * num_new
            places.num_short_heads = SHORT_ROWS * (len(batch.query_lens) - batch.num_decodes) // num_new
    found: Places = batch.derived[PLACES]
    return found


def cut(lengths: Ids, size: int) -> tuple[Ids, Ids]:
    """Pieces of at most a size: of which sequence each is, and where in it it begins."""
    counts = -(-lengths // size)
    sequence = np.repeat(np.arange(len(lengths)), counts)
    return sequence, (np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]) * size


def list_tiles(batch: PagedBatch[Tensor], num_queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequence and first query of every tile of the sequences with several new tokens, those with most keys first."""
    lens, contexts = batch.query_lens[batch.num_decodes :], batch.context_lens[batch.num_decodes :]
    sequence, first = cut(lens, num_queries)
    order = np.argsort(lens[sequence] - contexts[sequence] - first, kind="stable")
    sequences, firsts = to_device(np.stack((sequence[order] + batch.num_decodes, first[order])).astype(np.int32), device)
    return sequences, firsts


def plan_gathering(batch: PagedBatch[Tensor], device: torch.device) -> Gathering:
    lens = batch.context_lens.copy()
    lens[: batch.num_decodes] = 0
    sequence, first = cut(lens, GATHER_STEP)
    padded = -(-lens // GATHER_STEP) * GATHER_STEP
    starts = np.cumsum(padded) - padded
    sent = to_device(np.concatenate((starts, sequence, first)).astype(np.int32), device)
    rows, sequences, firsts = sent.tensor_split((len(starts), len(starts) + len(sequence)))
    return Gathering(rows, sequences, firsts, int(padded.sum()))


def choose_splits(num_sequences: int, num_kv_heads: int, num_processors: int) -> int:
    """Parts of a decode, so that all processors have work; 1 where there are sequences enough."""
    num_programs = num_sequences * num_kv_heads
    if 2 * num_programs >= 3 * num_processors:
        return 1
    return max(1, min(MAX_SPLITS, PROGRAMS_PER_PROCESSOR * num_processors // num_programs))


def score_scale(heads: HeadShape) -> tuple[float, float]:
    """Factor of the products and cap for `attend`."""
    if heads.softcap:
        return 2 * LOG2_E * heads.scale / heads.softcap, LOG2_E * heads.softcap
    return LOG2_E * heads.scale, 0.0


def attend_decodes(
    q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, out: Tensor, num_processors: int,
    tile: Tile | None = None,
) -> None:
    """Rows of out for the sequences with one new token."""
    places = find_places(batch, q.device)
    num, num_heads, head_dim = batch.num_decodes, heads.num_heads, heads.head_dim
    num_splits = places.num_splits or choose_splits(num, heads.num_kv_heads, num_processors)
    if batch.is_deterministic:
        num_splits = FIXED_SPLITS
    is_split = num_splits > 1
    tile = tile or decode_tile(heads, q.dtype, is_split)
    shape = (num, num_heads, num_splits) if is_split else (1, 1, 1)
    partials, levels = places.pair((*shape, head_dim), shape, torch.float32)
    scale, cap = score_scale(heads)
    width = triton.next_power_of_2(head_dim)
    decode_kernel[(heads.num_kv_heads, num_splits, num)](
        q, kv.keys, kv.values, batch.block_tables, places.context_lens, out, partials, levels, scale, cap, num_splits,
        heads.window, q.stride(0), batch.block_tables.stride(0), *kv.keys.stride()[:3],
        block_size=batch.block_size, group=num_heads // heads.num_kv_heads, head_dim=head_dim, rows=tile.rows, width=width,
        step=tile.step, has_window=heads.window > 0, has_cap=heads.softcap > 0, is_split=is_split,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )
    if is_split:
        join_kernel[(num_heads, num)](
            partials, levels, places.context_lens, out, num_splits, heads.window, head_dim=head_dim, width=width,
            step=tile.step, most_splits=triton.next_power_of_2(num_splits), has_window=heads.window > 0, num_warps=4,
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
    keys, values = places.pair(shape, shape, kv.keys.dtype)
    gather_kernel[(len(gathering.sequences), GATHER_STEP // GATHER_ROWS)](
        kv.keys, kv.values, batch.block_tables, gathering.sequences, gathering.firsts, places.context_lens, gathering.starts,
        keys, values, batch.block_tables.stride(0), *kv.keys.stride()[:2], block_size=batch.block_size, row_width=row_width,
        width=triton.next_power_of_2(row_width), many=GATHER_ROWS, num_warps=4,
    )
    block = [step, heads.head_dim]
    return gathering, TensorDescriptor.from_tensor(keys, block), TensorDescriptor.from_tensor(values, block)


def attend_prefills(
    q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, out: Tensor, tile: Tile | None = None
) -> None:
    """Rows of out for the sequences with several new tokens."""
    places = find_places(batch, q.device)
    group = heads.num_heads // heads.num_kv_heads
    is_gathered = places.is_gathered and q.dtype != torch.float32 and heads.head_dim in GATHERED_DIMS
    tile = tile or prefill_tile(heads, q.dtype, is_gathered, is_short=group <= places.num_short_heads)
    num_queries = tile.rows // group
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
        block_size=batch.block_size, num_kv_heads=heads.num_kv_heads, group=group, head_dim=heads.head_dim, rows=tile.rows,
        width=triton.next_power_of_2(heads.head_dim), step=tile.step, is_gathered=is_gathered, has_window=heads.window > 0,
        has_cap=heads.softcap > 0, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )
