"""Any order of events: the books balance, every sequence ends exactly once, and its tokens are those of the model."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from archerfish.errors import TooManyRequestsError
from archerfish.sched.drafts import Speculation
from archerfish.sched.plan import Plan
from archerfish.sequence import Sequence
from archerfish.step import StepResult
from tests.sched.worlds import OracleDrafter, OracleModel, World

POLICIES = ["fcfs", "priority", "longest-prefix-first", "deadline", "fair-share"]


class SchedulerMachine(RuleBasedStateMachine):
    tally: ClassVar[Counter[str]] = Counter()  # over all histories: what was checked, and how sequences ended

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.sequences: list[Sequence] = []

    @property
    def w(self) -> World:
        assert self.world is not None
        return self.world

    @property
    def in_flight(self) -> deque[tuple[Plan, StepResult]]:
        return self.w.in_flight

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 16]),
        num_tokens=st.integers(48, 160),
        policy=st.sampled_from(POLICIES),
        has_cache=st.booleans(),
        has_logits_cache=st.booleans(),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 30),
        fixed_chunk=st.sampled_from([0, 0, 0, 4, 8]),
        has_states=st.booleans(),
        num_drafted=st.sampled_from([0, 1, 5]),
        max_drafted=st.sampled_from([1, 64]),
        has_draft_model=st.booleans(),
    )
    def start(
        self,
        *,
        block_size: int,
        num_tokens: int,
        budget: int,
        max_num_seqs: int,
        fixed_chunk: int,
        has_states: bool,
        num_drafted: int,
        max_drafted: int,
        has_draft_model: bool,
        **options: Any,
    ) -> None:
        speculates = num_drafted and not fixed_chunk
        drafter, model = OracleDrafter(), OracleModel(3) if has_draft_model else None
        self.world = World(
            num_blocks=num_tokens // block_size,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_queue_size=12,
            max_num_batched_tokens=max_num_seqs + max(budget, fixed_chunk),
            fixed_chunk=fixed_chunk,
            has_states=has_states,
            speculation=Speculation(drafter, num_drafted, max_drafted, model) if speculates else None,
            **options,
        )

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 20),
        own=st.integers(0, 12),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 3]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["a", "b"]),
        timeout=st.sampled_from([None, None, None, 3.0]),
        stop=st.sampled_from([(), (1, 2, 3, 4, 5)]),
        host=st.booleans(),
        logprobs=st.sampled_from([None, None, 0]),
        seed=st.integers(0, 1),
    )
    def add(
        self, family: int, shared: int, own: int, timeout: float | None, host: bool, logprobs: int | None, **fields: Any
    ) -> None:
        prompt = [100 * family + i for i in range(shared)] + [7000 + 13 * own + i for i in range(own)]
        deadline = None if timeout is None else self.w.now + timeout
        options = {"prompt_logprobs": logprobs, "logprobs": logprobs}
        try:
            self.sequences += self.w.add(
                prompt or [1], deadline=deadline, needs_host_token=host, params=options, **fields
            )
        except TooManyRequestsError:
            assert self.w.scheduler.stats().queue_size == 12

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def plan(self) -> None:
        self.w.launch()
        self.w.take(self.w.scheduler.take_deltas())

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self) -> None:
        self.w.scheduler.commit(*self.in_flight.popleft())
        self.w.take(self.w.scheduler.take_deltas())

    @rule(count=st.integers(1, 10), depth=st.integers(0, 1))
    def go_on(self, count: int, depth: int) -> None:
        for _ in range(count):
            if len(self.in_flight) < 2:
                self.plan()
            while len(self.in_flight) > depth:
                self.commit()

    @precondition(lambda self: self.in_flight)
    @rule(which=st.integers(0, 99))
    def one_sequence_fails(self, which: int) -> None:
        plan, result = self.in_flight[0]
        index = which % len(plan.sequences)
        alive = plan.sequences[index].finish_reason is None
        result.errors[index] = RuntimeError("one")
        self.commit()
        assert not alive or plan.sequences[index].finish_reason == "error"

    @precondition(lambda self: self.in_flight)
    @rule()
    def step_fails(self) -> None:
        self.w.fail(self.in_flight.popleft()[0])
        self.w.take(self.w.scheduler.take_deltas())

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 999), whole=st.booleans())
    def interrupt(self, which: int, whole: bool) -> None:
        seq = self.sequences[which % len(self.sequences)]
        if whole:
            self.w.scheduler.abort(seq.request.request_id)
        else:
            self.w.scheduler.finish(seq)

    @rule()
    def time_passes(self) -> None:
        self.w.now += 2.0

    @rule()
    def clear(self) -> None:
        self.w.cache.clear()

    @invariant()
    def books_balance(self) -> None:
        if self.world is not None:
            self.w.take(self.w.scheduler.take_deltas())
            self.w.check()
            self.tally["moments"] += 1

    def teardown(self) -> None:
        if self.world is None:
            return
        self.w.run()
        self.tally["histories"] += 1
        for seq in self.sequences:
            self.tally[self.w.ends[seq.key]] += 1
            self.w.check_end(seq)


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def run_histories(num_histories: int, num_events: int, **options: Any) -> None:
    """The machine checks itself; here that it ran as often as asked, and that sequences ended in various ways."""
    chosen = settings(
        max_examples=num_histories,
        stateful_step_count=num_events,
        deadline=None,
        suppress_health_check=CHECKS,
        **options,
    )
    SchedulerMachine.tally.clear()
    run_state_machine_as_test(SchedulerMachine, settings=chosen)
    tally = SchedulerMachine.tally
    assert tally["histories"] >= num_histories and tally["moments"] > 2 * num_histories
    assert min(tally["length"], tally["stop"], tally["error"]) > 0


def test_any_order_of_events() -> None:
    run_histories(60, 40, derandomize=True)


@pytest.mark.slow
def test_any_order_of_events_at_length() -> None:
    run_histories(1500, 80)
