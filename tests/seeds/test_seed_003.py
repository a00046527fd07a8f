"""Seed 003, Mini-Infer: blocks, a scheduling policy and a model of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from archerfish import LLMEngine, SamplingParams
from archerfish.cache.block_manager import BlockManager
from archerfish.sched.policy import SchedulingPolicy, register_scheduling_policy
from archerfish.sequence import Request
from tests.engine.tiny_llama import prompts, save_tiny_llama, tiny_config


def test_blocks_are_allocated_and_freed() -> None:
    block_manager = BlockManager(num_blocks=8, block_size=16)
    blocks = block_manager.allocate(3)
    assert block_manager.num_free == 5
    assert block_manager.get_physical_blocks(blocks) == blocks  # blocks are numbered by their place in the pool
    block_manager.free(blocks)
    assert block_manager.num_free == 8


def test_a_policy_of_ones_own_orders_the_requests(tmp_path: Path) -> None:
    class LongestFirst(SchedulingPolicy):
        def schedule(self, requests: Sequence[Request], available_blocks: int) -> list[Request]:
            return sorted(requests, key=lambda request: -len(request.prompt_token_ids))

    register_scheduling_policy("longest-first", LongestFirst)
    ended: list[int] = []
    config = tiny_config(save_tiny_llama(tmp_path), max_num_seqs=1, scheduling_policy="longest-first")
    with LLMEngine(config) as engine:
        many = prompts(4)
        engine.generate(many, SamplingParams(max_tokens=2), on_result=lambda place, _: ended.append(place))
    assert ended == sorted(range(4), key=lambda place: -len(many[place]))


# `class MyModelAdapter(ModelAdapter)` is the example of docs/add-a-model.md, which tests/models/test_add_a_model.py
# runs.
