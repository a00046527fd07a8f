"""What tests of kernels on any backend share: types, random tensors, batches over KV blocks, copies of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from archerfish.kernels.ops import HeadShape, KVLayer, PagedBatch
from archerfish.kernels.torch.reference import TorchOps
from archerfish.runtime.batch import build_batch

Tensor = torch.Tensor
CPU_TYPES = ["float32", "bfloat16", "float16"]


def random(*shape: int, dtype: str = "float32", device: str = "cpu") -> Tensor:
    return torch.randn(*shape).to(device, getattr(torch, dtype))


def check_copied_blocks(ops: TorchOps, num_kv_heads: int, head_dim: int) -> None:
    """Copied blocks are equal in every layer, and others stay; a second copy changes nothing."""
    layers = [ops.new_kv_layer(6, 4, num_kv_heads, head_dim) for _ in range(2)]
    memories = [memory.normal_() for layer in layers for memory in (layer.keys, layer.values)]
    before = [memory.clone() for memory in memories]
    for _ in range(2):
        ops.copy_blocks(layers, [(0, 3), (0, 5), (2, 1)])
    for memory, old in zip(memories, before, strict=True):
        assert torch.equal(memory, old[[0, 2, 2, 0, 4, 0]])


def batch_over(
    ops: TorchOps,
    sequences: Sequence[tuple[int, int]],
    block_size: int,
    heads: HeadShape,
    *,
    is_deterministic: bool = False,
    num_rows: int = 0,
) -> tuple[PagedBatch[Tensor], KVLayer[Tensor]]:
    """A batch of (new tokens, context) sequences over shuffled blocks, in memory that is NaN wherever none has a
    token."""
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
        ops,
        tokens=[[7] * new for new, _ in sequences],
        starts=[context - new for new, context in sequences],
        blocks=blocks,
        block_size=block_size,
        is_deterministic=is_deterministic,
        num_rows=num_rows,
    )
    return batch, kv
