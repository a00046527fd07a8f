"""Encoders in Triton: attention within packed sequences, layer normalisation, embedding and pooling.

One launch computes attention of all sequences of a batch. The host divides them into tiles of queries. The list of
tiles, and where each sequence begins and ends, are read on the device, so that a captured pass serves any lengths: see
`FixedInputs`.

Scores are kept as base-2 logarithms. No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from archerfish.kernels.batches import Ids, Segments
from archerfish.kernels.encoding import EncoderInputs
from archerfish.kernels.ops import HeadShape, NormWeights, Pooling
from archerfish.kernels.triton.plan import Tile, cut, send_pieces
from archerfish.kernels.triton.tiles import cdiv, dot_block, next_power_of_2

Tensor = torch.Tensor
LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
TILE_ROWS = (16, 32, 64)  # queries of a tile; tl.dot takes no fewer than 16
MAX_WIDTH = 8192  # of a row that one program holds
ROW_ELEMENTS = 2048  # that one program takes at a time, as several rows where these are narrow
POOL_COLUMNS, POOL_ROWS = 128, 16  # of a step of pooling
TOKENS_PER_SEQUENCE = 4  # on average, at least, or a captured pass has no room for the sequences


@triton.jit(do_not_specialize=["bias_head_stride", "bias_row_stride", "window"])
def attention_kernel(
    qkv,
    starts,
    tile_sequences,
    tile_firsts,
    bias,
    out,
    scale,
    cap,
    window,
    qkv_stride,
    bias_head_stride,
    bias_row_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
    has_bias: tl.constexpr,
    is_causal: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
):
    tile = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    sequence = tl.load(tile_sequences + tile)
    first = tl.load(tile_firsts + tile).to(tl.int32)
    begin = tl.load(starts + sequence)
    length = (tl.load(starts + sequence + 1) - begin).to(tl.int32)
    if first >= length:  # filling of a captured pass
        return
    queries = first + tl.arange(0, rows)
    dims = tl.arange(0, width)
    is_query = (queries < length)[:, None] & (dims < head_dim)[None, :]
    source = qkv + begin * qkv_stride
    query_place = queries.to(tl.int64)[:, None] * qkv_stride + dims[None, :]
    query = tl.load(source + head * head_dim + query_place, mask=is_query, other=0.0)
    source += (num_heads + head // (num_heads // num_kv_heads)) * head_dim
    acc = tl.zeros((rows, width), tl.float32)
    top = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    first_key = 0
    end = length
    if has_window:
        first_key = tl.maximum(first - window + 1, 0) // step * step
        end = tl.minimum(end, first + rows + window - 1)
    if is_causal:
        end = tl.minimum(end, first + rows)
    for start in range(first_key, end, step):
        keys = start + tl.arange(0, step)
        is_key = keys < length
        is_loaded = is_key[:, None] & (dims < head_dim)[None, :]
        places = keys.to(tl.int64)[:, None] * qkv_stride + dims[None, :]
        key = tl.load(source + places, mask=is_loaded, other=0.0)
        value = tl.load(source + num_kv_heads * head_dim + places, mask=is_loaded, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if has_cap:  # cap * tanh(scores / cap)
            scores = cap * (2.0 / (1.0 + tl.exp2(-2.8853900817779268 * scores / cap)) - 1.0)
        if has_bias:
            row = bias + head.to(tl.int64) * bias_head_stride + queries.to(tl.int64)[:, None] * bias_row_stride
            is_pair = (queries < length)[:, None] & is_key[None, :]
            scores += tl.load(row + keys[None, :], mask=is_pair, other=0.0).to(tl.float32) * 1.4426950408889634
        distance = keys[None, :] - queries[:, None]
        is_seen = is_key[None, :]
        if is_causal:
            is_seen = is_seen & (distance <= 0)
        if has_window:
            is_seen = is_seen & (distance < window) & (distance > -window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        if has_window:  # a query may see none of the keys so far
            base = tl.where(new_top > float("-inf"), new_top, 0.0)
        else:
            base = new_top
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    target = out + (begin + queries)[:, None] * (num_heads * head_dim) + head * head_dim + dims[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_query)


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    eps,
    num_rows,
    x_stride,
    residual_stride,
    width: tl.constexpr,
    block: tl.constexpr,
    many: tl.constexpr,
    has_residual: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)
    columns = tl.arange(0, block)
    is_column = columns < width
    is_inside = (rows < num_rows)[:, None] & is_column[None, :]
    values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=is_inside, other=0.0).to(tl.float32)
    if has_residual:
        places = rows[:, None] * residual_stride + columns[None, :]
        values += tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)
    centred = tl.where(is_inside, values - (tl.sum(values, 1) / width)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    factors = tl.load(weight + columns, mask=is_column, other=0.0)
    shifts = tl.load(bias + columns, mask=is_column, other=0.0)
    normed = centred * scale[:, None] * factors[None, :] + shifts[None, :]
    tl.store(out + rows[:, None] * width + columns[None, :], normed.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def embed_kernel(
    first,
    second,
    third,
    first_ids,
    second_ids,
    third_ids,
    out,
    num_rows,
    first_stride,
    second_stride,
    third_stride,
    width: tl.constexpr,
    block: tl.constexpr,
    many: tl.constexpr,
    has_third: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)
    columns = tl.arange(0, block)[None, :]
    is_row = rows < num_rows
    is_inside = is_row[:, None] & (columns < width)
    places = tl.load(first_ids + rows, mask=is_row, other=0)[:, None] * first_stride + columns
    total = tl.load(first + places, mask=is_inside, other=0.0).to(tl.float32)
    places = tl.load(second_ids + rows, mask=is_row, other=0)[:, None] * second_stride + columns
    total += tl.load(second + places, mask=is_inside, other=0.0).to(tl.float32)
    if has_third:
        places = tl.load(third_ids + rows, mask=is_row, other=0)[:, None] * third_stride + columns
        total += tl.load(third + places, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + rows[:, None] * width + columns, total, mask=is_inside)


@triton.jit
def pool_kernel(
    x, starts, out, x_stride, width: tl.constexpr, block: tl.constexpr, many: tl.constexpr, mode: tl.constexpr
):
    """One sequence, some columns. Nothing is read of a sequence without tokens, which fills up a captured pass."""
    sequence = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + sequence)
    length = (tl.load(starts + sequence + 1) - begin).to(tl.int32)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_column = columns < width
    source = x + begin * x_stride
    if mode == "cls":
        result = tl.load(source + columns, mask=is_column & (length > 0), other=0.0).to(tl.float32)
    elif mode == "lasttoken":
        result = tl.load(source + (length - 1) * x_stride + columns, mask=is_column & (length > 0), other=0.0).to(
            tl.float32
        )
    else:
        acc = tl.full((many, block), float("-inf") if mode == "max" else 0.0, tl.float32)
        for first in range(0, length, many):
            rows = first + tl.arange(0, many)
            is_inside = (rows < length)[:, None] & is_column[None, :]
            places = rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
            values = tl.load(source + places, mask=is_inside, other=0.0).to(tl.float32)
            if mode == "max":
                acc = tl.maximum(acc, tl.where(is_inside, values, float("-inf")))
            else:
                acc += values
        if mode == "max":
            result = tl.max(acc, 0)
        else:
            count = tl.maximum(length, 1).to(tl.float32)
            if mode == "mean_sqrt_len_tokens":
                count = tl.sqrt(count)
            result = tl.sum(acc, 0) / count
    tl.store(out + sequence * width + columns, result, mask=is_column)


@triton.jit(do_not_specialize=["num_rows"])
def normalize_kernel(x, out, num_rows, x_stride, width: tl.constexpr, block: tl.constexpr, many: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)
    columns = tl.arange(0, block)[None, :]
    is_inside = (rows < num_rows)[:, None] & (columns < width)
    values = tl.load(x + rows[:, None] * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(values * values, 1)), 1e-12)
    tl.store(out + rows[:, None] * width + columns, values / length[:, None], mask=is_inside)


@dataclass(frozen=True)
class EncoderLayout:
    """Where sequences lie and which tiles they are cut into, on the device as int64."""

    starts: Tensor  # (sequences + 1,)
    tile_sequences: Tensor  # (tiles,)
    tile_firsts: Tensor  # (tiles,) first query; one past the end of its sequence: no tile
    rows: int  # of a tile

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True)
class RecordedSegments(Segments):
    """The sequences of recorded passes, whose layout and positions lie in memory that is filled anew for each pass."""

    layout: EncoderLayout | None = field(default=None, compare=False)


def lay_out(segments: Segments, device: torch.device, rows: int = 0) -> EncoderLayout:
    """The layout of a batch in tiles of `rows` queries; 0: as many as suit its lengths."""
    if isinstance(segments, RecordedSegments) and segments.layout is not None:
        return segments.layout
    return new_layout(segments, device, rows)


@lru_cache(maxsize=16)  # all layers of a pass share one
def new_layout(segments: Segments, device: torch.device, rows: int) -> EncoderLayout:
    mean_length = segments.num_tokens / len(segments.lengths)
    rows = rows or next((rows for rows in TILE_ROWS if mean_length <= rows), TILE_ROWS[-1])
    sequences, firsts = cut(np.asarray(segments.lengths, dtype=np.int64), rows)
    starts, tile_sequences, tile_firsts = send_pieces((segments.starts, sequences, firsts), device, np.int64)
    return EncoderLayout(starts, tile_sequences, tile_firsts, rows)


def even(size: int) -> int:
    """A size of int64 words after which the next address is a multiple of 16 bytes; else kernels are compiled anew."""
    return size + size % 2


def choose_tile(rows: int, head_dim: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32 or head_dim > 128:
        return Tile(rows, 32, 4, 1 if head_dim > 128 else 2)
    return Tile(rows, rows, max(1, rows // 16), 2)


class FixedInputs(EncoderInputs[Tensor]):
    """Inputs of captured passes in one buffer of the device, which one copy refills.

    Rows after the last token are filling: of token 0, and in no sequence.
    """

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self.num_tokens = num_tokens
        self.num_sequences = max(1, num_tokens // TOKENS_PER_SEQUENCE)
        rows = TILE_ROWS[0] if num_tokens <= TILE_ROWS[1] else TILE_ROWS[1]
        num_tiles = even(-(-num_tokens // rows) + self.num_sequences)
        self._sizes = (*(even(num_tokens),) * 3, even(self.num_sequences + 1), num_tiles, num_tiles)
        self._words = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        tokens, positions, types, starts, sequences, firsts = self._words.split(self._sizes)
        self.token_ids, self.type_ids = tokens[:num_tokens], types[:num_tokens]
        self._layout = EncoderLayout(starts[: self.num_sequences + 1], sequences, firsts, rows)
        self.segments = RecordedSegments((num_tokens,), self._layout)
        self.segments.__dict__["positions"] = positions[:num_tokens]  # instead of what the host would find

    def fill(self, token_ids: Ids, segments: Segments, type_ids: Ids | None) -> bool:
        num, num_sequences = len(token_ids), len(segments.lengths)
        if num > self.num_tokens or num_sequences > self.num_sequences:
            return False
        words = torch.zeros(len(self._words), dtype=torch.int64, pin_memory=self._words.is_cuda)
        parts = np.split(words.numpy(), np.cumsum(self._sizes)[:-1])
        parts[0][:num], parts[1][:num] = token_ids, segments.positions
        if type_ids is not None:
            parts[2][:num] = type_ids
        parts[3].fill(num)
        parts[3][: num_sequences + 1] = segments.starts
        sequences, firsts = cut(np.asarray(segments.lengths, dtype=np.int64), self._layout.rows)
        parts[4][: len(sequences)] = sequences
        parts[5].fill(self.num_tokens)
        parts[5][: len(firsts)] = firsts
        self._words.copy_(words, non_blocking=True)
        return True


def attention(
    qkv: Tensor, segments: Segments, heads: HeadShape, bias: Tensor | None, tile: Tile | None = None
) -> Tensor:
    """`Ops.attention` for heads of at most MAX_HEAD_DIM."""
    head_dim = heads.head_dim
    layout = lay_out(segments, qkv.device, tile.rows if tile else 0)
    tile = tile or choose_tile(layout.rows, head_dim, qkv.dtype)
    out = torch.empty((len(qkv), heads.num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    strides = (0, 0) if bias is None else bias.stride()[:2]
    attention_kernel[(len(layout.tile_firsts) * heads.num_heads,)](
        qkv,
        layout.starts,
        layout.tile_sequences,
        layout.tile_firsts,
        qkv if bias is None else bias,
        out,
        LOG2_E * heads.scale,
        LOG2_E * heads.softcap,
        heads.window,
        qkv.stride(0),
        *strides,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=head_dim,
        rows=layout.rows,
        width=dot_block(head_dim),
        step=tile.step,
        has_bias=bias is not None,
        is_causal=heads.is_causal,
        has_window=heads.window > 0,
        has_cap=heads.softcap > 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def row_blocks(num_rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and shape of programs that take whole rows."""
    block = next_power_of_2(width)
    many = max(1, ROW_ELEMENTS // block)
    return (cdiv(num_rows, many),), {"width": width, "block": block, "many": many, "num_warps": max(4, block // 1024)}


def layer_norm(x: Tensor, norm: NormWeights[Tensor], dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """Of x, or of x + residual: `Ops.layer_norm` for rows of at most MAX_WIDTH."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    grid, shape = row_blocks(*x.shape)
    added = x if residual is None else residual
    layer_norm_kernel[grid](
        x,
        added,
        norm.weight,
        norm.bias,
        out,
        norm.eps,
        len(x),
        x.stride(0),
        added.stride(0),
        has_residual=residual is not None,
        **shape,
    )
    return out


def embed(tables: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
    """`Ops.embed` of two or three tables with rows of at most MAX_WIDTH."""
    num_rows, width = len(ids[0]), tables[0].shape[1]
    out = torch.empty((num_rows, width), dtype=torch.float32, device=tables[0].device)
    grid, shape = row_blocks(num_rows, width)
    three, three_ids = [*tables, tables[0]][:3], [*ids, ids[0]][:3]
    embed_kernel[grid](
        *three, *three_ids, out, num_rows, *(table.stride(0) for table in three), has_third=len(tables) == 3, **shape
    )
    return out


def pool(x: Tensor, segments: Segments, mode: Pooling) -> Tensor:
    """`Ops.pool`."""
    layout, width = lay_out(segments, x.device), x.shape[1]
    out = torch.empty((layout.num_sequences, width), dtype=torch.float32, device=x.device)
    pool_kernel[(layout.num_sequences, cdiv(width, POOL_COLUMNS))](
        x, layout.starts, out, x.stride(0), width=width, block=POOL_COLUMNS, many=POOL_ROWS, mode=mode, num_warps=4
    )
    return out


def normalize(x: Tensor) -> Tensor:
    """`Ops.normalize` for rows of at most MAX_WIDTH."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    grid, shape = row_blocks(*x.shape)
    normalize_kernel[grid](x, out, len(x), x.stride(0), **shape)
    return out
