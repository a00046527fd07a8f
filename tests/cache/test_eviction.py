from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archerfish.cache.eviction import FIFO, LFU, LRU, EvictionPolicy, eviction_policy, register_eviction_policy
from archerfish.errors import InvalidOptionError


@dataclass(eq=False)
class Item:
    name: str
    created: int = 0
    last_access: int = 0
    num_hits: int = 0


def drain(order: EvictionPolicy[Item]) -> str:
    return "".join(order.pop().name for _ in range(len(order)))


def filled(order: EvictionPolicy[Item]) -> dict[str, Item]:
    items = {name: Item(name, tick, tick) for tick, name in enumerate("abcd", 1)}
    for item in items.values():
        order.add(item)
    return items


def test_lru_gives_the_least_recent() -> None:
    order = LRU[Item]()
    items = filled(order)
    items["a"].last_access = 9
    order.touch(items["a"])
    order.remove(items["c"])
    assert items["a"] in order and items["c"] not in order
    assert drain(order) == "bda"


def test_lru_puts_an_older_parent_first_and_a_newer_one_last() -> None:
    for last_access, expected in ((1, "pabcd"), (0, "pabcd"), (3, "abcdp")):
        order = LRU[Item]()
        filled(order)
        order.add(Item("p", 0, last_access))
        assert drain(order) == expected


def test_fifo_ignores_use() -> None:
    order = FIFO[Item]()
    items = filled(order)
    items["a"].last_access = 9
    order.touch(items["a"])
    order.add(Item("p", 0, 99))
    assert drain(order) == "pabcd"


def test_lfu_gives_the_least_used_and_of_those_the_least_recent() -> None:
    order = LFU[Item]()
    items = filled(order)
    for tick, name in enumerate("aabbc", 10):
        items[name].num_hits += 1
        items[name].last_access = tick
        order.touch(items[name])
    order.add(Item("p", 0, 3, 1))
    assert drain(order) == "dpcab"


def test_lfu_counts_saturate() -> None:
    order = LFU[Item]()
    order.add(Item("x", 1, 1, 10**6))
    order.add(Item("y", 2, 2, 10**5))
    order.add(Item("z", 3, 3, 254))
    assert drain(order) == "zxy"


@pytest.mark.parametrize("make", [LRU, LFU, FIFO])
def test_popping_an_empty_order_is_an_error(make: Callable[[], EvictionPolicy[Item]]) -> None:
    order, item = make(), Item("a")
    order.add(item)
    assert order.pop() is item and len(order) == 0 and item not in order
    with pytest.raises(KeyError):
        order.pop()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=60))
def test_lfu_always_gives_one_of_the_least_used(steps: list[tuple[int, int]]) -> None:
    order = LFU[Item]()
    items = [Item(str(i)) for i in range(8)]
    standing: list[Item] = []
    for tick, (action, index) in enumerate(steps, 1):
        item = items[index]
        item.last_access = tick
        if action == 0 and item not in standing:
            order.add(item)
            standing.append(item)
        elif action == 1 and item in standing:
            item.num_hits += 1
            order.touch(item)
        elif action == 2 and item in standing:
            order.remove(item)
            standing.remove(item)
        elif standing and action == 3:
            counts = [i.num_hits for i in standing]
            gone = order.pop()
            assert gone.num_hits == min(counts)
            standing.remove(gone)
        assert len(order) == len(standing)


def test_policies_are_found_by_name_and_can_be_registered() -> None:
    class Newest(LRU[Any]):
        def pop(self) -> Any:
            return self._order.popitem()[0]

    assert [type(eviction_policy(name)) for name in ("lru", "lfu", "fifo")] == [LRU, LFU, FIFO]
    register_eviction_policy("newest-first", Newest)
    order = eviction_policy("newest-first")
    filled(order)
    assert drain(order) == "dcba"
    with pytest.raises(InvalidOptionError, match="Did you mean 'lru'"):
        eviction_policy("lruu")
    with pytest.raises(InvalidOptionError, match="already"):
        register_eviction_policy("lru", Newest)
    with pytest.raises(InvalidOptionError, match="subclass"):
        register_eviction_policy("other", int)  # type: ignore[arg-type]
