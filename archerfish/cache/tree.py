"""The parts of the radix cache: nodes, the tree of a namespace, and what a lookup hands out."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from archerfish.sequence import Namespace

TOKEN_BYTES = array("I").itemsize
TOKEN_TYPE = np.dtype(f"u{TOKEN_BYTES}")


def common_length(data: bytes, start: int, edge: bytes, most: int) -> int:
    """How many of `most` tokens of `data` from token `start` on equal those of `edge`."""
    ours = np.frombuffer(data, TOKEN_TYPE, most, start * TOKEN_BYTES)
    differs = ours != np.frombuffer(edge, TOKEN_TYPE, most)
    first = int(differs.argmax()) if most else 0
    return first if most and differs[first] else most


def first_token(edge: bytes) -> int:
    return int.from_bytes(edge[:TOKEN_BYTES], sys.byteorder)


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """Tokens `start` to `end` of the path from the root, and the blocks that hold them.

    `blocks` covers logical blocks start // B to ceil(end / B) - 1. Where `start` is inside a block, blocks[0] also
    holds the tokens of that block before `start`: it is either a copy of the node's own, or (`shares_first`) the same
    physical block as an ancestor's. Each node has its own reference to each of its blocks.
    """

    tree: Tree
    parent: Node | None
    edge: bytes  # packed tokens
    first_token: int
    start: int
    end: int
    blocks: list[int]
    path_hash: int  # of all tokens up to `end`
    created: int = 0  # ticks that only grow
    last_access: int = 0
    num_hits: int = 0
    shares_first: bool = False
    lock_count: int = 0  # locks on this node and below it
    is_stale: bool = False  # evicted, or its namespace cleared, since it was handed out
    used_at: float = 0.0  # when it was last matched, extended or unlocked, in seconds on the cache's clock
    children: dict[int, Node] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_own_blocks(self) -> int:
        """Blocks that come back when this node goes and everything below it has gone."""
        return len(self.blocks) - self.shares_first

    def __repr__(self) -> str:
        return f"Node({self.start}..{self.end}, blocks={self.blocks}, locks={self.lock_count})"


class Tree:
    """One namespace: its root, its counters, and its ghosts.

    A ghost is the memory of an eviction: (hash of the path before the node, the node's first token) -> when. There is a
    bounded table for each namespace, so that what one forgets does not depend on what another evicts.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.generation = 0
        self.cleared_at: float | None = None
        self.ghosts: OrderedDict[tuple[int, int], float] = OrderedDict()
        self.hit_tokens = self.miss_tokens = self.request_hits = self.request_misses = 0
        self.evictions = self.evicted_tokens = 0
        self.start_over()

    def start_over(self) -> None:
        self.root = Node(self, None, b"", -1, 0, 0, [], 0)
        self.num_nodes = self.num_tokens = self.evictable_tokens = 0
        self.num_blocks = self.evictable_blocks = 0  # evictable: no running sequence needs them
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

    Where num_tokens is no multiple of the block size, the last block is shared with others beyond the match: copy it
    before writing.
    """

    num_tokens: int
    blocks: list[int]  # physical, for ceil(num_tokens / B) logical ones
    node: Node  # the match ends here or, if num_tokens < node.end, inside it
    record: HitRecord


HitReason = Literal["full", "never_seen", "evicted", "cache_off", "adapter_differs", "limit", "between_states"]


@dataclass(slots=True)
class HitRecord:
    """How far a prompt matched and why no further. It depends on nothing that another tenant has cached.

    full: every token. limit: as many as the caller allowed (the engine computes at least one itself, unless it has the
    logits).
    between_states: more of it may be known, but the model's states are kept at some places only, and this is the last
    of them.
    evicted: the next token was cached and had to go. adapter_differs: another adapter of the same tenant has more of
    it. never_seen also stands where what is known of an eviction has been forgotten or dropped by a clear.
    """

    num_prompt: int
    num_matched: int
    reason: HitReason
    evicted_seconds_ago: float | None = None
    generation: int = 0  # how often this namespace has been cleared
    cleared_seconds_ago: float | None = None  # since the last of these

    def explain(self) -> str:
        """One sentence for people."""
        if self.reason == "full":
            return f"All {self.num_prompt:,} tokens came from the cache."
        if self.reason == "cache_off":
            return f"None of {self.num_prompt:,} tokens came from the cache, which is turned off."
        cleared = self.cleared_seconds_ago
        when = "before" if cleared is None else f"since the cache was cleared {_ago(cleared)}"
        rest = {
            "limit": ": all that may, since the last one must be computed to go on from.",
            "evicted": f"; the next ones were evicted {_ago(self.evicted_seconds_ago)} to make room.",
            "between_states": "; the state behind them is the nearest that is kept, and the rest is computed from there.",
            "adapter_differs": "; the next ones are cached under another adapter only, whose results differ.",
            "never_seen": f"; the next ones have not been seen {when}.",
        }
        return f"{self.num_matched:,} of {self.num_prompt:,} tokens came from the cache{rest[self.reason]}"


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "earlier"
    if seconds < 120:
        return f"{seconds:.1f} seconds ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes ago"
    return f"{seconds / 3600:.0f} hours ago"
