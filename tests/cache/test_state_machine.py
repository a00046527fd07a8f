"""BlockManager and RadixCache under sequences that come and go: the books balance and every match holds the right
tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cache.simulation import NAMESPACES, Simulation

pytestmark = pytest.mark.no_cover
namespaces = st.sampled_from(NAMESPACES)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
# Long common prefixes with a tail of their own: what splits nodes inside blocks.
tails = st.lists(st.integers(0, 2), max_size=6)
shared_prompts = st.builds(lambda n, tail: ([0, 1, 2, 1] * 10)[:n] + tail, st.integers(0, 36), tails)
POLICIES = ["lru", "lfu", "fifo"]


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 3, 16]),
        policy=st.sampled_from(POLICIES),
        tokens=st.integers(60, 200),
        whole_blocks=st.booleans(),
    )
    def make(self, block_size: int, policy: str, tokens: int, whole_blocks: bool) -> None:
        self.sim = Simulation(max(4, tokens // block_size), block_size, policy, whole_blocks)

    @rule(
        namespace=namespaces,
        tokens=st.one_of(prompts, shared_prompts.filter(bool)),
        below=st.integers(0, 2),
        data=st.data(),
    )
    def start(self, namespace: Any, tokens: list[int], below: int, data: st.DataObject) -> None:
        insert_at = data.draw(st.one_of(st.none(), st.integers(0, len(tokens))))
        self.sim.start(namespace, tokens, max(0, len(tokens) - below), insert_at)

    @precondition(lambda self: self.sim.running)
    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=8), data=st.data())
    def extend(self, tokens: list[int], data: st.DataObject) -> None:
        self.sim.extend(data.draw(st.sampled_from(self.sim.running)), tokens)

    @precondition(lambda self: self.sim.running)
    @rule(data=st.data(), is_whole=st.booleans())
    def insert(self, data: st.DataObject, is_whole: bool) -> None:
        sequence = data.draw(st.sampled_from(self.sim.running))
        self.sim.insert(sequence, None if is_whole else data.draw(st.integers(0, len(sequence.tokens))))

    @precondition(lambda self: self.sim.running)
    @rule(data=st.data(), keeps=st.booleans())
    def finish(self, data: st.DataObject, keeps: bool) -> None:
        self.sim.finish(data.draw(st.sampled_from(self.sim.running)), keeps=keeps)

    @rule(num_blocks=st.integers(0, 12))
    def evict(self, num_blocks: int) -> None:
        self.sim.evict(num_blocks)

    @rule(namespace=st.one_of(st.none(), namespaces))
    def clear(self, namespace: Any) -> None:
        self.sim.clear(namespace)

    @rule(namespace=namespaces, tokens=shared_prompts)
    def remember(self, namespace: Any, tokens: list[int]) -> None:
        self.sim.remember(namespace, tokens)

    @rule()
    def try_old_match(self) -> None:
        self.sim.try_old_match()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            while self.sim.running:
                self.sim.finish(self.sim.running[-1], keeps=False)
            self.sim.cache.evict(self.sim.num_blocks)
            assert self.sim.blocks.num_free == self.sim.num_blocks


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, derandomize=True)
TestCacheMachine = CacheMachine.TestCase


def drive(sim: Simulation, draw: random.Random, num_operations: int, check_every: int) -> None:
    """A plain random walk over the same operations."""
    trunk = [draw.randrange(50) for _ in range(200)]
    next_check = check_every
    while sim.num_operations < num_operations:
        choice = draw.random()
        if (choice < 0.30 and len(sim.running) < 12) or not sim.running:
            tokens = trunk[: draw.randrange(120)] + [draw.randrange(3) for _ in range(draw.randrange(1, 12))]
            insert_at = draw.choice([None, draw.randrange(len(tokens) + 1)])
            sim.start(draw.choice(NAMESPACES), tokens, len(tokens) - draw.randrange(2), insert_at)
        elif choice < 0.55:
            sim.extend(draw.choice(sim.running), [draw.randrange(3) for _ in range(draw.randrange(1, 6))])
        elif choice < 0.65:
            sequence = draw.choice(sim.running)
            sim.insert(sequence, draw.choice([None, draw.randrange(len(sequence.tokens) + 1)]))
        elif choice < 0.92:
            sim.finish(draw.choice(sim.running), keeps=draw.random() < 0.8)
        elif choice < 0.96:
            sim.evict(draw.randrange(8))
        elif choice < 0.98:
            sim.remember(draw.choice(NAMESPACES), trunk[: draw.randrange(120)])
        elif choice < 0.999:
            sim.try_old_match()
        else:
            sim.clear(draw.choice([None, *NAMESPACES]))
        if sim.num_operations >= next_check:
            sim.check()
            next_check += check_every
    while sim.running:
        sim.finish(sim.running[-1], keeps=False)


@pytest.mark.parametrize(
    ("num_tokens", "num_operations"), [(1200, 2_000), pytest.param(2400, 112_000, marks=pytest.mark.slow)]
)  # nine of the long walks are over 10^6 operations
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_walk(block_size: int, policy: str, num_tokens: int, num_operations: int) -> None:
    sim = Simulation(num_tokens // block_size, block_size, policy)
    drive(sim, random.Random(f"{block_size}{policy}"), num_operations, num_operations // 40)
    assert sim.num_operations >= num_operations
    assert sim.cache.stats().evictions > 0
    sim.check()
    sim.cache.evict(sim.num_blocks)
    assert sim.blocks.num_free == sim.num_blocks
