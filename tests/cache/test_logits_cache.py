from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.cache.adaptive import CacheKey, LogitsCache, state_hash_of
from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import Node, RadixCache, RadixKey
from archerfish.errors import InvalidInputError, InvalidOptionError


class World:
    """A radix cache and a logits cache that lives with it."""

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


def test_entries_expire_by_age() -> None:
    world = World()
    old = world.keep([1, 2], "old")
    world.now = 5.0
    new = world.keep([3, 4], "new")
    world.now = 10.0
    assert world.logits.get(old) is None
    assert world.logits.get(new) == "new"
    world.now = 15.0
    assert world.logits.evict_expired() == 1
    assert world.logits.evict_expired() == 0
    stats = world.logits.get_stats()
    assert (stats.entries, stats.bytes, stats.expirations) == (0, 0, 2)


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


def test_ages_may_be_shorter_for_once() -> None:
    world = World()
    for moment in range(4):
        world.now = float(moment)
        world.keep([moment], moment)
    assert world.logits.evict_expired(max_age_s=2.0) == 2  # those of 0 and 1
    assert world.logits.evict_expired() == 0 and len(world.logits) == 2
    with pytest.raises(InvalidOptionError, match="max_age_s"):
        world.logits.evict_expired(-1)


def test_what_is_too_old_leaves_before_anything_else() -> None:
    world = World(max_bytes=25)
    old = world.keep([1], "old")
    assert world.logits.get(old) == "old"  # of use once, so that it would stay longer than the next one
    world.now = 5.0
    new = world.keep([2], "new")
    world.now = 10.0
    world.keep([3], "newest")
    assert new in world.logits and old not in world.logits
    assert (world.logits.get_stats().expirations, world.logits.get_stats().evictions) == (1, 0)


def test_the_oldest_go_when_room_is_needed() -> None:
    world = World(max_bytes=25)
    first, second, third = world.keep([1], "a"), world.keep([2], "b"), world.keep([3], "c")
    assert [world.logits.get(key) for key in (first, second, third)] == [None, "b", "c"]
    assert not world.logits.insert(first, "huge", 26, world.cache([1]))
    assert world.logits.get_stats().evictions == 1


def test_replacing_a_value_counts_its_bytes_once() -> None:
    world = World()
    key = world.keep([1], "a", 10)
    world.keep([1], "b", 30)
    assert world.logits.get(key) == "b"
    assert world.logits.get_stats().bytes == 30


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


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InvalidOptionError):
        LogitsCache(-1, 1.0)
    with pytest.raises(InvalidOptionError):
        LogitsCache(1, 0.0)


def test_contexts_that_never_repeat_are_not_kept_when_few_do() -> None:
    world = World(max_bytes=1000)
    for i in range(256):  # a full window without a hit
        world.logits.get(CacheKey([i], 1, "m"))
    once, twice = CacheKey([1000], 1, "m"), CacheKey([1001], 1, "m")
    world.logits.get(once)
    for _ in range(2):
        world.logits.get(twice)
    assert (world.logits.should_cache(once), world.logits.should_cache(twice)) == (False, True)
    assert not world.logits.insert(once, "once", 10, world.cache([1000]))
    assert world.logits.insert(twice, "twice", 10, world.cache([1001]))
    assert world.logits.get(twice) == "twice"
    assert world.logits.get_stats().refusals == 1
    assert [key for keys in world.logits._of_node.values() for key in keys] == [twice]


def test_what_was_of_use_stays_longest() -> None:
    world = World(max_bytes=25)
    used, unused = world.keep([1, 2], "used"), world.keep([3, 4], "unused")
    assert world.logits.get(used) == "used"
    world.keep([5, 6], "new")
    assert used in world.logits and unused not in world.logits


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["get", "insert", "drop", "wait", "resize"]), st.integers(0, 9)), max_size=80))
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
