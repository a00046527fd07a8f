"""The CPU backend over oneDNN: weights packed once, bias, activation and residual fused into the product.

Short sequences share one attention call: a row of a few of them under a block-diagonal mask costs a third of the same tokens
in rows of ten, because torch's kernel pays per row. Measured on AMX cores; the width below is where the cost per token is
least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from archerfish.kernels.ops import Activation, LinearWeight, Segments
from archerfish.kernels.reference import TorchOps, activate, join_heads, split_heads, stack_biases

Tensor = torch.Tensor
ROW_TOKENS = 48
PACK_FOR_ROWS = 1024  # the batch size that oneDNN is asked to choose a weight layout for
FUSED: dict[str, tuple[str, str]] = {  # ours: oneDNN's name and its variant
    "none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""), "tanh": ("tanh", ""),
}


def onednn() -> Any:
    return torch.ops.mkldnn


def is_available(dtype: str) -> bool:
    """Whether this torch has oneDNN's fused products for a type on this machine."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    check = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}.get(dtype)
    return check is None or bool(getattr(onednn(), check)())


class TorchCpuOps(TorchOps):
    """TorchOps with oneDNN's packed products and grouped attention."""

    name = "torch + oneDNN"

    def linear_weight(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> LinearWeight[Tensor]:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        bias = stack_biases(weights, biases)
        packed = onednn()._reorder_linear_weight(weight.to(self.torch_dtype), PACK_FOR_ROWS)
        packed_bias = None if bias is None else bias.to(self.torch_dtype)
        return LinearWeight(packed, packed_bias, weight.shape[1], weight.shape[0])

    def linear(
        self, x: Tensor, weight: LinearWeight[Tensor], *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor:
        x = x.to(self.torch_dtype)
        if residual is not None:
            y: Tensor = onednn()._linear_pointwise.binary(x, residual, weight.weight, weight.bias, "add")
            return activate(y, activation)
        if activation not in FUSED:
            return activate(onednn()._linear_pointwise(x, weight.weight, weight.bias, "none", [], ""), activation)
        post, algorithm = FUSED[activation]
        fused: Tensor = onednn()._linear_pointwise(x, weight.weight, weight.bias, post, [], algorithm)
        return fused

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps).to(self.torch_dtype)

    def attention(self, qkv: Tensor, segments: Segments, num_heads: int, *, bias: Tensor | None = None) -> Tensor:
        parts: list[Tensor] = []
        start = 0
        for row, num_rows in attention_rows(segments):
            end = start + sum(row) * num_rows
            q, k, v = split_heads(qkv[start:end], num_rows, num_heads)
            mask = row_mask(row, qkv.dtype) if bias is None else biased_mask(row, bias)
            parts.append(join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
            start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@lru_cache(maxsize=256)
def attention_rows(segments: Segments) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Consecutive sequences joined into rows of at most ROW_TOKENS (one sequence if it is longer), equal neighbours counted."""
    return tuple((row, len(list(group))) for row, group in groupby(rows_of(segments.lengths)))


def rows_of(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    row: list[int] = []
    for length in lengths:
        if row and sum(row) + length > ROW_TOKENS:
            yield tuple(row)
            row = []
        row.append(length)
    if row:
        yield tuple(row)


@lru_cache(maxsize=1024)
def row_mask(row: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """(n, n): 0 within a sequence, -inf between two of a row; None when there is only one."""
    if len(row) == 1:
        return None
    owner = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row))
    mask = torch.zeros(len(owner), len(owner), dtype=dtype)
    return mask.masked_fill_(owner[:, None] != owner[None, :], float("-inf"))


def biased_mask(row: tuple[int, ...], bias: Tensor) -> Tensor:
    """The (heads, longest, longest) bias laid along the diagonal of a row, -inf elsewhere."""
    if len(row) == 1:
        return bias[:, : row[0], : row[0]]
    width = sum(row)
    mask = torch.full((bias.shape[0], width, width), float("-inf"), dtype=bias.dtype)
    start = 0
    for n in row:
        mask[:, start : start + n, start : start + n] = bias[:, :n, :n]
        start += n
    return mask
