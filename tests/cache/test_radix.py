from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.digest import PathHash
from archerfish.cache.eviction import LFU
from archerfish.cache.radix import HitRecord, Node, RadixCache, RadixKey
from archerfish.errors import InvalidInputError, InvalidOptionError, InvariantError, StaleHandleError
from archerfish.sequence import Namespace, pack_tokens
from tests.cache.invariants import check_cache


class World:
    """A cache over blocks of four tokens, filled by sequences that end at once."""

    def __init__(self, block_size: int = 4, policy: str | LFU[Node] = "lru", **options: Any) -> None:
        self.now = 100.0
        self.dropped: list[Node] = []
        self.blocks = BlockManager(64, block_size)
        self.cache = RadixCache(
            self.blocks, policy=policy, clock=lambda: self.now, on_drop=self.dropped.append, **options
        )

    def add(self, tokens: list[int], namespace: Namespace | str = "") -> tuple[Node, list[int]]:
        taken = self.blocks.allocate(-(-len(tokens) // self.blocks.block_size))
        node = self.cache.insert(RadixKey.with_namespace(tokens, namespace), taken)
        self.blocks.free(taken)
        check_cache(self.cache)
        return node, taken

    def record(self, tokens: list[int], namespace: Namespace | str = "", limit: int | None = None) -> HitRecord:
        key = RadixKey.with_namespace(tokens, namespace)
        told = self.cache.explain(key, limit=limit)
        assert self.cache.match_prefix(key, limit=limit).record == told
        return told


def test_equal_tokens_in_two_namespaces_share_nothing() -> None:
    world = World()
    world.add([1, 2, 3], "a")
    for namespace in ("b", "", Namespace("a", "lora")):
        assert world.cache.match_prefix(RadixKey.with_namespace([1, 2, 3], namespace)).num_tokens == 0
    assert world.cache.match_prefix(RadixKey([1, 2, 3], Namespace("a"))).num_tokens == 3


def test_a_match_may_end_inside_a_node_and_inside_a_block() -> None:
    world = World()
    node, taken = world.add(list(range(10)))
    match = world.cache.match_prefix(RadixKey([0, 1, 2, 3, 4, 5, 99]))
    assert (match.num_tokens, match.blocks, match.node) == (6, taken[:2], node)
    assert world.cache.stats().node_count == 1  # no split
    assert world.cache.match_prefix(RadixKey(range(10)), limit=4).blocks == taken[:1]
    assert world.cache.match_prefix(RadixKey(range(10)), limit=0).node.parent is None
    assert world.cache.match_prefix(RadixKey(range(10)), limit=-5).num_tokens == 0
    assert world.cache.match_prefix(RadixKey([])).record.reason == "full"


def test_a_leaf_added_inside_a_block_uses_its_own_copy() -> None:
    world = World()
    _, first = world.add([0, 1, 2, 3, 4, 5])
    _, second = world.add([0, 1, 2, 3, 4, 5, 6, 7, 8])
    match = world.cache.match_prefix(RadixKey([0, 1, 2, 3, 4, 5, 6, 7, 8]))
    assert match.blocks == [first[0], second[1], second[2]]  # the deepest node wins where two have the block
    assert world.cache.match_prefix(RadixKey([0, 1, 2, 3, 4, 5])).blocks == first
    assert world.blocks.num_free == 64 - 4  # second[0] was not adopted


def test_a_split_inside_a_block_shares_it() -> None:
    world = World()
    lower, taken = world.add(list(range(10)))
    upper, _ = world.add(list(range(6)))
    assert (upper.start, upper.end, upper.blocks) == (0, 6, taken[:2])
    assert (lower.start, lower.end, lower.blocks, lower.shares_first) == (6, 10, taken[1:], True)
    assert [world.blocks.ref_count(block) for block in taken] == [1, 2, 1]
    assert world.cache.num_evictable == 3
    assert world.cache.evict(1) == 1  # the lower part had one block of its own
    assert world.cache.num_evictable == 2
    assert world.cache.match_prefix(RadixKey(range(10))).blocks == taken[:2]


def test_a_cached_block_that_is_extended_counts_once() -> None:
    world = World()
    taken = world.blocks.allocate(2)
    world.cache.insert(RadixKey(range(3)), taken)
    leaf = world.cache.insert(RadixKey(range(6)), taken)
    assert leaf.shares_first and leaf.blocks == taken
    assert world.cache.num_evictable == 2
    check_cache(world.cache, [taken])


def test_a_block_of_a_grandparent_counts_once() -> None:
    world = World(block_size=16)
    ours, copy = world.blocks.allocate(1), world.blocks.allocate(1)
    world.cache.insert(RadixKey(range(5)), ours)
    world.cache.insert(RadixKey(range(8)), copy)  # somebody else went on first, in a copy
    leaf = world.cache.insert(RadixKey(range(12)), ours)
    assert leaf.shares_first
    assert world.cache.num_evictable == 2
    check_cache(world.cache, [ours, copy])


def test_a_split_keeps_handles_and_locks() -> None:
    world = World()
    node, _ = world.add(list(range(10)))
    match = world.cache.match_prefix(RadixKey(range(10)))
    world.cache.lock(match.node)
    upper, _ = world.add(list(range(6)))
    assert match.node is node and node.lock_count == upper.lock_count == 1
    assert world.cache.evict(64) == 0
    world.cache.unlock(match.node)
    assert node.lock_count == upper.lock_count == 0
    check_cache(world.cache, [])
    assert world.cache.evict(64) == 3
    assert sorted(world.blocks.allocate(64)) == list(range(64))


def test_insert_of_what_is_there_adopts_nothing() -> None:
    world = World()
    node, taken = world.add(list(range(10)))
    again, others = world.add(list(range(10)))
    assert again is node and node.blocks == taken and not set(others) & set(taken)
    assert world.cache.insert(RadixKey([]), []).parent is None
    assert world.blocks.num_free == 61


def test_insert_needs_a_block_for_every_token() -> None:
    world = World()
    taken = world.blocks.allocate(1)
    with pytest.raises(InvalidInputError, match="5 tokens need 2 blocks of 4, not 1"):
        world.cache.insert(RadixKey(range(5)), taken)
    with pytest.raises(InvariantError):
        world.cache.insert(RadixKey(range(4)), [63])


def test_locks_protect_the_path_and_nothing_else() -> None:
    world = World()
    world.add([0, 1, 2, 3, 4, 5, 6, 7])
    deep, _ = world.add([0, 1, 2, 3, 9, 9, 9, 9])
    world.add([7, 7])
    assert world.cache.num_evictable == 4
    world.cache.lock(deep)
    world.cache.lock(deep)
    assert world.cache.num_evictable == 2
    assert world.cache.stats().protected_size == 8 and world.cache.stats().evictable_size == 6
    assert world.cache.evict(64) == 2
    world.cache.unlock(deep)
    assert world.cache.evict(64) == 0
    world.cache.unlock(deep)
    with pytest.raises(InvariantError):
        world.cache.unlock(deep)
    assert world.cache.evict(64) == 2
    with pytest.raises(StaleHandleError):
        world.cache.lock(deep)


def test_evict_goes_by_use_and_stops_when_there_is_enough() -> None:
    world = World()
    for first in (1, 2, 3):
        world.add([first] * 8)
    world.cache.match_prefix(RadixKey([1]))
    assert world.cache.evict(1) == 2
    assert [world.cache.peek(RadixKey([first])) for first in (1, 2, 3)] == [1, 0, 1]
    assert world.cache.evict(3) == 4
    assert world.cache.evict(1) == 0
    assert world.cache.stats().evictions == 3 and world.cache.stats().evicted_tokens == 24
    assert len(world.dropped) == 3


def test_the_end_of_a_lock_counts_as_use() -> None:
    world = World()
    node, _ = world.add([1, 1])
    world.cache.lock(node)
    world.add([2, 2])
    world.cache.unlock(node)
    world.cache.evict(1)
    assert [world.cache.peek(RadixKey([first])) for first in (1, 2)] == [1, 0]


def test_both_parts_of_a_split_have_its_past() -> None:
    world = World(policy="lfu")
    lower, _ = world.add([1] * 8)
    for _ in range(3):
        world.cache.match_prefix(RadixKey([1]))
    upper, _ = world.add([1] * 3)
    assert upper is lower.parent
    assert upper.num_hits == lower.num_hits == 3 and upper.created == lower.created


def test_a_parent_is_evicted_after_its_last_child() -> None:
    world = World()
    world.add([1, 1, 1, 1, 2, 2, 2, 2])
    world.add([1, 1, 1, 1])
    world.cache.match_prefix(RadixKey([1, 1, 1, 1, 2, 2, 2, 2]))
    world.add([5, 5])
    assert world.cache.evict(2) == 2
    assert world.cache.peek(RadixKey([5, 5])) == 2
    assert world.cache.peek(RadixKey([1])) == 0


@pytest.mark.parametrize(("policy", "survivor"), [("lru", 2), ("lfu", 1), ("fifo", 3)])
def test_policies_choose_differently(policy: str, survivor: int) -> None:
    world = World(policy=policy)
    for first in (1, 2, 3):
        world.add([first] * 4)
    for first in (1, 1, 3, 2):
        world.cache.match_prefix(RadixKey([first]))
    world.cache.evict(2)
    assert [first for first in (1, 2, 3) if world.cache.peek(RadixKey([first]))] == [survivor]
    with pytest.raises(InvalidOptionError, match="Did you mean"):
        World(policy="lrfu")
    order = LFU[Node]()
    assert World(policy=order).add([1])[0] in order


@pytest.mark.parametrize(("policy", "before", "first"), [("lru", "lfu", 1), ("fifo", "lru", 0), ("lfu", "lru", 2)])
def test_new_policy_orders_what_is_cached(policy: str, before: str, first: int) -> None:
    world = World(block_size=1, policy=before)
    for token in range(4):
        world.add([token])
    for token in (3, 1, 1, 3, 3, 0, 0, *([2] if policy == "lru" else [])):  # 1 twice and longest ago, 0 was made first
        world.cache.match_prefix(RadixKey([token]))
    world.cache.set_policy(policy)
    check_cache(world.cache, [])
    world.cache.evict(1)
    assert [token for token in range(4) if not world.cache.peek(RadixKey([token]))] == [first]
    check_cache(world.cache, [])


def test_blocks_of_others_do_not_count_as_freed() -> None:
    world = World()
    taken = world.blocks.allocate(2)
    world.cache.insert(RadixKey(range(8)), taken)
    assert world.cache.evict(1) == 0  # a sequence still owns both
    assert world.blocks.num_free == 62


def test_a_clear_makes_handles_stale() -> None:
    world = World()
    world.add(list(range(8)))
    match = world.cache.match_prefix(RadixKey(range(8)))
    unlocked = world.cache.match_prefix(RadixKey([77]))
    world.cache.lock(match.node)
    world.blocks.share(match.blocks)
    world.cache.clear()
    assert world.dropped == [match.node]
    assert world.cache.stats().node_count == 0 and world.cache.num_evictable == 0
    assert [world.blocks.ref_count(block) for block in match.blocks] == [1, 1]
    for handle in (match.node, unlocked.node):
        with pytest.raises(StaleHandleError):
            world.cache.lock(handle)
        with pytest.raises(StaleHandleError):
            world.cache.insert(RadixKey(range(8)), match.blocks, handle=handle)
    node, _ = world.add(list(range(8)))
    world.cache.lock(node)
    world.cache.unlock(match.node)  # the sequence ends as any other
    assert node.lock_count == 1
    world.blocks.free(match.blocks)
    check_cache(world.cache, [])


def test_a_clear_of_one_namespace_leaves_the_others() -> None:
    world = World()
    kept, _ = world.add([1, 2], "a")
    world.add([1, 2], "b")
    world.cache.clear("b")
    world.cache.clear("nobody")
    world.cache.lock(kept)
    assert world.cache.peek(RadixKey.with_namespace([1, 2], "a")) == 2
    assert world.cache.peek(RadixKey.with_namespace([1, 2], "b")) == 0


def test_statistics() -> None:
    world = World()
    world.add(list(range(10)), "a")
    world.cache.match_prefix(RadixKey.with_namespace(range(8), "a"))
    world.cache.match_prefix(RadixKey.with_namespace([50, 51], "a"))
    world.cache.match_prefix(RadixKey.with_namespace([60], "b"))
    world.cache.match_prefix(RadixKey.with_namespace([60], "b"), counts=False)
    world.cache.explain(RadixKey.with_namespace([60], "b"))
    ours, all_of_it = world.cache.stats("a"), world.cache.stats()
    assert (ours.hits, ours.misses, ours.request_hits, ours.request_misses, ours.hit_rate) == (8, 2, 1, 1, 0.8)
    assert (all_of_it.hits, all_of_it.misses, all_of_it.request_misses) == (8, 3, 2)
    assert (ours.total_cached, ours.total_capacity, ours.node_count, ours.utilization) == (10, 256, 1, 10 / 256)
    assert world.cache.stats("nobody").hit_rate == 0.0


def test_peek_and_explain_leave_the_order_alone() -> None:
    world = World()
    world.add([1] * 4)
    world.add([2] * 4)
    world.cache.peek(RadixKey([1]))
    world.cache.explain(RadixKey([1]))
    world.cache.evict(1)
    assert world.cache.peek(RadixKey([1])) == 0


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"], [None]])
def test_tokens_that_are_none_are_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="Tokens must be"):
        RadixKey(tokens)


def test_keys_are_snapshots() -> None:
    tokens = [1, 2, 3]
    key = RadixKey(tokens)
    tokens.append(4)
    assert len(key.tokens) == 3 and key == RadixKey((1, 2, 3)) == RadixKey(array("I", [1, 2, 3]))
    assert len({key, RadixKey([1, 2, 3]), RadixKey.with_namespace([1, 2, 3], "a")}) == 2


def test_path_hashes_do_not_depend_on_the_cuts() -> None:
    path_hash = PathHash()
    data = pack_tokens(range(9000)).tobytes()
    whole = path_hash.extend(0, 0, data, 0, 9000)
    part = path_hash.extend(0, 0, data, 0, 5)
    assert path_hash.extend(part, 5, data, 5, 8995) == whole
    zeros = pack_tokens([0, 0]).tobytes()
    assert path_hash.extend(0, 0, zeros, 0, 2) != path_hash.extend(0, 0, zeros, 0, 1)


def test_check_finds_what_is_broken() -> None:
    def lock_child(world: World, node: Node) -> None:
        world.add(list(range(12)))[0].lock_count = 1

    def count_one_more(world: World, node: Node) -> None:
        world.cache.num_evictable += 1

    breaks: list[tuple[Callable[[World, Node], object], str]] = [
        (lambda world, node: world.cache.order.remove(node), "eviction order"),
        (lambda world, node: world.blocks.share(node.blocks[:1]), "owners"),
        (lambda world, node: world.blocks.free(node.blocks[:1]), "owners"),
        (count_one_more, "evictable"),
        (lock_child, "."),
    ]
    for break_one, message in breaks:
        world = World()
        node, _ = world.add(list(range(8)))
        check_cache(world.cache, [])
        break_one(world, node)
        with pytest.raises(AssertionError, match=message):
            check_cache(world.cache, [])


# Hit records


def test_hit_record_of_a_full_limited_and_unseen_prompt() -> None:
    world = World()
    world.add([1, 2, 3, 4, 5])
    full = world.record([1, 2, 3, 4, 5])
    assert (full.reason, full.num_matched, full.num_prompt) == ("full", 5, 5)
    assert full.explain() == "All 5 tokens came from the cache."
    limit = world.record([1, 2, 3, 4, 5], limit=4)
    assert (limit.reason, limit.num_matched) == ("limit", 4)
    assert "4 of 5 tokens" in limit.explain()
    unseen = world.record([1, 2, 9])
    assert (unseen.reason, unseen.num_matched) == ("never_seen", 2)
    assert unseen.explain() == "2 of 3 tokens came from the cache; the next ones have not been seen before."


def test_cache_off() -> None:
    world = World(is_enabled=False)
    world.add([1, 2, 3])
    record = world.record([1, 2, 3])
    assert (record.reason, record.num_matched) == ("cache_off", 0)
    assert "turned off" in record.explain()
    assert world.cache.stats().misses == 3 and world.cache.stats().node_count == 0
    assert world.blocks.num_free == 64


def test_hit_record_of_what_was_evicted_and_cached_again() -> None:
    world = World()
    world.add([1, 2, 3])
    world.cache.evict(1)
    world.now += 42.0
    record = world.record([1, 2, 3])
    assert (record.reason, record.num_matched, record.evicted_seconds_ago) == ("evicted", 0, 42.0)
    assert "evicted 42.0 seconds ago" in record.explain()
    assert world.record([2, 2, 3]).reason == "never_seen"
    world.add([1, 2, 3])
    assert world.record([1, 2, 3]).reason == "full"
    assert not world.cache._trees[Namespace()].ghosts


def test_evictions_are_remembered_at_any_depth() -> None:
    world = World()
    world.add([1, 2, 3, 4, 5, 6])
    world.add([1, 2, 3])  # splits: the lower part is the older leaf
    world.cache.evict(1)
    world.add([1, 9])  # cuts the path before the ghost once more
    assert world.record([1, 2, 3, 4, 5]).reason == "evicted"
    assert world.record([1, 2, 3, 4, 5]).num_matched == 3
    assert world.record([1, 2, 3, 7]).reason == "never_seen"


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
    assert (
        world.cache.evict(1) == world.cache.evict(1) == 1
    )  # 5; then the lower part, which has no block of its own, and 6
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
        theirs.hits,
        theirs.misses,
        theirs.request_hits,
        theirs.evictions,
        theirs.node_count,
        theirs.total_cached,
    )


@pytest.mark.parametrize(("seconds", "said"), [(1.25, "1.2 seconds"), (600.0, "10 minutes"), (36000.0, "10 hours")])
def test_ages_are_readable(seconds: float, said: str) -> None:
    assert f"{said} ago" in HitRecord(2, 1, "evicted", seconds).explain()


def test_between_states_says_from_where_the_rest_is_computed() -> None:
    said = HitRecord(100, 64, "between_states").explain()
    assert said.startswith("64 of 100 tokens came from the cache; the state behind them is the nearest that is kept")
