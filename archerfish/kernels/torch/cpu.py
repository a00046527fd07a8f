"""The CPU backend over oneDNN: weights packed once, bias, activation and residual fused into the product.

Attention of encoders runs in rows whose width is a multiple of 32: torch's kernel takes twice as long per token at 40 or 100
tokens as at 32 or 96, and three times as long at 10. So the tokens are gathered into such rows, short sequences sharing one
under a block-diagonal mask, and gathered back.

The same kernel attends over KV blocks. It wants keys and values side by side, so they are gathered by token: as quick as by
block, and nothing but tokens of the sequence itself ever gets in. What to gather is found once per batch and window, for all
layers. The query heads that share a KV head take the place of query positions, so that no key is copied for each of them.
Decodes of similar lengths run in one call.

oneDNN compiles a product anew for every number of rows that it has not seen, which takes 30 ms: ten times the product. So
activations have one of few numbers of rows (`padded_rows`); rows past the last token are filling, which is never read. On ARM
oneDNN's products come from a library that compiles nothing, so that filling would only cost time.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from archerfish.background import WeakCache
from archerfish.kernels.formats import Tensors, WeightFormat, row_pieces
from archerfish.kernels.machine import ARM
from archerfish.kernels.ops import Activation, BlockMask, HeadShape, Ids, KVLayer, PagedBatch, Pooling, Rotation, Segments
from archerfish.kernels.torch.reference import ACTIVATIONS, TorchOps, TorchWeight, join_heads, split_heads, visible

Tensor = torch.Tensor
FEW_ROWS, MANY_ROWS, ROWS_STEP = 8, 1024, 256
ROW_STEP = 32  # of tokens side by side; of rows of a product whose results must not depend on how many there are
ROW_COST = {32: 1.3, 64: 1.7, 96: 1.9, 128: 2.2}  # milliseconds for 1,024 tokens in rows of a width, measured on one AMX core
INT8_ROWS = 8  # up to which torch's kernel for bfloat16 and int8 is quicker than widening
INT8_COLUMNS = 64  # of which widths are a multiple, or it may read past the end of rows (it does with 100)
PACK_FOR_ROWS = 1024  # the batch size that oneDNN is asked to choose a weight layout for
LONG_PROMPT = 512  # tokens from which a causal prompt gains nothing by being filled up, which takes a mask
SPLIT_SAVES = 1024  # keys that a further group of decodes must spare to be worth its call
KEEP_FREE = ((-3, 32 << 20), (-1, 128 << 20))  # mallopt's M_MMAP_THRESHOLD, at its most, and M_TRIM_THRESHOLD, in bytes
FUSED: dict[str, tuple[str, str]] = {  # ours: oneDNN's name and its variant
    "none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""), "tanh": ("tanh", ""),
    "sigmoid": ("sigmoid", ""),
}
onednn: Any = torch.ops.mkldnn


def is_available(dtype: str) -> bool:
    """Whether this torch has oneDNN's fused products for a type on this machine; on ARM those in float16 add up in float16."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == "float16" and platform.machine() in ARM:
        return False
    check = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}.get(dtype)
    return check is None or bool(getattr(onednn, check)())


class OneDnnWeight(TorchWeight):
    """A plain matrix in oneDNN's layout."""

    def __init__(self, ops: TorchOps, weight_format: WeightFormat, tensors: Tensors, bias: Tensor | None) -> None:
        super().__init__(ops, weight_format, tensors, bias)
        self.matrix: Tensor = onednn._reorder_linear_weight(self.dequantised(), PACK_FOR_ROWS)
        self.tensors = {}  # so that the checkpoint's memory can be released

    def multiply(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        if x.dtype != self.ops.torch_dtype:
            x = x.to(self.ops.torch_dtype)
        num_rows = x.shape[0]
        num_filling = padded_rows(num_rows) - num_rows
        if num_filling:
            x = F.pad(x, (0, 0, 0, num_filling))
            residual = None if residual is None else F.pad(residual, (0, 0, 0, num_filling))
        if residual is None:
            post, variant = FUSED.get(activation, FUSED["none"])
            y = onednn._linear_pointwise(x, self.matrix, self.bias, post, [], variant)
        else:
            y = onednn._linear_pointwise.binary(x, residual, self.matrix, self.bias, "add")
        if num_filling:
            y = y[:num_rows]
        is_done = activation == "none" or (residual is None and activation in FUSED)
        return y if is_done else ACTIVATIONS[activation](y)


class Int8CpuWeight(TorchWeight):
    """int8 rows. They are widened for every product, a piece at a time, so that no matrix is ever wide as a whole.

    For few rows in bfloat16 torch has a kernel that reads int8, for one row in less time than bfloat16 weights take; its
    versions for float32 and float16 are slower than widening.
    """

    ops: TorchCpuOps

    def __init__(self, ops: TorchCpuOps, weight_format: WeightFormat, tensors: Tensors, bias: Tensor | None) -> None:
        super().__init__(ops, weight_format, tensors, bias)
        if self.is_read_as_int8(1):
            ops.unfilled_rows = INT8_ROWS

    def is_read_as_int8(self, num_rows: int) -> bool:
        """Whether a product of so many rows is one for torch's kernel."""
        has_kernel = self.ops.torch_dtype == torch.bfloat16 and self.tensors["weight"].shape[1] % INT8_COLUMNS == 0
        return has_kernel and num_rows <= INT8_ROWS and not self.ops.is_deterministic

    def multiply(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        y = self.multiply_integers(x.to(self.ops.torch_dtype)).float().mul_(self.tensors["scales"])
        for added in (self.bias, residual):
            y = y if added is None else y.add_(added)
        return ACTIVATIONS[activation](y.to(self.ops.torch_dtype))

    def multiply_integers(self, x: Tensor) -> Tensor:
        """The product with the integers, in a type whose range holds it."""
        matrix, num_rows, is_deterministic = self.tensors["weight"], x.shape[0], self.ops.is_deterministic
        if self.is_read_as_int8(num_rows):
            return torch._weight_int8pack_mm(x.contiguous(), matrix, ones(len(matrix)))
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        num_filled = -(-num_rows // ROW_STEP) * ROW_STEP if is_deterministic else padded_rows(num_rows)
        x, height = F.pad(x.to(dtype), (0, 0, 0, num_filled - num_rows)), ROW_STEP if is_deterministic else num_filled
        tiles = [x[first : first + height] for first in range(0, num_filled, height)]
        parts: list[Tensor] = []
        for first, last in row_pieces(*matrix.shape):
            wide = matrix[first:last].to(dtype)
            parts.append(joined([onednn._linear_pointwise(tile, wide, None, "none", [], "") for tile in tiles]))
        return joined(parts, 1)[:num_rows]


class TorchCpuOps(TorchOps):
    """TorchOps with oneDNN's packed products and grouped attention."""

    name = "torch + oneDNN"
    products: ClassVar[Mapping[str, type[TorchWeight]]] = {"plain": OneDnnWeight, "int8": Int8CpuWeight}

    unfilled_rows: int = 0  # up to which a step's activations are not filled up, since some products take any number of rows

    def start_thread(self, num_threads: int) -> None:
        super().start_thread(num_threads)
        keep_freed_memory()

    def padded_rows(self, num_rows: int) -> int:
        return num_rows if num_rows <= self.unfilled_rows else padded_rows(num_rows)

    def embed(self, tables: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
        num_filling = padded_rows(len(ids[0])) - len(ids[0])
        return super().embed(tables, [F.pad(index, (0, num_filling)) for index in ids] if num_filling else ids)

    def pool(self, x: Tensor, segments: Segments, mode: Pooling) -> Tensor:
        if mode != "mean":
            return super().pool(x[: segments.num_tokens], segments, mode)
        parts: list[Tensor] = []
        start = 0
        for length, group in groupby(segments.lengths):  # far quicker than segment_reduce
            end = start + length * len(list(group))
            parts.append(x[start:end].view(-1, length, x.shape[1]).mean(1, dtype=torch.float32))
            start = end
        return joined(parts)

    def attention(self, qkv: Tensor, segments: Segments, num_heads: int, *, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            out = super().attention(qkv, segments, num_heads, bias=bias)
            return F.pad(out, (0, 0, 0, qkv.shape[0] - out.shape[0]))
        rows = lay_rows(segments, qkv.shape[0], self.torch_dtype)
        laid = qkv if rows.gather is None else qkv.index_select(0, rows.gather)
        parts: list[Tensor] = []
        start = 0
        for width, num_rows, mask in rows.groups:
            q, k, v = split_heads(laid[start : start + width * num_rows], num_rows, num_heads)
            parts.append(join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
            start += width * num_rows
        out = joined(parts)
        return out if rows.restore is None else out.index_select(0, rows.restore)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        wide = total.float()
        scaled = torch.mul(wide, rms_factor(wide, eps), out=None if wide is total else wide)
        return scaled.mul_(weight).to(self.torch_dtype), total

    def store_kv(
        self, qkv: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, rotation: Rotation[Tensor]
    ) -> Tensor:
        rotary, q_norm, k_norm = rotation.rotary, rotation.q_norm, rotation.k_norm
        if rotary is None or rotary.rotary_dim != heads.head_dim or (q_norm is None) != (k_norm is None):
            return super().store_kv(qkv, kv, batch, heads, rotation)
        num_rows, dim, num_both = qkv.shape[0], heads.head_dim, heads.num_heads + heads.num_kv_heads
        both, v = qkv.split_with_sizes((num_both * dim, heads.num_kv_heads * dim), 1)
        both = both.view(num_rows, num_both, dim).float()  # queries and keys are rotated together
        if q_norm is not None and k_norm is not None:
            weight = torch.cat((q_norm.expand(heads.num_heads, dim), k_norm.expand(heads.num_kv_heads, dim)))
            both = (both * rms_factor(both, rotation.eps)).mul_(weight)
        factors, rolled_factors = find_rotation(batch, rotary.cos_sin)
        both = (both * factors).addcmul_(both.roll(dim // 2, -1), rolled_factors).to(self.torch_dtype).view(num_rows, -1)
        q, k = both.split_with_sizes((heads.num_heads * dim, heads.num_kv_heads * dim), 1)
        slots = batch.slots
        if num_rows != batch.num_tokens:
            slots, k, v = (part[: batch.num_tokens] for part in (slots, k, v))
        kv.keys.view(-1, k.shape[1]).index_copy_(0, slots, k)
        kv.values.view(-1, k.shape[1]).index_copy_(0, slots, v)
        return q

    def paged_attention(
        self, q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, *,
        mask: BlockMask[Tensor] | None = None,
    ) -> Tensor:
        if heads.softcap or mask is not None:
            return super().paged_attention(q, kv, batch, heads, mask=mask)
        layout = lay_out(batch, heads.window, q.dtype)
        num_decodes, kv_heads, dim = batch.num_decodes, heads.num_kv_heads, heads.head_dim
        memories = [memory.view(-1, kv_heads * dim) for memory in (kv.keys, kv.values)]
        rows = q[:num_decodes] if layout.order is None else q.index_select(0, layout.order)
        parts: list[Tensor] = []
        start = 0
        for slots, hidden, num in layout.decodes:
            k, v = (memory.index_select(0, slots).view(num, -1, kv_heads, dim).transpose(1, 2) for memory in memories)
            query = rows[start : start + num].view(num, kv_heads, -1, dim)
            parts.append(F.scaled_dot_product_attention(query, k, v, attn_mask=hidden, scale=heads.scale).reshape(num, -1))
            start += num
        if layout.places is not None:
            parts = [torch.cat(parts).index_select(0, layout.places)]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts or [q[:0]])
        if num_decodes == len(q):
            return attended
        out = torch.empty_like(q)
        out[:num_decodes] = attended
        for prefill in layout.prefills:
            end = prefill.start + prefill.num_new
            out[prefill.start : end] = attend_prefill(q[prefill.start : end], memories, prefill, heads)
        out[batch.num_tokens :] = 0
        return out


@WeakCache
def find_rotation(batch: PagedBatch[Tensor], cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of a head and of the head rolled by half: (rows, 1, head_dim) each."""
    cos, sin = cos_sin.index_select(0, batch.positions).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


@lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Let the C library keep what activations free, which took 14,000 page faults and 20 ms in a step of 560 tokens.

    False: this is not glibc, and nothing has changed.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and all(set_option(name, value) for name, value in KEEP_FREE)


def rms_factor(x: Tensor, eps: float) -> Tensor:
    """What RMS normalisation multiplies each line of x with. torch's rms_norm is a chain of a dozen operations on a CPU."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(scalar(eps), length, length, value=1 / x.shape[-1]).rsqrt_()


@lru_cache(maxsize=64)
def scalar(value: float) -> Tensor:
    return torch.tensor(value)


@lru_cache(maxsize=64)
def ones(num: int) -> Tensor:
    return torch.ones(num, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Rows:
    """How the tokens of a batch lie in rows for attention."""

    groups: tuple[tuple[int, int, Tensor | None], ...]  # width, number of rows, mask: 0 within a sequence, -inf elsewhere
    gather: Tensor | None  # token of each place in the rows; None where the tokens lie so already
    restore: Tensor | None  # place of each token, and any place for the filling


@lru_cache(maxsize=16)  # shared by all layers of a pass, and by passes of other threads
def lay_rows(segments: Segments, num_rows: int, dtype: torch.dtype) -> Rows:
    """Whole sequences into rows, rows of one width side by side."""
    starts = segments.starts
    token_at: list[Ids] = []  # per group: (rows, width) tokens, -1 where a row is not filled
    groups: list[tuple[int, int, Tensor | None]] = []
    for width, rows in fill_rows(segments.lengths).items():
        tokens = np.full((len(rows), width), -1, dtype=np.int64)
        owners = np.full((len(rows), width), -1, dtype=np.int64)
        for place, row in enumerate(rows):
            row_tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in row])
            tokens[place, : len(row_tokens)] = row_tokens
            owners[place, : len(row_tokens)] = np.repeat(row, [segments.lengths[i] for i in row])
        mask = None
        if (owners != owners[:, :1]).any():  # unfilled places of a row see each other, so that no line is all -inf
            is_hidden = torch.from_numpy(owners[:, None, :, None] != owners[:, None, None, :])
            mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))
        groups.append((width, len(rows), mask))
        token_at.append(tokens.reshape(-1))
    places = np.concatenate(token_at)
    if len(places) == num_rows and bool((places == np.arange(len(places))).all()):
        return Rows(tuple(groups), None, None)
    restore = np.zeros(num_rows, dtype=np.int64)
    restore[places[places >= 0]] = np.flatnonzero(places >= 0)
    return Rows(tuple(groups), torch.from_numpy(np.maximum(places, 0)), torch.from_numpy(restore))


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def padded_rows(num_rows: int) -> int:
    """The least of the few numbers of rows that products are compiled for."""
    if num_rows > FEW_ROWS and platform.machine() in ARM:
        return num_rows
    if num_rows > MANY_ROWS:
        return -(-num_rows // ROWS_STEP) * ROWS_STEP
    if num_rows <= FEW_ROWS:  # in float32 half the time of 16
        return 4 if num_rows <= 4 else 8
    step = max(16, (1 << (num_rows - 1).bit_length()) // 8)
    return -(-num_rows // step) * step


def fill_rows(lengths: tuple[int, ...]) -> dict[int, list[list[int]]]:
    """Rows by width, each the indices of its sequences: as many consecutive ones as fit the width that suits the first."""
    by_width: dict[int, list[list[int]]] = {}
    row: list[int] = []
    left = 0
    for index, length in enumerate(lengths):
        if length > left:
            row, left = [], best_width(length)
            by_width.setdefault(left, []).append(row)
        row.append(index)
        left -= length
    return by_width


@lru_cache(maxsize=1024)
def best_width(length: int) -> int:
    """The width at which sequences of one length cost least per token."""
    widths = [width for width in ROW_COST if width >= length] or [-(-length // ROW_STEP) * ROW_STEP]
    return min(widths, key=lambda width: ROW_COST.get(width, 1.0) * width / (width // length))


@dataclass(frozen=True)
class Prefill:
    """A sequence with several new tokens."""

    start: int  # row of its first new token
    num_new: int
    slots: Tensor  # of the keys that any of them sees, the last one again where that is filled up
    mask: Tensor | None  # (new, keys): 0 or -inf; None: causal


@dataclass(frozen=True)
class AttentionLayout:
    """How a batch attends under one window."""

    # Decodes that attend in one call, group after group as in `order`: slots of their keys, (sequences * width,), past a
    # sequence's end its last one again; a mask (sequences, 1, 1, width) of 0 or -inf, or None; how many sequences.
    decodes: tuple[tuple[Tensor, Tensor | None, int], ...]
    order: Tensor | None  # decode that stands at each place; None: as they come
    places: Tensor | None  # place of each decode
    prefills: tuple[Prefill, ...]


@WeakCache
def lay_out(batch: PagedBatch[Tensor], window: int, dtype: torch.dtype) -> AttentionLayout:
    tables, block_size, num = batch.block_tables.numpy(), batch.block_size, batch.num_decodes
    ends = batch.context_lens[:num]
    firsts = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
    lengths = ends - firsts
    if batch.is_deterministic or num < 2:
        order, groups = None, [np.array([i]) for i in range(num)]
    else:
        order, groups = group_lengths(lengths)
    decodes: list[tuple[Tensor, Tensor | None, int]] = []
    for rows in groups:
        length = lengths[rows, None]
        column = np.arange(-(-int(length.max()) // ROW_STEP) * ROW_STEP)
        position = firsts[rows, None] + np.minimum(column, length - 1)
        slots = np.take_along_axis(tables[rows], position // block_size, axis=1) * block_size + position % block_size
        is_hidden, mask = column >= length, None
        if is_hidden.any():
            mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(is_hidden), float("-inf"))
            mask = mask[:, None, None]
        decodes.append((torch.from_numpy(slots.reshape(-1)), mask, len(rows)))
    prefills: list[Prefill] = []
    start = num
    for i in range(num, len(tables)):
        num_new = int(batch.query_lens[i])
        prefills.append(lay_prefill(tables[i], start, num_new, int(batch.context_lens[i]), block_size, window, dtype))
        start += num_new
    if order is None:
        return AttentionLayout(tuple(decodes), None, None, tuple(prefills))
    return AttentionLayout(tuple(decodes), torch.from_numpy(order), torch.from_numpy(np.argsort(order)), tuple(prefills))


def group_lengths(lengths: Ids) -> tuple[Ids | None, list[Ids]]:
    """Sequences that attend together, each group as wide as its longest: split where that spares enough keys."""
    order = np.argsort(-lengths, kind="stable")
    sizes = -(-lengths[order] // ROW_STEP) * ROW_STEP
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


def lay_prefill(
    table: Ids, start: int, num_new: int, context_len: int, block_size: int, window: int, dtype: torch.dtype
) -> Prefill:
    first = max(context_len - num_new - window + 1, 0) if window else 0
    num_keys = context_len - first
    is_causal = num_new == context_len and not 0 < window < context_len
    width = num_keys if is_causal and num_keys >= LONG_PROMPT else -(-num_keys // ROW_STEP) * ROW_STEP
    position = np.minimum(np.arange(first, first + width), context_len - 1)
    slots = torch.from_numpy(table[position // block_size] * block_size + position % block_size)
    if is_causal and width == num_keys:
        return Prefill(start, num_new, slots, None)
    mask = torch.full((num_new, width), float("-inf"), dtype=dtype)
    mask[:, :num_keys].masked_fill_(visible(num_new, num_keys, window, torch.device("cpu")), 0.0)
    return Prefill(start, num_new, slots, mask)


def attend_prefill(q: Tensor, memories: Sequence[Tensor], prefill: Prefill, heads: HeadShape) -> Tensor:
    """memories: keys and values, a row per slot. Each KV head is a row of the kernel's batch, and the query heads that share
    it see it through a stride of 0."""
    num_new, num_keys, kv_heads, dim = len(q), len(prefill.slots), heads.num_kv_heads, heads.head_dim
    grouped = q.view(num_new, kv_heads, -1, dim).permute(1, 2, 0, 3)
    shared = (kv_heads, grouped.shape[1], num_keys, dim)
    k, v = (
        memory.index_select(0, prefill.slots).view(num_keys, kv_heads, 1, dim).permute(1, 2, 0, 3).expand(shared)
        for memory in memories
    )
    is_causal = prefill.mask is None
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=prefill.mask, is_causal=is_causal, scale=heads.scale)
    return out.permute(2, 0, 1, 3).reshape(num_new, -1)
