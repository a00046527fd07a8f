"""Sampling in Triton. Each row has its own parameters, which are read on the device, so that a captured graph serves
any.

1. `survey_kernel` finds the largest logit of every chunk of the vocabulary, and the sum of the chunk's weights; for
cuts, also
   the largest logits of GROUP tokens each.
2. `settle_kernel`, one program per row, chooses the token of rows that are greedy or that draw from all tokens.
3. Rows with a top_k, top_p or min_p keep some of the likeliest tokens. `tabulate_kernel` counts and sums up tokens
between a
   few levels of logits, and `choose_kernel` finds a level below which no token is kept. A small top_k has such a level
   at once:
   so many groups have a token above it.
4. `list_kernel` lists the tokens above that level, mostly a few hundred, in the order of their ids.
5. `finish_kernel` finds which tokens of the list are kept, and draws one.

A weight is relative to that of the likeliest token. Sums that decide are integers in units of 2 ** -44: they do not
depend on the order of addition, and a token whose weight is below a unit is never drawn. All chunks have one size, so
that a row's result does not depend on the batch. No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from archerfish.kernels import sampling
from archerfish.kernels.batches import Ids
from archerfish.kernels.sampling import TOP_K_OFF, Logprobs, Masks, Penalties, SamplingBatch
from archerfish.kernels.torch.sampling import TorchSampling
from archerfish.kernels.triton import scores
from archerfish.kernels.triton.scores import order_of
from archerfish.kernels.triton.search import find_end, pick, sum_run, units_of, weigh
from archerfish.kernels.triton.tiles import cdiv, next_power_of_2

Tensor = torch.Tensor
CHUNK = 2048  # tokens that a program surveys
CAPACITY = 8192  # tokens of a row's list; where more are left, the whole row is searched
GROUP = 128  # tokens
NUM_HALVINGS = 14  # of the range of logits in which a level for a top_k is looked for
TILE = 1024  # tokens of a list that are read at a time
NUM_LEVELS, NUM_EDGES = 16, 16  # edges: into how many parts a search divides its range in one pass
UNIT_BITS = 44

GAMMA = tl.constexpr(sampling.GAMMA)
MIX_A = tl.constexpr(sampling.MIX_A)
MIX_B = tl.constexpr(sampling.MIX_B)
CHOSEN = tl.constexpr(sampling.CHOSEN)
NOT_FINITE = tl.constexpr(sampling.NOT_FINITE)
NONE_LEFT = tl.constexpr(sampling.NONE_LEFT)
LOG2_E = tl.constexpr(1.4426950408889634)
DEPTH = tl.constexpr(UNIT_BITS / 1.4426950408889634)  # of the lowest level below the likeliest token, in temperatures
MARGIN = tl.constexpr(1.00001)  # for sums in float32


@triton.jit
def shifted(word, count: tl.constexpr):
    """A shift to the right that brings in zeros."""
    return (word >> count) & ((1 << (64 - count)) - 1)


@triton.jit
def uniform(key, position):
    """`sampling.uniform`, in integers that wrap around."""
    word = key + (position + 1) * GAMMA
    word = (word ^ shifted(word, 30)) * MIX_A
    word = (word ^ shifted(word, 27)) * MIX_B
    word = word ^ shifted(word, 31)
    return shifted(word, 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def scale_of(temperature, row):
    """The factor from a difference of logits to a base-2 logarithm of weights."""
    return (1.0 / tl.maximum(tl.load(temperature + row).to(tl.float32), 1e-30).to(tl.float64) * LOG2_E).to(tl.float32)


@triton.jit
def range_of(firsts, range_ends, row, vocab_size, has_ranges: tl.constexpr):
    """The range of tokens that a row chooses from: the first, and the one after the last."""
    first = vocab_size * 0
    end = vocab_size
    if has_ranges:
        first = tl.load(firsts + row).to(tl.int32)
        end = tl.minimum(tl.load(range_ends + row).to(tl.int32), vocab_size)
    return first, end


@triton.jit
def survey_kernel(
    logits,
    firsts,
    range_ends,
    temperature,
    tops,
    top_ids,
    sums,
    group_tops,
    vocab_size,
    stride,
    chunk: tl.constexpr,
    group: tl.constexpr,
    is_drawn: tl.constexpr,
    has_cuts: tl.constexpr,
    has_ranges: tl.constexpr,
):
    """Of every chunk the largest logit, its lowest id, and the sum of weights relative to it. A NaN comes first."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
    values = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    if has_ranges:  # not in the mask: the logits need not wait for it
        first, end = range_of(firsts, range_ends, row, vocab_size, has_ranges)
        values = tl.where((ids >= first) & (ids < end), values, float("-inf"))
    is_nan = values != values
    clean = tl.where(is_nan, float("-inf"), values)
    top = tl.max(clean, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    if has_cuts:
        groups = place * (chunk // group) + tl.arange(0, chunk // group)
        tl.store(group_tops + groups, tl.max(tl.reshape(clean, (chunk // group, group)), 1))
    tl.store(top_ids + place, tl.min(tl.where(values == top, ids, vocab_size), 0))
    tl.store(tops + place, tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), top))
    if is_drawn:
        weights = tl.exp2((values - tl.where(top == float("-inf"), 0.0, top)) * scale_of(temperature, row))
        tl.store(sums + place, tl.sum(weights, 0))


@triton.jit
def draw_from_all(
    logits,
    tops,
    sums,
    highest,
    scale,
    number,
    first,
    end,
    num_chunks,
    unit: tl.constexpr,
    chunk: tl.constexpr,
    width: tl.constexpr,
):
    """A token of one row: first the chunk by the cumulative weights of chunks, then the token inside."""
    chunks = tl.arange(0, width)
    is_inside = chunks < num_chunks
    levels = tl.load(tops + chunks, mask=is_inside, other=float("-inf"))
    weights = tl.load(sums + chunks, mask=is_inside, other=0.0).to(tl.float64)
    weights = weights * tl.exp2((levels - highest) * scale).to(tl.float64)
    amounts = (weights * unit).to(tl.int64)
    total = tl.sum(amounts, 0)
    goal = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    chosen = tl.sum((tl.cumsum(amounts, 0) <= goal).to(tl.int32), 0)
    goal -= tl.sum(tl.where(chunks < chosen, amounts, 0), 0)
    own = tl.sum(tl.where(chunks == chosen, amounts, 0), 0)
    level = tl.max(tl.where(chunks == chosen, levels, float("-inf")), 0)
    ids = chosen * chunk + tl.arange(0, chunk)
    values = tl.load(logits + ids, mask=(ids >= first) & (ids < end), other=float("-inf")).to(tl.float32)
    inner = (weigh(values, level, scale, 0.0) * unit).to(tl.int64)
    total = tl.sum(inner, 0)
    goal = tl.minimum((goal.to(tl.float64) / own.to(tl.float64) * total.to(tl.float64)).to(tl.int64), total - 1)
    return (chosen * chunk + tl.sum((tl.cumsum(inner, 0) <= goal).to(tl.int32), 0)).to(tl.int64)


@triton.jit
def find_level(group_tops, num_groups, most, highest, num_halvings: tl.constexpr, width: tl.constexpr):
    """A level that at least `most` groups of a row reach; NaN where so many have no token."""
    groups = tl.arange(0, width)
    tops = tl.load(group_tops + groups, mask=groups < num_groups, other=float("-inf"))
    low = tl.min(tl.where(tops > float("-inf"), tops, float("inf")), 0)
    high = highest
    for _ in range(num_halvings):
        middle = low + (high - low) * 0.5
        is_enough = tl.sum((tops >= middle).to(tl.int32), 0) >= most
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return tl.where(tl.sum((tops >= low).to(tl.int32), 0) >= most, low, float("nan"))


@triton.jit
def settle_kernel(
    logits,
    firsts,
    range_ends,
    offsets,
    temperature,
    is_greedy,
    keys,
    positions,
    top_k,
    top_p,
    min_p,
    tops,
    top_ids,
    sums,
    group_tops,
    cut_tops,
    levels,
    report,
    vocab_size,
    stride,
    num_chunks,
    unit: tl.constexpr,
    chunk: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    num_levels: tl.constexpr,
    num_halvings: tl.constexpr,
    is_drawn: tl.constexpr,
    has_greedy: tl.constexpr,
    has_cuts: tl.constexpr,
    has_ranges: tl.constexpr,
):
    """Choose a token from the chunks of a row. A row with cuts gets levels, and its highest logit in cut_tops; others
    NaN.

    Levels after the last one are NaN: where a top_k has a level at once, all but the first.
    """
    row = tl.program_id(0).to(tl.int64)
    tops += row * num_chunks
    chunks = tl.arange(0, width)
    peaks = tl.load(tops + chunks, mask=chunks < num_chunks, other=float("-inf"))
    ids = tl.load(top_ids + row * num_chunks + chunks, mask=chunks < num_chunks, other=0)
    is_nan = peaks != peaks
    highest = tl.max(tl.where(is_nan, float("-inf"), peaks), 0)
    is_bad = (tl.max(is_nan.to(tl.int32), 0) > 0) | (highest == float("inf"))
    outcome = tl.where(is_bad, NOT_FINITE, tl.where(highest == float("-inf"), NONE_LEFT, CHOSEN))
    token = tl.min(tl.where(peaks == highest, ids, vocab_size), 0).to(tl.int64)
    if is_drawn:
        to_draw = outcome == CHOSEN
        if has_greedy:
            to_draw = to_draw & (tl.load(is_greedy + row) == 0)
        if has_cuts:
            is_cut = (tl.load(top_k + row) < vocab_size) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)
            is_cut = is_cut & to_draw
            tl.store(cut_tops + row, tl.where(is_cut, highest, float("nan")))
            at = tl.arange(0, num_levels)
            places = (at + 1).to(tl.float32) / num_levels
            depths = (places * tl.sqrt(places) * DEPTH).to(tl.float64) * tl.load(temperature + row)
            edges = (highest.to(tl.float64) - depths).to(tl.float32)
            num_groups = num_chunks * (chunk // group)
            most = tl.load(top_k + row)
            if is_cut & (most > 0) & (most <= num_groups):
                level = find_level(
                    group_tops + row * num_groups, num_groups, most, highest, num_halvings, width * (chunk // group)
                )
                edges = tl.where(level == level, tl.where(at == 0, level, float("nan")), edges)
            tl.store(levels + row * num_levels + at, edges)
            to_draw = to_draw & (is_cut == 0)
        if to_draw:
            number = uniform(tl.load(keys + row), tl.load(positions + row))
            first, end = range_of(firsts, range_ends, row, vocab_size, has_ranges)
            token = draw_from_all(
                logits + row * stride,
                tops,
                sums + row * num_chunks,
                highest,
                scale_of(temperature, row),
                number,
                first,
                end,
                num_chunks,
                unit,
                chunk,
                width,
            )
    if has_ranges:
        token += tl.load(offsets + row)
    tl.store(report + row, tl.where(outcome == CHOSEN, token, 0))
    tl.store(report + tl.num_programs(0) + row, outcome.to(tl.int64))


@triton.jit
def tabulate_kernel(
    logits,
    firsts,
    range_ends,
    temperature,
    min_p,
    cut_tops,
    levels,
    counts,
    masses,
    vocab_size,
    stride,
    chunk: tl.constexpr,
    num_levels: tl.constexpr,
    has_ranges: tl.constexpr,
):
    """How many tokens of a chunk lie between two levels, and what they weigh."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.load(cut_tops + row)
    if highest != highest:
        return
    ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
    first, end = range_of(firsts, range_ends, row, vocab_size, has_ranges)
    is_inside = (ids >= first) & (ids < end)
    values = tl.load(logits + row * stride + ids, mask=is_inside, other=float("-inf")).to(tl.float32)
    weights = weigh(values, highest, scale_of(temperature, row), tl.load(min_p + row).to(tl.float32))
    place = (row * tl.num_programs(1) + tl.program_id(1)) * num_levels
    upper = highest + float("inf")
    edges = tl.load(levels + row * num_levels + tl.arange(0, num_levels))
    num_used = tl.sum((edges == edges).to(tl.int32), 0)
    for level in range(num_used):  # one after the other: a table of tokens and levels would not fit into registers
        lower = tl.load(levels + row * num_levels + level)
        is_between = is_inside & (values >= lower) & (values < upper)
        tl.store(counts + place + level, tl.sum(is_between.to(tl.int32), 0))
        tl.store(masses + place + level, tl.sum(tl.where(is_between, weights, 0.0), 0))
        upper = lower


@triton.jit
def choose_kernel(
    top_k,
    top_p,
    cut_tops,
    levels,
    counts,
    masses,
    bounds,
    ends,
    totals,
    vocab_size,
    num_chunks,
    width: tl.constexpr,
    num_levels: tl.constexpr,
):
    """The levels between which the first cut lies, the weight of the row, and where every chunk's part of the list
    ends."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.load(cut_tops + row)
    if highest != highest:
        return
    at = tl.arange(0, num_levels)
    chunks = tl.arange(0, width)
    places = (row * num_chunks + chunks)[:, None] * num_levels + at[None, :]
    edges = tl.load(levels + row * num_levels + at)
    is_inside = (chunks < num_chunks)[:, None] & (edges == edges)[None, :]
    table = tl.load(counts + places, mask=is_inside, other=0)
    num_so_far = tl.cumsum(tl.sum(table, 0), 0)
    mass = tl.sum(tl.load(masses + places, mask=is_inside, other=0.0).to(tl.float64), 0)
    mass_so_far = tl.cumsum(mass, 0)
    total = tl.max(mass_so_far, 0)
    most = tl.load(top_k + row)
    goal = tl.load(top_p + row) * total
    if most < vocab_size:
        is_enough = num_so_far >= most
        is_short = num_so_far < most
    else:
        is_enough = mass_so_far >= goal * MARGIN
        is_short = mass_so_far * MARGIN < goal
    last = tl.min(tl.where(is_enough | (mass_so_far >= total), at, num_levels - 1), 0)
    before = tl.sum(is_short.to(tl.int32), 0) - 1
    tl.store(bounds + 2 * row, tl.min(tl.where(at <= last, edges, float("inf")), 0))
    tl.store(bounds + 2 * row + 1, tl.min(tl.where(at <= tl.minimum(before, last), edges, highest), 0))
    tl.store(totals + row, total)
    num_listed = tl.sum(tl.where((at <= last)[None, :], table, 0), 1)
    tl.store(ends + row * num_chunks + chunks, tl.cumsum(num_listed, 0), mask=chunks < num_chunks)


@triton.jit
def list_kernel(
    logits,
    firsts,
    range_ends,
    cut_tops,
    bounds,
    ends,
    listed,
    listed_ids,
    vocab_size,
    stride,
    capacity,
    num_chunks,
    chunk: tl.constexpr,
    has_ranges: tl.constexpr,
):
    """List a chunk's tokens from the lower bound on, in the order of their ids."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.load(cut_tops + row)
    if highest != highest:
        return
    number = tl.program_id(1)
    ends += row * num_chunks
    begin = tl.load(ends + number - 1, mask=number > 0, other=0)
    if (begin == tl.load(ends + number)) | (tl.load(ends + num_chunks - 1) > capacity):
        return
    ids = number * chunk + tl.arange(0, chunk)
    first, end = range_of(firsts, range_ends, row, vocab_size, has_ranges)
    is_inside = (ids >= first) & (ids < end)
    values = tl.load(logits + row * stride + ids, mask=is_inside, other=float("-inf")).to(tl.float32)
    is_listed = is_inside & (values >= tl.load(bounds + 2 * row))
    places = row * capacity + begin + tl.cumsum(is_listed.to(tl.int32), 0) - 1
    tl.store(listed + places, values, mask=is_listed)
    tl.store(listed_ids + places, ids, mask=is_listed)


@triton.jit
def finish_kernel(
    logits,
    firsts,
    range_ends,
    offsets,
    temperature,
    keys,
    positions,
    top_k,
    top_p,
    min_p,
    cut_tops,
    bounds,
    ends,
    totals,
    listed,
    listed_ids,
    report,
    vocab_size,
    stride,
    capacity,
    num_chunks,
    unit: tl.constexpr,
    tile: tl.constexpr,
    num_edges: tl.constexpr,
    has_ranges: tl.constexpr,
):
    """Find which tokens the cuts of a row keep, and draw one."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.load(cut_tops + row)
    if highest != highest:
        return
    scale = scale_of(temperature, row)
    least = tl.load(min_p + row).to(tl.float32)
    num_left = tl.load(ends + row * num_chunks + num_chunks - 1)
    is_listed = num_left <= capacity
    first, end = range_of(firsts, range_ends, row, vocab_size, has_ranges)
    size = tl.where(is_listed, num_left, end - first)
    logits += row * stride + first
    listed += row * capacity
    last = order_of(tl.load(bounds + 2 * row)).to(tl.int64)
    high = order_of(tl.load(bounds + 2 * row + 1)).to(tl.int64)
    num_last = size.to(tl.int64)
    total = (tl.load(totals + row) * unit).to(tl.int64)
    most = tl.maximum(tl.load(top_k + row), 1)
    if most <= num_left:
        last, before = find_end(
            listed, logits, is_listed, size, last, high, most, highest, scale, least, True, unit, tile, num_edges
        )
        num_last = most - before
        total = sum_run(listed, logits, is_listed, size, last, num_last, highest, scale, least, unit, tile)
    high = tl.where(most < vocab_size, order_of(highest).to(tl.int64), high)
    share = tl.load(top_p + row)
    if share < 1.0:
        wanted = share * total.to(tl.float64)
        goal = wanted.to(tl.int64)
        goal = tl.maximum(goal + (goal.to(tl.float64) < wanted).to(tl.int64), 1)
        lowest = last
        last, before = find_end(
            listed, logits, is_listed, size, last, high, goal, highest, scale, least, False, unit, tile, num_edges
        )
        own = tl.maximum(units_of(last, highest, scale, least, unit), 1)
        num_needed = (goal - before + own - 1) // own
        num_last = tl.where(last == lowest, tl.minimum(num_last, num_needed), num_needed)
    total = sum_run(listed, logits, is_listed, size, last, num_last, highest, scale, least, unit, tile)
    number = uniform(tl.load(keys + row), tl.load(positions + row))
    goal = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    place = pick(listed, logits, is_listed, size, last, num_last, goal, highest, scale, least, unit, tile)
    place = tl.minimum(place, size - 1).to(tl.int64)  # should a parameter be NaN
    token = tl.load(listed_ids + row * capacity + place, mask=is_listed, other=0).to(tl.int64)
    token = tl.where(is_listed, token, first + place)
    if has_ranges:
        token += tl.load(offsets + row)
    tl.store(report + row, token)


def cuts_of_rows(batch: SamplingBatch[Tensor]) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """top_k, top_p and min_p of all rows; None where no row has any."""
    cuts = batch.cuts
    like = batch.temperature
    min_p = batch.min_p
    if like is None or (cuts is None and min_p is None):
        return None, None, None
    if min_p is None:
        min_p = torch.zeros_like(like)
    if cuts is not None and len(cuts.rows) == len(like):
        return cuts.top_k, cuts.top_p, min_p
    top_k = torch.full_like(like, TOP_K_OFF, dtype=torch.int64)
    top_p = torch.full_like(like, float("inf"))
    if cuts is not None:
        top_k.index_copy_(0, cuts.rows, cuts.top_k)
        top_p.index_copy_(0, cuts.rows, cuts.top_p)
    return top_k, top_p, min_p


def draw(logits: Tensor, batch: SamplingBatch[Tensor], vocab_size: int) -> Tensor:
    """The report of `Drawn` for the first vocab_size columns of logits, to which all but the ranges has been
    applied."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    num_rows = len(logits)
    stride = logits.stride(0)
    num_chunks = cdiv(vocab_size, CHUNK)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    report = new(2, num_rows, dtype=torch.int64)
    if not num_rows:
        return report
    width = next_power_of_2(num_chunks)
    unit = 2.0 ** min(UNIT_BITS, 63 - vocab_size.bit_length())
    tops, sums = new(num_rows, num_chunks), new(num_rows, num_chunks)
    top_ids = new(num_rows, num_chunks, dtype=torch.int32)
    temperature, ranges = batch.temperature, batch.ranges
    first, end, offset = (None, None, None) if ranges is None else (ranges.first, ranges.end, ranges.offset)
    is_drawn, has_ranges = temperature is not None, ranges is not None
    top_k, top_p, min_p = cuts_of_rows(batch)
    has_cuts = top_k is not None
    group_tops = new(num_rows, num_chunks * (CHUNK // GROUP)) if has_cuts else tops
    survey_kernel[(num_rows, num_chunks)](
        logits,
        first,
        end,
        temperature,
        tops,
        top_ids,
        sums,
        group_tops,
        vocab_size,
        stride,
        chunk=CHUNK,
        group=GROUP,
        is_drawn=is_drawn,
        has_cuts=has_cuts,
        has_ranges=has_ranges,
        num_warps=4,
    )
    cut_tops, levels = new(num_rows), new(num_rows, NUM_LEVELS)
    settle_kernel[(num_rows,)](
        logits,
        first,
        end,
        offset,
        temperature,
        batch.is_greedy,
        batch.keys,
        batch.positions,
        top_k,
        top_p,
        min_p,
        tops,
        top_ids,
        sums,
        group_tops,
        cut_tops,
        levels,
        report,
        vocab_size,
        stride,
        num_chunks,
        unit=unit,
        chunk=CHUNK,
        group=GROUP,
        width=width,
        num_levels=NUM_LEVELS,
        num_halvings=NUM_HALVINGS,
        is_drawn=is_drawn,
        has_greedy=batch.is_greedy is not None,
        has_cuts=has_cuts,
        has_ranges=has_ranges,
        num_warps=4,
    )
    if not has_cuts:
        return report
    # Rows whose cut_tops is not NaN go on.
    capacity = min(CAPACITY, vocab_size)
    counts = new(num_rows, num_chunks, NUM_LEVELS, dtype=torch.int32)
    masses = new(num_rows, num_chunks, NUM_LEVELS)
    bounds, ends = new(num_rows, 2), new(num_rows, num_chunks, dtype=torch.int32)
    totals = new(num_rows, dtype=torch.float64)
    listed, listed_ids = new(num_rows, capacity), new(num_rows, capacity, dtype=torch.int32)
    tabulate_kernel[(num_rows, num_chunks)](
        logits,
        first,
        end,
        temperature,
        min_p,
        cut_tops,
        levels,
        counts,
        masses,
        vocab_size,
        stride,
        chunk=CHUNK,
        num_levels=NUM_LEVELS,
        has_ranges=has_ranges,
        num_warps=4,
    )
    choose_kernel[(num_rows,)](
        top_k,
        top_p,
        cut_tops,
        levels,
        counts,
        masses,
        bounds,
        ends,
        totals,
        vocab_size,
        num_chunks,
        width=width,
        num_levels=NUM_LEVELS,
        num_warps=8,
    )
    list_kernel[(num_rows, num_chunks)](
        logits,
        first,
        end,
        cut_tops,
        bounds,
        ends,
        listed,
        listed_ids,
        vocab_size,
        stride,
        capacity,
        num_chunks,
        chunk=CHUNK,
        has_ranges=has_ranges,
        num_warps=4,
    )
    finish_kernel[(num_rows,)](
        logits,
        first,
        end,
        offset,
        temperature,
        batch.keys,
        batch.positions,
        top_k,
        top_p,
        min_p,
        cut_tops,
        bounds,
        ends,
        totals,
        listed,
        listed_ids,
        report,
        vocab_size,
        stride,
        capacity,
        num_chunks,
        unit=unit,
        tile=TILE,
        num_edges=NUM_EDGES,
        has_ranges=has_ranges,
        num_warps=8,
    )
    return report


class TritonSampling(TorchSampling):
    """TorchSampling by kernels; logits are biased, tokens banned and counted in torch."""

    def _report(self, logits: Tensor, batch: SamplingBatch[Tensor]) -> Tensor:
        if batch.may_overwrite and batch.penalties is not None:
            scores.penalise(logits, batch.penalties)
        elif batch.changes_logits:
            return draw(self._adjusted(logits, batch), batch, logits.shape[1])
        return draw(logits, batch, logits.shape[1])

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int, rows: Ids | None) -> Logprobs[Tensor]:
        some = None if rows is None else torch.from_numpy(rows).to(logits.device)
        return scores.token_logprobs(logits if logits.stride(1) == 1 else logits.contiguous(), token_ids, num_top, some)

    def _mask(self, x: Tensor, masks: Masks[Tensor]) -> None:
        scores.mask(x, masks)

    def _penalise(self, x: Tensor, penalties: Penalties[Tensor]) -> None:
        scores.penalise(x, penalties)
