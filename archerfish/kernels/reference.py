"""What each operation means, in plain torch. Runs on any device that torch has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 (the name that every torch reader expects)

from archerfish.kernels.ops import Activation, Ids, LinearWeight, Ops, Pooling, Segments

Tensor = torch.Tensor


class TorchOps(Ops[Tensor]):
    """The reference backend."""

    name = "torch reference"

    def __init__(self, device: str = "cpu", dtype: str = "float32") -> None:
        super().__init__()
        self.device = device
        self.dtype = dtype
        self.torch_dtype: torch.dtype = getattr(torch, dtype)

    def ids(self, values: Ids) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def to_numpy(self, x: Tensor) -> npt.NDArray[np.float32]:
        array: npt.NDArray[np.float32] = x.float().cpu().numpy()
        return array

    def table(self, weight: Tensor) -> Tensor:
        return weight.to(self.device)

    def vector(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, torch.float32)

    def pack_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        bias = stack_biases(weights, biases)
        return weight.to(self.device), None if bias is None else bias.to(self.device, self.torch_dtype)

    def embed(self, tables: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
        total = F.embedding(ids[0], tables[0]).float()
        for table, index in zip(tables[1:], ids[1:], strict=True):
            total += F.embedding(index, table)
        return total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(self.torch_dtype)

    def linear(
        self, x: Tensor, weight: LinearWeight[Tensor], *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor:
        matrix, bias = weight.get()
        y = F.linear(x.to(self.torch_dtype), matrix.to(self.torch_dtype), bias)
        if residual is not None:
            y = y + residual
        return activate(y, activation)

    def attention(self, qkv: Tensor, segments: Segments, num_heads: int, *, bias: Tensor | None = None) -> Tensor:
        parts: list[Tensor] = []
        start = 0
        for length, group in groupby(segments.lengths):  # neighbours of equal length share a call
            num_rows = len(list(group))
            end = start + length * num_rows
            q, k, v = split_heads(qkv[start:end], num_rows, num_heads)
            mask = None if bias is None else bias[:, :length, :length].to(q.dtype)
            parts.append(join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
            start = end
        return torch.cat(parts)

    def relative_bias(self, table: Tensor, buckets: Ids) -> Tensor:
        return F.embedding(self.ids(buckets), table).permute(2, 0, 1).to(self.torch_dtype).contiguous()

    def pool(self, x: Tensor, segments: Segments, mode: Pooling) -> Tensor:
        if mode == "cls":
            return x[self.ids(segments.starts[:-1])].float()
        if mode == "lasttoken":
            return x[self.ids(segments.starts[1:] - 1)].float()
        lengths = self.ids(np.asarray(segments.lengths, dtype=np.int64))
        if mode == "mean_sqrt_len_tokens":
            total = torch.segment_reduce(x.float(), "sum", lengths=lengths)
            return total / lengths.sqrt().unsqueeze(1)
        return torch.segment_reduce(x.float(), mode, lengths=lengths)

    def normalize(self, x: Tensor) -> Tensor:
        return F.normalize(x.float(), dim=-1)


def stack_biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """Biases stacked like their weights; a missing one counts as zeros unless all are missing."""
    if all(b is None for b in biases):
        return None
    parts = [torch.zeros(w.shape[0], dtype=w.dtype) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_heads(qkv: Tensor, rows: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows * n, 3 * width) as three views (rows, heads, n, head width)."""
    q, k, v = qkv.view(rows, qkv.shape[0] // rows, 3, num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def join_heads(x: Tensor) -> Tensor:
    """(rows, heads, n, head width) as (rows * n, width)."""
    rows, heads, n, width = x.shape
    return x.transpose(1, 2).reshape(rows * n, heads * width)


def activate(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "none":
            return x
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
        case "tanh":
            return torch.tanh(x)
