"""RWKV-7's mixes for a few decodes, where every kernel costs as much as reading its weights: five kernels a layer, or seven.

`mix_rows_kernel` is for a handful of rows. It normalises and shifts them in every program, and multiplies them with some
outputs of a matrix: of the seven of a time mix (receptance, key, value, and the narrow ends of decay, rate, gate and value
mix), each with its own mix of a token and the one before it, or of the one of a channel mix. For more rows
`norm_shift_kernel` does the first half of that and `multiply_parts_kernel` the second, on tensor cores as
`multiply_tiles_kernel` does. `mix_few_heads_kernel` is `mix_tokens_kernel` for decodes with the wide ends of the low ranks
inside: a head needs nothing but its own outputs of them. A product that is added to the residual ends each mix.
Where weights are int8, all seven matrices are, and the scales of their outputs lie one after the other as the outputs do.

Programs of one kernel may run in any order, and a decode mostly leaves its state where it found it: no program writes inputs
that others read. With `mix_rows_kernel` the time mix's new inputs wait in `normed` for the heads, which store them, and set
aside the inputs that the channel mix reads and then overwrites.

No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl

from archerfish.kernels.recurrent import ChannelWeights, NormWeights, RecurrentBatch, StateLayer, Stream, TimeWeights
from archerfish.kernels.triton.launch import early_start, follow, invite_and_follow
from archerfish.kernels.triton.products import append, fetch_rows, load_piece, multiply_rows
from archerfish.kernels.triton.tiles import DIRECT_ROWS, LinearTile, cdiv, next_power_of_2, shared_bytes, tile_of
from archerfish.kernels.triton.wkv import WARPS, TritonRecurrentOps, next_state, norm_heads, prepare_heads, sigmoid

Tensor = torch.Tensor
MAX_WIDTH = 4096  # of rows that every program normalises
MAX_NORMED_WIDTH = 16384  # of a row that one program normalises
COLUMNS_PER_WARP = 256  # so that a row and the weights are spread over threads in the same way
HELD_ELEMENTS = 2048  # of weights, in the registers of a warp
NUM_PARTS = 7  # of a time mix
FEW_ROWS = 8  # of a step; with more, programs that have many rows are quicker
PART_ROWS = 64  # of a program with more than a few: what the tensor cores of a Hopper take at once
RANK_NAMES = ("decay_rank", "rate_rank", "gate_rank", "value_rank")


@triton.jit
def enter_part(part, program, first, begin, size, mix, weight):
    """A part of the outputs, for programs from `first` on: its first program, output, number of outputs, mix and weights."""
    is_inside = program >= first
    return (
        tl.where(is_inside, first, part[0]), tl.where(is_inside, begin, part[1]), tl.where(is_inside, size, part[2]),
        tl.where(is_inside, mix, part[3]), tl.where(is_inside, weight, part[4]),
    )  # fmt: skip


@triton.jit
def choose_part(
    first_weight, key, value, decay, rate, gate, value_mix, width: tl.constexpr, outputs: tl.constexpr,
    num_outputs: tl.constexpr, decay_rank: tl.constexpr, rate_rank: tl.constexpr, gate_rank: tl.constexpr,
    value_rank: tl.constexpr, is_time: tl.constexpr, is_narrow: tl.constexpr,
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
    x, norm, norm_bias, factors, before, previous, targets, normed, out, first_weight, key, value, decay, rate, gate, value_mix,
    output_scales, eps, x_stride, before_stride, normed_stride, width: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr,
    outputs: tl.constexpr, num_outputs: tl.constexpr, decay_rank: tl.constexpr, rate_rank: tl.constexpr,
    gate_rank: tl.constexpr, value_rank: tl.constexpr, is_time: tl.constexpr, is_early: tl.constexpr,
):
    """out: a part after the other, (rows, outputs) each.

    is_time: inputs before these lie in slots of `before`, new ones go to rows of `normed`; else the other way round.
    """
    program = tl.program_id(0)
    own, begin, size, mix, weight = choose_part(
        first_weight, key, value, decay, rate, gate, value_mix, width, outputs, num_outputs,
        decay_rank, rate_rank, gate_rank, value_rank, is_time, False,
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
        rounded = (centred * tl.rsqrt(tl.sum(centred * centred) / width + eps) * scales + shifts).to(normed.dtype.element_ty)
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
    x, shares, norm, norm_bias, factors, inputs, previous, targets, out, eps, x_stride, inputs_stride, num_rows,
    width: tl.constexpr, columns: tl.constexpr, num_shares: tl.constexpr, num_factors: tl.constexpr,
    is_early: tl.constexpr,
):
    """Norm and `shift_kernel` of a decode, whose shares are added to x at first."""
    row = tl.program_id(0)
    place = tl.arange(0, columns)
    scales = load_piece(norm, place, width, columns)
    shifts = load_piece(norm_bias, place, width, columns)
    source = tl.load(previous + row)
    kept = load_piece(inputs + tl.where(source < 0, -1 - source, 0) * inputs_stride, place, width, columns).to(tl.float32)
    target = tl.load(targets + row, mask=source < 0, other=-1)
    shift_factors = ()
    for number in tl.static_range(num_factors):
        shift_factors = append(shift_factors, load_piece(factors + number * width, place, width, columns))
    invite_and_follow(is_early)
    wide = load_piece(x + row * x_stride, place, width, columns).to(tl.float32)
    if num_shares > 0:
        for share in tl.static_range(num_shares):
            wide += load_piece(shares + (share * num_rows + row) * width, place, width, columns)
        sums = wide.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + place, sums, mask=place < width)
        wide = sums.to(tl.float32)
    centred = tl.where(place < width, wide - tl.sum(wide, 0) / width, 0.0)
    rounded = (centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps) * scales + shifts).to(inputs.dtype.element_ty)
    tl.store(inputs + target * inputs_stride + place, rounded, mask=(place < width) & (target >= 0))
    wide = rounded.to(tl.float32)
    for number in tl.static_range(num_factors):
        mixed = (wide + (kept - wide) * shift_factors[number]).to(out.dtype.element_ty)
        tl.store(out + (number * num_rows + row) * width + place, mixed, mask=place < width)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_parts_kernel(
    x, out, first_weight, key, value, decay, rate, gate, value_mix, output_scales, num_rows,
    width: tl.constexpr, rows: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr,
    num_outputs: tl.constexpr, decay_rank: tl.constexpr, rate_rank: tl.constexpr, gate_rank: tl.constexpr,
    value_rank: tl.constexpr, is_time: tl.constexpr, is_narrow: tl.constexpr, is_early: tl.constexpr,
):
    """x: (rows, width) of every mix. out: as of `mix_rows_kernel`."""
    own, begin, size, mix, weight = choose_part(
        first_weight, key, value, decay, rate, gate, value_mix, width, outputs, num_outputs,
        decay_rank, rate_rank, gate_rank, value_rank, is_time, is_narrow,
    )
    lines = tl.minimum(own, size - 1).to(tl.int64)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    x += mix * num_rows * width
    if parts == 1:
        fetch_rows(weight + lines[:, None] * width, width, width, is_early)
        invite_and_follow(is_early)
        y = tl.trans(multiply_rows(x, width, row, num_rows, weight, lines, 0, width, width, rows, outputs, columns))
    else:
        piece = tl.arange(0, parts)[:, None, None] * (columns // parts) + tl.arange(0, columns // parts)[None, None, :]
        acc = tl.zeros((parts, outputs, rows), tl.float32)  # a warp has one part
        is_row = (row < num_rows)[None, :, None]
        invite_and_follow(is_early)
        for start in range(0, width, columns):
            place = start + piece
            values = tl.load(x + row[None, :, None] * width + place, mask=is_row & (place < width), other=0.0)
            values = tl.permute(values, (0, 2, 1))
            tile = load_piece(weight + lines[None, :, None] * width, place, width, columns)
            acc = tl.dot(tile.to(values.dtype), values, acc, input_precision="ieee")
        y = tl.sum(acc, 0)
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
    products, decay_up, rate_up, gate_up, value_up, decay_bias, rate_bias, value_bias, first_value,
    removal, replacement, bonus, norm, norm_bias, eps, states, sources, targets, normed, time_inputs, channel_inputs, before,
    out, num_rows, state_stride, time_stride, channel_stride, width: tl.constexpr, dim: tl.constexpr,
    decay_rank: tl.constexpr, rate_rank: tl.constexpr, gate_rank: tl.constexpr, value_rank: tl.constexpr,
    decay_block: tl.constexpr, rate_block: tl.constexpr, gate_block: tl.constexpr, value_block: tl.constexpr,
    moves_inputs: tl.constexpr, is_early: tl.constexpr,
):
    """moves_inputs: behind `mix_rows_kernel`.

    Rows without a sequence go on from the empty state, and leave nothing but what they give.
    """
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
    if moves_inputs:
        channel_input = tl.load(channel_inputs + source * channel_stride + lines)
    follow(is_early)
    place = sequence * width + lines
    own = tl.load(products + place).to(tl.float32)
    key = tl.load(products + num_rows * width + place).to(tl.float32)
    value = tl.load(products + 2 * num_rows * width + place).to(tl.float32)
    if moves_inputs:
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
    y = norm_heads(
        tl.sum(state * own[None, :], 1), own, key, value, bonus_factor, norm_factor, norm_shift, eps, dim, 0
    ) * gate
    tl.store(out + place, y.to(out.dtype.element_ty))
    tl.store(matrix + target * state_stride, state, mask=is_real)
    if moves_inputs:
        tl.store(before + place, channel_input)
        tl.store(time_inputs + target * time_stride + lines, time_input, mask=is_real)


def choose_mix_tile(num_rows: int, num_outputs: int, width: int, element_bytes: int, device: torch.device) -> LinearTile:
    """One that is good for most; is_dot: norm and shift have a kernel of their own."""
    if num_rows > DIRECT_ROWS or width > MAX_WIDTH:
        return tile_of(max(num_rows, DIRECT_ROWS + 1), num_outputs, width, False, element_bytes, shared_bytes(device))
    columns = next_power_of_2(width)
    num_warps = max(1, min(16, columns // COLUMNS_PER_WARP))
    outputs = HELD_ELEMENTS * num_warps // (columns if num_rows == 1 else 2 * columns)
    return LinearTile(max(1, min(16, outputs)), columns, num_warps, 1)


@dataclass(frozen=True)
class SetAside:
    """Inputs of a layer's channel mix in front of a step, as the heads kernel leaves them in a batch's notes."""

    inputs: Tensor  # of all slots of the layer, which these are of
    rows: Tensor


@dataclass(frozen=True)
class FewWeights:
    """Matrices and biases of a time mix, with something in place of what a first layer lacks."""

    matrices: list[Tensor]  # receptance, key, value, and what makes decay, rate, gate and value mix narrow
    ups: list[Tensor]  # of the last four
    biases: list[Tensor]  # of decay, rate and value mix
    ranks: dict[str, int]  # of the four
    scales: Tensor | None  # of all outputs of int8 matrices, a part after the other

    @classmethod
    def of(cls, weights: TimeWeights[Tensor]) -> Optional["FewWeights"]:
        """None where biases, activations or types are not what the kernels expect. Found once."""
        if cls not in weights.derived:
            weights.derived[cls] = cls._find(weights)
        found: FewWeights | None = weights.derived[cls]
        return found

    @classmethod
    def _find(cls, weights: TimeWeights[Tensor]) -> Optional["FewWeights"]:
        lows = [weights.decay, weights.rate, weights.gate, weights.value_mix]
        expected = [("tanh", True), ("none", True), ("sigmoid", False), ("none", True)]
        firsts = [each.get() for each in (weights.receptance, weights.key, weights.value)]
        ups, biases, ranks = list[Tensor](), list[Tensor](), list[int]()
        for low, (activation, has_bias) in zip(lows, expected, strict=True):
            if low is None:
                ups.append(ups[0])
                biases.append(biases[0])
                ranks.append(0)
                continue
            down, up = low.down.get(), low.up.get()
            if low.activation != activation or (up.bias is not None) != has_bias or up.scales is not None:
                return None
            firsts.append(down)
            ups.append(up.matrix)
            ranks.append(len(down.matrix))
            if up.bias is not None:
                biases.append(up.bias)
        scales = [each.scales for each in firsts if each.scales is not None]
        if 0 < len(scales) < len(firsts):
            return None
        matrices = fill_up([each.matrix for each in firsts])
        return cls(matrices, ups, biases, dict(zip(RANK_NAMES, ranks, strict=True)), torch.cat(scales) if scales else None)

    @property
    def sizes(self) -> list[int]:
        """Outputs of each part."""
        return [len(each) for each in self.matrices[:3]] + list(self.ranks.values())


class FewRowsRecurrentOps(TritonRecurrentOps):
    """`TritonRecurrentOps` with whole mixes in few kernels, for steps of a few decodes."""

    few_rows = FEW_ROWS
    mix_tile: LinearTile | None = None  # instead of the chosen one, for tests and measurements
    head_warps = WARPS

    def mix_time(
        self, stream: Stream[Tensor], weights: TimeWeights[Tensor], first_value: Tensor | None, batch: RecurrentBatch[Tensor],
        layer: StateLayer[Tensor],
    ) -> tuple[Stream[Tensor], Tensor]:
        x = self.total(stream)
        few = FewWeights.of(weights) if self.is_few(x, batch) else None
        if few is None or not self.are_plain(x, few.matrices, few.scales) or not self.are_plain(x, few.ups):
            return super().mix_time(Stream(x), weights, first_value, batch, layer)
        (num_rows, width), sizes = x.shape, few.sizes
        products = torch.empty(num_rows * sum(sizes), dtype=self.ops.torch_dtype, device=x.device)
        normed, before, out = torch.empty((3, num_rows, width), dtype=self.ops.torch_dtype, device=x.device)
        tile = self.mix_tile or choose_mix_tile(num_rows, sum(sizes), width, products.element_size(), x.device)
        if tile.is_dot:
            mixed = norm_and_shift(Stream(x), weights.norm, weights.factors, layer.time_input, batch)
            multiply_parts(mixed, few.matrices, few.scales, sizes, few.ranks, tile, products)
        else:
            rows = MixedRows(x, weights.norm, weights.factors, layer.time_input, batch, normed)
            mix_rows(rows, few.matrices, few.scales, sizes, few.ranks, tile, products)
        size = num_rows * width
        value = products[2 * size : 3 * size].view(num_rows, width)
        heads, (_, num_heads, dim, _) = weights.heads, layer.wkv.shape
        blocks = {f"{name[:-4]}block": max(1, next_power_of_2(rank)) for name, rank in few.ranks.items()}
        mix_few_heads_kernel[(batch.num_decodes, num_heads)](
            products, *few.ups, *few.biases, value if first_value is None else first_value,
            heads.removal, heads.replacement, heads.bonus, heads.norm, heads.norm_bias, heads.eps, layer.wkv, batch.sources,
            batch.targets, normed, layer.time_input, layer.channel_input, before, out, num_rows, layer.wkv.stride(0),
            layer.time_input.stride(0), layer.channel_input.stride(0), width=width, dim=dim, num_warps=self.head_warps,
            moves_inputs=not tile.is_dot, **few.ranks, **blocks, **early_start(x.device),
        )
        if not tile.is_dot:
            batch.derived[SetAside] = SetAside(layer.channel_input, before)
        return self.add_product(x, out, weights.out), value

    def mix_channels(
        self, stream: Stream[Tensor], weights: ChannelWeights[Tensor], batch: RecurrentBatch[Tensor], layer: StateLayer[Tensor],
        kept_rows: Tensor | None,
    ) -> Stream[Tensor]:
        x, aside = self.total(stream), batch.derived.pop(SetAside, None)
        packed = weights.key.get()
        key, scales = packed.matrix, packed.scales
        if kept_rows is not None or not self.is_few(x, batch) or not self.are_plain(x, [key], scales):
            return super().mix_channels(Stream(x), weights, batch, layer, kept_rows)
        (num_rows, width), sizes, ranks = x.shape, [len(key)], dict.fromkeys(RANK_NAMES, 0)
        hidden = torch.empty((num_rows, len(key)), dtype=self.ops.torch_dtype, device=x.device)
        tile = self.mix_tile or choose_mix_tile(num_rows, len(key), width, hidden.element_size(), x.device)
        if tile.is_dot:
            mixed = norm_and_shift(Stream(x), weights.norm, weights.factor, layer.channel_input, batch)
            multiply_parts(mixed, [key], scales, sizes, ranks, tile, hidden)
        elif isinstance(aside, SetAside) and aside.inputs is layer.channel_input:
            rows = MixedRows(x, weights.norm, weights.factor, aside.rows, batch, layer.channel_input)
            mix_rows(rows, [key], scales, sizes, ranks, tile, hidden)
        else:
            return super().mix_channels(Stream(x), weights, batch, layer, kept_rows)
        return self.add_product(x, hidden, weights.value)

    def is_few(self, x: Tensor, batch: RecurrentBatch[Tensor]) -> bool:
        """Whether a step has nothing but a few decodes."""
        return batch.num_decodes == batch.num_sequences and 0 < batch.num_decodes <= len(x) <= self.few_rows

    def are_plain(self, x: Tensor, matrices: list[Tensor], scales: Tensor | None = None) -> bool:
        """Whether rows and weights lie as kernels read them; x may be float32 beside weights of the compute type."""
        is_plain = x.dtype in (self.ops.torch_dtype, torch.float32) and x.stride(1) == 1 and x.shape[1] <= MAX_NORMED_WIDTH
        dtype = self.ops.torch_dtype if scales is None else torch.int8
        return is_plain and all(matrix.dtype == dtype and matrix.is_contiguous() for matrix in matrices)


@dataclass(frozen=True)
class MixedRows:
    """Rows for `mix_rows`."""

    x: Tensor
    norm: NormWeights[Tensor]
    factors: Tensor
    before: Tensor  # inputs before these
    batch: RecurrentBatch[Tensor]
    normed: Tensor  # where these go


def mix_rows(
    rows: MixedRows, matrices: list[Tensor], scales: Tensor | None, sizes: list[int], ranks: dict[str, int], tile: LinearTile,
    out: Tensor,
) -> None:
    """Norm, shift and products with the matrices of a time mix, or with the one of a channel mix."""
    x, norm, batch = rows.x, rows.norm, rows.batch
    num_rows, width = x.shape
    mix_rows_kernel[(sum(cdiv(size, tile.outputs) for size in sizes),)](
        x, norm.weight, norm.bias, rows.factors, rows.before, batch.previous, batch.targets, rows.normed, out,
        *fill_up(matrices), scales, norm.eps, x.stride(0), rows.before.stride(0), rows.normed.stride(0), width=width,
        columns=next_power_of_2(width), rows=num_rows, outputs=tile.outputs, num_outputs=sizes[0], is_time=len(sizes) > 1,
        num_warps=tile.num_warps, **ranks, **early_start(x.device),
    )


def norm_and_shift(
    stream: Stream[Tensor], norm: NormWeights[Tensor], factors: Tensor, inputs: Tensor, batch: RecurrentBatch[Tensor]
) -> Tensor:
    """`layer_norm` and `shift` of decodes: (factors, rows, width), in the type of the inputs in slots.

    Shares of the stream end in its sums.
    """
    x, shares = stream.sums, stream.shares
    num_rows, width = x.shape
    num_factors, columns = factors.numel() // width, next_power_of_2(width)
    out = torch.empty((num_factors, num_rows, width), dtype=inputs.dtype, device=x.device)
    norm_shift_kernel[(num_rows,)](
        x, x if shares is None else shares, norm.weight, norm.bias, factors, inputs, batch.previous, batch.targets, out,
        norm.eps, x.stride(0), inputs.stride(0), num_rows, width=width, columns=columns,
        num_shares=0 if shares is None else len(shares), num_factors=num_factors,
        num_warps=max(1, min(16, columns // COLUMNS_PER_WARP)), **early_start(x.device),
    )
    return out


def multiply_parts(
    mixed: Tensor, matrices: list[Tensor], scales: Tensor | None, sizes: list[int], ranks: dict[str, int], tile: LinearTile,
    out: Tensor, *, is_many: bool = False, is_narrow: bool = False,
) -> None:
    """The second half of `mix_rows`. is_many: in tiles of many rows. is_narrow: of the narrow parts alone."""
    _, num_rows, width = mixed.shape
    rows = PART_ROWS if is_many else max(8, next_power_of_2(num_rows))
    num_tiles = sum(cdiv(size, tile.outputs) for size in sizes[3 if is_narrow else 0 :])
    multiply_parts_kernel[(num_tiles, cdiv(num_rows, rows))](
        mixed, out, *fill_up(matrices), scales, num_rows, width=width, rows=rows, outputs=tile.outputs, columns=tile.columns,
        parts=1 if is_many else tile.num_warps, num_outputs=sizes[0], is_time=len(sizes) > 1, is_narrow=is_narrow,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **ranks, **early_start(mixed.device),
    )


def fill_up(matrices: list[Tensor]) -> list[Tensor]:
    """As many as a kernel takes."""
    return matrices + [matrices[0]] * (NUM_PARTS - len(matrices))
