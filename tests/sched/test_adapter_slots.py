"""Slots of adapters under random use: none is given twice, none in use is taken, and all get a turn."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from archerfish.sched.adapters import MOST_MISSES, AdapterSlots
from tests.cache.invariants import check_slots

ADAPTERS = st.integers(1, 6)


class SlotMachine(RuleBasedStateMachine):
    """Sequences begin and end; adapters are loaded, or cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.loading: dict[int, int] = {}  # adapter -> slot
        self.content: dict[int, int] = {}  # what lies in each slot, or is on its way
        self.running: list[tuple[int, int]] = []  # adapter and slot of each sequence
        self.slots = AdapterSlots(3, self._load)

    def _load(self, adapter: int, slot: int) -> None:
        assert slot not in self.loading.values()
        assert all(slot != used for _, used in self.running), "a slot in use is given to another adapter"
        self.loading[adapter], self.content[slot] = slot, adapter

    @rule(adapter=ADAPTERS)
    def begin(self, adapter: int) -> None:
        self.slots.begin_plan()
        if self.slots.error_of(adapter) is None and self.slots.is_ready(adapter):
            slot = self.slots.enter(adapter)
            assert self.content[slot] == adapter and adapter not in self.loading
            self.running.append((adapter, slot))

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 99))
    def end(self, place: int) -> None:
        self.slots.leave(self.running.pop(place % len(self.running))[0])

    @precondition(lambda self: self.loading)
    @rule(place=st.integers(0, 99), fails=st.booleans())
    def come(self, place: int, fails: bool) -> None:
        adapter = list(self.loading)[place % len(self.loading)]
        slot = self.loading.pop(adapter)
        if fails:
            self.slots.failed(adapter, ValueError())
            del self.content[slot]
        else:
            self.slots.loaded(adapter)

    @rule(adapter=ADAPTERS)
    def forget(self, adapter: int) -> None:
        self.slots.forget_error(adapter)

    @invariant()
    def is_sound(self) -> None:
        check_slots(self.slots)
        assert self.slots.is_loading == bool(self.loading)


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_the_one_used_longest_ago_goes_first() -> None:
    loads: list[tuple[int, int]] = []
    slots = AdapterSlots(2, lambda adapter, slot: loads.append((adapter, slot)))
    for adapter in (1, 2):
        assert not slots.is_ready(adapter)
        slots.loaded(adapter)
    for adapter in (1, 2, 1):
        slots.enter(adapter)
        slots.leave(adapter)
    assert not slots.is_ready(3)
    assert loads == [(1, 1), (2, 2), (3, 2)], "2 was used before 1"
    assert slots.is_here(1) and not slots.is_here(2)


def test_an_adapter_without_end_makes_room() -> None:
    """One adapter always has a sequence that runs, and one that waits: another one gets its slot all the same."""
    loads, num_running = deque[int](), 1
    slots = AdapterSlots(1, lambda adapter, slot: loads.append(adapter))
    slots.is_ready(1)
    slots.loaded(loads.popleft())
    slots.enter(1)
    for step in range(3 * MOST_MISSES):
        slots.begin_plan()
        if slots.is_ready(2):
            assert step > MOST_MISSES
            return
        can_begin = slots.is_ready(1)
        if can_begin:
            slots.enter(1)
        if num_running:
            slots.leave(1)
        num_running += can_begin - (num_running > 0)
        while loads:
            slots.loaded(loads.popleft())
    pytest.fail("it waits for ever")


def test_many_sequences_of_a_plan_miss_once() -> None:
    slots = AdapterSlots(1, lambda adapter, slot: None)
    slots.is_ready(1)
    slots.loaded(1)
    slots.enter(1)
    for plan in range(MOST_MISSES + 1):
        slots.begin_plan()
        assert not any(slots.is_ready(2) for _ in range(3 * MOST_MISSES))
        assert slots.is_ready(1) == (plan < MOST_MISSES)
