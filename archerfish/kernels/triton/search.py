"""Searches of one program in a row of logits, or in a list of its likeliest tokens, for the kernels of
`triton/sampling.py`.

Sums are integers of a unit. No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from archerfish.kernels.triton.scores import order_of


@triton.jit
def weigh(values, highest, scale, min_p):
    """Weights of logits, 0 where min_p leaves a token out."""
    weights = tl.exp2((values - highest) * scale)
    return tl.where(weights >= min_p, weights, 0.0)


@triton.jit
def load_tile(listed, logits, is_listed, start, size, tile: tl.constexpr):
    """A tile of logits, from a row's list or from all its tokens."""
    places = start + tl.arange(0, tile)
    is_inside = places < size
    short = tl.load(listed + places, mask=is_inside & is_listed, other=float("-inf"))
    full = tl.load(logits + places, mask=is_inside & (is_listed == 0), other=float("-inf")).to(tl.float32)
    return tl.maximum(short, full)


@triton.jit
def find_end(
    listed,
    logits,
    is_listed,
    size,
    low,
    high,
    goal,
    highest,
    scale,
    min_p,
    is_count: tl.constexpr,
    unit: tl.constexpr,
    tile: tl.constexpr,
    num_edges: tl.constexpr,
):
    """The order of the last of the fewest likeliest tokens whose count or weight reaches the goal, or the lower order
    where all together do not; and the sum over tokens of higher orders."""
    at = tl.arange(0, num_edges)
    before = goal * 0
    is_open = goal == goal
    while is_open:
        step = (high - low) // num_edges + 1
        edges = tl.minimum(low + (at + 1) * step, high + 1)
        amounts = tl.zeros((num_edges,), tl.int64)
        for start in range(0, size, tile):
            values = load_tile(listed, logits, is_listed, start, size, tile)
            is_above = order_of(values).to(tl.int64)[:, None] >= edges[None, :]
            if is_count:
                amounts += tl.sum(is_above.to(tl.int32), 0).to(tl.int64)
            else:
                units = (weigh(values, highest, scale, min_p) * unit).to(tl.int64)
                amounts += tl.sum(tl.where(is_above, units[:, None], 0), 0)
        chosen = tl.min(tl.where(amounts < goal, at, num_edges - 1), 0)
        before = tl.sum(tl.where(at == chosen, amounts, 0), 0)
        next_high = tl.sum(tl.where(at == chosen, edges, 0), 0) - 1
        low += chosen * step
        high = next_high
        is_open = low < high
    return low, before


@triton.jit
def units_of(order, highest, scale, min_p, unit: tl.constexpr):
    """Weight in units of a token with a given order."""
    bits = order.to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return (weigh(value, highest, scale, min_p) * unit).to(tl.int64)


@triton.jit
def sum_run(
    listed, logits, is_listed, size, last, num_last, highest, scale, min_p, unit: tl.constexpr, tile: tl.constexpr
):
    """Weight in units of all tokens above the order `last`, and of at most num_last tokens of that order."""
    total = num_last * 0
    num_equal = num_last * 0
    for start in range(0, size, tile):
        values = load_tile(listed, logits, is_listed, start, size, tile)
        orders = order_of(values).to(tl.int64)
        total += tl.sum(tl.where(orders > last, (weigh(values, highest, scale, min_p) * unit).to(tl.int64), 0), 0)
        num_equal += tl.sum((orders == last).to(tl.int32), 0)
    return total + tl.minimum(num_equal, num_last) * units_of(last, highest, scale, min_p, unit)


@triton.jit
def pick(
    listed, logits, is_listed, size, last, num_last, goal, highest, scale, min_p, unit: tl.constexpr, tile: tl.constexpr
):
    """The place of the kept token at which the sum of weights, in the order of ids, passes the goal."""
    found = size
    num_equal = num_last * 0
    start = size * 0
    while start < size:
        values = load_tile(listed, logits, is_listed, start, size, tile)
        orders = order_of(values).to(tl.int64)
        is_equal = (orders == last).to(tl.int64)
        is_kept = (orders > last) | ((is_equal > 0) & (num_equal + tl.cumsum(is_equal, 0) <= num_last))
        amounts = tl.where(is_kept, (weigh(values, highest, scale, min_p) * unit).to(tl.int64), 0)
        total = tl.sum(amounts, 0)
        if goal < total:
            found = start + tl.sum((tl.cumsum(amounts, 0) <= goal).to(tl.int32), 0)
            start = size
        goal -= total
        num_equal += tl.sum(is_equal, 0)
        start += tile
    return found
