"""Adapters on a GPU: rows are sorted by slot and cut into chunks of one slot each. A kernel multiplies each chunk with
its A, a second one adds what B makes of that. Which rows belong to which chunk follows on the device, once for a pass,
so that one recording serves any mix of adapters; programs without a chunk end at once.

No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from archerfish.kernels.adapters import AdapterTable
from archerfish.kernels.ops import Activation
from archerfish.kernels.torch.activations import ACTIVATIONS
from archerfish.kernels.torch.adapters import TorchAdapters
from archerfish.kernels.triton.launch import early_start, follow
from archerfish.kernels.triton.products import finish
from archerfish.kernels.triton.tiles import cdiv, dot_block, next_power_of_2, shared_bytes

Tensor = torch.Tensor
FEW_ROWS = 512
FEW = 16
MANY = 32  # rows of a pass, and rows of a chunk up to so many and beyond
SPLIT_COLUMNS, MAX_SPLITS = 512, 16  # inputs that a program multiplies with A, at least, and most parts of them
MOST_INNER = 64  # numbers that a program makes of a row: the more, the less often the row is read
COLUMNS, OUTPUTS = 128, 128  # read at a time, and of a program
ENOUGH_PROGRAMS, ROWS_PER_TILE = (
    512,
    4,
)  # beyond so many, a program has several tiles of outputs; of a chunk, for each tile
MAX_PARTS = 4


@triton.jit
def load_chunk(order, chunk_slots, chunk_firsts, chunk_counts, ranks, rows: tl.constexpr):
    """Slot and rank of a program's chunk, how many rows it has, and the rows. What does not depend on other loads comes
    first:
    the chain of loads is most of the time of a pass with few rows."""
    chunk, places = tl.program_id(0), tl.arange(0, rows)
    slot = tl.load(chunk_slots + chunk)
    first = tl.load(chunk_firsts + chunk)
    count = tl.load(chunk_counts + chunk)
    rank = tl.load(ranks + tl.maximum(slot, 1) - 1)
    row = tl.load(order + first + places, mask=places < count, other=0)
    return slot, tl.where(slot > 0, rank, 0), count, row


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    x,
    down,
    ranks,
    order,
    chunk_slots,
    chunk_firsts,
    chunk_counts,
    inner,
    num_rows,
    num_each,
    x_stride,
    width: tl.constexpr,
    max_rank: tl.constexpr,
    num_inner: tl.constexpr,
    split: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    columns: tl.constexpr,
    is_early: tl.constexpr,
):
    """inner: (splits, rows, parts * most rank). num_each: rows that have the same row of x."""
    follow(is_early)
    slot, rank, count, row = load_chunk(order, chunk_slots, chunk_firsts, chunk_counts, ranks, rows)
    if rank == 0:
        return
    is_row = tl.arange(0, rows) < count
    number = tl.program_id(1) * block + tl.arange(0, block)
    is_number = (number < num_inner) & (number % max_rank < rank)
    lines = down + (slot - 1).to(tl.int64) * num_inner * width + number[:, None] * width
    total = tl.zeros((rows, block), dtype=tl.float32)
    first = tl.program_id(2) * split
    for start in range(first, tl.minimum(first + split, width), columns):
        column = start + tl.arange(0, columns)
        is_column = column < width
        a = tl.load(lines + column[None, :], mask=is_number[:, None] & is_column[None, :], other=0.0)
        values = tl.load(
            x + (row // num_each)[:, None] * x_stride + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        total += tl.dot(values.to(a.dtype), tl.trans(a), input_precision="ieee")
    place = (tl.program_id(2) * num_rows + row)[:, None] * num_inner + number[None, :]
    tl.store(inner + place, total, mask=is_row[:, None] & (number < num_inner)[None, :])


@triton.jit
def load_inner(
    inner,
    row,
    is_used,
    first,
    num_rows,
    max_rank: tl.constexpr,
    num_inner: tl.constexpr,
    num_splits: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """What A made of rows, from a number on."""
    number = tl.arange(0, block)
    total = tl.zeros((rows, block), dtype=tl.float32)
    for i in tl.static_range(num_splits):
        place = (i * num_rows + row)[:, None] * num_inner + (first + number)[None, :]
        total += tl.load(inner + place, mask=is_used[:, None] & (number < max_rank)[None, :], other=0.0)
    return total


@triton.jit
def load_outputs(
    y,
    up,
    total,
    slot,
    rank,
    row,
    mask,
    output,
    is_output,
    y_stride,
    scale,
    outputs: tl.constexpr,
    max_rank: tl.constexpr,
    block: tl.constexpr,
):
    """Some outputs of rows with what B makes of `total`."""
    number = tl.arange(0, block)
    given = tl.load(y + row[:, None] * y_stride + output[None, :], mask=mask, other=0.0).to(tl.float32)
    lines = up + (tl.maximum(slot - 1, 0).to(tl.int64) * outputs + output) * max_rank
    is_inside = is_output[:, None] & (number < max_rank)[None, :] & (rank > 0)  # what is beyond the rank is 0
    b = tl.load(lines[:, None] + number[None, :], mask=is_inside, other=0.0)
    return given + tl.dot(total.to(b.dtype), tl.trans(b), input_precision="ieee") * scale


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "scale"])
def expand_kernel(
    y,
    inner,
    up,
    out,
    ranks,
    order,
    chunk_slots,
    chunk_firsts,
    chunk_counts,
    num_rows,
    num_tiles,
    y_stride,
    out_stride,
    scale,
    end0: tl.constexpr,
    end1: tl.constexpr,
    end2: tl.constexpr,
    outputs: tl.constexpr,
    max_rank: tl.constexpr,
    num_inner: tl.constexpr,
    num_splits: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    gate: tl.constexpr,
    is_early: tl.constexpr,
):
    """end0, end1, end2: where the outputs of the first parts end. num_tiles: of outputs, of a program. With a gate
    there are two parts, and rows without an adapter are gated as well."""
    follow(is_early)
    slot, rank, count, row = load_chunk(order, chunk_slots, chunk_firsts, chunk_counts, ranks, rows)
    work = rank if gate == "none" else count
    if work == 0:
        return
    num_each = num_tiles * tile
    last0 = (end0 + num_each - 1) // num_each  # programs up to the end of each part: none of them has outputs of two
    last1 = last0 + (end1 - end0 + num_each - 1) // num_each
    last2 = last1 + (end2 - end1 + num_each - 1) // num_each
    program = tl.program_id(1)
    part = (program >= last0).to(tl.int32) + (program >= last1).to(tl.int32) + (program >= last2).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, end0, tl.where(part == 2, end1, end2)))
    end = tl.where(part == 0, end0, tl.where(part == 1, end1, tl.where(part == 2, end2, outputs)))
    before = tl.where(part == 0, 0, tl.where(part == 1, last0, tl.where(part == 2, last1, last2)))
    is_row = tl.arange(0, rows) < count
    is_used = is_row & (rank > 0)
    total = load_inner(inner, row, is_used, part * max_rank, num_rows, max_rank, num_inner, num_splits, rows, block)
    if gate != "none":
        up_total = load_inner(inner, row, is_used, max_rank, num_rows, max_rank, num_inner, num_splits, rows, block)
    for offset in range(0, num_each, tile):
        output = begin + (program - before) * num_each + offset + tl.arange(0, tile)
        is_output = output < end
        mask = is_row[:, None] & is_output[None, :]
        values = load_outputs(
            y, up, total, slot, rank, row, mask, output, is_output, y_stride, scale, outputs, max_rank, block
        )
        if gate != "none":
            up_values = load_outputs(
                y,
                up,
                up_total,
                slot,
                rank,
                row,
                mask,
                output + end0,
                is_output,
                y_stride,
                scale,
                outputs,
                max_rank,
                block,
            )
            values = finish(values, up_values, 0.0, 0.0, gate, True)
        tl.store(out + row[:, None] * out_stride + output[None, :], values.to(out.dtype.element_ty), mask=mask)


class Chunks(NamedTuple):
    """Rows of a pass by slot."""

    order: Tensor  # rows, those of a slot one after the other
    slots: Tensor  # of each chunk
    firsts: Tensor  # where a chunk's rows begin in `order`
    counts: Tensor  # how many it has; 0: there is no such chunk
    size: int  # at most


def find_chunks(rows: Tensor, num_slots: int) -> Chunks:
    """By operations whose shapes follow from the number of rows alone."""
    num = len(rows)
    size = FEW if num <= FEW_ROWS else MANY
    counts = rows.new_zeros(num_slots + 1).scatter_add_(0, rows, torch.ones_like(rows))
    numbers = (counts + size - 1) // size
    ends, row_ends = numbers.cumsum(0), counts.cumsum(0)
    chunk = torch.arange(num // size + min(num_slots + 1, num), device=rows.device)
    slots = torch.searchsorted(ends, chunk, right=True)
    is_chunk = slots <= num_slots
    slots = slots.clamp_max_(num_slots)
    nth = (chunk - (ends - numbers)[slots]) * size
    firsts, left = (row_ends - counts)[slots] + nth, counts[slots] - nth
    return Chunks(rows.argsort(stable=True), slots * is_chunk, firsts, left.clamp(0, size) * is_chunk, size)


def most_stages(x: Tensor, stage_bytes: int) -> int:
    return max(1, min(3, shared_bytes(x.device) // stage_bytes))


class TritonAdapters(TorchAdapters):
    """Adapters of all rows together."""

    def __init__(self, ops: Any, num_slots: int, max_rank: int) -> None:
        super().__init__(ops, num_slots, max_rank)
        self._found: dict[
            bool, tuple[Tensor, Chunks]
        ] = {}  # chunks of the rows of the pass, and (True) of places of experts

    @contextmanager
    def filling(self) -> Iterator[None]:
        if self.device == "cpu":
            yield
            return
        stream = torch.cuda.Stream(self.device)  # beside the steps, of which none reads what is written
        with torch.cuda.stream(stream), torch.inference_mode():
            yield
        stream.synchronize()

    def _chunks(self, places: Tensor | None, num: int) -> Chunks:
        rows = self.rows if places is None else places
        assert rows is not None
        found = self._found.get(places is not None)
        if found is None or found[0] is not rows:
            found = self._found[places is not None] = rows, find_chunks(rows, num)
        return found[1]

    def add(
        self,
        y: Tensor,
        x: Tensor,
        table: AdapterTable[Tensor],
        *,
        activation: Activation = "none",
        softcap: float = 0.0,
        scale: float = 1.0,
        places: Tensor | None = None,
    ) -> Tensor:
        if len(table.sizes) > MAX_PARTS:
            return super().add(y, x, table, activation=activation, softcap=softcap, scale=scale, places=places)
        y = y if y.stride(-1) == 1 else y.contiguous()
        self._expand(y, y, x, table, "none", scale, places)
        y = ACTIVATIONS[activation](y)
        return softcap * torch.tanh(y / softcap) if softcap else y

    def add_gated(
        self, y: Tensor, x: Tensor, table: AdapterTable[Tensor], gate: Activation, places: Tensor | None = None
    ) -> Tensor:
        """`Ops.gated` of what `add` gives for a product of two equal parts. x: a row for each, or for some
        neighbours."""
        out = torch.empty((len(y), table.sizes[0]), dtype=y.dtype, device=y.device)
        self._expand(out, y, x, table, gate, 1.0, places)
        return out

    def _expand(
        self,
        out: Tensor,
        y: Tensor,
        x: Tensor,
        table: AdapterTable[Tensor],
        gate: Activation,
        scale: float,
        places: Tensor | None,
    ) -> None:
        chunks, most = self._chunks(places, len(table.ranks)), self.max_rank
        order = chunks.order, chunks.slots, chunks.firsts, chunks.counts
        if table.is_lookup:
            assert self.rows is not None
            inner = table.down[(self.rows - 1).clamp_min(0), x].float()[None]
        else:
            inner = self._shrink(x if x.stride(-1) == 1 else x.contiguous(), table, chunks, len(y))
        outputs = sum(table.sizes)
        block = dot_block(most)
        sizes = table.sizes if gate == "none" else table.sizes[:1]
        ends = [end for _, end in table.bounds][:-1] + [outputs] * (MAX_PARTS - len(table.sizes))
        many = len(chunks.slots) * cdiv(sum(sizes), OUTPUTS) // ENOUGH_PROGRAMS
        num_tiles = min(chunks.size // ROWS_PER_TILE, next_power_of_2(max(1, many)))
        stage_bytes = OUTPUTS * (chunks.size * y.element_size() + block * table.up.element_size())
        expand_kernel[(len(chunks.slots), sum(cdiv(size, num_tiles * OUTPUTS) for size in sizes))](
            y,
            inner,
            table.up,
            out,
            table.ranks,
            *order,
            inner.shape[1],
            num_tiles,
            y.stride(0),
            out.stride(0),
            scale,
            end0=ends[0],
            end1=ends[1],
            end2=ends[2],
            outputs=outputs,
            max_rank=most,
            num_inner=inner.shape[2],
            num_splits=len(inner),
            rows=chunks.size,
            block=block,
            tile=OUTPUTS,
            gate=gate,
            num_warps=4,
            num_stages=most_stages(y, stage_bytes * len(table.sizes[: 1 if gate == "none" else 2])),
            **early_start(y.device),
        )

    def _shrink(self, x: Tensor, table: AdapterTable[Tensor], chunks: Chunks, num: int) -> Tensor:
        """A x by part of the inputs, for so many rows."""
        width, most = x.shape[1], self.max_rank
        num_inner = most * len(table.sizes)
        block = dot_block(min(MOST_INNER, num_inner))
        split = cdiv(max(SPLIT_COLUMNS, cdiv(width, MAX_SPLITS)), COLUMNS) * COLUMNS
        inner = torch.empty((cdiv(width, split), num, num_inner), device=x.device)
        stage_bytes = (chunks.size + block) * COLUMNS * x.element_size()
        shrink_kernel[(len(chunks.slots), cdiv(num_inner, block), len(inner))](
            x,
            table.down,
            table.ranks,
            chunks.order,
            chunks.slots,
            chunks.firsts,
            chunks.counts,
            inner,
            num,
            max(1, num // max(1, len(x))),
            x.stride(0),
            width=width,
            max_rank=most,
            num_inner=num_inner,
            split=split,
            rows=chunks.size,
            block=block,
            columns=COLUMNS,
            num_warps=4,
            num_stages=most_stages(x, stage_bytes),
            **early_start(x.device),
        )
        return inner
