"""The inner loop of attention over KV blocks, for the kernels of `triton/attention.py` and `triton/prefill.py`.

Keys are taken in steps, and each step updates a running softmax. Under a block mask, steps that no query of the tile
sees are left out: the mask is read for many steps at once, and the loop runs over the others, so that loads can be
issued ahead as they are without a mask. A step of keys never crosses the border of two blocks of a mask.

Keys and values in FP8 are taken as they are: the scale of keys is part of that of scores, and sums of values are scaled
when they are finished. Decodes compute with them in float16, which is one instruction for two numbers, and load two
values as one
word: single bytes would be read one by one from shared memory. Sums over even and odd dimensions are then kept apart.

No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from archerfish.kernels.ops import HeadShape

LOG2_E = tl.constexpr(1.4426950408889634)
MASK_NUMBERS = ("num_mask_rows", "num_mask_columns")
STEPS_AT_ONCE = tl.constexpr(32)  # steps that a mask is read for at a time, each a bit of a word


@triton.jit
def start_softmax(rows: tl.constexpr, width: tl.constexpr):
    """An empty running softmax: the sum of weighted values, the highest score, the sum of weights."""
    top = tl.full((rows,), float("-inf"), tl.float32)
    return tl.zeros((rows, width), tl.float32), top, tl.zeros((rows,), tl.float32)


@triton.jit
def sink_softmax(sinks, heads, is_row, is_first, width: tl.constexpr):
    """A running softmax that begins with the sinks of its rows' heads, if there are some and this is the first part."""
    acc, top, total = start_softmax(is_row.shape[0], width)
    if sinks is not None:
        is_taken = is_row & is_first
        top = tl.load(sinks + heads, mask=is_taken, other=float("-inf")).to(tl.float32) * LOG2_E
        total = is_taken.to(tl.float32)
    return acc, top, total


@triton.jit
def load_scales(kv_scales, kv_head, num_kv_heads):
    """What keys and values of a head are to be multiplied with; 1 where they have no scales."""
    key_scale = 1.0
    value_scale = 1.0
    if kv_scales is not None:
        key_scale = tl.load(kv_scales + kv_head)
        value_scale = tl.load(kv_scales + num_kv_heads + kv_head)
    return key_scale, value_scale


@triton.jit
def load_keys(
    keys,
    values,
    table,
    start,
    end,
    block_stride,
    token_stride,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
    is_masked: tl.constexpr,
    is_paired: tl.constexpr,
):
    """One step of keys and values from their blocks; with is_masked, those from `end` on are zeros.

    is_paired: values come as words of two; every dimension is there.
    """
    dims = tl.arange(0, width)
    positions = start + tl.arange(0, step)
    is_key = positions < end
    if is_masked:
        blocks = tl.load(table + positions // block_size, mask=is_key, other=0).to(tl.int64)
        is_loaded = is_key[:, None] & (dims < head_dim)[None, :]
    else:
        blocks = tl.load(table + positions // block_size).to(tl.int64)
        is_loaded = (dims < head_dim)[None, :]
    rows = blocks * block_stride + (positions % block_size) * token_stride
    places = rows[:, None] + dims[None, :]
    if is_paired:
        values = values.to(tl.pointer_type(tl.int16), bitcast=True)
        value_places = (rows // 2)[:, None] + tl.arange(0, width // 2)[None, :]
        if is_masked:
            key = tl.load(keys + places, mask=is_loaded, other=0.0)
            value = tl.load(values + value_places, mask=is_key[:, None], other=0)
        else:
            key = tl.load(keys + places)
            value = tl.load(values + value_places)
    elif is_masked or width > head_dim:
        key = tl.load(keys + places, mask=is_loaded, other=0.0)
        value = tl.load(values + places, mask=is_loaded, other=0.0)
    else:
        key = tl.load(keys + places)
        value = tl.load(values + places)
    return key, value


@triton.jit
def weigh_keys(
    query,
    key,
    top,
    query_positions,
    start,
    end,
    window,
    scale,
    cap,
    mask,
    num_mask_rows,
    num_mask_columns,
    step: tl.constexpr,
    mask_size: tl.constexpr,
    mask_span: tl.constexpr,
    is_masked: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    may_see_none: tl.constexpr,
):
    """Weights of a step of keys, the factor for all weights before it, and the new highest score.

    may_see_none: a row may not have seen any key yet.
    """
    positions = start + tl.arange(0, step)
    scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
    if has_cap:  # cap * tanh(x), scale having brought 2 x log2(e)
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0))
        factor = 1.0
    else:
        factor = scale
    if is_masked:
        is_seen = (positions < end)[None, :] & (positions[None, :] <= query_positions[:, None])
        if has_window:
            is_seen = is_seen & (positions[None, :] > query_positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
    if mask_span > 1:  # some queries of the tile may not see what others do
        key_block = start // mask_size
        query_blocks = query_positions // mask_size
        mask_rows = tl.minimum(query_blocks, num_mask_rows - 1).to(tl.int64) * num_mask_columns
        is_listed = tl.load(mask + mask_rows + tl.minimum(key_block, num_mask_columns - 1)) != 0
        scores = tl.where((is_listed | (query_blocks == key_block))[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    level = new_top
    if may_see_none:
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
    return tl.exp2(scores * factor - level[:, None]), tl.exp2(top - level), new_top


@triton.jit
def take_loaded(
    query,
    acc,
    top,
    total,
    key,
    value,
    query_positions,
    start,
    end,
    window,
    scale,
    cap,
    step: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
):
    """Add one step of keys, which `load_keys` has loaded up to `end`, to the running softmax; there may be none."""
    weights, shrink, top = weigh_keys(
        query,
        key,
        top,
        query_positions,
        start,
        end,
        window,
        scale,
        cap,
        None,
        0,
        0,
        step,
        0,
        0,
        True,
        has_window,
        has_cap,
        True,
    )
    acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, top, total * shrink + tl.sum(weights, 1)


@triton.constexpr_function
def unpack_code(place):
    """The first or second FP8 number of two words, as two numbers in float16."""
    return f"""{{
        .reg .b32 bytes;
        .reg .b16 pair, rest;
        prmt.b32 bytes, $1, 0, 0x{"0031" if place else "0020"};
        mov.b32 {{pair, rest}}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, pair;
    }}"""


@triton.jit
def take_pairs(
    query,
    even_acc,
    odd_acc,
    top,
    total,
    key,
    words,
    query_positions,
    start,
    end,
    window,
    scale,
    cap,
    step: tl.constexpr,
    is_masked: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
):
    """As `take_loaded`, with words of two FP8 values, and sums divided into even and odd dimensions."""
    weights, shrink, top = weigh_keys(
        query,
        key,
        top,
        query_positions,
        start,
        end,
        window,
        scale,
        cap,
        None,
        0,
        0,
        step,
        0,
        0,
        is_masked,
        has_window,
        has_cap,
        True,
    )
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(tl.float16)
    first_code: tl.constexpr = unpack_code(0)
    second_code: tl.constexpr = unpack_code(1)
    even = tl.inline_asm_elementwise(first_code, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    odd = tl.inline_asm_elementwise(second_code, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    even_acc = tl.dot(weights, even, even_acc * shrink[:, None])
    odd_acc = tl.dot(weights, odd, odd_acc * shrink[:, None])
    return even_acc, odd_acc, top, total


@triton.jit
def attend_pairs(
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
    end,
    window,
    scale,
    cap,
    block_stride,
    token_stride,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
    has_first: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
):
    """As `attend`, over FP8 keys and values, whose first step may be loaded already; there may be none."""
    query = query.to(tl.float16)
    even_acc, odd_acc = tl.split(tl.reshape(acc, (acc.shape[0], width // 2, 2)))
    if has_first:
        even_acc, odd_acc, top, total = take_pairs(
            query,
            even_acc,
            odd_acc,
            top,
            total,
            first_keys,
            first_values,
            query_positions,
            begin,
            end,
            window,
            scale,
            cap,
            step,
            True,
            has_window,
            has_cap,
        )
        begin += step
    middle = begin if has_window else begin + tl.maximum(end - begin, 0) // step * step  # whole steps need no mask
    for is_rest in tl.static_range(2):
        for start in range(middle if is_rest else begin, end if is_rest else middle, step):
            key, value = load_keys(
                keys,
                values,
                table,
                start,
                end,
                block_stride,
                token_stride,
                block_size,
                head_dim,
                width,
                step,
                is_rest == 1,
                True,
            )
            even_acc, odd_acc, top, total = take_pairs(
                query,
                even_acc,
                odd_acc,
                top,
                total,
                key,
                value,
                query_positions,
                start,
                end,
                window,
                scale,
                cap,
                step,
                is_rest == 1,
                has_window,
                has_cap,
            )
    return tl.reshape(tl.join(even_acc, odd_acc), (acc.shape[0], width)), top, total


@triton.jit
def take_keys(
    query,
    acc,
    top,
    total,
    query_positions,
    keys,
    values,
    table,
    row,
    column,
    start,
    end,
    window,
    scale,
    cap,
    block_stride,
    token_stride,
    mask,
    num_mask_rows,
    num_mask_columns,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
    mask_size: tl.constexpr,
    mask_span: tl.constexpr,
    is_gathered: tl.constexpr,
    is_masked: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
):
    """Load one step of keys and add it to the running softmax. All keys lie before `end` unless is_masked."""
    if is_gathered:
        key = keys.load([row + start, column])
    else:
        key, value = load_keys(
            keys,
            values,
            table,
            start,
            end,
            block_stride,
            token_stride,
            block_size,
            head_dim,
            width,
            step,
            is_masked,
            False,
        )
    weights, shrink, top = weigh_keys(
        query,
        key,
        top,
        query_positions,
        start,
        end,
        window,
        scale,
        cap,
        mask,
        num_mask_rows,
        num_mask_columns,
        step,
        mask_size,
        mask_span,
        is_masked,
        has_window,
        has_cap,
        has_window or mask_span > 0,
    )
    total = total * shrink + tl.sum(weights, 1)
    if is_gathered:
        value = values.load([row + start, column])
    acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit
def seen_steps(
    mask,
    num_mask_rows,
    num_mask_columns,
    first,
    end,
    first_query,
    last_query,
    step: tl.constexpr,
    mask_size: tl.constexpr,
    mask_span: tl.constexpr,
):
    """Which of the next STEPS_AT_ONCE steps any query sees, as bits of a word, and how many these are."""
    index = tl.arange(0, STEPS_AT_ONCE)
    starts = first + index * step
    key_blocks = (starts // mask_size)[None, :]
    query_blocks = (first_query // mask_size + tl.arange(0, mask_span))[:, None]
    mask_rows = tl.minimum(query_blocks, num_mask_rows - 1).to(tl.int64) * num_mask_columns
    is_listed = tl.load(mask + mask_rows + tl.minimum(key_blocks, num_mask_columns - 1)) != 0
    is_seen = (is_listed & (key_blocks < query_blocks)) | (key_blocks == query_blocks)
    is_seen = is_seen & (query_blocks <= last_query // mask_size) & (starts < end)[None, :]
    is_taken = tl.max(is_seen.to(tl.int32), 0)
    return tl.sum(is_taken.to(tl.int64) << index.to(tl.int64), 0), tl.sum(is_taken, 0)


@triton.jit
def attend(
    query,
    acc,
    top,
    total,
    query_positions,
    keys,
    values,
    table,
    row,
    column,
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
    first_query,
    last_query,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
    mask_size: tl.constexpr,
    mask_span: tl.constexpr,
    is_gathered: tl.constexpr,
    is_masked: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
):
    """Add the keys from `begin` to `end` to the running softmax. Their number is a multiple of `step` unless is_masked.

    The keys lie in blocks of the table; with is_gathered, in contiguous rows from `row` and `column` on.
    mask_span: rows of a mask that the queries at positions first_query to last_query may fall into; 0: there is no
    mask.
    """
    if mask_span > 0:
        for first in range(begin, end, STEPS_AT_ONCE * step):
            waiting, num_steps = seen_steps(
                mask,
                num_mask_rows,
                num_mask_columns,
                first,
                end,
                first_query,
                last_query,
                step,
                mask_size,
                mask_span,
            )
            for _ in range(num_steps):
                lowest = waiting & -waiting
                waiting = waiting ^ lowest
                start = first + (tl.log2(lowest.to(tl.float32)) + 0.5).to(tl.int32) * step
                acc, top, total = take_keys(
                    query,
                    acc,
                    top,
                    total,
                    query_positions,
                    keys,
                    values,
                    table,
                    row,
                    column,
                    start,
                    end,
                    window,
                    scale,
                    cap,
                    block_stride,
                    token_stride,
                    mask,
                    num_mask_rows,
                    num_mask_columns,
                    block_size,
                    head_dim,
                    width,
                    step,
                    mask_size,
                    mask_span,
                    is_gathered,
                    is_masked,
                    has_window,
                    has_cap,
                )
    else:
        for start in range(begin, end, step):
            acc, top, total = take_keys(
                query,
                acc,
                top,
                total,
                query_positions,
                keys,
                values,
                table,
                row,
                column,
                start,
                end,
                window,
                scale,
                cap,
                block_stride,
                token_stride,
                mask,
                num_mask_rows,
                num_mask_columns,
                block_size,
                head_dim,
                width,
                step,
                mask_size,
                mask_span,
                is_gathered,
                is_masked,
                has_window,
                has_cap,
            )
    return acc, top, total


def score_scale(heads: HeadShape) -> tuple[float, float]:
    """The factor of query-key products and the cap of scores, for `attend`."""
    if heads.softcap:
        return 2 * LOG2_E.value * heads.scale / heads.softcap, LOG2_E.value * heads.softcap
    return LOG2_E.value * heads.scale, 0.0
