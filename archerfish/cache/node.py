"""The parts of the radix cache: nodes, the tree of a namespace, and what a match hands out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from archerfish.cache.hits import HitRecord
from archerfish.cache.key import TOKEN_BYTES
from archerfish.sequence import Namespace


class Node:
    """Tokens `start` to `end` of the path from the root, and the blocks that hold them.

    `blocks` covers logical blocks start // B to ceil(end / B) - 1. Where `start` is inside a block, blocks[0] also holds the
    tokens of that block before `start`: it is either a copy of the node's own, or (`shares_first`) the same physical block as
    an ancestor's. Each node has its own reference to each of its blocks.
    """

    __slots__ = (
        "blocks", "children", "created", "edge", "end", "first_token", "generation", "last_access", "lock_count", "num_hits",
        "parent", "path_hash", "shares_first", "start", "tree",
    )  # fmt: skip

    def __init__(
        self, tree: Tree, parent: Node | None, edge: bytes, first_token: int, start: int, blocks: list[int], path_hash: int,
        tick: int,
    ) -> None:  # fmt: skip
        self.tree = tree
        self.parent = parent
        self.edge = edge  # packed tokens
        self.first_token = first_token
        self.start = start
        self.end = start + len(edge) // TOKEN_BYTES
        self.blocks = blocks
        self.path_hash = path_hash  # of all tokens up to `end`
        self.shares_first = False
        self.children: dict[int, Node] = {}
        self.lock_count = 0  # locks on this node and below it
        self.generation = tree.generation
        self.created = self.last_access = tick
        self.num_hits = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_own_blocks(self) -> int:
        """Blocks that come back when this node goes and everything below it has gone."""
        return len(self.blocks) - self.shares_first

    @property
    def is_stale(self) -> bool:
        """Whether the node was evicted, or its namespace cleared, since it was handed out."""
        return self.generation != self.tree.generation

    def __repr__(self) -> str:
        return f"Node({self.start}..{self.end}, blocks={self.blocks}, locks={self.lock_count})"


class Tree:
    """One namespace: its root, its counters, and its ghosts.

    A ghost is the memory of an eviction: (hash of the path before the node, the node's first token) -> when. There is a bounded
    table for each namespace, so that what one forgets does not depend on what another evicts.
    """

    __slots__ = (
        "cleared_at", "evictable_tokens", "evicted_tokens", "evictions", "generation", "ghosts", "hit_tokens", "miss_tokens",
        "namespace", "num_nodes", "num_tokens", "request_hits", "request_misses", "root",
    )  # fmt: skip

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.generation = 0
        self.cleared_at: float | None = None
        self.ghosts: OrderedDict[tuple[int, int], float] = OrderedDict()
        self.hit_tokens = self.miss_tokens = self.request_hits = self.request_misses = 0
        self.evictions = self.evicted_tokens = 0
        self.start_over()

    def start_over(self) -> None:
        self.root = Node(self, None, b"", -1, 0, [], 0, 0)
        self.num_nodes = self.num_tokens = self.evictable_tokens = 0
        self.ghosts.clear()

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


@dataclass(slots=True)
class Match:
    """The longest cached prefix of a key. Lock it before anything may evict; `blocks` stay valid while it is locked.

    The match ends `offset` tokens into `node`. Where num_tokens is no multiple of the block size, the last block is shared
    with others beyond the match: copy it before writing.
    """

    num_tokens: int
    blocks: list[int]  # physical, for ceil(num_tokens / B) logical ones
    node: Node
    offset: int
    record: HitRecord
    generation: int
