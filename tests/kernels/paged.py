"""Batches over KV blocks, for tests of attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from archerfish.kernels.ops import HeadShape, KVLayer, PagedBatch
from archerfish.kernels.torch.reference import TorchOps
from archerfish.runtime.batch import build_batch

Tensor = torch.Tensor


def batch_over(
    ops: TorchOps, sequences: Sequence[tuple[int, int]], block_size: int, heads: HeadShape, *, is_deterministic: bool = False,
    num_rows: int = 0,
) -> tuple[PagedBatch[Tensor], KVLayer[Tensor]]:
    """A batch of (new tokens, context) sequences over shuffled blocks, in memory that is NaN wherever none has a token."""
    torch.manual_seed(0)
    sequences = sorted(sequences, key=lambda item: item[0] != 1)
    needed = [-(-context // block_size) for _, context in sequences]
    order = np.random.default_rng(1).permutation(sum(needed) + 2).tolist()
    blocks = [[order.pop() for _ in range(num)] for num in needed]
    kv = ops.new_kv_layer(sum(needed) + 2, block_size, heads.num_kv_heads, heads.head_dim)
    for memory in (kv.keys, kv.values):
        memory.fill_(float("nan"))
        for owned, (_, context) in zip(blocks, sequences, strict=True):
            position = torch.arange(context, device=ops.device)
            block = torch.tensor(owned, device=ops.device)[position // block_size]
            memory[block, position % block_size] = torch.randn(context, heads.num_kv_heads, heads.head_dim).to(memory)
    batch = build_batch(
        ops, tokens=[[7] * new for new, _ in sequences], starts=[context - new for new, context in sequences], blocks=blocks,
        block_size=block_size, is_deterministic=is_deterministic, num_rows=num_rows,
    )
    return batch, kv
