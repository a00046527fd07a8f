"""The prefix cache: one radix tree of tokens per namespace, whose nodes own blocks of KV.

How a sequence uses it: `match_prefix`, `lock` the match, `BlockManager.share` the full blocks that it reads (copying
the last one where the match ends inside a block), allocate the rest, compute. When it has computed more that is worth
keeping: `insert`, lock the new node, unlock the old one. When it ends: insert, unlock, free its blocks.

A sequence has references of its own to all of its blocks, and locks the path of those that are in the tree. So a clear
takes nothing from under a running sequence, and `num_evictable` is exactly what `evict` can bring back.

After `clear`, nodes from before it are stale. `lock` and `insert` with one raise StaleHandleError: its KV may be of
other weights. `unlock` of one does nothing, so that a sequence that ran through a clear ends as any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.digest import ModelDigest, PathHash
from archerfish.cache.eviction import FIFO, EvictionPolicy, eviction_policy
from archerfish.cache.tree import TOKEN_BYTES, HitRecord, Match, Node, Tree, common_length, first_token
from archerfish.errors import InvalidInputError, InvariantError, StaleHandleError
from archerfish.sequence import Namespace, RadixKey, as_namespace

__all__ = ["CacheStats", "HitRecord", "Match", "Node", "RadixCache", "RadixKey"]

# Other adapters of a tenant that are searched to distinguish "adapter_differs" from "never_seen".
MAX_ADAPTERS_COMPARED = 16
STALE = "This cache handle is stale: its node was cleared or evicted."


@dataclass(slots=True, frozen=True)
class CacheStats:
    """Counters of a RadixCache, or of one namespace of it. Sizes, hits and misses are in tokens."""

    hit_rate: float  # hits / (hits + misses); 0 before the first request
    hits: int  # prompt tokens that were found
    misses: int  # prompt tokens that were not
    request_hits: int  # requests with at least one token found
    request_misses: int
    evictable_size: int  # cached, and no running sequence needs it
    protected_size: int  # cached and locked
    total_cached: int
    total_capacity: int  # of all blocks; the same for every namespace
    evictions: int  # nodes evicted
    evicted_tokens: int
    node_count: int
    utilization: float  # total_cached / total_capacity


class RadixCache:
    """Longest-prefix lookup over blocks, shared by all sequences of an engine. Not for several threads at once."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        policy: str | EvictionPolicy[Any] = "lru",
        is_enabled: bool = True,
        whole_blocks: bool = False,
        clock: Callable[[], float] = time.monotonic,
        on_drop: Callable[[Node], None] | None = None,
        num_ghosts: int = 8192,
    ) -> None:
        """`on_drop` is called with every node that goes; `num_ghosts` evictions are remembered for each namespace.

        `whole_blocks`: a block holds a state, which cannot be used in part, so that a match ends where a block does.
        """
        self.blocks = blocks
        self.block_size = blocks.block_size
        self.is_enabled = is_enabled
        self.whole_blocks = whole_blocks
        self.order: EvictionPolicy[Node] = eviction_policy(policy) if isinstance(policy, str) else policy
        self.num_evictable = 0  # blocks that evict() can bring back
        self.digest: ModelDigest | None = None  # where the cached prefixes are published, if there are routers
        self._clock = clock
        self._on_drop = on_drop
        self._num_ghosts = num_ghosts
        self._path_hash = PathHash()
        self._tick = 0
        self._trees: dict[Namespace, Tree] = {}
        self._trees_of_tenant: dict[str, list[Tree]] = {}

    # Lookup

    def match_prefix(self, key: RadixKey, *, limit: int | None = None, counts: bool = True) -> Match:
        """The longest cached prefix of at most `limit` tokens. Its nodes become the most recent ones.

        `counts=False` leaves the counters alone: for a request that is looked up again before it could be admitted.
        """
        tree = self._trees.get(key.namespace) or self._add_tree(key.namespace)
        node, matched, record = self._find(tree, key, limit)
        if counts:
            tree.hit_tokens += matched
            tree.miss_tokens += record.num_prompt - matched
            tree.request_hits += matched > 0
            tree.request_misses += matched == 0
        if node.parent is not None:
            self._touch(node, num_hits=1)
        size = self.block_size
        missing = -(-matched // size)  # logical blocks below this one are still to be found
        parts: list[list[int]] = []
        current: Node | None = node
        while current is not None and missing:  # where several nodes have a block, the deepest wins
            first = current.start // size
            if first < missing:
                parts.append(current.blocks[: missing - first])
                missing = first
            current = current.parent
        return Match(matched, list(chain.from_iterable(reversed(parts))), node, record)

    def peek(self, key: RadixKey) -> int:
        """How many tokens match_prefix would find; changes nothing."""
        tree = self._trees.get(key.namespace)
        if tree is None or not self.is_enabled:
            return 0
        matched = self._descend(tree, key, len(key.tokens))[1]
        return matched - matched % self.block_size if self.whole_blocks else matched

    def explain(self, key: RadixKey, *, limit: int | None = None) -> HitRecord:
        """The record that match_prefix would give; changes neither recency nor counters."""
        return self._find(self._trees.get(key.namespace) or Tree(key.namespace), key, limit)[2]

    # Growth

    def insert(self, key: RadixKey, blocks: Sequence[int], *, handle: Node | None = None) -> Node:
        """Cache a path whose tokens i * B to (i + 1) * B are in blocks[i]. Returns the node that ends where the key
        ends.

        The tree takes a reference of its own to the blocks of the new part; those of a part that it has already stay
        the caller's alone. With `handle` (what the sequence has locked) it is refused if the namespace was cleared
        meanwhile.
        """
        if handle is not None and handle.is_stale:
            raise StaleHandleError(STALE)
        tree = self._trees.get(key.namespace) or self._add_tree(key.namespace)
        if not self.is_enabled:
            return tree.root
        length, size = len(key.tokens), self.block_size
        if len(blocks) * size < length:
            raise InvalidInputError(f"{length} tokens need {-(-length // size)} blocks of {size}, not {len(blocks)}.")
        node, matched = self._descend(tree, key, length)
        if matched < node.end:
            node = self._split(node, matched - node.start)
        if matched < length:
            parent = node
            first = key.tokens[matched]
            own = list(blocks[matched // size : -(-length // size)])
            self.blocks.share(own)
            path_hash = self._path_hash.extend(parent.path_hash, matched, key.data, matched, length - matched)
            if self.digest is not None:
                added = self._path_hash.prefixes(parent.path_hash, matched, key.data, matched, length - matched)
                self.digest.add(key.namespace, added)
            self._tick += 1
            edge, tick = key.data[matched * TOKEN_BYTES :], self._tick
            node = Node(tree, parent, edge, first, matched, length, own, path_hash, tick, tick)
            above: Node | None = parent
            while above is not None and above.end > matched - matched % size and not node.shares_first:
                node.shares_first = above.blocks[-1] == own[0]  # the block that the new node begins inside of
                above = above.parent
            if parent.parent is not None and not parent.children and not parent.lock_count:
                self.order.remove(parent)
            parent.children[first] = node
            tree.num_nodes += 1
            tree.num_tokens += length - matched
            tree.num_blocks += node.num_own_blocks
            self._count_evictable(node, 1)
            tree.ghosts.pop((parent.path_hash, first), None)
            self.order.add(node)
        if node.parent is not None:
            self._touch(node)
        return node

    # Protection

    def lock(self, node: Node) -> None:
        """Keep a node and its ancestors from being evicted, until as many calls of unlock."""
        if node.is_stale:
            raise StaleHandleError(STALE)
        if not node.lock_count and not node.children and node.parent is not None:
            self.order.remove(node)
        current: Node | None = node
        while current is not None:
            if not current.lock_count:
                self._count_evictable(current, -1)
            current.lock_count += 1
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one lock; counts as a use of the path. Of a node from before a clear: nothing happens."""
        if node.is_stale:
            return
        if not node.lock_count:
            raise InvariantError(f"{node!r} is unlocked but was not locked.")
        self._tick += 1
        now = self._clock()
        current: Node | None = node
        while current is not None:
            current.lock_count -= 1
            current.last_access, current.used_at = self._tick, now
            if not current.lock_count:
                self._count_evictable(current, 1)
            current = current.parent
        if not node.lock_count and not node.children and node.parent is not None:
            self.order.add(node)

    # Removal

    def evict(self, num_blocks: int) -> int:
        """Drop unlocked leaves in the policy's order until that many blocks have come back, or no leaf is left.

        Returns how many blocks came back: more than asked where the last leaf had more.
        """
        freed = 0
        while freed < num_blocks and len(self.order):
            freed += self._evict_leaf(self.order.pop())
        return freed

    def clear(self, namespace: str | Namespace | None = None) -> None:
        """Forget everything in a namespace (a string: the tenant's without an adapter), or in all of them.

        Locked nodes go too: the sequences that locked them keep their own references to the blocks.
        """
        for tree in self._trees_of(namespace):
            tree.generation += 1
            tree.cleared_at = self._clock()
            tree.root.is_stale = True
            for node in tree.nodes():
                node.is_stale = True
                if not node.lock_count:
                    self.num_evictable -= node.num_own_blocks
                    if not node.children:
                        self.order.remove(node)
                self.blocks.free(node.blocks)
                self._drop(node)
            tree.start_over()

    def set_policy(self, policy: str) -> None:
        """Evict in another order from now on. What can be evicted is sorted once, which takes a moment if it is
        much."""
        order: EvictionPolicy[Node] = eviction_policy(policy)
        nodes = [self.order.pop() for _ in range(len(self.order))]
        nodes.sort(key=(lambda node: node.created) if isinstance(order, FIFO) else (lambda node: node.last_access))
        for node in nodes:
            order.add(node)
        self.order = order

    # Figures

    def stats(self, namespace: str | Namespace | None = None) -> CacheStats:
        """Counters since the start, and sizes now, of one namespace or of all."""
        trees = self._trees_of(namespace)
        hits, misses = sum(t.hit_tokens for t in trees), sum(t.miss_tokens for t in trees)
        cached, evictable = sum(t.num_tokens for t in trees), sum(t.evictable_tokens for t in trees)
        capacity = self.blocks.num_total * self.block_size
        return CacheStats(
            hit_rate=hits / (hits + misses) if hits + misses else 0.0,
            hits=hits,
            misses=misses,
            request_hits=sum(t.request_hits for t in trees),
            request_misses=sum(t.request_misses for t in trees),
            evictable_size=evictable,
            protected_size=cached - evictable,
            total_cached=cached,
            total_capacity=capacity,
            evictions=sum(t.evictions for t in trees),
            evicted_tokens=sum(t.evicted_tokens for t in trees),
            node_count=sum(t.num_nodes for t in trees),
            utilization=cached / capacity,
        )

    def trees_of_tenant(self, tenant: str) -> list[Tree]:
        return self._trees_of_tenant.get(tenant, [])

    # Inside

    def _add_tree(self, namespace: Namespace) -> Tree:
        tree = self._trees[namespace] = Tree(namespace)
        self._trees_of_tenant.setdefault(namespace.tenant, []).append(tree)
        return tree

    def _trees_of(self, namespace: str | Namespace | None) -> list[Tree]:
        if namespace is None:
            return list(self._trees.values())
        tree = self._trees.get(as_namespace(namespace))
        return [] if tree is None else [tree]

    def _find(self, tree: Tree, key: RadixKey, limit: int | None) -> tuple[Node, int, HitRecord]:
        """What `_descend` gives, cut to whole blocks if only those can be used, and why it is no more."""
        length, size = len(key.tokens), self.block_size
        most = length if limit is None else max(0, min(limit, length))
        node, matched = self._descend(tree, key, most) if self.is_enabled else (tree.root, 0)
        record = HitRecord(length, matched, "never_seen", generation=tree.generation)
        if tree.cleared_at is not None:
            record.cleared_seconds_ago = self._clock() - tree.cleared_at
        if not self.is_enabled:
            record.reason = "cache_off"
        elif self.whole_blocks and (matched % size or 0 < most - matched < size):  # no state can lie behind it
            record.reason = "between_states"
            record.num_matched = matched = matched - matched % size
            while node.parent is not None and matched <= node.start:
                node = node.parent
        elif matched == length:
            record.reason = "full"
        elif matched == most:
            record.reason = "limit"
        else:
            self._explain_end(record, tree, key, node)
        return node, matched, record

    def _explain_end(self, record: HitRecord, tree: Tree, key: RadixKey, node: Node) -> None:
        """Find out whether the next token was cached and evicted, or is cached under another adapter."""
        matched, path_hash = record.num_matched, node.path_hash
        if tree.ghosts and matched < node.end and node.parent is not None:
            path_hash = self._path_hash.extend(node.parent.path_hash, node.start, node.edge, 0, matched - node.start)
        evicted_at = tree.ghosts.get((path_hash, key.tokens[matched]))
        if evicted_at is not None:
            record.reason, record.evicted_seconds_ago = "evicted", self._clock() - evicted_at
            return
        others = self.trees_of_tenant(tree.namespace.tenant)[-MAX_ADAPTERS_COMPARED:]
        if any(other is not tree and self._descend(other, key, matched + 1)[1] > matched for other in others):
            record.reason = "adapter_differs"

    @staticmethod
    def _descend(tree: Tree, key: RadixKey, limit: int) -> tuple[Node, int]:
        """The deepest node that shares a token with the key, and how many tokens of the key are cached."""
        node, matched = tree.root, 0
        tokens, data = key.tokens, key.data
        while matched < limit:
            child = node.children.get(tokens[matched])
            if child is None:
                break
            if child.end <= limit and data.startswith(child.edge, matched * TOKEN_BYTES):
                node, matched = child, child.end
                continue
            return child, matched + common_length(data, matched, child.edge, min(child.end, limit) - matched)
        return node, matched

    def _count_evictable(self, node: Node, sign: int) -> None:
        """No running sequence needs a node any more; with a sign of -1, one does, or it goes."""
        num_blocks = sign * node.num_own_blocks
        self.num_evictable += num_blocks
        node.tree.evictable_blocks += num_blocks
        node.tree.evictable_tokens += sign * node.num_tokens

    def _touch(self, node: Node, num_hits: int = 0) -> None:
        self._tick += 1
        tick, now = self._tick, self._clock()
        current = node
        while current.parent is not None:
            current.last_access, current.used_at = tick, now
            current.num_hits += num_hits
            current = current.parent
        if not node.lock_count and not node.children:
            self.order.touch(node)

    def _split(self, node: Node, offset: int) -> Node:
        """Cut a node in two; returns the upper one. It stays the lower, so that handles and locks mean the whole
        path."""
        parent, size = node.parent, self.block_size
        assert parent is not None and 0 < offset < node.num_tokens
        cut = node.start + offset
        first = node.start // size
        edge = node.edge[: offset * TOKEN_BYTES]
        path_hash = self._path_hash.extend(parent.path_hash, node.start, edge, 0, offset)
        above = node.blocks[: -(-cut // size) - first]
        upper = Node(
            node.tree,
            parent,
            edge,
            node.first_token,
            node.start,
            cut,
            above,
            path_hash,
            node.created,
            node.last_access,
            node.num_hits,
            node.shares_first,
            node.lock_count,
            used_at=node.used_at,
        )
        parent.children[node.first_token] = upper

        node.parent, node.start = upper, cut
        node.edge = node.edge[offset * TOKEN_BYTES :]
        node.first_token = first_token(node.edge)
        node.blocks = node.blocks[cut // size - first :]
        node.shares_first = cut % size != 0
        if node.shares_first:
            self.blocks.share(node.blocks[:1])
        upper.children[node.first_token] = node
        node.tree.num_nodes += 1
        return upper

    def _evict_leaf(self, node: Node) -> int:
        parent, tree = node.parent, node.tree
        assert parent is not None
        del parent.children[node.first_token]
        if not parent.children and not parent.lock_count and parent.parent is not None:
            self.order.add(parent)
        self._count_evictable(node, -1)
        tree.num_blocks -= node.num_own_blocks
        tree.num_nodes -= 1
        tree.num_tokens -= node.num_tokens
        tree.evictions += 1
        tree.evicted_tokens += node.num_tokens
        ghost = (parent.path_hash, node.first_token)
        tree.ghosts[ghost] = self._clock()
        tree.ghosts.move_to_end(ghost)
        if len(tree.ghosts) > self._num_ghosts:
            tree.ghosts.popitem(last=False)
        self._drop(node)
        node.is_stale, node.parent = True, None
        return self.blocks.free(node.blocks)

    def _drop(self, node: Node) -> None:
        """Tell others of a node that goes."""
        if self.digest is not None and node.parent is not None:
            hashes = self._path_hash.prefixes(node.parent.path_hash, node.start, node.edge, 0, node.num_tokens)
            self.digest.remove(node.tree.namespace, hashes)
        if self._on_drop is not None:
            self._on_drop(node)
