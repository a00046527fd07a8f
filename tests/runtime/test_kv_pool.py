"""How much KV fits, and the memory that holds it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from archerfish.config import EngineConfig
from archerfish.errors import InvalidOptionError, OutOfMemoryError
from archerfish.kernels import room
from archerfish.kernels.machine import Memory
from archerfish.kernels.ops import KVLayer
from archerfish.kernels.recurrent import EMPTY_SLOT, StateShape
from archerfish.kernels.torch.reference import TorchOps
from archerfish.models.adapter import KVShape
from archerfish.runtime import kv_pool
from archerfish.runtime.kv_pool import KVCachePool, allocate_pool, check_plan, plan_memory, work_bytes

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=8)
STATES = StateShape(num_layers=2, num_heads=4, head_dim=64)
GIB = 1 << 30


def plan(**options: Any) -> kv_pool.MemoryPlan:
    return plan_memory(EngineConfig(**options), SHAPE, "cpu", "float32", weight_bytes=0)


def test_blocks_follow_from_the_model_and_the_tokens_asked_for() -> None:
    found = plan(max_cache_tokens=1000, block_size=16)
    assert found.block_bytes == SHAPE.bytes_per_block(16, 4) == 2 * 2 * 3 * 8 * 4 * 16
    assert (found.num_blocks, found.num_tokens) == (62, 992)
    assert plan(max_cache_tokens=1000).block_size == 16
    for options, message in (
        ({"block_size": 257}, "at most 256 tokens"),
        ({"max_cache_tokens": 10}, "less than one block"),
    ):
        with pytest.raises(InvalidOptionError, match=message):
            plan(**options)


def test_a_block_of_states_is_one_state_whatever_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "memory", lambda: Memory(8 * GIB, 2 * GIB))
    state_bytes = 2 * (4 * 4 * 64 * 64 + 2 * 256 * 2)
    usual = plan_memory(EngineConfig(), STATES, "cpu", "bfloat16", 0)
    assert (usual.block_bytes, usual.block_size) == (state_bytes, 64)
    assert usual.num_blocks == GIB // 2 // state_bytes - 1  # and the empty state
    near = plan_memory(EngineConfig(block_size=16), STATES, "cpu", "bfloat16", 0)
    assert (near.num_blocks, near.block_size) == (usual.num_blocks, 16)
    few = plan_memory(EngineConfig(max_cache_tokens=1024, block_size=512), STATES, "cpu", "bfloat16", 0)
    assert few.num_blocks == 2


def test_without_a_prefix_cache_a_sequence_keeps_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "memory", lambda: Memory(8 * GIB, 2 * GIB))
    config = EngineConfig(enable_prefix_caching=False, max_num_seqs=70)
    found = plan_memory(config, STATES, "cpu", "float32", 0, max_len=3000)
    assert (found.num_blocks, found.block_size) == (70, 3000)
    assert "max_num_seqs" in found.reason
    with pytest.raises(InvalidOptionError, match="max_cache_tokens has no meaning"):
        plan_memory(config.replace(max_cache_tokens=4096), STATES, "cpu", "float32", 0, max_len=3000)
    monkeypatch.setattr(room, "memory", lambda: Memory(8 * GIB, 1000))
    planned = plan_memory(config, STATES, "cpu", "float32", 0, max_len=3000)
    with pytest.raises(OutOfMemoryError, match=r"tiny needs 0.3 MiB for states; 0.0 MiB of 8.0 GiB are free here"):
        check_plan("tiny", config, STATES, "cpu", planned)


def test_a_pool_of_states() -> None:
    ops = TorchOps("cpu", "bfloat16")
    pool, got = allocate_pool(ops, STATES, kv_pool.MemoryPlan(5, 16, 1, ""))
    assert isinstance(pool, kv_pool.StatePool) and got.num_blocks == 5
    assert pool.layers[0].wkv.shape == (6, 4, 64, 64) and pool.layers[0].wkv.dtype == torch.float32
    assert pool.layers[1].time_input.shape == pool.layers[1].channel_input.shape == (6, 256)
    assert pool.layers[1].time_input.dtype == torch.bfloat16
    for layer in pool.layers:
        assert not any(memory[EMPTY_SLOT].any() for memory in (layer.wkv, layer.time_input, layer.channel_input))


def test_the_memory_budget_is_a_quarter_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "memory", lambda: Memory(8 * GIB, 2 * GIB))
    assert plan().num_bytes == pytest.approx(0.5 * GIB, rel=0.001)
    assert plan(memory_budget_gib=1.0).num_bytes == pytest.approx(GIB, rel=0.001)
    with pytest.raises(InvalidOptionError, match=r"2\.0 GiB are free"):
        plan(memory_budget_gib=3.0)
    monkeypatch.setattr(room, "memory", lambda: Memory(8 * GIB, 1000))
    with pytest.raises(OutOfMemoryError, match=r"for KV; 0\.0 MiB of"):
        check_plan("tiny", EngineConfig(), SHAPE, "cpu", plan())


def check(config: EngineConfig, device: str = "cpu", **needs: int) -> str:
    """The refusal of a model with these needs, or nothing."""
    planned = plan_memory(config, SHAPE, device, "float32", needs["weights"], needs.get("work", 0))
    try:
        check_plan("big", config, SHAPE, device, planned)
    except OutOfMemoryError as error:
        assert (error.status, error.code, error.exit_code) == (507, "out_of_memory", 5)
        return str(error)
    return ""


def test_what_does_not_fit_is_refused_with_numbers_and_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "memory", lambda: Memory(14 * GIB, int(13.2 * GIB)))
    usual, most = EngineConfig(), 2 * GIB // 384  # tokens of 2 GiB of KV
    assert check(usual, weights=13 * GIB) == ""  # little is left, which KV takes a quarter of
    assert check(usual, weights=int(16.1 * GIB), work=GIB) == (
        "big needs 16.1 GiB for weights, 0.0 MiB for KV and 1.0 GiB for buffers; 13.2 GiB of 14.0 GiB are free here. "
        "Choose weights=int8 or a smaller model."
    )
    assert "Choose weights=int4 or a smaller model." in check(EngineConfig(weights="int8"), weights=14 * GIB)
    assert "Choose a smaller model." in check(EngineConfig(weights="int4"), weights=14 * GIB)
    assert "Choose a max_num_seqs below 256." in check(usual, weights=GIB, work=20 * GIB)
    wide = EngineConfig(max_num_batched_tokens=1 << 20)
    assert "Choose a max_num_batched_tokens below 1048576." in check(wide, weights=GIB, work=20 * GIB)
    asked = EngineConfig(max_cache_tokens=100_000_000)
    assert check(asked, weights=GIB).startswith("big needs 1.0 GiB for weights and 35.8 GiB for KV; 13.2 GiB of")
    tokens = int(re.findall("max_cache_tokens of at most ([0-9,]+)", check(asked, weights=GIB))[0].replace(",", ""))
    assert check(EngineConfig(max_cache_tokens=tokens), weights=GIB) == ""
    assert check(EngineConfig(max_cache_tokens=tokens + 16), weights=GIB)
    assert check(EngineConfig(max_cache_tokens=most), weights=11 * GIB) == ""


def test_free_memory_of_a_card_counts_and_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * GIB, 80 * GIB))
    assert check(EngineConfig(), "cuda", weights=18 * GIB) == ""
    refused = check(EngineConfig(), "cuda", weights=20 * GIB)
    assert (
        "and 1.0 GiB for buffers; 20.0 GiB of 80.0 GiB are free on the card. Choose weights=int8, device=cpu or"
        in refused
    )
    assert "8.0 GiB of 80.0 GiB are free on the card (gpu_memory_utilization)" in check(
        EngineConfig(gpu_memory_utilization=0.1), "cuda", weights=10 * GIB
    )


def test_memory_starts_as_zeros() -> None:
    pool = KVCachePool(TorchOps("cpu", "bfloat16"), KVShape(1, 4, 64), num_blocks=64, block_size=16)
    assert pool.layers[0].keys.shape == pool.layers[0].values.shape == (64, 16, 4, 64)
    assert not pool.layers[0].keys.any()
    assert not pool.layers[0].values.any()


class FullOps(TorchOps):
    """Has memory for so many blocks."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.num_freed = room, 0

    def new_kv_layer(self, num_blocks: int, *shape: int) -> KVLayer[torch.Tensor]:
        if num_blocks > self.room:
            raise MemoryError("Full.")
        return super().new_kv_layer(num_blocks, *shape)

    def free_unused(self) -> None:
        self.num_freed += 1


def test_a_pool_that_does_not_fit_is_made_smaller() -> None:
    planned = plan(max_cache_tokens=1600, block_size=16)
    ops = FullOps(80)
    pool, got = allocate_pool(ops, SHAPE, planned)
    assert pool.num_blocks == got.num_blocks == 72
    assert "85 blocks did not fit" in got.reason
    assert ops.num_freed == 2
    with pytest.raises(OutOfMemoryError, match="not even"):
        allocate_pool(FullOps(10), SHAPE, planned)


def test_work_bytes_grow_with_tokens_and_logits() -> None:
    shapes = [(1000, 64), (256, 64), (64, 256)]
    few = work_bytes(shapes, 1000, 128, 4, "bfloat16")
    assert work_bytes(shapes, 1000, 256, 4, "bfloat16") - few == 128 * 2 * (4 * 256 + 8 * 64)
    assert work_bytes(shapes, 1000, 128, 5, "bfloat16") - few == 2 * 1000 * 6 + 4 * 1000
