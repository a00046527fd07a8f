"""Attention over KV blocks on a CPU, with torch's fused kernel.

That kernel wants keys and values side by side, so they are gathered by token: as quick as by block, and nothing but tokens of
the sequence itself ever gets in. What to gather is found once per batch and window, for all layers.

The query heads that share a KV head take the place of query positions, so that no key is copied for each of them. Decodes run
in one call per group of like lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from archerfish.kernels.ops import HeadShape, Ids, KVLayer, PagedBatch
from archerfish.kernels.torch.reference import visible
from archerfish.kernels.torch.weak_cache import WeakCache

Tensor = torch.Tensor
STEP = 32  # the fused kernel is quickest over a multiple of so many keys
LONG_PROMPT = 512  # tokens from which a causal prompt gains nothing by being filled up, which takes a mask
SPLIT_SAVES = 1024  # keys that a further group must spare to be worth its call


@dataclass(frozen=True)
class Decodes:
    """Decodes that attend in one call."""

    slots: Tensor  # (sequences * width,) of the keys; past a sequence's end its last one again
    mask: Tensor | None  # (sequences, 1, 1, width): 0 or -inf; None: all see all
    width: int


@dataclass(frozen=True)
class Prefill:
    """A sequence with several new tokens."""

    start: int  # row of its first new token
    num_new: int
    slots: Tensor  # of the keys that any of them sees, the last one again where that is filled up
    mask: Tensor | None  # (new, keys): 0 or -inf; None: causal


@dataclass(frozen=True)
class Layout:
    """How a batch attends under one window."""

    decodes: tuple[Decodes, ...]  # one after the other in `order`
    order: Tensor | None  # decode that stands at each place; None: as they come
    places: Tensor | None  # place of each decode
    prefills: tuple[Prefill, ...]


def no_layouts(batch: PagedBatch[Tensor]) -> dict[tuple[int, torch.dtype], Layout]:
    """By window and type."""
    return {}


layouts = WeakCache(no_layouts)


def attend_blocks(q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape) -> Tensor:
    """`Ops.paged_attention` without softcap, sinks and mask; rows past the last token are left as they happen to be."""
    found, key = layouts(batch), (heads.window, q.dtype)
    if key not in found:
        found[key] = lay_out(batch, heads.window, q.dtype)
    layout = found[key]
    keys, values = rows_of(kv)
    parts = [attend_decodes(rows, keys, values, group, heads) for rows, group in decode_rows(q, batch, layout)]
    if len(parts) > 1:
        joined = torch.cat(parts)
        parts = [joined if layout.places is None else joined.index_select(0, layout.places)]
    if not layout.prefills and len(q) == batch.num_decodes:
        return parts[0]
    out = torch.empty_like(q)
    if parts:
        out[: batch.num_decodes] = parts[0]
    for prefill in layout.prefills:
        rows = q[prefill.start : prefill.start + prefill.num_new]
        out[prefill.start : prefill.start + prefill.num_new] = attend_prefill(rows, keys, values, prefill, heads)
    out[batch.num_tokens :] = 0
    return out


def rows_of(kv: KVLayer[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer as views with one row per slot."""
    num_slots = kv.keys.shape[0] * kv.keys.shape[1]
    return kv.keys.view(num_slots, -1), kv.values.view(num_slots, -1)


def decode_rows(q: Tensor, batch: PagedBatch[Tensor], layout: Layout) -> list[tuple[Tensor, Decodes]]:
    rows = q[: batch.num_decodes] if layout.order is None else q.index_select(0, layout.order)
    found: list[tuple[Tensor, Decodes]] = []
    start = 0
    for group in layout.decodes:
        end = start + len(group.slots) // group.width
        found.append((rows[start:end], group))
        start = end
    return found


def attend_decodes(q: Tensor, keys: Tensor, values: Tensor, group: Decodes, heads: HeadShape) -> Tensor:
    num, kv_heads, dim = len(q), heads.num_kv_heads, heads.head_dim
    grouped = q.view(num, kv_heads, -1, dim)
    k, v = (
        memory.index_select(0, group.slots).view(num, group.width, kv_heads, dim).transpose(1, 2) for memory in (keys, values)
    )
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=heads.scale).reshape(num, -1)


def attend_prefill(q: Tensor, keys: Tensor, values: Tensor, prefill: Prefill, heads: HeadShape) -> Tensor:
    """Each KV head is a row of the kernel's batch, and the query heads that share it see it through a stride of 0."""
    num_new, num_keys, kv_heads, dim = len(q), len(prefill.slots), heads.num_kv_heads, heads.head_dim
    grouped = q.view(num_new, kv_heads, -1, dim).permute(1, 2, 0, 3)
    shared = (kv_heads, grouped.shape[1], num_keys, dim)
    k, v = (
        memory.index_select(0, prefill.slots).view(num_keys, kv_heads, 1, dim).permute(1, 2, 0, 3).expand(shared)
        for memory in (keys, values)
    )
    out = F.scaled_dot_product_attention(
        grouped, k, v, attn_mask=prefill.mask, is_causal=prefill.mask is None, scale=heads.scale
    )
    return out.permute(2, 0, 1, 3).reshape(num_new, -1)


def lay_out(batch: PagedBatch[Tensor], window: int, dtype: torch.dtype) -> Layout:
    tables = batch.block_tables.numpy()
    num = batch.num_decodes
    ends = batch.context_lens[:num]
    firsts = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
    lengths = ends - firsts
    if batch.is_deterministic or num < 2:
        order, groups = None, [np.array([i]) for i in range(num)]
    else:
        order, groups = group_lengths(lengths)
    decodes = tuple(lay_decodes(tables, firsts, lengths, rows, batch.block_size, dtype) for rows in groups)
    places = None if order is None else torch.from_numpy(np.argsort(order))
    prefills: list[Prefill] = []
    start = num
    for i in range(num, len(tables)):
        num_new = int(batch.query_lens[i])
        prefills.append(lay_prefill(tables[i], start, num_new, int(batch.context_lens[i]), batch.block_size, window, dtype))
        start += num_new
    return Layout(decodes, None if order is None else torch.from_numpy(order), places, tuple(prefills))


def group_lengths(lengths: Ids) -> tuple[Ids | None, list[Ids]]:
    """Sequences that attend together, each group as wide as its longest: split where that spares enough keys."""
    order = np.argsort(-lengths, kind="stable")
    sizes = padded(lengths[order])
    groups: list[Ids] = []
    waiting = [(0, len(order))]
    while waiting:
        begin, end = waiting.pop()
        inner = np.arange(begin + 1, end)
        spared = (sizes[begin] - sizes[inner]) * (end - inner)
        if len(inner) and spared.max() > SPLIT_SAVES:
            middle = int(inner[spared.argmax()])
            waiting += [(middle, end), (begin, middle)]
        else:
            groups.append(order[begin:end])
    return (None, [np.arange(len(order))]) if len(groups) == 1 else (order, groups)


def padded(lengths: Ids) -> Ids:
    return -(-lengths // STEP) * STEP


def lay_decodes(tables: Ids, firsts: Ids, lengths: Ids, rows: Ids, block_size: int, dtype: torch.dtype) -> Decodes:
    first, length = firsts[rows, None], lengths[rows, None]
    width = int(padded(length.max()))
    column = np.arange(width)
    position = first + np.minimum(column, length - 1)
    slots = np.take_along_axis(tables[rows], position // block_size, axis=1) * block_size + position % block_size
    is_hidden = column >= length
    mask = None
    if is_hidden.any():
        mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(is_hidden), float("-inf"))[:, None, None]
    return Decodes(torch.from_numpy(slots.reshape(-1)), mask, width)


def lay_prefill(
    table: Ids, start: int, num_new: int, context_len: int, block_size: int, window: int, dtype: torch.dtype
) -> Prefill:
    first = max(context_len - num_new - window + 1, 0) if window else 0
    num_keys = context_len - first
    is_causal = num_new == context_len and not 0 < window < context_len
    width = num_keys if is_causal and num_keys >= LONG_PROMPT else -(-num_keys // STEP) * STEP
    position = np.minimum(np.arange(first, first + width), context_len - 1)
    slots = torch.from_numpy(table[position // block_size] * block_size + position % block_size)
    if is_causal and width == num_keys:
        return Prefill(start, num_new, slots, None)
    mask = torch.full((num_new, width), float("-inf"), dtype=dtype)
    mask[:, :num_keys].masked_fill_(visible(num_new, num_keys, window, torch.device("cpu")), 0.0)
    return Prefill(start, num_new, slots, mask)
