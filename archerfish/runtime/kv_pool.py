"""The memory of blocks of keys and values, or of recurrent states, and how much of it there is room for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, NamedTuple

from archerfish.config import EngineConfig
from archerfish.errors import InvalidOptionError, OutOfMemoryError
from archerfish.kernels.batches import T
from archerfish.kernels.decoding import DecodeState
from archerfish.kernels.ops import KV_SCALE_BYTES, KVLayer, Ops
from archerfish.kernels.recurrent import FIRST_SLOT, StateShape
from archerfish.kernels.room import GIB, check_room, size, usable_memory
from archerfish.kernels.sampling import SamplingBatch
from archerfish.kernels.select import choose_backend
from archerfish.models.adapter import KVShape, MemoryShape
from archerfish.runtime.batch import pack_batch, pack_recurrent_batch
from archerfish.types import DTYPE_BYTES

KV_BLOCK_SIZE, MAX_KV_BLOCK_SIZE = 16, 256
# Tokens between two states that are kept, by `archerfish bench rwkv`: with 64 a context takes what its keys would take
# in bfloat16, and what lies behind the last one is computed in no time; a GPU computes more in that, and has less
# memory.
CPU_STATE_SPACING, GPU_STATE_SPACING = 64, 256
CPU_SHARE, CPU_MOST_BYTES = 0.25, 4 * GIB  # of free memory, unless a budget is given
GPU_SPARE_BYTES = GIB  # for the context, recorded steps, kept logits and the allocator's slack
MAX_SHRINKS, SHRUNK = 6, 0.85  # how often a pool that does not fit is tried again, and with which share of it


class MemoryPool(ABC, Generic[T]):
    """The memory of all blocks, in all layers. BlockManager counts the owners of blocks; this only holds them."""

    ops: Ops[T]
    num_blocks: int
    block_size: int
    layers: Sequence[Any]  # as `ModelAdapter.forward` takes them
    records_decodes: bool  # whether `decode_batch` can be used
    has_keys: bool  # else it has states
    pack_batch: ClassVar[Callable[..., Any]]  # makes the batch that the model takes: see `batch.pack_batch`

    def close(self) -> None:
        """Give the memory back."""
        self.layers = ()

    @abstractmethod
    def new_decode_state(self, num_rows: int, max_len: int) -> DecodeState[T]:
        """What the device remembers of so many sequences, of at most so many tokens, between steps that are only
        decodes."""

    @abstractmethod
    def decode_batch(self, inputs: T, state: DecodeState[T], *, is_shared: bool) -> tuple[Any, SamplingBatch[T]]:
        """What inputs of such a step say, for the model and for `Ops.sample`."""


class KVCachePool(MemoryPool[T]):
    """Keys and values of all blocks."""

    has_keys = True
    pack_batch = staticmethod(pack_batch)

    def __init__(self, ops: Ops[T], shape: KVShape, num_blocks: int, block_size: int) -> None:
        self.ops = ops
        self.num_blocks, self.block_size = num_blocks, block_size
        self.records_decodes = shape.head_dim <= ops.max_recorded_head_dim
        self.layers: Sequence[KVLayer[T]] = [
            ops.new_kv_layer(num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
            for _ in range(shape.num_layers)
        ]

    def new_decode_state(self, num_rows: int, max_len: int) -> DecodeState[T]:
        return self.ops.new_decode_state(num_rows, -(-max_len // self.block_size))

    def decode_batch(self, inputs: T, state: DecodeState[T], *, is_shared: bool) -> tuple[Any, SamplingBatch[T]]:
        return self.ops.decode_batch(inputs, state, self.block_size, is_shared=is_shared)


class StatePool(MemoryPool[T]):
    """States of all blocks and, in front of them, the empty state. block_size: tokens between two states that are kept.

    A block is the state behind the last of its tokens that has been computed.
    """

    records_decodes = True
    has_keys = False
    pack_batch = staticmethod(pack_recurrent_batch)

    def __init__(self, ops: Ops[T], shape: StateShape, num_blocks: int, block_size: int) -> None:
        self.ops, self.recurrent = ops, ops.recurrent()
        self.num_blocks, self.block_size = num_blocks, block_size
        self.layers = self.recurrent.new_states(FIRST_SLOT + num_blocks, shape).layers

    def new_decode_state(self, num_rows: int, max_len: int) -> DecodeState[T]:
        return self.ops.new_decode_state(num_rows, 1)  # both blocks of a step travel with it

    def decode_batch(self, inputs: T, state: DecodeState[T], *, is_shared: bool) -> tuple[Any, SamplingBatch[T]]:
        return self.recurrent.decode_batch(inputs, state)


class MemoryPlan(NamedTuple):
    """How many blocks of KV, or states, fit, computed before anything is allocated."""

    num_blocks: int
    block_size: int
    block_bytes: int
    reason: str  # what set the number, for people to read
    weight_bytes: int = 0
    work_bytes: int = 0  # of the buffers of a step

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def work_bytes(
    shapes: Collection[tuple[int, ...]],
    vocab_size: int,
    step_tokens: int,
    max_num_seqs: int,
    dtype: str,
    num_chosen: int = 0,
) -> int:
    """What the tensors of the largest step take: activations of its tokens, and logits of all sequences.

    num_chosen: experts of a token, whose matrices are stacked.
    """
    widths = [shape[0] for shape in shapes if len(shape) == 2 and shape[0] != vocab_size]
    widths += [num_chosen * shape[1] // 2 for shape in shapes if len(shape) == 3]
    inputs = [shape[1] for shape in shapes if len(shape) == 2 and shape[0] == vocab_size]
    per_token = (4 * max(widths, default=0) + 8 * min(inputs, default=0)) * DTYPE_BYTES[dtype]
    logits = vocab_size * (4 + DTYPE_BYTES[dtype])
    counts = 4 * vocab_size  # of tokens, for penalties
    return step_tokens * per_token + max_num_seqs * (2 * logits + counts)


def allocate_pool(ops: Ops[T], shape: MemoryShape, plan: MemoryPlan) -> tuple[MemoryPool[T], MemoryPlan]:
    """A pool as planned, or a smaller one if the device has less memory than it said."""
    for _ in range(MAX_SHRINKS):
        try:
            with ops.allocating(f"{kind_of(shape)} of {plan.num_tokens:,} tokens"):
                if isinstance(shape, StateShape):
                    return StatePool(ops, shape, plan.num_blocks, plan.block_size), plan
                return KVCachePool(ops, shape, plan.num_blocks, plan.block_size), plan
        except OutOfMemoryError:
            tried, reason = plan, f"{plan.num_blocks:,} blocks did not fit"
            plan = plan._replace(num_blocks=max(1, int(plan.num_blocks * SHRUNK)), reason=reason)
    raise OutOfMemoryError(
        f"There is no room for {kind_of(shape)}: not even {tried.num_bytes / GIB:.2f} GiB could be had.",
        hint="Other programs may use the memory: free some, or lower max_cache_tokens, on a card gpu_memory_utilization.",
    )


def kind_of(shape: MemoryShape) -> str:
    return "states" if isinstance(shape, StateShape) else "KV"


def choose_block_size(config: EngineConfig, shape: MemoryShape, device: str, max_len: int) -> int:
    """As configured, else what suits the memory: without a prefix cache, a recurrent model needs one state for a
    sequence."""
    if isinstance(shape, KVShape):
        if config.block_size > MAX_KV_BLOCK_SIZE:
            raise InvalidOptionError(
                f"[engine] block_size is {config.block_size}; a block of KV has at most {MAX_KV_BLOCK_SIZE} tokens."
            )
        return config.block_size or KV_BLOCK_SIZE
    if config.block_size or not config.enable_prefix_caching:
        return config.block_size or max_len
    return GPU_STATE_SPACING if device == "cuda" else CPU_STATE_SPACING


def plan_memory(
    config: EngineConfig,
    shape: MemoryShape,
    device: str,
    dtype: str,
    weight_bytes: int,
    work_bytes: int = 0,
    *,
    max_len: int = 1 << 20,
) -> MemoryPlan:
    """Blocks for a model on a device, one at least: `check_plan` says whether they fit. work_bytes: what a step
    needs."""
    block_size, has_states = choose_block_size(config, shape, device, max_len), isinstance(shape, StateShape)
    block_bytes = bytes_per_block(config, shape, device, dtype, block_size)
    work_bytes += GPU_SPARE_BYTES if device == "cuda" else 0
    if config.max_cache_tokens:
        num_blocks = num_blocks_of(config, block_size, is_one_state=has_states and block_size >= max_len)
        return MemoryPlan(num_blocks, block_size, block_bytes, "max_cache_tokens", weight_bytes, work_bytes)
    budget, reason = memory_budget(config, device, weight_bytes + work_bytes)
    num_blocks = max(1, int(budget // block_bytes) - has_states)  # one is the empty state
    most = config.max_num_seqs + (0 if config.speculation == "off" else 2 * (config.num_draft_tokens + 1))
    if has_states and block_size >= max_len and num_blocks > most:
        num_blocks, reason = most, "one state for each of max_num_seqs"
    return MemoryPlan(num_blocks, block_size, block_bytes, reason, weight_bytes, work_bytes)


def bytes_per_block(config: EngineConfig, shape: MemoryShape, device: str, dtype: str, block_size: int) -> int:
    """As kv_dtype says; where it cannot be had, an InvalidOptionError."""
    if config.kv_dtype == "auto":
        return shape.bytes_per_block(block_size, DTYPE_BYTES[dtype])
    if isinstance(shape, StateShape):
        raise InvalidOptionError(
            "[engine] kv_dtype is for keys and values; this model has states.", hint="Leave it out."
        )
    backend = choose_backend(device, dtype)
    if config.kv_dtype not in backend.kv_types:
        hint = f"Leave it out; this backend has {', '.join(backend.kv_types)}." if backend.kv_types else "Leave it out."
        raise InvalidOptionError(
            f"[engine] kv_dtype is {config.kv_dtype}, which the backend {backend.name!r} does not have.", hint=hint
        )
    if config.kv_dtype == "fp8":
        return shape.bytes_per_block(block_size, 1)
    return replace(shape, head_dim=shape.head_dim + KV_SCALE_BYTES).bytes_per_block(block_size, 1)


def check_plan(model: str, config: EngineConfig, shape: MemoryShape, device: str, plan: MemoryPlan) -> None:
    """Raise an OutOfMemoryError with numbers and ways out if what was planned does not fit."""
    kind, share = kind_of(shape), config.gpu_memory_utilization
    others = plan.weight_bytes + plan.work_bytes
    left = int(usable_memory(device, share).available_bytes - others) // plan.block_bytes * plan.block_size
    if left >= plan.block_size and (config.max_cache_tokens or config.memory_budget_gib):
        ways = [f"a max_cache_tokens of at most {left:,}", "a smaller model"]
    else:
        is_wide = plan.work_bytes > plan.weight_bytes
        ways = {"auto": ["weights=int8"], "int8": ["weights=int4"]}.get("" if is_wide else config.weights, [])
        ways += ["device=cpu"] if device == "cuda" else []
        # The logits of a sequence take about as much as the activations of ten tokens.
        wide = "max_num_batched_tokens" if config.max_num_batched_tokens > 10 * config.max_num_seqs else "max_num_seqs"
        ways += [f"a {wide} below {getattr(config, wide)}" if is_wide else "a smaller model"]
    cache_bytes, num = (
        plan.num_bytes + plan.block_bytes * isinstance(shape, StateShape),
        ranks_in_memory(config, device),
    )
    needs = {"weights": plan.weight_bytes * num, kind: cache_bytes * num, "buffers": plan.work_bytes * num}
    check_room(model, device, needs, ways, share=share)


def num_blocks_of(config: EngineConfig, block_size: int, *, is_one_state: bool) -> int:
    """As max_cache_tokens says."""
    if is_one_state:
        raise InvalidOptionError(
            "[engine] max_cache_tokens has no meaning for a recurrent model that keeps one state of each sequence.",
            hint="Leave it out: max_num_seqs and memory_budget_gib say how many states there are.",
        )
    num_blocks = config.max_cache_tokens // block_size
    if num_blocks < 1:
        raise InvalidOptionError(
            f"[engine] max_cache_tokens is {config.max_cache_tokens}, less than one block of {block_size} tokens."
        )
    return num_blocks


def ranks_in_memory(config: EngineConfig, device: str) -> int:
    """How many ranks share the memory of a device. One that shares a card has a part of gpu_memory_utilization."""
    return config.num_ranks if device == "cpu" else 1


def memory_budget(config: EngineConfig, device: str, taken_bytes: int) -> tuple[float, str]:
    """Bytes for KV or states and what set them. taken_bytes: for all else."""
    found, num = usable_memory(device, config.gpu_memory_utilization), ranks_in_memory(config, device)
    free, taken = found.available_bytes // num, f"less {size(taken_bytes)} for weights and work"
    if device == "cuda":
        share = f"{config.gpu_memory_utilization:.0%} of {found.total_bytes / GIB:.0f} GiB"
        return free - taken_bytes, f"{share}, {taken}"
    if config.memory_budget_gib:
        wanted = config.memory_budget_gib * GIB / num
        if wanted > free:
            raise InvalidOptionError(
                f"[engine] memory_budget_gib is {config.memory_budget_gib:g}, but {size(free)} are free."
            )
        return wanted, f"memory_budget_gib = {config.memory_budget_gib:g}"
    budget = min((free - taken_bytes) * CPU_SHARE, CPU_MOST_BYTES / num)
    return budget, f"a quarter of the {size(free)} that are free, {taken}, at most 4 GiB"
