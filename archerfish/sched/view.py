"""What one tenant may see of the memory and of its own part of the prefix cache, found in bounded time for a live
view."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from archerfish.cache.tree import TOKEN_BYTES, Node, Tree
from archerfish.sched.live import LiveSequences

MAX_NODES = 120  # of the tree that are shown
MAX_LOOKED_AT = 1000  # nodes, to choose these from
MAX_CHILDREN = 128  # of one node that are looked at: the oldest and the newest ones
MAX_TREES = 16  # of one tenant: its adapters
MAX_PREVIEW = 48  # tokens of a node
MAX_MAPPED = 16_384  # blocks of a pool that is shown in the order of memory
KINDS = ("free", "cached", "running")  # of blocks in memory, by their numbers in `_map`
Run = tuple[str, int]  # so many blocks, one after another, of one kind


def cache_view(live: LiveSequences, tenant: str, now: float, *, sees_all: bool) -> dict[str, Any]:
    """Blocks by kind, the tree, and sequences and prompt tokens by what became of them.

    sees_all: an operator, or any caller of a server without keys. For others nothing here depends on other tenants:
    "hidden" blocks are free or those of others.
    """
    cache, counts = live.cache, live.counts_by_tenant()
    trees = cache.trees_of_tenant(tenant)
    own = counts.get(tenant, {"waiting": 0, "running": 0})
    if sees_all:
        own = {name: sum(one[name] for one in counts.values()) for name in own}
    runs, order = _runs(live, tenant, trees, sees_all=sees_all)
    num_running = sum(count for kind, count in runs if kind == "running")
    found = cache.stats() if sees_all else None
    return {
        "blocks": {
            "total": live.blocks.num_total,
            "block_tokens": live.blocks.block_size,
            "order": order,
            "runs": runs,
        },
        "nodes": list(_nodes(trees, now)),
        "num_nodes": sum(tree.num_nodes for tree in trees),
        "num_running": own["running"],
        "num_waiting": own["waiting"],
        "kv_usage": (live.num_needed if sees_all else num_running) / live.blocks.num_total,
        "cached_tokens": sum(tree.hit_tokens for tree in trees) if found is None else found.hits,
        "computed_tokens": sum(tree.miss_tokens for tree in trees) if found is None else found.misses,
    }


def _runs(live: LiveSequences, tenant: str, trees: list[Tree], *, sees_all: bool) -> tuple[list[Run], str]:
    """The blocks, in the order of memory where all of them are the caller's and they are not too many, else by kind."""
    total = live.blocks.num_total
    if sees_all and not tenant:
        if total <= MAX_MAPPED:
            return _map(live), "memory"
        kinds = {"running": live.num_needed, "cached": live.cache.num_evictable, "free": live.blocks.num_free}
    else:
        num_cached = sum(tree.evictable_blocks for tree in trees)
        num_locked = sum(tree.num_blocks - tree.evictable_blocks for tree in trees)
        num_own = sum(
            len(seq.blocks) - live.num_shared_blocks(seq) + (len(seq.draft.states) if seq.draft is not None else 0)
            for seq in live.holders()
            if seq.request.namespace.tenant == tenant
        )
        num_running = min(num_locked + num_own, total - num_cached)
        kinds = {"running": num_running, "cached": num_cached}
        rest = total - num_cached - num_running
        num_free = min(live.blocks.num_free, rest)
        kinds |= {"others": rest - num_free, "free": num_free} if sees_all else {"hidden": rest}
    return [(kind, count) for kind, count in kinds.items() if count], "kind"


def _map(live: LiveSequences) -> list[Run]:
    """Every block of the pool; those that sequences hold, or keep from being evicted, are running."""
    running: list[int] = []
    seen: set[Node] = set()
    for seq in live.holders():
        running += seq.draft.states if seq.draft is not None else []
        running += seq.blocks[live.num_shared_blocks(seq) :]
        node: Node | None = None if seq.node.is_stale else seq.node
        while node is not None and node not in seen:
            seen.add(node)
            running += node.blocks
            node = node.parent
    kinds = np.minimum(np.array(live.blocks.ref_counts, np.int64), 1)
    kinds[running] = 2
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    lengths = np.diff(starts, append=len(kinds))
    return [(KINDS[kind], length) for kind, length in zip(kinds[starts].tolist(), lengths.tolist(), strict=True)]


def _nodes(trees: list[Tree], now: float) -> Iterator[dict[str, Any]]:
    """The most recent nodes of the trees, each behind its parent; `parent` is its place among them, -1 for the first
    ones."""
    numbers, num_left = itertools.count(), MAX_LOOKED_AT
    candidates: list[tuple[int, int, Node, int]] = []

    def look_at(parent: Node, place: int) -> None:
        nonlocal num_left
        children, most = parent.children.values(), min(MAX_CHILDREN, num_left) // 2
        few = children if len(children) <= 2 * most else (*itertools.islice(children, most), *_last(parent, most))
        num_left -= len(few)
        for child in few:
            heapq.heappush(candidates, (-child.last_access, next(numbers), child, place))

    for tree in trees[-MAX_TREES:]:
        look_at(tree.root, -1)
    for place in range(MAX_NODES):
        if not candidates:
            return
        *_, node, parent = heapq.heappop(candidates)
        look_at(node, place)
        preview = array("I", node.edge[: MAX_PREVIEW * TOKEN_BYTES])
        yield {
            "parent": parent,
            "start": node.start,
            "end": node.end,
            "hits": node.num_hits,
            "locks": node.lock_count,
            "num_children": len(node.children),
            "age_s": round(max(0.0, now - node.used_at), 1),
            "adapter": node.tree.namespace.adapter,
            "preview": preview.tolist(),
        }


def _last(parent: Node, count: int) -> Iterator[Node]:
    return itertools.islice(reversed(parent.children.values()), count)
