"""The memory of KV blocks, and how much of it there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from archerfish.config import EngineConfig
from archerfish.errors import DeviceError, InvalidOptionError
from archerfish.kernels.machine import memory
from archerfish.kernels.ops import KVLayer, Ops, T
from archerfish.models.adapter import KVShape
from archerfish.types import DTYPE_BYTES

GIB = 1 << 30
CPU_SHARE, CPU_MOST_BYTES = 0.25, 4 * GIB  # of free memory, unless a budget is given
GPU_SPARE_BYTES = 1 * GIB  # for activations, graphs and the allocator's slack


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


def plan_memory(config: EngineConfig, shape: KVShape, device: str, dtype: str, weight_bytes: int) -> MemoryPlan:
    """Blocks for a model on a device; a DeviceError when not even one sequence would fit."""
    block_bytes = shape.bytes_per_token(DTYPE_BYTES[dtype]) * config.block_size
    if config.max_cache_tokens:
        num_blocks = config.max_cache_tokens // config.block_size
        if num_blocks < 1:
            raise InvalidOptionError(
                f"[engine] max_cache_tokens is {config.max_cache_tokens}, less than one block of {config.block_size} tokens."
            )
        return MemoryPlan(num_blocks, config.block_size, block_bytes, "max_cache_tokens")
    budget, reason = memory_budget(config, device, weight_bytes)
    num_blocks = int(budget // block_bytes)
    if num_blocks < 1:
        raise DeviceError(
            f"There is no room for KV: {reason}; one block of {config.block_size} tokens takes {block_bytes / 1e6:.1f} MB.",
            hint="Free memory, choose a smaller model, or raise the budget.",
        )
    return MemoryPlan(num_blocks, config.block_size, block_bytes, reason)


def memory_budget(config: EngineConfig, device: str, weight_bytes: int) -> tuple[float, str]:
    """Bytes for KV and what set them."""
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        budget = min(total * config.gpu_memory_utilization - weight_bytes, free - weight_bytes) - GPU_SPARE_BYTES
        return budget, f"{config.gpu_memory_utilization:.0%} of {total / GIB:.0f} GiB, less weights and 1 GiB for the rest"
    free = memory().available_bytes
    if config.memory_budget_gib:
        wanted = config.memory_budget_gib * GIB
        if wanted > free:
            raise InvalidOptionError(
                f"[engine] memory_budget_gib is {config.memory_budget_gib:g}, but {free / GIB:.1f} GiB of memory are free."
            )
        return wanted, f"memory_budget_gib = {config.memory_budget_gib:g}"
    return min(free * CPU_SHARE, CPU_MOST_BYTES), f"a quarter of the {free / GIB:.1f} GiB that are free, at most 4"
