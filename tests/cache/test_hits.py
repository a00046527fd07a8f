from __future__ import annotations

import pytest

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import HitRecord, RadixCache, RadixKey
from archerfish.sequence import Namespace


class World:
    def __init__(self, *, is_enabled: bool = True, num_ghosts: int = 8192) -> None:
        self.now = 100.0
        self.blocks = BlockManager(64, 4)
        self.cache = RadixCache(self.blocks, is_enabled=is_enabled, clock=lambda: self.now, num_ghosts=num_ghosts)

    def add(self, tokens: list[int], namespace: Namespace | str = "") -> None:
        taken = self.blocks.allocate(-(-len(tokens) // 4))
        self.cache.insert(RadixKey.with_namespace(tokens, namespace), taken)
        self.blocks.free(taken)

    def record(self, tokens: list[int], namespace: Namespace | str = "", limit: int | None = None) -> HitRecord:
        key = RadixKey.with_namespace(tokens, namespace)
        told = self.cache.explain(key, limit=limit)
        assert self.cache.match_prefix(key, limit=limit).record == told
        return told


def test_full_and_limit() -> None:
    world = World()
    world.add([1, 2, 3, 4, 5])
    full = world.record([1, 2, 3, 4, 5])
    assert (full.reason, full.num_matched, full.num_prompt) == ("full", 5, 5)
    assert full.explain() == "All 5 tokens came from the cache."
    limit = world.record([1, 2, 3, 4, 5], limit=4)
    assert (limit.reason, limit.num_matched) == ("limit", 4)
    assert "4 of 5 tokens" in limit.explain()


def test_never_seen() -> None:
    world = World()
    world.add([1, 2, 3])
    record = world.record([1, 2, 9])
    assert (record.reason, record.num_matched) == ("never_seen", 2)
    assert record.explain() == "2 of 3 tokens came from the cache; the next ones have not been seen before."


def test_cache_off() -> None:
    world = World(is_enabled=False)
    world.add([1, 2, 3])
    record = world.record([1, 2, 3])
    assert (record.reason, record.num_matched) == ("cache_off", 0)
    assert "turned off" in record.explain()
    assert world.cache.stats().misses == 3 and world.cache.stats().node_count == 0
    assert world.blocks.num_free == 64


def test_evicted_and_when() -> None:
    world = World()
    world.add([1, 2, 3])
    world.cache.evict(1)
    world.now += 42.0
    record = world.record([1, 2, 3])
    assert (record.reason, record.num_matched, record.evicted_seconds_ago) == ("evicted", 0, 42.0)
    assert "evicted 42.0 seconds ago" in record.explain()
    assert world.record([2, 2, 3]).reason == "never_seen"


def test_evictions_are_remembered_at_any_depth() -> None:
    world = World()
    world.add([1, 2, 3, 4, 5, 6])
    world.add([1, 2, 3])  # splits: the lower part is the older leaf
    world.cache.evict(1)
    world.add([1, 9])  # cuts the path before the ghost once more
    assert world.record([1, 2, 3, 4, 5]).reason == "evicted"
    assert world.record([1, 2, 3, 4, 5]).num_matched == 3
    assert world.record([1, 2, 3, 7]).reason == "never_seen"


def test_caching_again_ends_the_memory_of_the_eviction() -> None:
    world = World()
    world.add([1, 2, 3])
    world.cache.evict(1)
    world.add([1, 2, 3])
    assert world.record([1, 2, 3]).reason == "full"
    assert not world.cache._trees[Namespace()].ghosts


def test_the_oldest_evictions_are_forgotten() -> None:
    world = World(num_ghosts=2)
    for token in (1, 2, 3):
        world.add([token])
    world.cache.evict(3)
    assert [world.record([token]).reason for token in (1, 2, 3)] == ["never_seen", "evicted", "evicted"]


def test_an_eviction_that_happens_again_is_new() -> None:
    world = World(num_ghosts=2)
    world.add([1, 2])
    world.add([1, 2, 3])
    world.cache.evict(2)
    for tokens in ([5], [1, 2, 3], [1, 2], [6]):
        world.add(tokens)
    world.record([1, 2])  # so that the upper part stays
    assert world.cache.evict(1) == world.cache.evict(1) == 1  # 5; then the lower part, which has no block of its own, and 6
    assert world.record([1, 2, 3]).num_matched == 2
    assert [world.record(tokens).reason for tokens in ([5], [1, 2, 3], [6])] == ["never_seen", "evicted", "evicted"]


def test_a_hit_record_names_another_adapter_of_the_tenant() -> None:
    world = World()
    world.add([1, 2, 3, 4], Namespace("t", "x"))
    world.add([1, 2], Namespace("t", "y"))
    record = world.record([1, 2, 3], Namespace("t", "y"))
    assert (record.reason, record.num_matched) == ("adapter_differs", 2)
    assert world.record([1, 2, 9], Namespace("t", "y")).reason == "never_seen"
    assert world.record([1, 2, 3], Namespace("t", "new")).reason == "adapter_differs"


def test_clearing_is_recorded_and_forgets_evictions() -> None:
    world = World()
    world.add([1, 2, 3])
    world.cache.evict(1)
    world.cache.clear()
    world.now += 7.0
    record = world.record([1, 2, 3])
    assert (record.reason, record.generation, record.cleared_seconds_ago) == ("never_seen", 1, 7.0)
    assert "cleared 7.0 seconds ago" in record.explain()


@pytest.mark.parametrize("other", [Namespace("b"), Namespace("b", "x"), Namespace("", "a")])
def test_hit_records_do_not_depend_on_other_tenants(other: Namespace) -> None:
    alone, among = World(num_ghosts=2), World(num_ghosts=2)
    for world in (alone, among):
        world.add([1, 2, 3, 4, 5], "a")
        world.add([6, 7], "a")
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 8], [9], [6, 7, 7]):
        among.add(tokens, other)
        among.record(tokens, other)
    for world in (alone, among):
        world.cache.evict(1)  # the tenant's own oldest leaf, in both worlds
    among.now = alone.now = 200.0
    for token in range(20, 30):
        among.add([token], other)
        among.cache.match_prefix(RadixKey.with_namespace([6, 7], "a"), counts=False)
    among.cache.lock(among.cache.match_prefix(RadixKey.with_namespace([6, 7], "a"), counts=False).node)
    among.cache.evict(64)  # everything of the other tenant; more than the ghosts that a namespace keeps
    among.cache.clear(other)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 8], [9], [6, 7, 7], [20]):
        assert among.record(tokens, "a") == alone.record(tokens, "a")
        assert among.record(tokens, "a").explain() == alone.record(tokens, "a").explain()
    ours, theirs = among.cache.stats("a"), alone.cache.stats("a")
    assert (ours.hits, ours.misses, ours.request_hits, ours.evictions, ours.node_count, ours.total_cached) == (
        theirs.hits, theirs.misses, theirs.request_hits, theirs.evictions, theirs.node_count, theirs.total_cached,
    )  # fmt: skip


@pytest.mark.parametrize(("seconds", "said"), [(1.25, "1.2 seconds"), (600.0, "10 minutes"), (36000.0, "10 hours")])
def test_ages_are_readable(seconds: float, said: str) -> None:
    assert f"{said} ago" in HitRecord(2, 1, "evicted", seconds).explain()


def test_between_states_says_from_where_the_rest_is_computed() -> None:
    said = HitRecord(100, 64, "between_states").explain()
    assert said.startswith("64 of 100 tokens came from the cache; the state behind them is the nearest that is kept")
