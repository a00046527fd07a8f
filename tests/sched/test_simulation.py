"""Ten thousand requests of all kinds under memory pressure: all end exactly once, nothing leaks, nobody starves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from archerfish.sequence import Delta, Sequence
from tests.sched.worlds import World

pytestmark = pytest.mark.no_cover
MAX_WAITING = 60
# About twice what is seen, the same for 700 and for 10,000 requests. Under fair-share a request of low priority waits
# for as long as others of its tenant come, which is what a priority is for: the bound is for the others.
MAX_WAIT_STEPS = {"fcfs": 1000, "longest-prefix-first": 1000, "fair-share": 2000}


@dataclass
class Tally:
    """What a simulation has seen."""

    sequences: list[Sequence] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(
        default_factory=list
    )  # steps from arrival to first admission, and the priority
    num_operations: int = 0
    num_steps: int = 0

    def longest_wait(self, policy: str) -> int:
        """Of the requests that the policy promises a turn."""
        return max(wait for wait, priority in self.waits if policy != "fair-share" or priority >= 0)


class Simulation:
    """Requests keep arriving while others run; some are aborted, some have deadlines, now and then a step fails."""

    def __init__(self, policy: str, depth: int, *, seed: int, has_states: bool = False) -> None:
        self.random = random.Random(seed)
        self.world = World(
            policy=policy,
            depth=depth,
            num_blocks=80,
            block_size=8,
            max_num_seqs=24,
            max_num_batched_tokens=96,
            max_queue_size=MAX_WAITING,
            has_states=has_states,
        )
        self.tally = Tally()
        self._waiting: dict[Sequence, int] = {}

    def add(self) -> None:
        draw = self.random
        shared = draw.choice([0, 0, 20, 45, 90]) if draw.random() < 0.6 else 0
        family = draw.randrange(6)
        own = draw.randrange(1, 60) if draw.random() < 0.9 else draw.randrange(100, 400)
        prompt = [100 * family + i for i in range(shared)] + [draw.randrange(2000, 2004) for _ in range(own)]
        added = self.world.add(
            prompt,
            max_tokens=draw.randrange(1, 40) if draw.random() < 0.8 else draw.randrange(40, 120),
            n=draw.choice([1, 1, 1, 1, 1, 2, 3]),
            tenant=f"tenant{draw.randrange(5)}",
            priority=draw.choice([0, 0, 0, 1, -1]),
            deadline=self.world.now + draw.randrange(50, 400) if draw.random() < 0.1 else None,
            stop=[1, 2] if draw.random() < 0.5 else [],
            needs_host_token=draw.random() < 0.1,
        )
        self.tally.sequences += added
        self._waiting.update(dict.fromkeys(added, self.tally.num_steps))

    def step(self) -> None:
        world, draw = self.world, self.random
        world.now += 1.0
        self.tally.num_steps += 1
        if draw.random() < 0.05:
            seq = draw.choice(self.tally.sequences)
            if draw.random() < 0.7:
                world.scheduler.abort(seq.request.request_id)
            else:
                world.scheduler.finish(seq)
        if draw.random() < 0.004:
            self.fail()
        self._count(world.step())

    def fail(self) -> None:
        world = self.world
        plan = world.in_flight.popleft()[0] if world.in_flight else world.scheduler.plan()
        if plan is not None:
            world.fail(plan)

    def _count(self, deltas: list[Delta]) -> None:
        self.tally.num_operations += len(deltas) + 1
        started = [seq for seq in self._waiting if seq.row >= 0 or seq.finish_reason is not None or seq.num_emitted]
        for seq in started:
            self.tally.waits.append((self.tally.num_steps - self._waiting.pop(seq), seq.request.priority))

    def run(self, num_requests: int, *, num_operations: int = 0) -> Tally:
        num_added = 0
        while num_added < num_requests or self.tally.num_operations < num_operations:
            while self.world.scheduler.stats().queue_size < MAX_WAITING - 20 and self.random.random() < 0.8:
                self.add()
                num_added += 1
            self.step()
            if self.tally.num_steps % 500 == 0:
                self.world.check()
        while self.world.scheduler.has_work:
            self.step()
        self.world.run()
        return self.tally

    def check(self) -> None:
        world, tally = self.world, self.tally
        assert len(world.ends) == len(tally.sequences)
        for seq in tally.sequences:
            world.check_end(seq)
        stats = world.scheduler.stats()
        assert stats.num_preemptions > 0 and stats.cached_logits_used > 0 and world.cache.stats().evictions > 0
        assert stats.completed_requests + stats.failed_requests + stats.aborted_requests == stats.total_requests
        assert 0.5 < stats.kv_utilization <= 1.0
        assert set(world.ends.values()) >= {"length", "stop", "abort", "error"}


ALL_POLICIES = ["fcfs", "priority", "fair-share", "longest-prefix-first", "deadline"]
FEW = 250  # requests
CASES = [
    ("fcfs", 0, False, FEW),
    ("fcfs", 1, False, FEW),
    ("fair-share", 1, False, FEW),
    ("longest-prefix-first", 1, False, FEW),
    ("fcfs", 0, True, FEW),
    ("fcfs", 1, True, FEW),
    *(
        pytest.param(policy, depth, False, 10_000, marks=pytest.mark.slow)
        for policy in ALL_POLICIES
        for depth in (0, 1)
    ),
]


@pytest.mark.parametrize(("policy", "depth", "has_states", "num_requests"), CASES)
def test_mixed_requests_all_end_once_and_none_starves(
    policy: str, depth: int, has_states: bool, num_requests: int
) -> None:
    simulation = Simulation(
        policy, depth, seed=depth + (len(policy) if num_requests == FEW else 0), has_states=has_states
    )
    tally = simulation.run(num_requests)
    simulation.check()
    if policy in MAX_WAIT_STEPS:
        assert tally.longest_wait(policy) < MAX_WAIT_STEPS[policy]


@pytest.mark.slow
def test_a_million_operations() -> None:
    simulation = Simulation("fair-share", 1, seed=99)
    tally = simulation.run(10_000, num_operations=1_000_000)
    simulation.check()
    assert tally.num_operations >= 1_000_000
