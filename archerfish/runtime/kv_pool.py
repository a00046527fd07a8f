"""The memory of KV blocks, and how much of it there is room for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from archerfish.config import EngineConfig
from archerfish.errors import DeviceError, InvalidOptionError, OutOfMemoryError
from archerfish.kernels.machine import memory
from archerfish.kernels.ops import KVLayer, Ops, T
from archerfish.models.adapter import KVShape
from archerfish.types import DTYPE_BYTES

GIB = 1 << 30
CPU_SHARE, CPU_MOST_BYTES = 0.25, 4 * GIB  # of free memory, unless a budget is given
GPU_SPARE_BYTES = GIB  # for the context, recorded steps, kept logits and the allocator's slack
MAX_SHRINKS, SHRUNK = 6, 0.85  # how often a pool that does not fit is tried again, and with which share of it


class KVCachePool(Generic[T]):
    """Keys and values of all blocks, in all layers. BlockManager says who owns which block; this only holds them."""

    def __init__(self, ops: Ops[T], shape: KVShape, num_blocks: int, block_size: int) -> None:
        self.ops = ops
        self.num_blocks, self.block_size = num_blocks, block_size
        self.layers: list[KVLayer[T]] = [
            ops.new_kv_layer(num_blocks, block_size, shape.num_kv_heads, shape.head_dim) for _ in range(shape.num_layers)
        ]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block to block, (from, to), in every layer."""
        if pairs:
            self.ops.copy_blocks(self.layers, pairs)


_POOLS: dict[str, type[KVCachePool[Any]]] = {"cpu": KVCachePool, "cuda": KVCachePool, "mps": KVCachePool}


def register_kv_pool(device: str, pool: type[KVCachePool[Any]]) -> None:
    """Use another pool for a device, such as one over memory of the user's own."""
    _POOLS[device] = pool


def kv_pool_class(device: str) -> type[KVCachePool[Any]]:
    return _POOLS.get(device, KVCachePool)


@dataclass(frozen=True)
class MemoryPlan:
    """How many blocks of KV fit, computed before anything is allocated."""

    num_blocks: int
    block_size: int
    block_bytes: int
    reason: str  # what set the number, for people to read

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def work_bytes(shapes: Collection[tuple[int, ...]], vocab_size: int, step_tokens: int, max_num_seqs: int, dtype: str) -> int:
    """What the tensors of the largest step take on a GPU: activations of its tokens, and logits of all sequences."""
    widths = [shape[0] for shape in shapes if len(shape) == 2 and shape[0] != vocab_size]
    inputs = [shape[1] for shape in shapes if len(shape) == 2]
    per_token = (4 * max(widths, default=0) + 8 * min(inputs, default=0)) * DTYPE_BYTES[dtype]
    logits = vocab_size * (4 + DTYPE_BYTES[dtype])
    counts = 4 * vocab_size  # of tokens, for penalties
    return step_tokens * per_token + max_num_seqs * (2 * logits + counts)


def allocate_pool(device: str, ops: Ops[T], shape: KVShape, plan: MemoryPlan) -> tuple[KVCachePool[T], MemoryPlan]:
    """A pool as planned; where a GPU has less room than it said, a smaller one."""
    for _ in range(MAX_SHRINKS):
        try:
            return kv_pool_class(device)(ops, shape, plan.num_blocks, plan.block_size), plan
        except OutOfMemoryError:
            ops.free_unused()
            tried, reason = plan, f"{plan.num_blocks:,} blocks did not fit"
            plan = replace(plan, num_blocks=max(1, int(plan.num_blocks * SHRUNK)), reason=reason)
    raise DeviceError(
        f"There is no room for KV: not even {tried.num_bytes / GIB:.2f} GiB could be had.",
        hint="Other programs may use the card: free memory there, or lower gpu_memory_utilization.",
    )


def plan_memory(
    config: EngineConfig, shape: KVShape, device: str, dtype: str, weight_bytes: int, work_bytes: int = 0
) -> MemoryPlan:
    """Blocks for a model on a device; a DeviceError when not even one would fit. work_bytes: what a step needs on a GPU."""
    block_bytes = shape.bytes_per_token(DTYPE_BYTES[dtype]) * config.block_size
    if config.max_cache_tokens:
        num_blocks = config.max_cache_tokens // config.block_size
        if num_blocks < 1:
            raise InvalidOptionError(
                f"[engine] max_cache_tokens is {config.max_cache_tokens}, less than one block of {config.block_size} tokens."
            )
        return MemoryPlan(num_blocks, config.block_size, block_bytes, "max_cache_tokens")
    budget, reason = memory_budget(config, device, weight_bytes + work_bytes)
    num_blocks = int(budget // block_bytes)
    if num_blocks < 1:
        raise DeviceError(
            f"There is no room for KV: {reason}; one block of {config.block_size} tokens takes {block_bytes / 1e6:.1f} MB.",
            hint="Free memory, choose a smaller model, or raise the budget.",
        )
    return MemoryPlan(num_blocks, config.block_size, block_bytes, reason)


def memory_budget(config: EngineConfig, device: str, taken_bytes: int) -> tuple[float, str]:
    """Bytes for KV and what set them. taken_bytes: of a GPU, for all else."""
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        taken = (taken_bytes + GPU_SPARE_BYTES) / GIB
        budget = min(total * config.gpu_memory_utilization, free) - taken * GIB
        share = f"{config.gpu_memory_utilization:.0%} of {total / GIB:.0f} GiB"
        return budget, f"{share}, less {taken:.1f} GiB for weights and work"
    free = memory().available_bytes
    if config.memory_budget_gib:
        wanted = config.memory_budget_gib * GIB
        if wanted > free:
            raise InvalidOptionError(
                f"[engine] memory_budget_gib is {config.memory_budget_gib:g}, but {free / GIB:.1f} GiB of memory are free."
            )
        return wanted, f"memory_budget_gib = {config.memory_budget_gib:g}"
    return min(free * CPU_SHARE, CPU_MOST_BYTES), f"a quarter of the {free / GIB:.1f} GiB that are free, at most 4"
