"""Triton kernels of RWKV-7's recurrence. `torch/wkv.py` says what they compute, `triton/recurrent.py` launches them.

A program has one head of one sequence and keeps its state in registers, storing it behind each piece of the sequence.
It does all that lies between a time mix's products: decay, rate, keys, recurrence, norm of the head, bonus and gate
touch nothing but the head's own columns. `mix_decodes_kernel` has one token of each sequence, `mix_tokens_kernel` takes
one after the other, `mix_chunks_kernel` a chunk of them at once. With D_t the product of the decays of a chunk's first
t tokens, S_t = R_t diag(D_t), where

    R_t = R_(t-1) + u_t (z_t a_t / D_t)^T + v_t (k_t / D_t)^T        u_t = -R_(t-1) (D_(t-1) z_t)

So the u of a chunk solve a triangular system, and S at its end is linear in S at its start: only that is left to do
chunk by chunk. A decay is above 0.545, so that 1 / D stays within float32 for over 100 tokens.

No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from archerfish.kernels.triton.launch import follow
from archerfish.kernels.triton.products import append


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_rows"])
def shift_kernel(
    x,
    inputs,
    previous,
    targets,
    factors,
    out,
    num_rows,
    inputs_stride,
    width: tl.constexpr,
    block: tl.constexpr,
    num_factors: tl.constexpr,
    stores: tl.constexpr,
):
    """stores: every row is a sequence's only new one, and becomes its last input where it has a target."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < width
    place = tl.load(previous + row)
    own = tl.load(x + row * width + columns, mask=is_inside, other=0.0)
    wide = own.to(tl.float32)
    if place >= 0:
        delta = tl.load(x + place * width + columns, mask=is_inside, other=0.0).to(tl.float32) - wide
    else:
        kept = inputs + (-1 - place) * inputs_stride + columns
        delta = tl.load(kept, mask=is_inside, other=0.0).to(tl.float32) - wide
        if stores:
            target = tl.load(targets + row)
            tl.store(inputs + target * inputs_stride + columns, own, mask=is_inside & (target >= 0))
    for number in tl.static_range(num_factors):
        factor = tl.load(factors + number * width + columns, mask=is_inside, other=0.0)
        target = out + (number * num_rows + row) * width + columns
        tl.store(target, (wide + delta * factor).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def prepare_heads(decay, rate, key, removal, replacement, axis: tl.constexpr):
    """Logarithm of the decay, key, removal key and what it adds, from products of a head in float32."""
    log_decay = -0.6065306597126334 * sigmoid(decay)
    own_rate = sigmoid(rate)
    removed = key * removal
    length = tl.sqrt(tl.sum(removed * removed, axis, keep_dims=True))
    removed = removed / tl.maximum(length, 1e-12)
    return log_decay, key * (1.0 + (own_rate - 1.0) * replacement), removed, removed * own_rate


@triton.jit
def load_heads(
    decay,
    key,
    value,
    rate,
    first_value,
    value_mix,
    removal,
    replacement,
    place,
    weight_place,
    is_inside,
    has_value_mix: tl.constexpr,
    axis: tl.constexpr,
):
    """Logarithm of the decay, key, value, removal key and what it adds, of the tokens at some places, in float32."""
    own_decay = tl.load(decay + place, mask=is_inside, other=0.0).to(tl.float32)
    own_rate = tl.load(rate + place, mask=is_inside, other=0.0).to(tl.float32)
    own_key = tl.load(key + place, mask=is_inside, other=0.0).to(tl.float32)
    own_value = tl.load(value + place, mask=is_inside, other=0.0).to(tl.float32)
    if has_value_mix:
        share = sigmoid(tl.load(value_mix + place, mask=is_inside, other=0.0).to(tl.float32))
        own_value += (tl.load(first_value + place, mask=is_inside, other=0.0).to(tl.float32) - own_value) * share
    log_decay, own_key, removed, added = prepare_heads(
        own_decay, own_rate, own_key, tl.load(removal + weight_place), tl.load(replacement + weight_place), axis
    )
    return tl.where(is_inside, log_decay, 0.0), own_key, own_value, removed, added


@triton.jit
def norm_heads(y, receptance, key, value, bonus, norm, norm_bias, eps, dim: tl.constexpr, axis: tl.constexpr):
    """Norm of the head, and bonus."""
    y -= tl.sum(y, axis, keep_dims=True) / dim
    y *= tl.rsqrt(tl.sum(y * y, axis, keep_dims=True) / dim + eps)
    return y * norm + norm_bias + tl.sum(receptance * key * bonus, axis, keep_dims=True) * value


@triton.jit
def finish_heads(
    y,
    receptance,
    key,
    value,
    gate,
    bonus,
    norm,
    norm_bias,
    eps,
    place,
    weight_place,
    is_inside,
    dim: tl.constexpr,
    axis: tl.constexpr,
):
    """Norm of the head, bonus and gate."""
    y = norm_heads(
        y,
        receptance,
        key,
        value,
        tl.load(bonus + weight_place),
        tl.load(norm + weight_place),
        tl.load(norm_bias + weight_place),
        eps,
        dim,
        axis,
    )
    return y * tl.load(gate + place, mask=is_inside, other=0.0).to(tl.float32)


@triton.jit
def next_state(state, log_decay, key, value, removed, added):
    """Behind a token; values down, keys across."""
    taken = tl.sum(state * removed[None, :], 1)
    return state * tl.exp(log_decay)[None, :] - taken[:, None] * added[None, :] + value[:, None] * key[None, :]


@triton.jit
def mix_token(
    state,
    row,
    receptance,
    decay,
    key,
    value,
    rate,
    gate,
    first_value,
    value_mix,
    removal,
    replacement,
    bonus,
    norm,
    norm_bias,
    eps,
    out,
    width,
    weight_place,
    dim: tl.constexpr,
    has_value_mix: tl.constexpr,
):
    """The state behind a token, whose output is stored."""
    place = tl.cast(row, tl.int64) * width + weight_place
    is_inside = tl.arange(0, dim) < dim
    log_decay, own_key, own_value, removed, added = load_heads(
        decay,
        key,
        value,
        rate,
        first_value,
        value_mix,
        removal,
        replacement,
        place,
        weight_place,
        is_inside,
        has_value_mix,
        0,
    )
    own = tl.load(receptance + place).to(tl.float32)
    state = next_state(state, log_decay, own_key, own_value, removed, added)
    y = tl.sum(state * own[None, :], 1)
    y = finish_heads(
        y, own, own_key, own_value, gate, bonus, norm, norm_bias, eps, place, weight_place, is_inside, dim, 0
    )
    tl.store(out + place, y.to(out.dtype.element_ty))
    return state


@triton.jit(do_not_specialize_on_alignment=["first_pieces"])
def mix_tokens_kernel(
    receptance,
    decay,
    key,
    value,
    rate,
    gate,
    first_value,
    value_mix,
    removal,
    replacement,
    bonus,
    norm,
    norm_bias,
    eps,
    states,
    sources,
    targets,
    starts,
    first_pieces,
    out,
    state_stride,
    width,
    dim: tl.constexpr,
    has_value_mix: tl.constexpr,
):
    """One token after the other."""
    sequence = tl.program_id(0)
    columns = tl.arange(0, dim)
    weight_place = tl.program_id(1) * dim + columns
    matrix = states + tl.program_id(1) * dim * dim + columns[:, None] * dim + columns[None, :]
    first = tl.load(first_pieces + sequence).to(tl.int32)
    state = tl.load(matrix + tl.load(sources + first).to(tl.int64) * state_stride)
    for piece in range(first, tl.load(first_pieces + sequence + 1).to(tl.int32)):
        for row in range(tl.load(starts + piece).to(tl.int32), tl.load(starts + piece + 1).to(tl.int32)):
            state = mix_token(
                state,
                row,
                receptance,
                decay,
                key,
                value,
                rate,
                gate,
                first_value,
                value_mix,
                removal,
                replacement,
                bonus,
                norm,
                norm_bias,
                eps,
                out,
                width,
                weight_place,
                dim,
                has_value_mix,
            )
        tl.store(matrix + tl.load(targets + piece).to(tl.int64) * state_stride, state)


@triton.jit
def mix_decodes_kernel(
    receptance,
    decay,
    key,
    value,
    rate,
    gate,
    first_value,
    value_mix,
    removal,
    replacement,
    bonus,
    norm,
    norm_bias,
    eps,
    states,
    sources,
    targets,
    out,
    state_stride,
    width,
    dim: tl.constexpr,
    height: tl.constexpr,
    has_value_mix: tl.constexpr,
    is_early: tl.constexpr,
):
    """One token of each sequence, in the row of its number. height: of a piece of the state, which has values down.

    A row without a sequence goes on from the empty state, and leaves nothing but what it gives. States are read and
    written once a step, and take no room in caches that others could use.
    """
    sequence = tl.program_id(0)
    columns = tl.arange(0, dim)
    lines = tl.arange(0, height)
    first = tl.program_id(1) * dim
    source = tl.load(sources + sequence).to(tl.int64)
    target = tl.maximum(tl.load(targets + sequence).to(tl.int64), 0)
    matrix = states + first * dim + lines[:, None] * dim + columns[None, :]
    pieces = ()
    for start in tl.static_range(0, dim, height):
        pieces = append(
            pieces, tl.load(matrix + tl.maximum(source, 0) * state_stride + start * dim, cache_modifier=".cg")
        )
    own_removal = tl.load(removal + first + columns)
    own_replacement = tl.load(replacement + first + columns)
    own_bonus = tl.load(bonus + first + columns)
    scales = ()
    shifts = ()
    for start in tl.static_range(0, dim, height):
        scales = append(scales, tl.load(norm + first + start + lines))
        shifts = append(shifts, tl.load(norm_bias + first + start + lines))
    follow(is_early)
    row = sequence.to(tl.int64) * width + first
    own = tl.load(receptance + row + columns).to(tl.float32)
    own_decay = tl.load(decay + row + columns).to(tl.float32)
    own_rate = tl.load(rate + row + columns).to(tl.float32)
    own_key = tl.load(key + row + columns).to(tl.float32)
    values = ()
    gates = ()
    for start in tl.static_range(0, dim, height):
        place = row + start + lines
        own_value = tl.load(value + place).to(tl.float32)
        if has_value_mix:
            share = sigmoid(tl.load(value_mix + place).to(tl.float32))
            own_value += (tl.load(first_value + place).to(tl.float32) - own_value) * share
        values = append(values, own_value)
        gates = append(gates, tl.load(gate + place).to(tl.float32))
    log_decay, own_key, removed, added = prepare_heads(own_decay, own_rate, own_key, own_removal, own_replacement, 0)
    kept = tl.exp(log_decay)
    extra = tl.sum(own * own_key * own_bonus, 0)
    results = ()
    total = 0.0
    for piece in tl.static_range(0, dim // height):
        taken = tl.sum(pieces[piece] * removed[None, :], 1)
        state = (
            pieces[piece] * kept[None, :] - taken[:, None] * added[None, :] + values[piece][:, None] * own_key[None, :]
        )
        target_piece = matrix + target * state_stride + piece * height * dim
        tl.store(target_piece, state, mask=source >= 0, cache_modifier=".cs")
        y = tl.sum(state * own[None, :], 1)
        total += tl.sum(y, 0)
        results = append(results, y)
    squares = 0.0
    for piece in tl.static_range(0, dim // height):
        centred = results[piece] - total / dim
        squares += tl.sum(centred * centred, 0)
    scale = tl.rsqrt(squares / dim + eps)
    for piece in tl.static_range(0, dim // height):
        y = (results[piece] - total / dim) * scale * scales[piece] + shifts[piece] + extra * values[piece]
        tl.store(out + row + piece * height + lines, (y * gates[piece]).to(out.dtype.element_ty))


@triton.jit
def multiply(left, right):
    """On tensor cores, in three parts that add up to float32's precision."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def inverse_of_lower(lower, chunk: tl.constexpr):
    """(1 + lower)^-1 of a strictly lower matrix, row by row: powers of it would cancel badly where tokens repeat."""
    rows = tl.arange(0, chunk)
    found = -lower
    for row in range(1, chunk):
        is_row = (rows == row)[:, None]
        own = tl.sum(tl.where(is_row, found, 0.0), 0)
        own += tl.sum(own[:, None] * found, 0)
        found = tl.where(is_row, own[None, :], found)
    return found + (rows[:, None] == rows[None, :]).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["first_pieces"])
def mix_chunks_kernel(
    receptance,
    decay,
    key,
    value,
    rate,
    gate,
    first_value,
    value_mix,
    removal,
    replacement,
    bonus,
    norm,
    norm_bias,
    eps,
    states,
    sources,
    targets,
    starts,
    first_pieces,
    out,
    state_stride,
    width,
    dim: tl.constexpr,
    has_value_mix: tl.constexpr,
    chunk: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    columns = tl.arange(0, dim)
    rows = tl.arange(0, chunk)
    weight_place = head * dim + columns[None, :]
    # Keys down, values across: the state turned over, as the products below take it.
    matrix = states + head * dim * dim + columns[None, :] * dim + columns[:, None]
    first = tl.load(first_pieces + sequence).to(tl.int32)
    state = tl.load(matrix + tl.load(sources + first).to(tl.int64) * state_stride)
    before = rows[:, None] > rows[None, :]
    until = rows[:, None] >= rows[None, :]
    for piece in range(first, tl.load(first_pieces + sequence + 1).to(tl.int32)):
        end = tl.load(starts + piece + 1).to(tl.int32)
        for start in range(tl.load(starts + piece).to(tl.int32), end, chunk):
            place = (start + rows).to(tl.int64)[:, None] * width + weight_place
            is_inside = (start + rows < end)[:, None] & (columns < dim)[None, :]
            log_decay, own_key, own_value, removed, added = load_heads(
                decay,
                key,
                value,
                rate,
                first_value,
                value_mix,
                removal,
                replacement,
                place,
                weight_place,
                is_inside,
                has_value_mix,
                1,
            )
            own = tl.load(receptance + place, mask=is_inside, other=0.0).to(tl.float32)
            total = tl.cumsum(log_decay, 0)
            last = tl.sum(log_decay, 0)
            reads = removed * tl.exp(total - log_decay)
            asks = own * tl.exp(total)
            adds = tl.trans(added * tl.exp(-total))
            keys = tl.trans(own_key * tl.exp(-total))
            among = tl.where(before, multiply(reads, adds), 0.0)
            from_keys = tl.where(before, multiply(reads, keys), 0.0)
            right = -multiply(reads, state) - multiply(from_keys, own_value)
            written = multiply(inverse_of_lower(among, chunk), right)
            y = multiply(asks, state)
            y += multiply(tl.where(until, multiply(asks, adds), 0.0), written)
            y += multiply(tl.where(until, multiply(asks, keys), 0.0), own_value)
            state = (state + multiply(adds, written) + multiply(keys, own_value)) * tl.exp(last)[:, None]
            y = finish_heads(
                y, own, own_key, own_value, gate, bonus, norm, norm_bias, eps, place, weight_place, is_inside, dim, 1
            )
            tl.store(out + place, y.to(out.dtype.element_ty), mask=is_inside)
        tl.store(matrix + tl.load(targets + piece).to(tl.int64) * state_stride, state)


@triton.jit(do_not_specialize=["num_rows"])
def stage_states_kernel(
    token_words,
    row_words,
    position_words,
    block_words,
    source_words,
    last_tokens,
    places,
    num_rows,
    on_device: tl.constexpr,
    first_slot: tl.constexpr,
    no_slot: tl.constexpr,
):
    """places: token ids, previous rows, sources, targets and next positions."""
    sequence = tl.program_id(0)
    token = tl.load(token_words + sequence)
    position = tl.load(position_words + sequence)
    is_real = position >= 0
    source = tl.where(is_real, tl.load(source_words + sequence) + first_slot, no_slot)
    last = tl.load(last_tokens + tl.load(row_words + sequence))
    tl.store(places + sequence, tl.where(token == on_device, last, token))
    tl.store(places + num_rows + sequence, tl.where(is_real, -1 - source, 0))
    tl.store(places + 2 * num_rows + sequence, source)
    tl.store(places + 3 * num_rows + sequence, tl.where(is_real, tl.load(block_words + sequence) + first_slot, no_slot))
    tl.store(places + 4 * num_rows + sequence, position + 1)
