from __future__ import annotations

import pytest

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.logits_cache import CacheKey, LogitsCache, state_hash_of
from archerfish.cache.radix import Node, RadixCache, RadixKey
from archerfish.errors import InvalidOptionError


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
