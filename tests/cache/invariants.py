"""Do the books of a cache, and of the slots of adapters, balance? Everything is counted afresh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import Node, RadixCache
from archerfish.cache.tree import first_token
from archerfish.sched.adapters import AdapterSlots
from archerfish.sched.scheduler import Scheduler


def check_cache(cache: RadixCache, owned: Iterable[Iterable[int]] | None = None) -> None:
    """Raise AssertionError at the first thing that is not as it must be; exactly so with the block lists of all
    sequences."""
    blocks = cache.blocks
    order = cache.order
    num_evictable = cache.num_evictable
    extend_hash = cache._path_hash.extend
    cached: Counter[int] = Counter()  # references of nodes, by block
    num_leaves = found_evictable = 0
    holder: dict[int, Node] = {}  # the topmost node that has the block
    for tree in cache._trees.values():
        num_nodes = num_tokens = evictable_tokens = num_blocks = evictable_blocks = 0
        for node in tree.nodes():
            _check_node(node, blocks.block_size, extend_hash)
            _check_holders(node, holder, blocks.block_size)
            cached.update(node.blocks)
            num_nodes += 1
            num_tokens += node.num_tokens
            num_blocks += node.num_own_blocks
            if not node.lock_count:
                evictable_tokens += node.num_tokens
                evictable_blocks += node.num_own_blocks
            is_unlocked_leaf = not node.lock_count and not node.children
            num_leaves += is_unlocked_leaf
            require(
                (node in order) == is_unlocked_leaf, f"{node!r} is in the eviction order iff it is an unlocked leaf"
            )
        locks = sum(child.lock_count for child in tree.root.children.values())
        require(locks <= tree.root.lock_count, "the root has its children's locks")
        found_evictable += evictable_blocks
        counted = (num_nodes, num_tokens, evictable_tokens, num_blocks, evictable_blocks)
        kept = (tree.num_nodes, tree.num_tokens, tree.evictable_tokens, tree.num_blocks, tree.evictable_blocks)
        require(counted == kept, f"nodes, tokens and blocks, all and evictable ones, are {counted}, kept as {kept}")
    require(len(order) == num_leaves, f"the eviction order has {len(order)} nodes for {num_leaves} unlocked leaves")
    require(found_evictable == num_evictable, f"{found_evictable} blocks are evictable, kept as {num_evictable}")
    _check_references(blocks, cached, owned)


def require(condition: bool, expected: str) -> None:
    assert condition, f"The cache is broken. Expected: {expected}."


def _check_node(node: Node, block_size: int, extend_hash: Callable[..., int]) -> None:
    parent = node.parent
    assert parent is not None
    require(not node.is_stale, f"{node!r} is of this generation")
    require(node.num_tokens > 0 and node.start == parent.end, f"{node!r} begins where its parent {parent!r} ends")
    first = first_token(node.edge)
    require(node.first_token == first and parent.children.get(first) is node, f"{node!r} is found by its first token")
    require(
        len(node.blocks) == -(-node.end // block_size) - node.start // block_size,
        f"{node!r} has the blocks of its tokens",
    )
    require(
        node.lock_count >= sum(child.lock_count for child in node.children.values()),
        f"{node!r} has its children's locks",
    )
    expected = extend_hash(parent.path_hash, node.start, node.edge, 0, node.num_tokens)
    require(node.path_hash == expected, f"{node!r} has the hash of its path")


def _check_holders(node: Node, holder: dict[int, Node], block_size: int) -> None:
    """Only ancestors may have a block of this node, and then only its first one; `shares_first` says so."""
    for index, block in enumerate(node.blocks):
        top = holder.setdefault(block, node)
        is_shared = top is not node
        if index == 0:
            require(
                node.shares_first == is_shared, f"shares_first of {node!r} says whether an ancestor has its first block"
            )
        if is_shared:
            require(index == 0 and node.start % block_size != 0, f"block {block} of {node!r} is its own")
            above = node.parent
            while above is not None and above is not top:
                above = above.parent
            require(above is top, f"block {block} of {node!r} is held by no node but its ancestors, yet {top!r} has it")


def _check_references(blocks: BlockManager, cached: Counter[int], owned: Iterable[Iterable[int]] | None) -> None:
    owners = Counter(block for table in owned or () for block in table)
    num_used = 0
    for block in range(blocks.num_total):
        count, wanted = blocks.ref_count(block), cached[block] + owners[block]
        num_used += count > 0
        is_right = count >= wanted if owned is None else count == wanted
        require(is_right, f"block {block} has {wanted} known owners, not {count}")
    num_free, num_total = blocks.num_free, blocks.num_total
    require(num_free + num_used == num_total, f"{num_free} free + {num_used} used = {num_total} blocks")


def owned_blocks(scheduler: Scheduler) -> list[list[int]]:
    """The blocks of every sequence that holds some, and those that open steps copy from."""
    blocks = [[*seq.blocks, *(seq.draft.states if seq.draft is not None else ())] for seq in scheduler._live.holders()]
    return blocks + [list(step.copied_blocks) for step in scheduler._open.values()]


def check_slots(slots: AdapterSlots) -> None:
    """Free and held slots are all slots, each once, and those in use are ready."""
    held = slots._held.values()
    assert sorted(slot.number for slot in (*slots._free, *held)) == list(range(1, slots.num_slots + 1))
    assert all(slot.num_users >= 0 and (slot.is_ready or not slot.num_users) for slot in held)
