"""What the scheduler takes out of the cache, and who gives way when memory is short."""

from __future__ import annotations

from collections import defaultdict

import pytest

from archerfish.sched.plan import Plan
from archerfish.sequence import Sequence
from archerfish.step import StepResult
from tests.sched.worlds import DEPTHS, World, commit, plan


def told_logprobs(world: World, seq: Sequence) -> list[int]:
    """The tokens of a prompt with logprobs, as they are reported."""
    told: list[int] = []
    while seq.finish_reason is None:
        for delta in world.step():
            told += [entry.token_id for entry in delta.prompt_logprobs or () if delta.sequence is seq]
    world.run()
    return told


# The cache


def test_a_prompt_that_begins_as_an_earlier_one_takes_its_blocks() -> None:
    world = World(block_size=4)
    world.add(list(range(1, 13)), max_tokens=1)
    world.run()
    (seq,) = world.add([*range(1, 11), 90, 91], max_tokens=3)
    made = plan(world)
    assert (made.input.starts.tolist(), made.input.counts.tolist(), len(made.input.copies)) == ([10], [2], 1)
    assert (seq.num_cached, seq.hit.num_matched) == (10, 10)
    commit(world, made)
    world.run()
    world.check_output(seq)


def test_an_exact_repeat_needs_no_forward_pass() -> None:
    world = World()
    prompt = list(range(1, 12))
    world.add(prompt, max_tokens=3)
    world.run()
    before = world.runner.num_forward_tokens
    (seq,) = world.add(prompt, max_tokens=1, seed=5)
    made = plan(world)
    step = made.input
    assert (step.counts.tolist(), step.samples.tolist(), step.num_decodes, len(step.tokens)) == ([0], [1], 0, 0)
    commit(world, made)
    assert world.runner.num_forward_tokens == before
    assert world.scheduler.stats().cached_logits_used == 1
    world.check_output(seq)
    world.run()


@pytest.mark.parametrize(
    ("has_logits_cache", "tenants", "num_computed"), [(False, "b", 1), (True, "a", 11), (True, "aB", 1)]
)
def test_what_is_computed_without_logits_of_the_tenant(has_logits_cache: bool, tenants: str, num_computed: int) -> None:
    """An upper-case tenant had a longer prompt, so that its keys are cached and its logits are not."""
    world = World(has_logits_cache=has_logits_cache)
    prompt = list(range(1, 12))
    for tenant in tenants:
        world.add([*prompt, 70, 71, 72] if tenant.isupper() else prompt, tenant=tenant.lower())
    world.run()
    world.add(prompt, tenant="b")
    assert plan(world).input.counts.tolist() == [num_computed]


def test_prompt_logprobs_are_computed_in_full_and_reported_once() -> None:
    world = World(max_num_batched_tokens=9)
    prompt = list(range(1, 18))
    world.add(prompt)
    world.run()
    (seq,) = world.add(prompt, max_tokens=2, params={"prompt_logprobs": 0})
    assert told_logprobs(world, seq) == prompt[1:] and seq.num_cached == 0


def test_prompt_logprobs_are_reported_once_despite_a_preemption() -> None:
    world = World(num_blocks=12, block_size=4, max_num_batched_tokens=10, max_num_seqs=2)
    world.add(8, max_tokens=30, priority=1)
    world.step()
    (seq,) = world.add(30, max_tokens=2, params={"prompt_logprobs": 0})
    assert told_logprobs(world, seq) == list(seq.request.prompt_token_ids[1:])


@DEPTHS
def test_sequences_of_a_request_share_its_prompt(depth: int) -> None:
    world = World(depth=depth)
    sequences = world.add(11, n=4, max_tokens=5)
    world.run()
    assert [seq.num_cached for seq in sequences] == [0, 11, 11, 11]
    assert world.scheduler.stats().cached_logits_used == 3
    for seq in sequences:
        world.check_output(seq)
    assert len({tuple(world.outputs[seq.key]) for seq in sequences}) > 1


def test_without_a_cache_sequences_start_at_once() -> None:
    world = World(has_cache=False)
    sequences = world.add(11, n=4, max_tokens=5)
    assert len(plan(world).sequences) == 4
    assert sequences[3].hit.reason == "cache_off"


@DEPTHS
def test_a_common_prefix_of_new_prompts_is_computed_once(depth: int) -> None:
    world = World(depth=depth, num_blocks=256, max_num_batched_tokens=100)
    shared = list(range(1, 81))
    sequences = [world.add([*shared, 100 + i, 200, 300], max_tokens=3)[0] for i in range(8)]
    world.run()
    assert [seq.num_cached for seq in sequences] == [0] + [80] * 7
    for seq in sequences:
        world.check_output(seq)


def test_no_wait_for_other_tenants_or_short_prefixes() -> None:
    world = World(num_blocks=64, max_num_batched_tokens=100)
    for tenant in ("a", "b"):
        world.add(list(range(1, 41)), tenant=tenant)
    assert len(plan(world).sequences) == 2
    world = World(max_num_batched_tokens=100)
    for i in range(3):
        world.add([*range(1, 9), *[100 + i] * 12])
    assert len(plan(world).sequences) == 3


def test_a_sequence_does_not_lock_blocks_that_it_has_twice() -> None:
    world = World(block_size=4)
    world.add([1, 2, 3, 4, 5], max_tokens=1)
    world.add([1, 2, 3, 4, 5], max_tokens=9)
    world.step()
    assert world.scheduler.num_running == 1
    assert world.cache.num_evictable == 2


def test_a_clear_keeps_running_sequences_out_of_the_tree() -> None:
    world = World()
    (seq,) = world.add(list(range(1, 12)), max_tokens=6)
    world.step()
    world.cache.clear()
    world.run()
    world.check_output(seq)
    assert world.cache.stats().total_cached == 0


# Memory pressure


@DEPTHS
@pytest.mark.parametrize(("priorities", "preempted"), [((0, 1), 0), ((0, 0), 1)])
def test_the_latest_of_the_lowest_priority_is_preempted(
    depth: int, priorities: tuple[int, int], preempted: int
) -> None:
    world = World(num_blocks=10, block_size=4, depth=depth, max_num_seqs=3)
    sequences = [world.add(8, max_tokens=20, priority=priority)[0] for priority in priorities]
    world.run()
    assert [seq.num_preemptions for seq in sequences] == [int(place == preempted) for place in range(2)]
    assert world.scheduler.stats().num_preemptions == 1
    prefilled = world.scheduler.stats().prefill_tokens_computed
    assert prefilled < 16 + 20, "resuming must not compute everything anew"
    for seq in sequences:
        world.check_output(seq)


def test_a_preempted_sequence_waits_at_its_old_place() -> None:
    world = World(num_blocks=10, block_size=4, max_num_seqs=2)
    world.add(8, max_tokens=24)
    (second,) = world.add(8, max_tokens=20)
    third = world.add(8, max_tokens=20)[0]
    while not second.num_preemptions:
        world.step()
    assert list(world.scheduler._live.queue.ordered(0, 9)) == [second, third]
    world.run()
    assert world.order_of_ends == ["r0", "r1", "r2"]


def test_admission_avoids_immediate_preemption() -> None:
    world = World(num_blocks=12, block_size=4, max_num_seqs=4)
    for _ in range(4):
        world.add(12, max_tokens=8)
    world.step()
    assert world.scheduler.num_running == 3
    world.run()
    assert world.scheduler.stats().num_preemptions <= 2


@DEPTHS
def test_a_prompt_that_waited_for_memory_gets_it_before_short_ones(depth: int) -> None:
    world, num_steps = World(depth=depth, max_queue_size=1000), 0
    world.add(70), world.add(70), world.add(70), world.step()
    (long,) = world.add(220, max_tokens=1)  # 55 of the 64 blocks
    while not long.num_emitted:
        world.add(60, max_tokens=20), world.add(60, max_tokens=20), world.step()
        num_steps += 1
    assert num_steps <= 35 + depth  # what was running ends first, within 25


def test_what_is_cached_is_evicted_before_anybody_is_preempted() -> None:
    world = World(num_blocks=10, block_size=4)
    world.add(16, max_tokens=4)
    world.run()
    (seq,) = world.add(16, max_tokens=24)
    world.run()
    assert seq.num_preemptions == 0
    world.check_output(seq)


# Deterministic mode


@DEPTHS
def test_fixed_chunks_end_at_multiples_whatever_else_runs(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(fixed_chunk=8, depth=depth, max_num_batched_tokens=20, num_blocks=16)
    parts: dict[Sequence, list[tuple[int, int]]] = defaultdict(list)  # tokens of each that were computed together
    execute = world.runner.execute

    def record(plan: Plan) -> StepResult:
        for seq, start, count in zip(
            plan.sequences, plan.input.starts.tolist(), plan.input.counts.tolist(), strict=True
        ):
            parts[seq].append((start, start + count))
        return execute(plan)

    monkeypatch.setattr(world.runner, "execute", record)
    sequences = [world.add(length, max_tokens=20)[0] for length in (30, 17, 8, 21, 5)]
    world.run()
    assert world.scheduler.stats().num_preemptions > 0
    for seq in sequences:
        world.check_output(seq)
        assert parts[seq]
        for start, end in parts[seq]:
            if start < seq.num_prompt:
                assert start % 8 == 0 and (end == seq.num_prompt or end == start + 8)
            else:
                assert end == start + 1


def test_fixed_chunks_round_matches_down() -> None:
    world = World(fixed_chunk=8)
    world.add([*range(1, 22)], max_tokens=5)
    world.run()
    (part,) = world.add([*range(1, 20), 77, 78], max_tokens=2)
    (same,) = world.add([*range(1, 22)], max_tokens=2)
    world.run()
    assert (part.num_cached, same.num_cached) == (16, 21)


@pytest.mark.parametrize(
    ("block_size", "fixed_chunk", "cached"), [(4, 0, 20), (3, 0, 21), (3, 4, 12), (8, 4, 16), (16, 0, 16)]
)
def test_what_is_found_of_states_ends_where_one_is_kept(block_size: int, fixed_chunk: int, cached: int) -> None:
    """And with fixed chunks where one of those ends as well."""
    world = World(block_size=block_size, fixed_chunk=fixed_chunk, has_states=True, has_logits_cache=False)
    prompt = list(range(100, 123))
    for expected in (0, cached):
        (seq,) = world.add(prompt, max_tokens=3)
        world.run()
        world.check_output(seq)
        assert seq.num_cached == expected


def test_a_state_that_a_sequence_is_still_changing_is_not_shared() -> None:
    world = World(block_size=8, has_states=True)
    (first,) = world.add(list(range(20)), max_tokens=12)
    for _ in range(3):
        world.step()
    assert world.cache.stats().total_cached == 16  # of 22
    (second,) = world.add(list(range(20)), max_tokens=12)
    world.run()
    assert (first.num_cached, second.num_cached) == (0, 16)
    assert world.outputs[first.key] == world.outputs[second.key]
    assert world.cache.stats().total_cached == 24  # of 31 that were computed
