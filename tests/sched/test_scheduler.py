from __future__ import annotations

from typing import Any

import pytest

from archerfish.cache.radix import RadixKey
from archerfish.errors import InputTooLargeError, InvalidInputError, InvalidOptionError, InvariantError, OverloadedError
from archerfish.sched.fakes import FakeRunner, expected_output
from archerfish.sequence import Plan, Sequence, Status, StepResult
from tests.sched.worlds import VOCAB, World

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def plan(world: World) -> Plan:
    made = world.scheduler.plan()
    assert made is not None
    return made


def commit(world: World, made: Plan, **changes: Any) -> None:
    result = world.runner.execute(made)
    for name, value in changes.items():
        setattr(result, name, value)
    world.scheduler.commit(made, result)
    world.take(world.scheduler.take_deltas())


class Recorder(FakeRunner):
    """Remembers which tokens of each sequence were computed together."""

    def __init__(self, num_blocks: int, block_size: int, *, vocab_size: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size=vocab_size)
        self.parts: dict[Sequence, list[tuple[int, int]]] = {}

    def execute(self, plan: Plan) -> StepResult:
        for seq, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
            self.parts.setdefault(seq, []).append((start, start + count))
        return super().execute(plan)


def counts(made: Plan) -> dict[str, int]:
    return {seq.request.request_id: count for seq, count in zip(made.sequences, made.counts, strict=True)}


# What is accepted


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="empty"):
        World().add([])


def test_a_live_request_id_is_refused_and_free_again_afterwards() -> None:
    world = World()
    world.add(5, request_id="a")
    with pytest.raises(InvalidInputError, match="'a'"):
        world.add(5, request_id="a")
    world.run()
    world.add(5, request_id="a")


def test_a_request_over_the_model_length_is_refused_at_once() -> None:
    world = World(max_model_len=20)
    with pytest.raises(InputTooLargeError, match="20"):
        world.add(16, max_tokens=5)
    world.add(16, max_tokens=4)


def test_a_request_over_the_whole_memory_is_refused_at_once() -> None:
    world = World(num_blocks=4, block_size=4)
    with pytest.raises(InputTooLargeError, match="holds 16"):
        world.add(13, max_tokens=4)


@DEPTHS
def test_a_request_as_large_as_the_whole_memory_runs_even_over_a_full_cache(depth: int) -> None:
    world = World(num_blocks=4, block_size=4, depth=depth)
    prompt = list(range(1, 12))
    (first,) = world.add(prompt, max_tokens=5)
    world.run()
    (second,) = world.add([*prompt[:6], *range(20, 25)], max_tokens=5)
    (third,) = world.add(prompt, max_tokens=5)
    world.run()
    (fourth,) = world.add([*prompt[:6], *range(30, 37)], max_tokens=3)
    world.run()
    for seq in (first, second, third, fourth):
        world.check_output(seq)


@DEPTHS
def test_a_lone_sequence_gets_past_what_it_has_locked_itself(depth: int) -> None:
    world = World(num_blocks=4, block_size=4, depth=depth)
    world.add(list(range(1, 7)), max_tokens=1)
    world.run()
    (seq,) = world.add([*range(1, 7), 50], max_tokens=9)
    world.run()
    assert (seq.num_cached, seq.num_preemptions) == (6, 1)
    world.check_output(seq)


def test_a_match_in_a_long_node_locks_no_more_than_it_uses() -> None:
    world = World(num_blocks=12, block_size=4)
    world.add(list(range(1, 41)), max_tokens=1)
    world.run()
    (short,) = world.add([*range(1, 9), 50], max_tokens=9)
    plan(world)
    assert short.num_cached == 8
    assert world.cache.num_evictable == 8


def test_a_full_queue_refuses_and_counts_requests_not_sequences() -> None:
    world = World(max_queue_size=2)
    world.add(5, n=4)
    world.add(5)
    with pytest.raises(OverloadedError, match="2 requests"):
        world.add(5)
    world.step()
    world.add(5)
    assert world.scheduler.stats().refused_requests == 1


def test_a_budget_that_leaves_nothing_for_prompts_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="max_num_batched_tokens"):
        World(max_num_seqs=64, max_num_batched_tokens=64)


# Plans


@DEPTHS
def test_outputs_are_those_of_the_model(depth: int) -> None:
    world = World(depth=depth)
    sequences = [world.add(length, max_tokens=length % 7 + 1)[0] for length in range(1, 30)]
    world.run()
    for seq in sequences:
        world.check_output(seq)


def test_decodes_come_first_and_prefill_gets_what_they_leave() -> None:
    world = World(max_num_seqs=4, max_num_batched_tokens=10)
    world.add(3, max_tokens=50, request_id="a")
    world.step()
    world.add(25, request_id="b")
    world.add(5, request_id="c")
    seen = []
    for _ in range(4):
        made = plan(world)
        seen.append(counts(made))
        assert made.sequences[0].request.request_id == "a"
        commit(world, made)
    assert seen == [{"a": 1, "b": 9}, {"a": 1, "b": 9}, {"a": 1, "b": 7, "c": 2}, {"a": 1, "b": 1, "c": 3}]


def test_unfinished_prefills_go_on_in_the_order_of_admission() -> None:
    world = World(max_num_batched_tokens=20)
    world.add(30, request_id="a")
    world.add(30, request_id="b")
    first, second, third = plan(world), None, None
    commit(world, first)
    second = plan(world)
    commit(world, second)
    third = plan(world)
    assert (counts(first), counts(second), counts(third)) == ({"a": 20}, {"a": 10, "b": 10}, {"a": 1, "b": 19})


def test_a_plan_may_be_made_while_one_is_in_flight_but_not_two() -> None:
    world = World()
    (seq,) = world.add(6, max_tokens=8)
    first, second = plan(world), plan(world)
    assert (first.starts, first.counts) == ([0], [6])
    assert (second.starts, second.counts) == ([6], [1])
    assert (seq.num_pending, seq.num_in_flight) == (2, 2)
    with pytest.raises(InvariantError, match="two steps"):
        world.scheduler.plan()
    with pytest.raises(InvariantError, match="open"):
        world.scheduler.commit(second, StepResult([0]))
    commit(world, first)
    assert (seq.num_pending, seq.num_known, seq.num_computed) == (1, 8, 7)


def test_a_sequence_with_its_last_token_in_flight_is_not_planned_again() -> None:
    world = World()
    world.add(6, max_tokens=2)
    first, second = plan(world), plan(world)
    commit(world, first)
    assert world.scheduler.plan() is None
    commit(world, second)
    assert world.ends == {("r0", 0): "length"}
    assert not world.scheduler.has_work


def test_a_sequence_that_needs_its_token_on_the_host_waits_for_it() -> None:
    world = World(depth=1)
    (grammar,) = world.add(6, needs_host_token=True)
    (plain,) = world.add(6)
    commit_later = plan(world)
    assert counts(plan(world)) == {"r1": 1}
    commit(world, commit_later)
    assert counts(plan(world)) == {"r0": 1, "r1": 1}
    assert grammar.num_pending == 1 and plain.num_pending == 2


def test_rows_are_small_stable_and_used_again() -> None:
    world = World(max_num_seqs=3)
    (first,) = world.add(4, max_tokens=1)
    others = [world.add(4, max_tokens=9)[0] for _ in range(3)]
    world.step()
    assert first.row == -1 and [seq.row for seq in others] == [1, 2, -1]
    world.step()
    assert [seq.row for seq in others] == [1, 2, 0]


def test_blocks_are_taken_only_as_tokens_need_them() -> None:
    world = World(block_size=4)
    (seq,) = world.add(7, max_tokens=6)
    sizes = []
    while not seq.finish_reason:
        world.step()
        sizes.append((seq.num_computed, len(seq.blocks)))
    assert sizes == [(7, 2), (8, 2), (9, 3), (10, 3), (11, 3), (0, 0)]


# The cache


def test_a_prompt_that_begins_as_an_earlier_one_takes_its_blocks() -> None:
    world = World(block_size=4)
    world.add(list(range(1, 13)), max_tokens=1)
    world.run()
    (seq,) = world.add([*range(1, 11), 90, 91], max_tokens=3)
    made = plan(world)
    assert (made.starts, made.counts, len(made.copies)) == ([10], [2], 1)
    assert (seq.num_cached, seq.hit.num_matched) == (10, 10)
    commit(world, made)
    world.run()
    world.check_output(seq)


def test_an_exact_repeat_gets_its_first_token_without_a_forward_pass() -> None:
    world = World()
    prompt = list(range(1, 12))
    world.add(prompt, max_tokens=3)
    world.run()
    before = world.runner.num_forward_tokens
    (seq,) = world.add(prompt, max_tokens=1, seed=5)
    made = plan(world)
    assert (made.counts, made.samples, made.num_decodes, made.num_tokens) == ([0], [True], 0, 0)
    commit(world, made)
    assert world.runner.num_forward_tokens == before
    assert world.scheduler.stats().cached_logits_used == 1
    world.check_output(seq)
    world.run()


def test_without_logits_at_least_one_token_is_computed() -> None:
    world = World(has_logits_cache=False)
    prompt = list(range(1, 13))
    world.add(prompt, max_tokens=3)
    world.run()
    world.add(prompt, max_tokens=3)
    assert plan(world).counts == [1]


def test_tenants_share_neither_blocks_nor_logits() -> None:
    world = World()
    prompt = list(range(1, 12))
    world.add(prompt, tenant="a")
    world.run()
    world.add(prompt, tenant="b")
    assert plan(world).counts == [11]


def test_logits_of_another_tenant_are_not_used_even_if_the_kv_is_there() -> None:
    world = World()
    prompt = list(range(1, 12))
    world.add(prompt, tenant="a")
    world.add([*prompt, 70, 71, 72], tenant="b")
    world.run()
    world.add(prompt, tenant="b")
    assert plan(world).counts == [1]


def test_prompt_logprobs_are_computed_in_full_and_told_once() -> None:
    world = World(max_num_batched_tokens=9)
    prompt = list(range(1, 18))
    world.add(prompt)
    world.run()
    (seq,) = world.add(prompt, max_tokens=2, params={"prompt_logprobs": 0})
    told: list[int] = []
    while seq.finish_reason is None:
        for delta in world.step():
            told += [entry.token_id for entry in delta.prompt_logprobs or ()]
    assert told == prompt[1:] and seq.num_cached == 0
    world.run()


def test_prompt_logprobs_are_told_once_although_a_preemption_came_between() -> None:
    world = World(num_blocks=12, block_size=4, max_num_batched_tokens=10, max_num_seqs=2)
    world.add(8, max_tokens=30, priority=1)
    world.step()
    (seq,) = world.add(30, max_tokens=2, params={"prompt_logprobs": 0})
    told: list[int] = []
    while seq.finish_reason is None:
        for delta in world.step():
            if delta.sequence is seq:
                told += [entry.token_id for entry in delta.prompt_logprobs or ()]
    assert told == list(seq.request.prompt_token_ids[1:])
    world.run()


@DEPTHS
def test_the_other_sequences_of_a_request_hit_the_prompt_of_the_first(depth: int) -> None:
    world = World(depth=depth)
    sequences = world.add(11, n=4, max_tokens=5)
    world.run()
    assert [seq.num_cached for seq in sequences] == [0, 11, 11, 11]
    assert world.scheduler.stats().cached_logits_used == 3
    for seq in sequences:
        world.check_output(seq)
    assert len({tuple(world.outputs[seq.key]) for seq in sequences}) > 1


def test_without_a_cache_all_sequences_of_a_request_start_at_once() -> None:
    world = World(has_cache=False)
    sequences = world.add(11, n=4, max_tokens=5)
    assert len(plan(world).sequences) == 4
    assert sequences[3].hit.reason == "cache_off"


@DEPTHS
def test_of_prompts_that_arrive_together_and_begin_alike_one_is_computed(depth: int) -> None:
    world = World(depth=depth, num_blocks=256, max_num_batched_tokens=100)
    shared = list(range(1, 81))
    sequences = [world.add([*shared, 100 + i, 200, 300], max_tokens=3)[0] for i in range(8)]
    world.run()
    assert [seq.num_cached for seq in sequences] == [0] + [80] * 7
    for seq in sequences:
        world.check_output(seq)


def test_a_sequence_does_not_wait_for_what_another_tenant_computes() -> None:
    world = World(num_blocks=64, max_num_batched_tokens=100)
    for tenant in ("a", "b"):
        world.add(list(range(1, 41)), tenant=tenant)
    assert len(plan(world).sequences) == 2


def test_a_sequence_does_not_lock_blocks_that_it_has_twice() -> None:
    world = World(block_size=4)
    world.add([1, 2, 3, 4, 5], max_tokens=1)
    world.add([1, 2, 3, 4, 5], max_tokens=9)
    world.step()
    assert world.scheduler.num_running == 1
    assert world.cache.num_evictable == 2


def test_a_short_common_beginning_makes_nobody_wait() -> None:
    world = World(max_num_batched_tokens=100)
    for i in range(3):
        world.add([*range(1, 9), *[100 + i] * 12])
    assert len(plan(world).sequences) == 3


def test_a_clear_during_a_run_keeps_what_was_computed_before_out_of_the_tree() -> None:
    world = World()
    (seq,) = world.add(list(range(1, 12)), max_tokens=6)
    world.step()
    world.cache.clear()
    world.run()
    world.check_output(seq)
    assert world.cache.stats().total_cached == 0


# Ends


def test_a_stop_token_ends_a_sequence_and_is_told() -> None:
    world = World()
    (probe,) = world.add([1, 2, 3], max_tokens=8)
    tokens, _ = expected_output(probe.request, 0, VOCAB)
    (seq,) = world.add([1, 2, 3], max_tokens=8, stop=[tokens[3]])
    world.run()
    assert world.outputs[seq.key][-1] == tokens[3]
    assert world.ends[seq.key] == "stop"
    world.check_output(seq)


def test_a_stop_token_does_not_count_before_min_tokens() -> None:
    world = World()
    (probe,) = world.add([1, 2, 3], max_tokens=8)
    tokens, _ = expected_output(probe.request, 0, VOCAB)
    (seq,) = world.add([1, 2, 3], max_tokens=8, stop=tokens, params={"min_tokens": 3})
    world.run()
    assert world.outputs[seq.key] == tokens[:4]


@DEPTHS
def test_tokens_after_the_end_are_dropped_and_memory_comes_back_with_the_step(depth: int) -> None:
    world = World(depth=depth)
    (seq,) = world.add(6, max_tokens=20)
    for _ in range(4):
        world.step()
    num_in_flight = seq.num_in_flight
    assert num_in_flight == depth
    assert world.scheduler.finish(seq)
    assert not world.scheduler.finish(seq)
    world.take(world.scheduler.take_deltas())
    assert (seq.row >= 0) == bool(seq.blocks) == bool(depth)
    told = list(world.outputs[seq.key])
    world.run()
    assert world.outputs[seq.key] == told and world.ends[seq.key] == "stop"
    assert seq.row == -1 and not seq.blocks


@DEPTHS
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_abort_at_any_moment(depth: int, num_steps: int) -> None:
    world = World(depth=depth, max_num_batched_tokens=12)
    (other,) = world.add(9, max_tokens=9)
    (seq,) = world.add(18, max_tokens=9)
    for _ in range(num_steps):
        world.step()
    assert world.scheduler.abort(seq.request.request_id)
    assert not world.scheduler.abort(seq.request.request_id)
    assert not world.scheduler.abort("unknown")
    world.run()
    assert world.ends[seq.key] == "abort"
    world.check_prefix(seq)
    world.check_output(other)


def test_deadlines_end_waiting_and_running_sequences() -> None:
    world = World(max_num_seqs=1)
    (running,) = world.add(5, max_tokens=50, deadline=101.0)
    (waiting,) = world.add(5, max_tokens=50, deadline=100.5)
    (free,) = world.add(5, max_tokens=3)
    world.step()
    world.now = 100.6
    world.step()
    assert world.ends == {waiting.key: "deadline"}
    world.now = 101.0
    world.run()
    assert world.ends[running.key] == "deadline"
    world.check_output(free)
    assert world.scheduler.stats().failed_requests == 2


def test_an_error_of_one_sequence_ends_that_one_alone() -> None:
    world = World()
    (bad,) = world.add(6, max_tokens=5)
    (good,) = world.add(6, max_tokens=5)
    error = RuntimeError("boom")
    commit(world, plan(world), errors={0: error})
    assert world.ends == {bad.key: "error"} and bad.error is error
    assert world.cache.peek(RadixKey(bad.tokens)) == 0 and world.cache.peek(RadixKey(good.tokens[:6])) == 6
    world.run()
    world.check_output(good)


@DEPTHS
def test_a_failed_step_ends_its_sequences_and_leaves_nothing_in_the_tree(depth: int) -> None:
    world = World()
    (bad,) = world.add(11, max_tokens=5)
    made = plan(world)
    world.runner.execute(made)
    (late,) = world.add(7, max_tokens=3)
    behind = plan(world) if depth else None
    result = world.runner.execute(behind) if behind is not None else None
    world.scheduler.fail(made, RuntimeError("boom"))
    assert world.scheduler.take_deltas()[0].finish_reason == bad.finish_reason == "error"
    assert bad.status is Status.FINISHED and (bad.row >= 0) == bool(depth)
    if behind is not None and result is not None:
        assert bad in behind.sequences
        world.scheduler.commit(behind, result)
    assert bad.row == -1 and world.cache.stats().total_cached == (7 if depth else 0)
    world.run()
    world.check_output(late)


def test_a_failed_step_of_a_sequence_that_has_just_ended_keeps_only_what_was_sure() -> None:
    world = World()
    (seq,) = world.add(11, max_tokens=5)
    commit(world, plan(world))
    made = plan(world)
    world.scheduler.finish(seq)
    world.scheduler.fail(made, RuntimeError("boom"))
    assert seq.finish_reason == "stop"
    assert world.cache.stats().total_cached == 11
    world.run()


# Memory pressure


@DEPTHS
def test_under_pressure_the_latest_of_the_lowest_priority_gives_way_and_resumes_by_a_hit(depth: int) -> None:
    world = World(num_blocks=10, block_size=4, depth=depth, max_num_seqs=3)
    (low,) = world.add(8, max_tokens=20, priority=0)
    (high,) = world.add(8, max_tokens=20, priority=1)
    world.run()
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)
    assert world.scheduler.stats().num_preemptions == 1
    prefilled = world.scheduler.stats().prefill_tokens_computed
    assert prefilled < 16 + 20, "resuming must not compute everything anew"
    for seq in (low, high):
        world.check_output(seq)


@DEPTHS
def test_of_equal_priority_the_latest_gives_way(depth: int) -> None:
    world = World(num_blocks=10, block_size=4, depth=depth)
    (first,) = world.add(8, max_tokens=20)
    (second,) = world.add(8, max_tokens=20)
    world.run()
    assert first.num_preemptions == 0 and second.num_preemptions >= 1
    assert world.order_of_ends == ["r0", "r1"]
    world.check_output(second)


def test_a_preempted_sequence_waits_at_its_old_place() -> None:
    world = World(num_blocks=10, block_size=4, max_num_seqs=2)
    world.add(8, max_tokens=24)
    (second,) = world.add(8, max_tokens=20)
    third = world.add(8, max_tokens=20)[0]
    while not second.num_preemptions:
        world.step()
    assert list(world.scheduler._board.queue.ordered(0, 9)) == [second, third]
    world.run()
    assert world.order_of_ends == ["r0", "r1", "r2"]


def test_nothing_is_admitted_that_would_have_to_be_preempted_at_once() -> None:
    world = World(num_blocks=12, block_size=4, max_num_seqs=4)
    for _ in range(4):
        world.add(12, max_tokens=8)
    world.step()
    assert world.scheduler.num_running == 3
    world.run()
    assert world.scheduler.stats().num_preemptions <= 2


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
def test_fixed_chunks_end_at_multiples_whatever_else_runs(depth: int) -> None:
    world = World(fixed_chunk=8, depth=depth, max_num_batched_tokens=20, num_blocks=16)
    world.loop.runner = runner = Recorder(16, 4, vocab_size=VOCAB)
    sequences = [world.add(length, max_tokens=20)[0] for length in (30, 17, 8, 21, 5)]
    world.run()
    assert world.scheduler.stats().num_preemptions > 0
    for seq in sequences:
        world.check_output(seq)
        assert runner.parts[seq]
        for start, end in runner.parts[seq]:
            if start < seq.num_prompt:
                assert start % 8 == 0 and (end == seq.num_prompt or end == start + 8)
            else:
                assert end == start + 1


def test_with_fixed_chunks_matches_are_rounded_down_unless_all_is_known() -> None:
    world = World(fixed_chunk=8)
    world.add([*range(1, 22)], max_tokens=5)
    world.run()
    (part,) = world.add([*range(1, 20), 77, 78], max_tokens=2)
    (same,) = world.add([*range(1, 22)], max_tokens=2)
    world.run()
    assert (part.num_cached, same.num_cached) == (16, 21)


# Figures


def test_counters_and_queue_status() -> None:
    world = World(max_num_seqs=2)
    world.add(8, max_tokens=3, tenant="a")
    world.now += 1
    world.add(8, max_tokens=3, tenant="a")
    world.add(8, max_tokens=3, tenant="b")
    world.step()
    status = world.scheduler.queue_status()
    assert (status["queued_requests"], status["waiting"], status["running"]) == (1, 1, 2)
    assert status["tenants"] == {"a": {"waiting": 0, "running": 2}, "b": {"waiting": 1, "running": 0}}
    assert world.scheduler.num_waiting == 1 and world.scheduler.num_running == 2
    world.now += 2
    world.run()
    stats = world.scheduler.stats()
    assert (stats.total_requests, stats.completed_requests, stats.failed_requests) == (3, 3, 0)
    assert (stats.total_tokens_generated, stats.prefill_tokens_computed) == (9, 24)
    assert stats.queue_seconds == pytest.approx(1 + 0 + 2)
    assert (stats.prefill_seconds, stats.decode_seconds) == pytest.approx((0, 4))
    assert stats.avg_queue_ms == pytest.approx(1000)
    assert (stats.queue_size, stats.concurrent_requests) == (0, 0)


def test_kv_utilization_is_the_share_of_held_blocks_that_is_filled() -> None:
    world = World(block_size=8)
    world.add(12, max_tokens=1)
    world.step()
    assert world.scheduler.stats().kv_utilization == pytest.approx(12 / 16)
