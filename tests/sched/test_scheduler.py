"""What the scheduler accepts, what it plans, how sequences end, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest

from archerfish.bench.scheduler import step_times_us
from archerfish.cache.radix import RadixKey
from archerfish.errors import (
    InputTooLargeError,
    InvalidInputError,
    InvalidOptionError,
    InvariantError,
    TooManyRequestsError,
)
from archerfish.sequence import Status
from archerfish.step import StepResult
from tests.calls import num_calls
from tests.sched.fakes import expected_output
from tests.sched.worlds import DEPTHS, World, commit, counts, plan

# What is accepted


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [(0, InvalidInputError, "empty"), (17, InputTooLargeError, "sequence is 20"), (13, InputTooLargeError, "holds 16")],
)
def test_impossible_requests_are_refused_at_once(prompt: int, kind: type[Exception], message: str) -> None:
    world = World(num_blocks=4, block_size=4, max_model_len=20)
    with pytest.raises(kind, match=message):
        world.add([7] * prompt, max_tokens=4)
    world.add(12, max_tokens=4)


def test_a_live_request_id_is_refused_and_free_again_afterwards() -> None:
    world = World()
    world.add(5, request_id="a")
    with pytest.raises(InvalidInputError, match="'a'"):
        world.add(5, request_id="a")
    world.run()
    world.add(5, request_id="a")


@DEPTHS
def test_a_request_as_large_as_the_memory_evicts_the_cache(depth: int) -> None:
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
    with pytest.raises(TooManyRequestsError, match="2 requests"):
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
    assert seen == [
        {"a": 1, "c": 5, "b": 4},
        {"a": 1, "c": 1, "b": 8},
        {"a": 1, "c": 1, "b": 8},
        {"a": 1, "c": 1, "b": 5},
    ]


def test_unfinished_prefills_go_on_in_the_order_of_admission() -> None:
    world = World(max_num_batched_tokens=20)
    world.add(30, request_id="a")
    world.add(30, request_id="b")
    for expected in ({"a": 20}, {"a": 10, "b": 10}, {"a": 1, "b": 19}):
        made = plan(world)
        assert counts(made) == expected
        commit(world, made)


def test_a_plan_may_be_made_while_one_is_in_flight_but_not_two() -> None:
    world = World()
    (seq,) = world.add(6, max_tokens=8)
    first, second = plan(world), plan(world)
    assert (first.input.starts.tolist(), first.input.counts.tolist()) == ([0], [6])
    assert (second.input.starts.tolist(), second.input.counts.tolist()) == ([6], [1])
    assert (seq.num_pending, seq.num_in_flight) == (2, 2)
    with pytest.raises(InvariantError, match="two steps"):
        world.scheduler.plan()
    with pytest.raises(InvariantError, match="open"):
        world.scheduler.commit(second, StepResult(np.zeros((1, 1), dtype=np.int64)))
    commit(world, first)
    assert (seq.num_pending, len(seq.tokens), seq.num_computed) == (1, 7, 7)


def test_no_plan_follows_the_last_token() -> None:
    world = World()
    world.add(6, max_tokens=2)
    first, second = plan(world), plan(world)
    commit(world, first)
    assert world.scheduler.plan() is None
    commit(world, second)
    assert world.ends == {("r0", 0): "length"}
    assert not world.scheduler.has_work


def test_a_sequence_waits_for_its_token_on_the_host() -> None:
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


# Ends


def test_a_stop_token_ends_a_sequence_after_min_tokens() -> None:
    world = World()
    (probe,) = world.add([1, 2, 3], max_tokens=8)
    tokens, _ = expected_output(probe.request)
    (first,) = world.add([1, 2, 3], max_tokens=8, stop=[tokens[3]])
    (second,) = world.add([1, 2, 3], max_tokens=8, stop=tokens, params={"min_tokens": 3})
    world.run()
    for seq in (first, second):
        assert world.outputs[seq.key] == tokens[:4] and world.ends[seq.key] == "stop"


@DEPTHS
def test_tokens_after_the_end_are_dropped(depth: int) -> None:
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
    world.check_end(seq)
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
def test_a_failed_step_ends_its_sequences(depth: int) -> None:
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


def test_a_failed_step_keeps_only_what_was_committed() -> None:
    world = World()
    (seq,) = world.add(11, max_tokens=5)
    commit(world, plan(world))
    made = plan(world)
    world.scheduler.finish(seq)
    world.scheduler.fail(made, RuntimeError("boom"))
    assert seq.finish_reason == "stop"
    assert world.cache.stats().total_cached == 11
    world.run()


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
    assert stats.avg_queue_time_ms == pytest.approx(1000)
    assert (stats.queue_size, stats.concurrent_requests) == (0, 0)


def test_prefill_tokens_are_counted_when_a_step_is_committed() -> None:
    world = World(block_size=16)
    world.add(8, max_tokens=3)
    made = plan(world)
    assert world.scheduler.tokens_done == (0, 0)
    commit(world, made)
    assert world.scheduler.tokens_done == (8, 1)
    assert world.scheduler.stats().kv_utilization == pytest.approx(8 / 16)  # of the room in the blocks that are held
    world.add(8, max_tokens=3)
    world.scheduler.fail(plan(world), RuntimeError("boom"))
    assert world.scheduler.tokens_done == (8, 1)


def calls_of(num_sequences: int, num_waiting: int) -> int:
    """Calls of 30 steps; times belong to `archerfish bench scheduler`."""

    def run(steps: int) -> int:
        return num_calls(lambda: step_times_us(num_sequences, steps, num_waiting=num_waiting, prompt_tokens=16))

    return run(60) - run(30)


def test_a_step_makes_few_calls() -> None:
    assert calls_of(64, 0) < 30 * 64 * 4
    assert calls_of(16, 2000) < 2 * calls_of(16, 10)
