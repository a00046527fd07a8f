from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.cache.adaptive import CacheKey, LogitsCache, state_hash_of
from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import Node, RadixCache, RadixKey
from archerfish.errors import InvalidInputError


class World:
    """A radix cache and a logits cache that lives with it. What LogitsCache has of AdaptiveCache is tested there."""

    def __init__(self, max_bytes: int = 100, ttl_seconds: float = 10.0) -> None:
        self.now = 0.0
        self.blocks = BlockManager(64, 4)
        self.logits = LogitsCache(max_bytes, ttl_seconds, lambda: self.now)
        self.radix = RadixCache(self.blocks, on_drop=self.logits.drop)

    def cache(self, tokens: list[int]) -> Node:
        taken = self.blocks.allocate(-(-len(tokens) // 4))
        node = self.radix.insert(RadixKey(tokens), taken)
        self.blocks.free(taken)
        return node

    def keep(self, tokens: list[int], value: object, num_bytes: int = 10) -> CacheKey:
        key = CacheKey(tokens, len(tokens), "m")
        assert self.logits.insert(key, value, num_bytes, self.cache(tokens))
        return key


def test_gives_back_what_was_kept() -> None:
    world = World()
    world.keep([1, 2, 3], "value")
    assert world.logits.get(CacheKey((1, 2, 3), 3, "m")) == "value"
    assert world.logits.get(CacheKey(RadixKey([1, 2, 3]), 3, "m")) == "value"
    assert world.logits.get(CacheKey([1, 2, 4], 3, "m")) is None
    assert world.logits.get(CacheKey([1, 2, 3], 2, "m")) is None
    assert world.logits.get(CacheKey([1, 2, 3], 3, "other")) is None
    stats = world.logits.get_stats()
    assert (stats.hits, stats.misses, stats.entries, stats.bytes) == (2, 3, 1, 10)


def test_without_a_node_entries_live_by_age_and_room_alone() -> None:
    world = World(max_bytes=100)
    row, key = memoryview(array("f", [0.5] * 10)), CacheKey([1, 2], 2, "m")
    assert world.logits.insert(key, row) and world.logits.get(key) is row  # 40 bytes, as the row itself says
    assert world.logits.get_stats().bytes == 40
    world.radix.clear()
    assert key in world.logits and not world.logits._of_node
    assert not world.logits.insert(key, memoryview(array("f", [0.5] * 26)))
    with pytest.raises(InvalidInputError, match="num_bytes"):
        world.logits.insert(key, "no row")


def test_entries_die_with_their_node() -> None:
    world = World()
    evicted, cleared = world.keep([1, 2], "a"), world.keep([3, 4], "b")
    world.radix.evict(1)
    assert world.logits.get(evicted) is None and world.logits.get(cleared) == "b"
    world.radix.clear()
    assert world.logits.get(cleared) is None
    assert world.logits.get_stats().bytes == 0
    assert not world.logits._of_node


def test_a_split_leaves_the_entry_with_its_end() -> None:
    world = World()
    key = world.keep([1, 2, 3, 4, 5, 6], "long")
    short = world.keep([1, 2, 3], "short")
    assert world.radix.evict(1) >= 1  # the lower part, which ends where the long context ends
    assert world.logits.get(key) is None and world.logits.get(short) == "short"


def test_nothing_is_kept_for_a_dead_node_or_a_root() -> None:
    world = World()
    node = world.cache([1, 2])
    world.radix.evict(1)
    key = CacheKey([1, 2], 2, "m")
    assert not world.logits.insert(key, "late", 1, node)
    assert not world.logits.insert(key, "root", 1, world.radix.insert(RadixKey([]), []))
    assert len(world.logits) == 0


def test_namespaces_have_state_hashes_of_their_own() -> None:
    assert state_hash_of("m", ("a", "bc")) != state_hash_of("m", ("ab", "c"))
    assert state_hash_of("m", ("a", "")) != state_hash_of("m", ("", "a"))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["get", "insert", "drop", "wait", "resize"]), st.integers(0, 9)), max_size=80)
)
def test_entries_and_nodes_always_agree(actions: list[tuple[str, int]]) -> None:
    world = World(max_bytes=40)
    nodes: dict[int, Node] = {}
    for action, number in actions:
        key = CacheKey([number, 1], 2, "m")
        if action == "get":
            world.logits.get(key)
        elif action == "insert":
            nodes[number] = world.cache([number, 1])
            world.logits.insert(key, number, 10, nodes[number])
        elif action == "drop" and number in nodes:
            world.logits.drop(nodes[number])
        elif action == "wait":
            world.now += number
        elif action == "resize":
            world.logits.resize(10 * number, 10.0)
        stats = world.logits.get_stats()
        assert stats.bytes == 10 * stats.entries <= world.logits.max_bytes
        assert sum(map(len, world.logits._of_node.values())) == stats.entries
        assert all(world.logits._of_node.values())
