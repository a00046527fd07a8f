"""Kernels of RWKV-7's mixes for steps of decodes; `triton/recurrent.py` launches them.

With a few decodes, every kernel costs as much as reading its weights. A layer then has five kernels. `mix_rows_kernel`
normalises and shifts the rows in every program, and multiplies them with some outputs of a matrix: one of the seven of
a time mix (receptance, key, value, and the narrow ends of decay, rate, gate and value mix), each with its own mix of a
token and the one before it, or the one of a channel mix. `mix_few_heads_kernel` is `mix_tokens_kernel` for decodes with
the wide ends of the low ranks inside: a head needs only its own outputs of them.

With more decodes a layer has eight kernels. `norm_shift_kernel` normalises and shifts, `multiply_parts_kernel`
multiplies on tensor cores, and `raise_rows_kernel` computes the wide ends of the low ranks, which programs of single
heads would read anew for every row.

Where weights have scales, all seven matrices have them, and the scales of their outputs lie one after the other as the
outputs do.

Programs of one kernel may run in any order, and a decode mostly leaves its state where it found it: no program writes
inputs that others read. The time mix's new inputs wait in `normed` for `mix_few_heads_kernel`, which stores them, and
copies the inputs that the channel mix reads and then overwrites.

States are most of what a step of many decodes reads. They are loaded while the products before them run:
`norm_shift_kernel`, `multiply_parts_kernel` and `raise_rows_kernel` let the next kernel's programs start before they
wait themselves.

No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from archerfish.kernels.triton.launch import follow, invite_and_follow
from archerfish.kernels.triton.products import append, fetch_rows, load_piece, multiply_rows
from archerfish.kernels.triton.wkv import next_state, norm_heads, prepare_heads, sigmoid


@triton.jit
def enter_part(part, program, first, begin, size, mix, weight):
    """A part of the outputs, for programs from `first` on: its first program, output, number of outputs, mix and
    weights."""
    is_inside = program >= first
    return (
        tl.where(is_inside, first, part[0]),
        tl.where(is_inside, begin, part[1]),
        tl.where(is_inside, size, part[2]),
        tl.where(is_inside, mix, part[3]),
        tl.where(is_inside, weight, part[4]),
    )


@triton.jit
def choose_part(
    first_weight,
    key,
    value,
    decay,
    rate,
    gate,
    value_mix,
    width: tl.constexpr,
    outputs: tl.constexpr,
    num_outputs: tl.constexpr,
    decay_rank: tl.constexpr,
    rate_rank: tl.constexpr,
    gate_rank: tl.constexpr,
    value_rank: tl.constexpr,
    is_time: tl.constexpr,
    is_narrow: tl.constexpr,
):
    """What a program computes: some outputs of a part, the part's first and number of them, its mix and weights.

    Mixes stand in the order of their factors: r, w, k, v, a, g. is_narrow: programs begin with the narrow parts.
    """
    program = tl.program_id(0)
    part = (0, 0, num_outputs, 0, first_weight)
    if is_time:
        wide: tl.constexpr = (width + outputs - 1) // outputs
        if is_narrow:
            program += 3 * wide
        rate_first: tl.constexpr = 3 * wide + (decay_rank + outputs - 1) // outputs
        gate_first: tl.constexpr = rate_first + (rate_rank + outputs - 1) // outputs
        value_first: tl.constexpr = gate_first + (gate_rank + outputs - 1) // outputs
        part = enter_part(part, program, wide, width, width, 2, key)
        part = enter_part(part, program, 2 * wide, 2 * width, width, 3, value)
        part = enter_part(part, program, 3 * wide, 3 * width, decay_rank, 1, decay)
        part = enter_part(part, program, rate_first, 3 * width + decay_rank, rate_rank, 4, rate)
        part = enter_part(part, program, gate_first, 3 * width + decay_rank + rate_rank, gate_rank, 5, gate)
        if value_rank > 0:
            begin: tl.constexpr = 3 * width + decay_rank + rate_rank + gate_rank
            part = enter_part(part, program, value_first, begin, value_rank, 3, value_mix)
    own = (program - part[0]) * outputs + tl.arange(0, outputs)
    return own, part[1], part[2], part[3], part[4]


@triton.jit
def activate_part(y, mix, is_time: tl.constexpr):
    """tanh of the decay's narrow end, the logistic function of the gate's; relu^2 of a channel mix."""
    if is_time:
        slope = tl.where(mix == 1, 2.0, 1.0)
        curved = sigmoid(slope * y)
        y = tl.where(mix == 1, 2.0 * curved - 1.0, tl.where(mix == 5, curved, y))
    else:
        y = tl.maximum(y, 0.0)
        y = y * y
    return y


@triton.jit
def load_rows(
    x, stride, previous, place, width: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr, from_slots: tl.constexpr
):
    """Rows of x, or those of its slots that decodes go on from: the empty state's where there is none."""
    found = ()
    for row in tl.static_range(rows):
        if from_slots:
            source = tl.load(previous + row)
            line = x + tl.where(source < 0, -1 - source, 0) * stride
        else:
            line = x + row * stride
        found = append(found, load_piece(line, place, width, columns))
    return found


@triton.jit(do_not_specialize_on_alignment=["previous", "targets"])
def mix_rows_kernel(
    x,
    norm,
    norm_bias,
    factors,
    before,
    previous,
    targets,
    normed,
    out,
    first_weight,
    key,
    value,
    decay,
    rate,
    gate,
    value_mix,
    output_scales,
    eps,
    x_stride,
    before_stride,
    normed_stride,
    width: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    num_outputs: tl.constexpr,
    decay_rank: tl.constexpr,
    rate_rank: tl.constexpr,
    gate_rank: tl.constexpr,
    value_rank: tl.constexpr,
    is_time: tl.constexpr,
    is_early: tl.constexpr,
):
    """out: a part after the other, (rows, outputs) each.

    is_time: inputs before these lie in slots of `before`, new ones go to rows of `normed`; else the other way round.
    """
    program = tl.program_id(0)
    own, begin, size, mix, weight = choose_part(
        first_weight,
        key,
        value,
        decay,
        rate,
        gate,
        value_mix,
        width,
        outputs,
        num_outputs,
        decay_rank,
        rate_rank,
        gate_rank,
        value_rank,
        is_time,
        False,
    )
    lines = tl.minimum(own, size - 1).to(tl.int64)
    place = tl.arange(0, columns)[None, :]
    tile = load_piece(weight + lines[:, None] * width, place, width, columns)
    factor = load_piece(factors + mix * width, place, width, columns)
    scales = load_piece(norm, place, width, columns)
    shifts = load_piece(norm_bias, place, width, columns)
    if output_scales is not None:
        own_scales = tl.load(output_scales + begin + lines)
    if is_time:
        kept = load_rows(before, before_stride, previous, place, width, columns, rows, True)
    else:
        own_targets = ()
        for row in tl.static_range(rows):
            own_targets = append(own_targets, tl.load(targets + row, mask=tl.load(previous + row) < 0, other=-1))
    follow(is_early)
    if not is_time:
        kept = load_rows(before, before_stride, previous, place, width, columns, rows, False)
    values = load_rows(x, x_stride, previous, place, width, columns, rows, False)
    for row in tl.static_range(rows):
        wide = values[row].to(tl.float32)
        centred = tl.where(place < width, wide - tl.sum(wide) / width, 0.0)
        rounded = (centred * tl.rsqrt(tl.sum(centred * centred) / width + eps) * scales + shifts).to(
            normed.dtype.element_ty
        )
        wide = rounded.to(tl.float32)
        y = tl.sum(tile.to(tl.float32) * (wide + (kept[row].to(tl.float32) - wide) * factor), 1)
        if output_scales is not None:
            y *= own_scales
        y = activate_part(y, mix, is_time)
        tl.store(out + begin * rows + row * size + own, y.to(out.dtype.element_ty), mask=own < size)
        if program == row % tl.num_programs(0):
            if is_time:
                tl.store(normed + row * normed_stride + place, rounded, mask=place < width)
            else:
                is_kept = (place < width) & (own_targets[row] >= 0)
                tl.store(normed + own_targets[row] * normed_stride + place, rounded, mask=is_kept)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["previous", "targets"])
def norm_shift_kernel(
    x,
    norm,
    norm_bias,
    factors,
    inputs,
    previous,
    targets,
    out,
    eps,
    x_stride,
    inputs_stride,
    num_rows,
    width: tl.constexpr,
    columns: tl.constexpr,
    num_factors: tl.constexpr,
    is_early: tl.constexpr,
):
    """Norm and `shift_kernel` of a decode."""
    row = tl.program_id(0)
    place = tl.arange(0, columns)
    scales = load_piece(norm, place, width, columns)
    shifts = load_piece(norm_bias, place, width, columns)
    source = tl.load(previous + row)
    kept = load_piece(inputs + tl.where(source < 0, -1 - source, 0) * inputs_stride, place, width, columns).to(
        tl.float32
    )
    target = tl.load(targets + row, mask=source < 0, other=-1)
    shift_factors = ()
    for number in tl.static_range(num_factors):
        shift_factors = append(shift_factors, load_piece(factors + number * width, place, width, columns))
    invite_and_follow(is_early)
    wide = load_piece(x + row * x_stride, place, width, columns).to(tl.float32)
    centred = tl.where(place < width, wide - tl.sum(wide, 0) / width, 0.0)
    rounded = (centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps) * scales + shifts).to(
        inputs.dtype.element_ty
    )
    tl.store(inputs + target * inputs_stride + place, rounded, mask=(place < width) & (target >= 0))
    wide = rounded.to(tl.float32)
    for number in tl.static_range(num_factors):
        mixed = (wide + (kept - wide) * shift_factors[number]).to(out.dtype.element_ty)
        tl.store(out + (number * num_rows + row) * width + place, mixed, mask=place < width)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_parts_kernel(
    x,
    out,
    first_weight,
    key,
    value,
    decay,
    rate,
    gate,
    value_mix,
    output_scales,
    num_rows,
    width: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    columns: tl.constexpr,
    num_outputs: tl.constexpr,
    decay_rank: tl.constexpr,
    rate_rank: tl.constexpr,
    gate_rank: tl.constexpr,
    value_rank: tl.constexpr,
    is_time: tl.constexpr,
    is_narrow: tl.constexpr,
    is_early: tl.constexpr,
):
    """x: (rows, width) of every mix. out: as of `mix_rows_kernel`."""
    own, begin, size, mix, weight = choose_part(
        first_weight,
        key,
        value,
        decay,
        rate,
        gate,
        value_mix,
        width,
        outputs,
        num_outputs,
        decay_rank,
        rate_rank,
        gate_rank,
        value_rank,
        is_time,
        is_narrow,
    )
    lines = tl.minimum(own, size - 1).to(tl.int64)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    x += mix * num_rows * width
    fetch_rows(weight + lines[:, None] * width, width, is_early)
    invite_and_follow(is_early)
    y = tl.trans(multiply_rows(x, width, row, num_rows, weight, lines, width, rows, outputs, columns, 1))
    if output_scales is not None:
        y *= tl.load(output_scales + begin + lines)[:, None]
    y = activate_part(y, mix, is_time)
    is_inside = (row < num_rows)[None, :] & (own < size)[:, None]
    tl.store(out + begin * num_rows + row[None, :] * size + own[:, None], y.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def load_up(weight, lines, rank: tl.constexpr, block: tl.constexpr):
    return load_piece(weight + lines[:, None] * rank, tl.arange(0, block)[None, :], rank, block)


@triton.jit
def raise_low(low, tile, rank: tl.constexpr, block: tl.constexpr):
    """Outputs of a head from a narrow row."""
    return tl.sum(tile.to(tl.float32) * load_piece(low, tl.arange(0, block)[None, :], rank, block).to(tl.float32), 1)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["sources", "targets"])
def mix_few_heads_kernel(
    products,
    decay_up,
    rate_up,
    gate_up,
    value_up,
    decay_bias,
    rate_bias,
    value_bias,
    first_value,
    removal,
    replacement,
    bonus,
    norm,
    norm_bias,
    eps,
    states,
    sources,
    targets,
    normed,
    time_inputs,
    channel_inputs,
    before,
    out,
    num_rows,
    state_stride,
    time_stride,
    channel_stride,
    width: tl.constexpr,
    dim: tl.constexpr,
    decay_rank: tl.constexpr,
    rate_rank: tl.constexpr,
    gate_rank: tl.constexpr,
    value_rank: tl.constexpr,
    decay_block: tl.constexpr,
    rate_block: tl.constexpr,
    gate_block: tl.constexpr,
    value_block: tl.constexpr,
    is_early: tl.constexpr,
):
    """Rows without a sequence go on from the empty state, and leave nothing but what they give."""
    sequence = tl.program_id(0)
    columns = tl.arange(0, dim)
    lines = tl.program_id(1) * dim + columns
    source = tl.load(sources + sequence).to(tl.int64)
    is_real = source >= 0
    source = tl.maximum(source, 0)
    target = tl.maximum(tl.load(targets + sequence).to(tl.int64), 0)
    matrix = states + tl.program_id(1) * dim * dim + columns[:, None] * dim + columns[None, :]
    state = tl.load(matrix + source * state_stride)
    decay_tile = load_up(decay_up, lines, decay_rank, decay_block)
    rate_tile = load_up(rate_up, lines, rate_rank, rate_block)
    gate_tile = load_up(gate_up, lines, gate_rank, gate_block)
    if value_rank > 0:
        value_tile = load_up(value_up, lines, value_rank, value_block)
        value_shift = tl.load(value_bias + lines).to(tl.float32)
    decay_shift = tl.load(decay_bias + lines).to(tl.float32)
    rate_shift = tl.load(rate_bias + lines).to(tl.float32)
    removal_factor = tl.load(removal + lines)
    replacement_factor = tl.load(replacement + lines)
    bonus_factor = tl.load(bonus + lines)
    norm_factor = tl.load(norm + lines)
    norm_shift = tl.load(norm_bias + lines)
    channel_input = tl.load(channel_inputs + source * channel_stride + lines)
    follow(is_early)
    place = sequence * width + lines
    own = tl.load(products + place).to(tl.float32)
    key = tl.load(products + num_rows * width + place).to(tl.float32)
    value = tl.load(products + 2 * num_rows * width + place).to(tl.float32)
    time_input = tl.load(normed + place)
    low = products + 3 * num_rows * width
    decay = raise_low(low + sequence * decay_rank, decay_tile, decay_rank, decay_block) + decay_shift
    low += num_rows * decay_rank
    rate = raise_low(low + sequence * rate_rank, rate_tile, rate_rank, rate_block) + rate_shift
    low += num_rows * rate_rank
    gate = raise_low(low + sequence * gate_rank, gate_tile, gate_rank, gate_block)
    low += num_rows * gate_rank
    if value_rank > 0:
        share = sigmoid(raise_low(low + sequence * value_rank, value_tile, value_rank, value_block) + value_shift)
        value += (tl.load(first_value + place).to(tl.float32) - value) * share
    log_decay, key, removed, added = prepare_heads(decay, rate, key, removal_factor, replacement_factor, 0)
    state = next_state(state, log_decay, key, value, removed, added)
    y = (
        norm_heads(tl.sum(state * own[None, :], 1), own, key, value, bonus_factor, norm_factor, norm_shift, eps, dim, 0)
        * gate
    )
    tl.store(out + place, y.to(out.dtype.element_ty))
    tl.store(matrix + target * state_stride, state, mask=is_real)
    tl.store(before + place, channel_input)
    tl.store(time_inputs + target * time_stride + lines, time_input, mask=is_real)


@triton.jit(do_not_specialize=["num_rows"])
def raise_rows_kernel(
    low,
    decay_up,
    rate_up,
    gate_up,
    value_up,
    decay_bias,
    rate_bias,
    value_bias,
    out,
    num_rows,
    width: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    decay_rank: tl.constexpr,
    rate_rank: tl.constexpr,
    gate_rank: tl.constexpr,
    value_rank: tl.constexpr,
    block: tl.constexpr,
    is_even: tl.constexpr,
    is_early: tl.constexpr,
):
    """low: narrow rows, (rows, rank) of one after the other. out: (rows, width) of each.

    is_even: ranks are multiples of 16.
    """
    part = tl.program_id(0)
    own = tl.program_id(1) * outputs + tl.arange(0, outputs)
    lines = tl.minimum(own, width - 1)
    row = tl.program_id(2) * rows + tl.arange(0, rows)
    up = tl.where(part == 0, decay_up, tl.where(part == 1, rate_up, tl.where(part == 2, gate_up, value_up)))
    bias = tl.where(part == 0, decay_bias, tl.where(part == 1, rate_bias, value_bias))
    rank = tl.where(part == 0, decay_rank, tl.where(part == 1, rate_rank, tl.where(part == 2, gate_rank, value_rank)))
    begin = tl.where(part > 0, decay_rank, 0) + tl.where(part > 1, rate_rank, 0) + tl.where(part > 2, gate_rank, 0)
    if is_even:
        rank = tl.multiple_of(rank, 16)
        begin = tl.multiple_of(begin, 16)
    place = tl.arange(0, block)
    tile = tl.load(up + lines[None, :] * rank + place[:, None], mask=(place < rank)[:, None], other=0.0)
    shifts = tl.load(bias + lines, mask=(part != 2) & (lines >= 0), other=0.0).to(tl.float32)
    invite_and_follow(is_early)
    low += begin * num_rows
    is_row = (row < num_rows)[:, None]
    narrow = tl.load(low + row[:, None] * rank + place[None, :], mask=is_row & (place < rank)[None, :], other=0.0)
    y = tl.dot(narrow, tile, input_precision="ieee") + shifts[None, :]
    target = (part.to(tl.int64) * num_rows + row)[:, None] * width + own[None, :]
    tl.store(out + target, y.to(out.dtype.element_ty), mask=is_row & (own < width)[None, :])
