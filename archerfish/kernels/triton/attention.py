"""Attention of sequences with one new token over KV blocks, in Triton; `triton/prefill.py` has those with several.

In both, the query heads that share a KV head are rows of one tile, so that a key is read once for all of them. The
kernels look up blocks in the table while they load keys.

The keys of a decode are split into parts, which run in parallel; `join_kernel` joins their results. The grid depends
only on the number of sequences, and lengths are read on the device, so that a captured graph serves any context. The
program whose part has the new token can rotate and store the new key itself: no other program reads it.

Keys that all decodes share are read once for many of them: tiles of `shared_kernel` hold the heads of many sequences,
and `decode_kernel` begins with its results.

Scores are kept as base-2 logarithms. No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from archerfish.kernels.batches import BlockMask
from archerfish.kernels.ops import HeadShape, KVLayer, PagedBatch, Rotation
from archerfish.kernels.triton import plan as planning
from archerfish.kernels.triton.attend import (
    MASK_NUMBERS,
    attend,
    attend_pairs,
    load_keys,
    load_scales,
    score_scale,
    sink_softmax,
    start_softmax,
    take_loaded,
)
from archerfish.kernels.triton.launch import early_start, follow
from archerfish.kernels.triton.norm import load_heads, rotate_heads, rotation_factors, to_kv
from archerfish.kernels.triton.plan import AttentionPlan, Tile, find_plan, lay_mask
from archerfish.kernels.triton.tiles import cdiv, dot_block, next_power_of_2

Tensor = torch.Tensor
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
FIXED_SPLITS = 16  # of deterministic batches, whose results must not depend on the number of sequences
PARTS_AT_ONCE = 4  # results over shared keys that a decode loads at a time


@triton.jit
def cut_keys(
    context_lens,
    sequence,
    shared_len,
    num_parts,
    window,
    step: tl.constexpr,
    has_window: tl.constexpr,
    is_shared: tl.constexpr,
):
    """The length of a decode's context, the first key of its parts, and the number of keys of a part."""
    context_len = tl.load(context_lens + sequence)
    first = context_len * 0
    if has_window:
        first = tl.maximum(context_len - window, 0) // step * step
    if is_shared:
        first = tl.load(shared_len).to(tl.int32)
    return context_len, first, part_len(context_len - first, num_parts, step)


@triton.jit
def part_len(num_keys, num_parts, step: tl.constexpr):
    """The number of keys of a part: whole steps, at least one."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, step), num_parts), 1) * step


@triton.jit
def store_part(partials, levels, place, result, level, is_row, head_dim: tl.constexpr, width: tl.constexpr):
    """Store the result of one part of the keys for each row, and the logarithm of its weight."""
    dims = tl.arange(0, width)[None, :]
    tl.store(partials + place[:, None] * head_dim + dims, result, mask=is_row[:, None] & (dims < head_dim))
    tl.store(levels + place, level, mask=is_row)


@triton.jit(do_not_specialize=["num_sequences", "num_parts"])
def shared_kernel(
    q,
    keys,
    values,
    kv_scales,
    table,
    context_lens,
    shared_len,
    partials,
    levels,
    scale,
    cap,
    num_sequences,
    num_parts,
    q_stride,
    block_stride,
    token_stride,
    head_stride,
    block_size: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
    has_cap: tl.constexpr,
    is_early: tl.constexpr,
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
    acc, top, total = start_softmax(rows, width)
    query_positions = tl.zeros((rows,), tl.int32) + end
    keys += kv_head * head_stride
    values += kv_head * head_stride
    scale *= load_scales(kv_scales, kv_head, tl.num_programs(1))[0]
    middle = begin + (end - begin) // step * step  # whole steps need no mask
    acc, top, total = attend(
        query,
        acc,
        top,
        total,
        query_positions,
        keys,
        values,
        table,
        0,
        0,
        begin,
        middle,
        0,
        scale,
        cap,
        block_stride,
        token_stride,
        table,
        0,
        0,
        0,
        0,
        block_size,
        head_dim,
        width,
        step,
        0,
        0,
        False,
        False,
        False,
        has_cap,
    )
    acc, top, total = attend(
        query,
        acc,
        top,
        total,
        query_positions,
        keys,
        values,
        table,
        0,
        0,
        middle,
        end,
        0,
        scale,
        cap,
        block_stride,
        token_stride,
        table,
        0,
        0,
        0,
        0,
        block_size,
        head_dim,
        width,
        step,
        0,
        0,
        False,
        True,
        False,
        has_cap,
    )
    place = (sequence * tl.num_programs(1) * group + heads) * num_parts + part
    store_part(partials, levels, place, acc / total[:, None], top + tl.log2(total), is_row, head_dim, width)


@triton.jit
def take_parts(
    acc,
    top,
    total,
    partials,
    levels,
    place,
    is_row,
    num_used,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    at_once: tl.constexpr,
):
    """Add the results of the first num_used parts to the running softmax, `at_once` loads at a time."""
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


@triton.jit
def make_new(
    q,
    key_offset,
    value_offset,
    keys,
    values,
    key_scale,
    value_scale,
    place,
    is_own,
    members,
    eps,
    factors,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    has_q_norm: tl.constexpr,
    has_k_norm: tl.constexpr,
):
    """Queries, key and value of a new token for a KV head, from the product's output. Key and value are stored."""
    dims = tl.arange(0, head_dim)[None, :]
    queries = load_heads(q + members[:, None] * head_dim, (members < group)[:, None], head_dim)
    loaded = load_heads(q + key_offset, is_own, head_dim)
    value = tl.load(q + key_offset + value_offset + dims, mask=is_own, other=0.0).to(tl.float32)
    value = to_kv(value / value_scale, values.dtype.element_ty)
    query = rotate_heads(queries, factors[0], eps, head_dim, has_q_norm).to(q.dtype.element_ty)
    key = to_kv(rotate_heads(loaded, factors[1], eps, head_dim, has_k_norm) / key_scale, keys.dtype.element_ty)
    tl.store(keys + place + dims, key, mask=is_own)
    tl.store(values + place + dims, value, mask=is_own)
    return query, key, value


@triton.jit
def take_key(query, acc, top, total, key, value, is_taken, scale, cap, has_cap: tl.constexpr):
    """Add one key and its value to the running softmax where is_taken."""
    level = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale
    if has_cap:
        level = cap * (1.0 - 2.0 / (tl.exp2(level) + 1.0))
    level = tl.where(is_taken, level, float("-inf"))
    new_top = tl.maximum(top, level)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    weight = tl.exp2(level - base)
    return acc * shrink[:, None] + value.to(tl.float32) * weight[:, None], new_top, total * shrink + weight


@triton.jit(do_not_specialize=["num_splits", "num_shared_parts", "window", "table_stride", *MASK_NUMBERS])
def decode_kernel(
    q,
    keys,
    values,
    kv_scales,
    tables,
    context_lens,
    shared_len,
    out,
    partials,
    levels,
    shared_partials,
    shared_levels,
    scale,
    cap,
    num_splits,
    num_shared_parts,
    window,
    q_stride,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    mask,
    num_mask_rows,
    num_mask_columns,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    cos_sin_stride,
    sinks,
    block_size: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
    mask_size: tl.constexpr,
    mask_span: tl.constexpr,
    shared_step: tl.constexpr,
    parts_at_once: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    is_split: tl.constexpr,
    is_shared: tl.constexpr,
    is_new: tl.constexpr,
    is_rotated: tl.constexpr,
    has_q_norm: tl.constexpr,
    has_k_norm: tl.constexpr,
    is_paired: tl.constexpr,
    is_early: tl.constexpr,
):
    """is_paired: keys and values are FP8, and values are loaded as words of two.

    is_new: q is the product's output, with queries, keys and values; the new key is not in its block yet.

    Everything that does not come from the product in front is loaded before that ends: in a split decode, the first
    keys too.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len, first, num_keys = cut_keys(
        context_lens, sequence, shared_len, num_splits, window, step, has_window, is_shared
    )
    begin = first + split * num_keys
    end = tl.minimum(begin + num_keys, context_len)
    if is_split:  # noqa: SIM102 (the compiler decides this one)
        if (begin >= end) & (split > 0):
            return

    members, dims = tl.arange(0, rows), tl.arange(0, width)
    is_inside = (members < group)[:, None] & (dims < head_dim)[None, :]
    head_row = (sequence * tl.num_programs(0) + kv_head) * group + members
    position = context_len - 1
    query_positions = tl.zeros((rows,), tl.int32) + position
    table = tables + sequence * table_stride
    q += sequence * q_stride + kv_head * group * head_dim
    keys += kv_head * head_stride
    values += kv_head * head_stride
    key_scale, value_scale = load_scales(kv_scales, kv_head, tl.num_programs(0))
    scale *= key_scale
    acc, top, total = sink_softmax(sinks, kv_head * group + members, members < group, split == 0, width)
    last = tl.minimum(end, position) if is_new else end
    if is_new:
        rotary_row = cos_sin + tl.maximum(position, 0).to(tl.int64) * cos_sin_stride
        factors = (
            rotation_factors(rotary_row, q_norm, head_dim, is_rotated, has_q_norm),
            rotation_factors(rotary_row, k_norm, head_dim, is_rotated, has_k_norm),
        )
        is_own = (begin <= position) & (position < end)
        block = tl.load(table + position // block_size, mask=is_own, other=0).to(tl.int64)
    first_keys, first_values = None, None
    if is_new and is_split:
        first_keys, first_values = load_keys(
            keys,
            values,
            table,
            begin,
            last,
            block_stride,
            token_stride,
            block_size,
            head_dim,
            width,
            step,
            True,
            is_paired,
        )
    follow(is_early)

    if is_new:
        query, key, value = make_new(
            q,
            (tl.num_programs(0) * group + kv_head - kv_head * group) * head_dim,
            tl.num_programs(0) * head_dim,
            keys,
            values,
            key_scale,
            value_scale,
            block * block_stride + position % block_size * token_stride,
            is_own,
            members,
            eps,
            factors,
            group,
            head_dim,
            has_q_norm,
            has_k_norm,
        )
    else:
        query = tl.load(q + members[:, None] * head_dim + dims[None, :], mask=is_inside, other=0.0)
    if is_shared:  # the first part of a decode begins with the results over shared keys
        acc, top, total = take_parts(
            acc,
            top,
            total,
            shared_partials,
            shared_levels,
            head_row * num_shared_parts,
            members < group,
            tl.where((split == 0) & (begin < end), tl.cdiv(first, part_len(first, num_shared_parts, shared_step)), 0),
            head_dim,
            width,
            parts_at_once,
        )
    if is_paired:
        acc, top, total = attend_pairs(
            query,
            acc,
            top,
            total,
            first_keys,
            first_values,
            query_positions,
            keys,
            values,
            table,
            begin,
            last,
            window,
            scale,
            cap,
            block_stride,
            token_stride,
            block_size,
            head_dim,
            width,
            step,
            is_new and is_split,
            has_window,
            has_cap,
        )
    else:
        if is_new and is_split:
            acc, top, total = take_loaded(
                query,
                acc,
                top,
                total,
                first_keys,
                first_values,
                query_positions,
                begin,
                last,
                window,
                scale,
                cap,
                step,
                has_window,
                has_cap,
            )
            begin += step
        acc, top, total = attend(
            query,
            acc,
            top,
            total,
            query_positions,
            keys,
            values,
            table,
            0,
            0,
            begin,
            last,
            window,
            scale,
            cap,
            block_stride,
            token_stride,
            mask,
            num_mask_rows,
            num_mask_columns,
            position,
            position,
            block_size,
            head_dim,
            width,
            step,
            mask_size,
            mask_span,
            False,
            True,
            has_window,
            has_cap,
        )
    if is_new:
        acc, top, total = take_key(query, acc, top, total, key, value, is_own, scale, cap, has_cap)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if is_split:
        store_part(
            partials,
            levels,
            head_row * num_splits + split,
            result,
            top + tl.log2(total),
            members < group,
            head_dim,
            width,
        )
    else:
        result = (result * value_scale).to(out.dtype.element_ty)
        tl.store(out + head_row[:, None] * head_dim + dims[None, :], result, mask=is_inside)


@triton.jit(do_not_specialize=["num_splits", "window"])
def join_kernel(
    partials,
    levels,
    kv_scales,
    context_lens,
    shared_len,
    out,
    num_splits,
    window,
    num_kv_heads,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
    most_splits: tl.constexpr,
    has_window: tl.constexpr,
    is_shared: tl.constexpr,
    is_early: tl.constexpr,
):
    """Join the results of the parts of one decode and one head, weighted by their shares of the softmax."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    context_len, first, num_keys = cut_keys(
        context_lens, sequence, shared_len, num_splits, window, step, has_window, is_shared
    )
    follow(is_early)
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
    value_scale = load_scales(kv_scales, head * num_kv_heads // tl.num_programs(0), num_kv_heads)[1]
    joined = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0) * value_scale
    tl.store(out + row * head_dim + dims, joined.to(out.dtype.element_ty), mask=dims < head_dim)


@dataclass(frozen=True)
class SharedParts:
    """Results over the keys that all decodes share, part by part."""

    partials: Tensor  # (decodes, heads, parts, head_dim)
    levels: Tensor  # (decodes, heads, parts)
    num_parts: int
    step: int


def attend_shared(
    q: Tensor,
    kv: KVLayer[Tensor],
    batch: PagedBatch[Tensor],
    heads: HeadShape,
    plan: AttentionPlan,
    num_processors: int,
) -> SharedParts | None:
    """Attention of the decodes over the keys that they share; None where each decode reads all of its keys itself."""
    if plan.shared_len is None or heads.window or batch.is_deterministic:
        return None
    num = batch.num_decodes
    head_dim = heads.head_dim
    group = heads.num_heads // heads.num_kv_heads
    tile = planning.shared_tile(heads, q.dtype, num * group)
    num_tiles = cdiv(num * group, tile.rows)
    num_parts = planning.choose_shared_parts(num_tiles * heads.num_kv_heads, num_processors)
    shape = (num, heads.num_heads, num_parts)
    partials, levels = plan.pair("shared parts", (*shape, head_dim), shape, torch.float32)
    scale, cap = score_scale(heads)
    shared_kernel[(num_tiles, heads.num_kv_heads, num_parts)](
        q,
        *kv,
        batch.block_tables,
        plan.context_lens,
        plan.shared_len,
        partials,
        levels,
        scale,
        cap,
        num,
        num_parts,
        q.stride(0),
        *kv.keys.stride()[:3],
        block_size=batch.block_size,
        group=group,
        head_dim=head_dim,
        rows=tile.rows,
        width=dot_block(head_dim),
        step=tile.step,
        has_cap=heads.softcap > 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early_start(q.device),
    )
    return SharedParts(partials, levels, num_parts, tile.step)


def takes_new(batch: PagedBatch[Tensor], heads: HeadShape, rotation: Rotation[Tensor]) -> bool:
    """Whether `attend_decodes` can store the new keys and values: only decodes, no shared keys, whole heads rotated by
    their halves, norms of single heads."""
    rotary, norms = rotation.rotary, (rotation.q_norm, rotation.k_norm)
    is_whole = rotary is None or (rotary.rotary_dim == heads.head_dim and not rotary.is_interleaved)
    is_whole &= all(norm is None or len(norm) == heads.head_dim for norm in norms)
    is_power = heads.head_dim <= MAX_HEAD_DIM and heads.head_dim == next_power_of_2(heads.head_dim) >= MIN_HEAD_DIM
    if not (is_whole and is_power and 0 < batch.num_decodes == len(batch.query_lens)):
        return False
    return find_plan(batch).shared_len is None


def attend_decodes(
    q: Tensor,
    kv: KVLayer[Tensor],
    batch: PagedBatch[Tensor],
    heads: HeadShape,
    out: Tensor,
    num_processors: int,
    tile: Tile | None = None,
    mask: BlockMask[Tensor] | None = None,
    rotation: Rotation[Tensor] | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Rows of out for the sequences with one new token.

    rotation: q is the product's output; new keys and values are stored on the way. Not with shared keys or a mask.
    """
    plan = find_plan(batch)
    num = batch.num_decodes
    num_heads = heads.num_heads
    head_dim = heads.head_dim
    num_expected = plan.num_expected or num
    num_splits = plan.num_splits or planning.choose_splits(num_expected, heads.num_kv_heads, num_processors)
    if batch.is_deterministic:
        num_splits = FIXED_SPLITS
    is_split = num_splits > 1
    tile = tile or planning.decode_tile(
        heads, q.dtype, num_expected, is_split, num_processors, is_narrow=kv.scales is not None
    )
    tile, laid = lay_mask(mask, tile, 1, plan.context_lens)
    shape = (num, num_heads, num_splits) if is_split else (1, 1, 1)
    partials, levels = plan.pair("parts", (*shape, head_dim), shape, torch.float32)
    shared = None if mask is not None else attend_shared(q, kv, batch, heads, plan, num_processors)
    shared_len = plan.context_lens if shared is None or plan.shared_len is None else plan.shared_len
    parts = shared or SharedParts(partials, levels, num_parts=0, step=tile.step)
    scale, cap = score_scale(heads)
    width = dot_block(head_dim)
    is_paired = q.is_cuda and kv.keys.dtype == torch.float8_e4m3fn and q.dtype != torch.float32
    is_paired = is_paired and mask is None and width == head_dim
    given = rotation or Rotation()
    table = plan.context_lens if given.rotary is None else given.rotary.cos_sin
    decode_kernel[(heads.num_kv_heads, num_splits, num)](
        q,
        *kv,
        batch.block_tables,
        plan.context_lens,
        shared_len,
        out,
        partials,
        levels,
        parts.partials,
        parts.levels,
        scale,
        cap,
        num_splits,
        parts.num_parts,
        heads.window,
        q.stride(0),
        batch.block_tables.stride(0),
        *kv.keys.stride()[:3],
        laid.visible,
        laid.num_rows,
        laid.num_columns,
        table,
        q if given.q_norm is None else given.q_norm,
        q if given.k_norm is None else given.k_norm,
        given.eps,
        table.stride(0),
        sinks,
        block_size=batch.block_size,
        group=num_heads // heads.num_kv_heads,
        head_dim=head_dim,
        rows=tile.rows,
        width=width,
        step=tile.step,
        mask_size=laid.size,
        mask_span=laid.span,
        shared_step=parts.step,
        parts_at_once=PARTS_AT_ONCE,
        has_window=heads.window > 0,
        has_cap=heads.softcap > 0,
        is_split=is_split,
        is_shared=shared is not None,
        is_new=rotation is not None,
        is_rotated=given.rotary is not None,
        has_q_norm=given.q_norm is not None,
        has_k_norm=given.k_norm is not None,
        is_paired=is_paired,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early_start(q.device),
    )
    if is_split:
        join_kernel[(num_heads, num)](
            partials,
            levels,
            kv.scales,
            plan.context_lens,
            shared_len,
            out,
            num_splits,
            heads.window,
            heads.num_kv_heads,
            head_dim=head_dim,
            width=width,
            step=tile.step,
            most_splits=next_power_of_2(num_splits),
            has_window=heads.window > 0,
            is_shared=shared is not None,
            num_warps=4,
            **early_start(q.device),
        )
