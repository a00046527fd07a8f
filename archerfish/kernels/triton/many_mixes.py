"""RWKV-7's mixes for steps of many decodes, in few kernels.

`norm_shift_kernel` and `multiply_parts_kernel` are those of a few rows; up to PARTS_ROWS the latter has all products of a mix
that come first, on tensor cores that all warps share, and beyond that cuBLAS has the wide ones. `raise_rows_kernel` has the
wide ends of all low ranks, which a program of `mix_few_heads_kernel` would read anew for every row. The last product of a
channel mix is left in shares, which the next layer's norm adds up.

States are most of what a step reads: they are on their way while the products before them run, whose kernels and
`raise_rows_kernel` let the next one's programs come before they wait themselves.

No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from archerfish.kernels.ops import LinearWeight
from archerfish.kernels.recurrent import ChannelWeights, HeadInputs, RecurrentBatch, StateLayer, Stream, TimeWeights
from archerfish.kernels.triton.launch import early_start, invite_and_follow
from archerfish.kernels.triton.linear import add_shares, multiply_shares
from archerfish.kernels.triton.mixes import (
    PART_ROWS,
    RANK_NAMES,
    FewRowsRecurrentOps,
    FewWeights,
    multiply_parts,
    norm_and_shift,
)
from archerfish.kernels.triton.tiles import LinearTile, cdiv, dot_block, share_tile, shared_bytes

Tensor = torch.Tensor
PARTS_ROWS = 256  # up to which one kernel for all parts is quicker than cuBLAS for each
WIDE_MIXES = (0, 2, 3)  # of receptance, key and value, among r, w, k, v, a, g
RAISED_ROWS, RAISED_OUTPUTS = 64, 64  # of a program


@triton.jit(do_not_specialize=["num_rows"])
def raise_rows_kernel(
    low, decay_up, rate_up, gate_up, value_up, decay_bias, rate_bias, value_bias, out, num_rows, width: tl.constexpr,
    rows: tl.constexpr, outputs: tl.constexpr, decay_rank: tl.constexpr, rate_rank: tl.constexpr, gate_rank: tl.constexpr,
    value_rank: tl.constexpr, block: tl.constexpr, is_even: tl.constexpr, is_early: tl.constexpr,
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


def raise_rows(low: Tensor, few: FewWeights, num_rows: int, width: int) -> Tensor:
    """Decay, rate, gate and, unless the layer is the first, value mix: (3 or 4, rows, width)."""
    num_parts = sum(rank > 0 for rank in few.ranks.values())
    out = torch.empty((num_parts, num_rows, width), dtype=low.dtype, device=low.device)
    ranks = few.ranks.values()
    grid = (num_parts, cdiv(width, RAISED_OUTPUTS), cdiv(num_rows, RAISED_ROWS))
    raise_rows_kernel[grid](
        low, *few.ups, *few.biases, out, num_rows, width=width, rows=RAISED_ROWS, outputs=RAISED_OUTPUTS, **few.ranks,
        block=dot_block(max(ranks)), is_even=all(rank % 16 == 0 for rank in ranks), num_warps=4,
        **early_start(low.device),
    )
    return out


def choose_part_tile(element_bytes: int, device: torch.device) -> LinearTile:
    """With as many stages as there is room for."""
    outputs, columns = 32, 256 // element_bytes
    stage_bytes = (PART_ROWS + outputs) * columns * element_bytes
    return LinearTile(outputs, columns, 4, max(1, min(6, shared_bytes(device) // stage_bytes)), is_dot=True)


class DecodingRecurrentOps(FewRowsRecurrentOps):
    """`FewRowsRecurrentOps` that also has steps of many decodes in few kernels."""

    parts_rows = PARTS_ROWS

    def mix_time(
        self, stream: Stream[Tensor], weights: TimeWeights[Tensor], first_value: Tensor | None, batch: RecurrentBatch[Tensor],
        layer: StateLayer[Tensor],
    ) -> tuple[Stream[Tensor], Tensor]:
        x = stream.sums
        few = FewWeights.of(weights) if self.are_many(x, batch) else None
        if few is None or not self.are_plain(x, few.matrices, few.scales) or not self.are_plain(x, few.ups):
            return super().mix_time(stream, weights, first_value, batch, layer)
        (num_rows, width), sizes = x.shape, few.sizes
        mixed = norm_and_shift(stream, weights.norm, weights.factors, layer.time_input, batch)
        products = torch.empty(num_rows * sum(sizes), dtype=mixed.dtype, device=x.device)
        wide, low = products.split((3 * num_rows * width, num_rows * sum(sizes[3:])))
        receptance, key, value = wide = wide.view(3, num_rows, width)
        is_narrow = num_rows > self.parts_rows
        if is_narrow:
            firsts = (weights.receptance, weights.key, weights.value)
            for mix, weight, out in zip(WIDE_MIXES, firsts, wide, strict=True):
                torch.mm(mixed[mix], self.ops.wide_matrix(weight.get()).t(), out=out)
        tile = self.mix_tile or choose_part_tile(mixed.element_size(), x.device)
        multiply_parts(mixed, few.matrices, few.scales, sizes, few.ranks, tile, products, is_many=True, is_narrow=is_narrow)
        raised = raise_rows(low, few, num_rows, width)
        inputs = HeadInputs(
            receptance=receptance, decay=raised[0], key=key, value=value, rate=raised[1], gate=raised[2],
            first_value=first_value, value_mix=raised[3] if len(raised) > 3 else None,
        )
        return self.add_shares_of(x, self.mix_heads(inputs, weights.heads, layer.wkv, batch), weights.out), value

    def mix_channels(
        self, stream: Stream[Tensor], weights: ChannelWeights[Tensor], batch: RecurrentBatch[Tensor], layer: StateLayer[Tensor],
        kept_rows: Tensor | None,
    ) -> Stream[Tensor]:
        x, packed = stream.sums, weights.key.get()
        key, scales = packed.matrix, packed.scales
        if kept_rows is not None or not self.are_many(x, batch) or not self.are_plain(x, [key], scales):
            return super().mix_channels(stream, weights, batch, layer, kept_rows)
        mixed, num_rows = norm_and_shift(stream, weights.norm, weights.factor, layer.channel_input, batch), len(x)
        if num_rows > self.parts_rows:
            hidden = self.square(self.ops.linear(mixed[0], weights.key, activation="relu"))
        else:
            hidden = torch.empty((num_rows, len(key)), dtype=mixed.dtype, device=x.device)
            tile = self.mix_tile or choose_part_tile(mixed.element_size(), x.device)
            multiply_parts(mixed, [key], scales, [len(key)], dict.fromkeys(RANK_NAMES, 0), tile, hidden, is_many=True)
        return self.add_shares_of(x, hidden, weights.value)

    def total(self, stream: Stream[Tensor]) -> Tensor:
        return stream.sums if stream.shares is None else add_shares(stream.sums, stream.shares)

    def add_shares_of(self, sums: Tensor, x: Tensor, weight: LinearWeight[Tensor]) -> Stream[Tensor]:
        """As `add_product`, with a product of many columns left in shares."""
        packed = weight.get()
        tile = share_tile(len(x), packed.matrix, x.element_size(), shared_bytes(x.device))
        is_plain = packed.bias is None and sums.is_contiguous() and self.are_plain(x, [packed.matrix], packed.scales)
        if tile is None or not is_plain:
            return self.add_product(sums, x, weight)
        return Stream(sums, multiply_shares(x, packed, tile))

    def are_many(self, x: Tensor, batch: RecurrentBatch[Tensor]) -> bool:
        """Whether a step has nothing but decodes, and more than a few."""
        return batch.num_decodes == batch.num_sequences and len(x) > self.few_rows and 0 < batch.num_decodes <= len(x)
