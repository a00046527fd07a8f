"""Prompts share the tokens of a step: short ones do not wait for long ones, long ones get on, and steps stay short."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import TooManyRequestsError
from archerfish.sched.plan import MIN_CHUNK, Plan
from archerfish.sequence import Sequence
from archerfish.step import StepResult
from tests.sched.worlds import DEPTHS, World

BUDGET = 64
ROOM: dict[str, Any] = {"num_blocks": 13_000, "block_size": 4, "max_model_len": 100_000, "max_num_seqs": 32}


def make_world(
    depth: int = 0, policy: str = "fcfs", budget: int = BUDGET, tokens_per_s: float = 0.0, **options: Any
) -> World:
    """A world in which a step takes as long as its tokens need; 0: no time."""
    world = World(depth=depth, policy=policy, max_num_batched_tokens=budget + 32, **ROOM, **options)
    execute = world.runner.execute

    def timed(plan: Plan) -> StepResult:
        if tokens_per_s:
            world.now += len(plan.input.tokens) / tokens_per_s
        return execute(plan)

    world.runner.execute = timed  # type: ignore[method-assign]
    return world


def steps_to_first_token(world: World, seq: Sequence, limit: int = 5000) -> int:
    for num_steps in range(limit):
        if seq.num_emitted:
            return num_steps
        world.step()
    raise AssertionError(f"{seq.key} has no token after {limit} steps")


@DEPTHS
@pytest.mark.parametrize("policy", ["fcfs", "fair-share", "priority", "deadline", "longest-prefix-first"])
@pytest.mark.parametrize("lengths", [[20_000], [8_000] * 6])
def test_a_short_prompt_waits_a_few_steps_behind_long_ones(lengths: list[int], policy: str, depth: int) -> None:
    world = make_world(depth, policy)
    for length in lengths:
        world.add(length, tenant="a")
    for _ in range(3):
        world.step()
    (short,) = world.add(50, tenant="b")
    assert steps_to_first_token(world, short) <= 3 + depth


@DEPTHS
def test_a_long_prompt_gets_every_other_step_from_short_ones(depth: int) -> None:
    world = make_world(depth)
    (long,) = world.add(40 * BUDGET, max_tokens=1)
    num_steps = 0
    while not long.num_emitted:
        world.add(BUDGET // 2, max_tokens=1)
        world.add(BUDGET // 2, max_tokens=1)
        world.step()
        num_steps += 1
    assert num_steps <= 2 * 40 + 4


def test_lone_and_equal_prompts_get_whole_steps() -> None:
    """Sharing steps between equal ones would make the first wait and help none."""
    world = make_world()
    (long,) = world.add(10 * (BUDGET + 32))
    assert steps_to_first_token(world, long) == 10
    world = make_world()
    first, second = (world.add(480)[0] for _ in range(2))
    assert steps_to_first_token(world, first) == 5 and second.num_computed == 0


@pytest.mark.no_cover
@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 600), st.integers(0, 6), st.sampled_from("abc")), min_size=1, max_size=25),
    st.sampled_from(["fcfs", "fair-share"]),
    st.integers(0, 1),
)
def test_any_prompt_is_computed_in_time(arrivals: list[tuple[int, int, str]], policy: str, depth: int) -> None:
    """A decode is in every step, and a prompt waits for no more than twice the steps of all prompts that came before it
    or are shorter."""
    world = make_world(depth, policy)
    added: list[tuple[Sequence, int]] = []
    ends: dict[Sequence, int] = {}
    num_steps = 0
    for length, pause, tenant in [*arrivals, (1, 0, "a")]:
        added.append((world.add(length, max_tokens=60, tenant=tenant)[0], num_steps))
        for _ in range(pause):
            decoding = [
                seq for seq, _ in added if seq.num_emitted and seq.finish_reason is None and not seq.num_preemptions
            ]
            before = {seq: len(seq.tokens) for seq in decoding}
            world.step()
            num_steps += 1
            assert all(len(seq.tokens) > before[seq] or seq.finish_reason is not None for seq in decoding)
            ends |= {seq: num_steps for seq, _ in added if seq.num_emitted and seq not in ends}
    while len(ends) < len(added):
        world.step()
        num_steps += 1
        ends |= {seq: num_steps for seq, _ in added if seq.num_emitted and seq not in ends}
    for place, (seq, arrived) in enumerate(added):
        others = [other for at, (other, _) in enumerate(added) if at <= place or other.num_prompt <= seq.num_prompt]
        num_tokens = sum(other.num_prompt for other in others)
        assert ends[seq] - arrived <= 2 * (num_tokens / BUDGET + len(others)) + 4


@pytest.mark.parametrize("tokens_per_s", [100, 250, 1000, 1e6])
@pytest.mark.parametrize("max_gap_s", [0.03, 0.25])
def test_steps_are_bounded_by_the_measured_speed(tokens_per_s: float, max_gap_s: float) -> None:
    world = make_world(tokens_per_s=tokens_per_s, budget=2048, max_gap_s=max_gap_s)
    world.add(20_000)
    durations = []
    for num_steps in range(12):
        if num_steps == 6:
            world.add(20_000)  # another one waits
        before = world.now
        world.step()
        durations.append(world.now - before)
    least = MIN_CHUNK / tokens_per_s
    assert all(duration <= max(max_gap_s, least) * 1.01 for duration in durations[1:])
    full = min(max_gap_s, (2048 + 32) / tokens_per_s) - 8 / tokens_per_s  # chunks are multiples of 8 tokens
    assert all(duration >= max(least, full) * 0.99 for duration in durations[2:])


def test_chunks_shrink_as_the_context_grows() -> None:
    """A pair of tokens costs time, too. Steps with decodes alone follow, and a short prompt has its token in two."""
    world = make_world(budget=512, max_gap_s=0.08)
    world.scheduler.plans_ahead = False
    world.scheduler.prompts.decodes_share = 0.2
    execute = world.runner.execute

    def timed(plan: Plan) -> StepResult:
        num_prompt = plan.num_prompt_tokens
        world.now += 0.001 + 0.001 * num_prompt + 0.008 * (len(plan.input.tokens) - num_prompt) + 1e-6 * plan.num_pairs
        return execute(plan)

    world.runner.execute = timed  # type: ignore[method-assign]
    (long,) = world.add(6000)
    for _ in range(3):
        world.step()
    durations, counts, num_plain = list[float](), list[int](), 0
    while not long.num_emitted:
        if world.scheduler.num_running == 1:
            (short,) = world.add(30, max_tokens=16)
            assert steps_to_first_token(world, short) <= 2
        before, done = world.now, long.num_computed
        world.step()
        durations.append(world.now - before)
        counts.append(long.num_computed - done)
        num_plain += not counts[-1]
    counts = [count for count in counts if count]
    assert max(durations) < 0.13, "the gap, or the shortest chunk where the context is long"
    assert max(counts) > 2 * counts[-2] == 2 * MIN_CHUNK
    assert 0.5 * len(counts) < num_plain < 4 * len(counts)


def test_a_short_request_is_quick_on_a_slow_machine() -> None:
    """As a CPU that computes 250 tokens of prompts a second."""
    world = make_world(tokens_per_s=250, budget=512, depth=1)
    world.add(20_000, tenant="a")
    for _ in range(5):
        world.step()
    (short,) = world.add(50, tenant="b")
    began = world.now
    steps_to_first_token(world, short)
    assert world.now - began < 4


def test_a_full_engine_refuses_requests_above_max_requests() -> None:
    world = World(max_num_seqs=2, max_requests=3)
    for _ in range(3):
        assert world.scheduler.has_room
        world.add(4)
    assert not world.scheduler.has_room
    with pytest.raises(TooManyRequestsError, match="3 requests run or wait"):
        world.add(4)
    world.run()
    world.add(4)
    world.run()
