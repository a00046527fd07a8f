from __future__ import annotations

from array import array

import pytest

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.eviction import LFU
from archerfish.cache.radix import Node, RadixCache, RadixKey
from archerfish.cache.tree import PathHash, common_length
from archerfish.errors import InvalidInputError, InvalidOptionError, InvariantError, StaleHandleError
from archerfish.sequence import Namespace, pack_tokens


class World:
    """A cache over blocks of four tokens, filled by sequences that end at once."""

    def __init__(self, block_size: int = 4, policy: str = "lru", num_blocks: int = 64) -> None:
        self.dropped: list[Node] = []
        self.blocks = BlockManager(num_blocks, block_size)
        self.cache = RadixCache(self.blocks, policy=policy, clock=lambda: 0.0, on_drop=self.dropped.append)

    def add(self, tokens: list[int], namespace: str = "") -> tuple[Node, list[int]]:
        taken = self.blocks.allocate(-(-len(tokens) // self.blocks.block_size))
        node = self.cache.insert(RadixKey.with_namespace(tokens, namespace), taken)
        self.blocks.free(taken)
        self.cache.check()
        return node, taken


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


def test_a_split_at_a_block_border_shares_none() -> None:
    world = World()
    lower, taken = world.add(list(range(8)))
    world.add([0, 1, 2, 3, 9])
    assert (lower.start, lower.blocks, lower.shares_first) == (4, taken[1:], False)
    assert world.blocks.ref_count(taken[0]) == world.blocks.ref_count(taken[1]) == 1


def test_a_sequence_that_goes_on_in_a_cached_block_counts_it_once() -> None:
    world = World()
    taken = world.blocks.allocate(2)
    world.cache.insert(RadixKey(range(3)), taken)
    leaf = world.cache.insert(RadixKey(range(6)), taken)
    assert leaf.shares_first and leaf.blocks == taken
    assert world.cache.num_evictable == 2
    world.cache.check([taken])


def test_a_block_of_a_grandparent_counts_once() -> None:
    world = World(block_size=16)
    ours, copy = world.blocks.allocate(1), world.blocks.allocate(1)
    world.cache.insert(RadixKey(range(5)), ours)
    world.cache.insert(RadixKey(range(8)), copy)  # somebody else went on first, in a copy
    leaf = world.cache.insert(RadixKey(range(12)), ours)
    assert leaf.shares_first
    assert world.cache.num_evictable == 2
    world.cache.check([ours, copy])


def test_a_split_keeps_handles_and_locks() -> None:
    world = World()
    node, taken = world.add(list(range(10)))
    match = world.cache.match_prefix(RadixKey(range(10)))
    world.cache.lock(match.node)
    upper, _ = world.add(list(range(6)))
    assert match.node is node and node.lock_count == upper.lock_count == 1
    assert world.cache.evict(64) == 0
    world.cache.unlock(match.node)
    assert node.lock_count == upper.lock_count == 0
    world.cache.check([])
    assert world.cache.evict(64) == 3
    assert sorted(world.blocks.allocate(64)) == list(range(64)) and taken


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
    assert world.cache.evict(64) == 2
    with pytest.raises(StaleHandleError):
        world.cache.lock(deep)


def test_unlocking_what_is_not_locked_is_an_error() -> None:
    world = World()
    node, _ = world.add([1, 2])
    with pytest.raises(InvariantError):
        world.cache.unlock(node)


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


def test_a_policy_may_be_handed_in() -> None:
    blocks = BlockManager(4, 4)
    order = LFU[Node]()
    cache = RadixCache(blocks, policy=order)
    node = cache.insert(RadixKey([1]), blocks.allocate(1))
    assert node in order


def test_a_parent_goes_right_after_its_last_child_when_it_is_as_old() -> None:
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


def test_blocks_of_others_do_not_count_as_freed() -> None:
    world = World()
    taken = world.blocks.allocate(2)
    world.cache.insert(RadixKey(range(8)), taken)
    assert world.cache.evict(1) == 0  # a sequence still owns both
    assert world.blocks.num_free == 62


def test_a_clear_makes_handles_stale_and_leaves_running_sequences_alone() -> None:
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
    world.cache.check([])


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


def test_common_length() -> None:
    data = pack_tokens([9, 1, 2, 3, 300, 5]).tobytes()
    assert common_length(data, 1, pack_tokens([1, 2, 3, 44]).tobytes(), 4) == 3
    assert common_length(data, 1, pack_tokens([1, 2, 3, 300, 6]).tobytes(), 3) == 3
    assert common_length(data, 4, pack_tokens([300 + 256]).tobytes(), 1) == 0


def test_path_hashes_do_not_depend_on_the_cuts() -> None:
    path_hash = PathHash()
    data = pack_tokens(range(9000)).tobytes()
    whole = path_hash.extend(0, 0, data, 0, 9000)
    part = path_hash.extend(0, 0, data, 0, 5)
    assert path_hash.extend(part, 5, data, 5, 8995) == whole
    zeros = pack_tokens([0, 0]).tobytes()
    assert path_hash.extend(0, 0, zeros, 0, 2) != path_hash.extend(0, 0, zeros, 0, 1)


def test_check_finds_what_is_broken() -> None:
    def broken() -> tuple[World, Node]:
        world = World()
        node, _ = world.add(list(range(8)))
        return world, node

    world, node = broken()
    world.cache.order.remove(node)
    with pytest.raises(InvariantError, match="eviction order"):
        world.cache.check()
    world, node = broken()
    world.blocks.share(node.blocks[:1])
    world.cache.check()
    with pytest.raises(InvariantError, match="owners"):
        world.cache.check([])
    world, _ = broken()
    world.cache.num_evictable += 1
    with pytest.raises(InvariantError, match="evictable"):
        world.cache.check()
    world, node = broken()
    world.blocks.free(node.blocks[:1])
    with pytest.raises(InvariantError, match="owners"):
        world.cache.check()
    world, node = broken()
    child, _ = world.add(list(range(12)))
    child.lock_count = 1
    with pytest.raises(InvariantError):
        world.cache.check()
