"""The CPU backend over oneDNN: weights packed once, bias, activation and residual fused into the product.

Attention runs in rows whose width is a multiple of 32: torch's kernel takes twice as long per token at 40 or 100 tokens as at
32 or 96, and three times as long at 10. So the tokens are gathered into such rows, short sequences sharing one under a
block-diagonal mask, and gathered back.

oneDNN compiles a product anew for every number of rows that it has not seen, which takes 30 ms: ten times the product. So
activations have one of few numbers of rows (`padded_rows`); rows past the last token are filling, which is never read. On ARM
oneDNN's products come from a library that compiles nothing, so that filling would only cost time.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from archerfish.kernels.formats import Tensors, WeightFormat, row_pieces
from archerfish.kernels.machine import ARM
from archerfish.kernels.ops import (
    Activation,
    BlockMask,
    HeadShape,
    Ids,
    KVLayer,
    PagedBatch,
    Pooling,
    Rotary,
    Segments,
)
from archerfish.kernels.torch.paged_cpu import attend_blocks, rows_of
from archerfish.kernels.torch.reference import TorchOps, TorchWeight, activate, join_heads, split_heads
from archerfish.kernels.torch.weak_cache import WeakCache

Tensor = torch.Tensor
FEW_ROWS, MANY_ROWS, ROWS_STEP = 8, 1024, 256
ROW_STEP = 32  # of tokens side by side; of rows of a product whose results must not depend on how many there are
ROW_COST = {32: 1.3, 64: 1.7, 96: 1.9, 128: 2.2}  # milliseconds for 1,024 tokens in rows of a width, measured on one AMX core
INT8_ROWS = 8  # up to which torch's kernel for bfloat16 and int8 is quicker than widening
INT8_COLUMNS = 64  # of which widths are a multiple, or it may read past the end of rows (it does with 100)
PACK_FOR_ROWS = 1024  # the batch size that oneDNN is asked to choose a weight layout for
KEEP_FREE = ((-3, 32 << 20), (-1, 128 << 20))  # mallopt's M_MMAP_THRESHOLD, at its most, and M_TRIM_THRESHOLD, in bytes
FUSED: dict[str, tuple[str, str]] = {  # ours: oneDNN's name and its variant
    "none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""), "tanh": ("tanh", ""),
    "sigmoid": ("sigmoid", ""),
}


def onednn() -> Any:
    return torch.ops.mkldnn


def is_available(dtype: str) -> bool:
    """Whether this torch has oneDNN's fused products for a type on this machine; on ARM those in float16 add up in float16."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == "float16" and platform.machine() in ARM:
        return False
    check = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}.get(dtype)
    return check is None or bool(getattr(onednn(), check)())


class OneDnnWeight(TorchWeight):
    """A plain matrix in oneDNN's layout."""

    def __init__(self, ops: TorchOps, weight_format: WeightFormat, tensors: Tensors, bias: Tensor | None) -> None:
        super().__init__(ops, weight_format, tensors, bias)
        self.matrix: Tensor = onednn()._reorder_linear_weight(self.dequantised(), PACK_FOR_ROWS)
        self.tensors = {}  # so that the checkpoint's memory can be released

    def multiply(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        if x.dtype != self.ops.torch_dtype:
            x = x.to(self.ops.torch_dtype)
        if residual is not None:
            y = onednn()._linear_pointwise.binary(x, residual, self.matrix, self.bias, "add")
            return activate(y, activation)
        num_rows = x.shape[0]
        num_filling = padded_rows(num_rows) - num_rows
        if num_filling:
            x = F.pad(x, (0, 0, 0, num_filling))
        post, variant = FUSED.get(activation, FUSED["none"])
        y = onednn()._linear_pointwise(x, self.matrix, self.bias, post, [], variant)
        if num_filling:
            y = y[:num_rows]
        return y if activation in FUSED else activate(y, activation)


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
        return activate(y.to(self.ops.torch_dtype), activation)

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
            parts.append(joined([onednn()._linear_pointwise(tile, wide, None, "none", [], "") for tile in tiles], 0))
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

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps).to(self.torch_dtype)

    def pool(self, x: Tensor, segments: Segments, mode: Pooling) -> Tensor:
        if mode != "mean":
            return super().pool(x[: segments.num_tokens], segments, mode)
        parts: list[Tensor] = []
        start = 0
        for length, group in groupby(segments.lengths):  # far quicker than segment_reduce
            end = start + length * len(list(group))
            parts.append(x[start:end].view(-1, length, x.shape[1]).mean(1, dtype=torch.float32))
            start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if rows.restore is None else out.index_select(0, rows.restore)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        wide = total.float()
        scaled = torch.mul(wide, rms_factor(wide, eps), out=None if wide is total else wide)
        return scaled.mul_(weight).to(self.torch_dtype), total

    def store_kv(
        self, qkv: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, rotary: Rotary[Tensor] | None, *,
        q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    ) -> Tensor:
        if rotary is None or rotary.rotary_dim != heads.head_dim or (q_norm is None) != (k_norm is None):
            return super().store_kv(qkv, kv, batch, heads, rotary, q_norm=q_norm, k_norm=k_norm, eps=eps)
        num_rows, dim, num_both = qkv.shape[0], heads.head_dim, heads.num_heads + heads.num_kv_heads
        both, v = qkv.split_with_sizes((num_both * dim, heads.num_kv_heads * dim), 1)
        both = both.view(num_rows, num_both, dim).float()  # queries and keys are rotated together
        if q_norm is not None and k_norm is not None:
            weight = torch.cat((q_norm.expand(heads.num_heads, dim), k_norm.expand(heads.num_kv_heads, dim)))
            both = (both * rms_factor(both, eps)).mul_(weight)
        cos, sin = rotation(rotary, batch)
        both = (both * cos).addcmul_(both.roll(dim // 2, -1), sin).to(self.torch_dtype).view(num_rows, -1)
        q, k = both.split_with_sizes((heads.num_heads * dim, heads.num_kv_heads * dim), 1)
        keys, values = rows_of(kv)
        slots = batch.slots
        if num_rows != batch.num_tokens:
            slots, k, v = (part[: batch.num_tokens] for part in (slots, k, v))
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)
        return q

    def paged_attention(
        self, q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, *,
        mask: BlockMask[Tensor] | None = None,
    ) -> Tensor:
        if heads.softcap or heads.sinks or mask is not None:
            return super().paged_attention(q, kv, batch, heads, mask=mask)
        return attend_blocks(q, kv, batch, heads)


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


def rotation(rotary: Rotary[Tensor], batch: PagedBatch[Tensor]) -> tuple[Tensor, Tensor]:
    """Factors of a head and of the head rolled by half, (rows, 1, head_dim) each, found once for all layers."""
    found = rotations(batch)
    if id(rotary) not in found:
        cos, sin = rotary.cos_sin.index_select(0, batch.positions).unsqueeze(1).chunk(2, dim=-1)
        found[id(rotary)] = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return found[id(rotary)]


def no_rotations(batch: PagedBatch[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """By the id of a Rotary."""
    return {}


rotations = WeakCache(no_rotations)


@dataclass(frozen=True)
class Rows:
    """How the tokens of a batch lie in rows for attention."""

    groups: tuple[tuple[int, int, Tensor | None], ...]  # width, number of rows, mask: 0 within a sequence, -inf elsewhere
    gather: Tensor | None  # token of each place in the rows; None where the tokens lie so already
    restore: Tensor | None  # place of each token, and any place for the filling


@lru_cache(maxsize=16)  # shared by all layers of a pass, and by passes of other threads
def lay_rows(segments: Segments, num_rows: int, dtype: torch.dtype) -> Rows:
    """Whole sequences into rows, rows of one width side by side."""
    by_width: dict[int, list[list[int]]] = {}
    for width, row in fill_rows(segments.lengths):
        by_width.setdefault(width, []).append(row)
    starts = segments.starts
    token_at: list[Ids] = []  # per group: (rows, width) tokens, -1 where a row is not filled
    groups: list[tuple[int, int, Tensor | None]] = []
    for width, rows in by_width.items():
        tokens = np.full((len(rows), width), -1, dtype=np.int64)
        owners = np.full((len(rows), width), -1, dtype=np.int64)
        for place, row in enumerate(rows):
            row_tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in row])
            tokens[place, : len(row_tokens)] = row_tokens
            owners[place, : len(row_tokens)] = np.repeat(row, [segments.lengths[i] for i in row])
        is_full = bool((owners == owners[:, :1]).all())
        groups.append((width, len(rows), None if is_full else block_mask(owners, dtype)))
        token_at.append(tokens.reshape(-1))
    places = np.concatenate(token_at)
    if len(places) == num_rows and bool((places == np.arange(len(places))).all()):
        return Rows(tuple(groups), None, None)
    restore = np.zeros(num_rows, dtype=np.int64)
    restore[places[places >= 0]] = np.flatnonzero(places >= 0)
    return Rows(tuple(groups), torch.from_numpy(np.maximum(places, 0)), torch.from_numpy(restore))


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
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


def block_mask(owners: Ids, dtype: torch.dtype) -> Tensor:
    """(rows, 1, width, width); the unfilled places of a row see each other, so that no line is all -inf."""
    owner = torch.from_numpy(owners)
    mask = torch.zeros(owner.shape[0], 1, owner.shape[1], owner.shape[1], dtype=dtype)
    return mask.masked_fill_((owner[:, :, None] != owner[:, None, :]).unsqueeze(1), float("-inf"))


def fill_rows(lengths: tuple[int, ...]) -> Iterator[tuple[int, list[int]]]:
    """(width, indices of sequences) of each row: as many consecutive sequences as fit the width that suits the first."""
    row: list[int] = []
    width = left = 0
    for index, length in enumerate(lengths):
        if row and length <= left:
            row.append(index)
            left -= length
            continue
        if row:
            yield width, row
        width = best_width(length)
        row, left = [index], width - length
    if row:
        yield width, row


@lru_cache(maxsize=1024)
def best_width(length: int) -> int:
    """The width at which sequences of one length cost least per token."""
    widths = [width for width in ROW_COST if width >= length] or [-(-length // ROW_STEP) * ROW_STEP]
    return min(widths, key=lambda width: ROW_COST.get(width, 1.0) * width / (width // length))
