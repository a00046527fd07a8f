"""Attention of sequences with several new tokens over KV blocks, in Triton.

The host divides their new tokens into tiles and lists these, those with most keys first. Where most keys are new,
`gather_kernel` first copies all keys into contiguous rows: the card's copy engine (TMA) then loads them, which saves
more time than the copy costs.

No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from archerfish.kernels.batches import BlockMask
from archerfish.kernels.ops import HeadShape, KVLayer, PagedBatch
from archerfish.kernels.triton import plan as planning
from archerfish.kernels.triton.attend import MASK_NUMBERS, attend, load_scales, score_scale, sink_softmax
from archerfish.kernels.triton.plan import AttentionPlan, Gathering, Tile, find_plan, lay_mask
from archerfish.kernels.triton.tiles import dot_block, next_power_of_2

Tensor = torch.Tensor
GATHER_ROWS = 4  # of a program that gathers; divides GATHER_STEP
GATHERED_DIMS = (64, 128)  # of heads that the copy engine can load


@triton.jit(do_not_specialize=["window", "table_stride", *MASK_NUMBERS])
def prefill_kernel(
    q,
    keys,
    values,
    kv_scales,
    tables,
    tile_sequences,
    tile_firsts,
    context_lens,
    query_starts,
    query_lens,
    key_starts,
    out,
    scale,
    cap,
    window,
    q_stride,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    mask,
    num_mask_rows,
    num_mask_columns,
    sinks,
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
    mask_size: tl.constexpr,
    mask_span: tl.constexpr,
    is_gathered: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
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

    acc, top, total = sink_softmax(sinks, kv_head * group + members % group, is_row, True, width)
    num_keys = tl.where(first_query < query_len, context_len, 0)  # none for a tile without real tokens
    end = tl.minimum(first_position + rows // group, num_keys)
    last_position = end - 1
    key_row = tl.load(key_starts + sequence)
    key_scale, value_scale = load_scales(kv_scales, kv_head, num_kv_heads)
    scale *= key_scale
    if not is_gathered:
        keys += kv_head * head_stride
        values += kv_head * head_stride
    table = tables + sequence * table_stride
    if has_window:
        begin = tl.maximum(first_position - window + 1, 0) // step * step
    else:  # keys that all queries of the tile see need no mask
        begin = tl.minimum(first_position + 1, num_keys) // step * step
        acc, top, total = attend(
            query,
            acc,
            top,
            total,
            query_positions,
            keys,
            values,
            table,
            key_row,
            kv_head * head_dim,
            0,
            begin,
            window,
            scale,
            cap,
            block_stride,
            token_stride,
            mask,
            num_mask_rows,
            num_mask_columns,
            first_position,
            last_position,
            block_size,
            head_dim,
            width,
            step,
            mask_size,
            mask_span,
            is_gathered,
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
        key_row,
        kv_head * head_dim,
        begin,
        end,
        window,
        scale,
        cap,
        block_stride,
        token_stride,
        mask,
        num_mask_rows,
        num_mask_columns,
        first_position,
        last_position,
        block_size,
        head_dim,
        width,
        step,
        mask_size,
        mask_span,
        is_gathered,
        True,
        has_window,
        has_cap,
    )
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None] * value_scale
    target = (token * (num_kv_heads * group * head_dim) + column)[:, None] + dims[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["table_stride"])
def gather_kernel(
    keys,
    values,
    tables,
    tile_sequences,
    tile_firsts,
    context_lens,
    key_starts,
    key_rows,
    value_rows,
    table_stride,
    block_stride,
    token_stride,
    block_size: tl.constexpr,
    row_width: tl.constexpr,
    width: tl.constexpr,
    many: tl.constexpr,
):
    """Copies keys and values of sequences, one token per row; rows past a sequence's end become zeros."""
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
    tl.store(key_rows + rows, key.to(key_rows.dtype.element_ty), mask=is_inside)
    tl.store(value_rows + rows, value.to(value_rows.dtype.element_ty), mask=is_inside)


def gather(
    kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, plan: AttentionPlan, step: int, dtype: torch.dtype
) -> tuple[Gathering, TensorDescriptor, TensorDescriptor]:
    """Copies of the keys and values of the sequences with several new tokens, for loads of `step` keys of one head."""
    gathering = plan.gathering
    if gathering is None:
        gathering = plan.gathering = planning.plan_gathering(batch, kv.keys.device)
    row_width = heads.num_kv_heads * heads.head_dim
    shape = (gathering.num_rows, row_width)
    keys, values = plan.pair("gathered", shape, shape, dtype)
    gather_kernel[(len(gathering.sequences), planning.GATHER_STEP // GATHER_ROWS)](
        kv.keys,
        kv.values,
        batch.block_tables,
        gathering.sequences,
        gathering.firsts,
        plan.context_lens,
        gathering.starts,
        keys,
        values,
        batch.block_tables.stride(0),
        *kv.keys.stride()[:2],
        block_size=batch.block_size,
        row_width=row_width,
        width=next_power_of_2(row_width),
        many=GATHER_ROWS,
        num_warps=4,
    )
    block = [step, heads.head_dim]
    return gathering, TensorDescriptor.from_tensor(keys, block), TensorDescriptor.from_tensor(values, block)


def attend_prefills(
    q: Tensor,
    kv: KVLayer[Tensor],
    batch: PagedBatch[Tensor],
    heads: HeadShape,
    out: Tensor,
    tile: Tile | None = None,
    mask: BlockMask[Tensor] | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Rows of out for the sequences with several new tokens."""
    plan = find_plan(batch)
    group = heads.num_heads // heads.num_kv_heads
    is_gathered = plan.is_gathered and q.dtype != torch.float32 and heads.head_dim in GATHERED_DIMS
    is_short = mask is not None or group <= plan.num_short_heads
    tile = tile or planning.prefill_tile(heads, q.dtype, is_gathered, is_short)
    num_queries = tile.rows // group
    tile, laid = lay_mask(mask, tile, num_queries, plan.context_lens)
    if num_queries not in plan.tiles and plan.num_rows:
        plan.tiles[num_queries] = planning.list_tiles_on_device(plan, batch.num_decodes, num_queries)
    elif num_queries not in plan.tiles:
        plan.tiles[num_queries] = planning.list_tiles(batch, num_queries, q.device)
    sequences, firsts = plan.tiles[num_queries]
    keys = kv.keys
    values = kv.values
    key_starts = plan.query_starts
    if is_gathered:
        gathering, keys, values = gather(kv, batch, heads, plan, tile.step, q.dtype)
        key_starts = gathering.starts
    scale, cap = score_scale(heads)
    prefill_kernel[(len(sequences) * heads.num_kv_heads,)](
        q,
        keys,
        values,
        kv.scales,
        batch.block_tables,
        sequences,
        firsts,
        plan.context_lens,
        plan.query_starts,
        plan.query_lens,
        key_starts,
        out,
        scale,
        cap,
        heads.window,
        q.stride(0),
        batch.block_tables.stride(0),
        *kv.keys.stride()[:3],
        laid.visible,
        laid.num_rows,
        laid.num_columns,
        sinks,
        block_size=batch.block_size,
        num_kv_heads=heads.num_kv_heads,
        group=group,
        head_dim=heads.head_dim,
        rows=tile.rows,
        width=dot_block(heads.head_dim),
        step=tile.step,
        mask_size=laid.size,
        mask_span=laid.span,
        is_gathered=is_gathered,
        has_window=heads.window > 0,
        has_cap=heads.softcap > 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
