"""Which cached node goes first. A policy is an order with add, touch, remove and pop; each is O(1) in the three given
here.

The cache keeps three numbers on a node before it calls: `created` and `last_access` (ticks that only grow) and
`num_hits`. Only nodes that may be evicted now stand in the order. A node joins it when it is made, when its last lock
goes, or when its last child has been evicted; in that case it may be older than others that stand there.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from archerfish.errors import InvalidOptionError, refuse_unknown


class Evictable(Protocol):
    """What a policy may read of a node; nodes are compared and hashed by identity."""

    created: int
    last_access: int
    num_hits: int


N = TypeVar("N", bound=Evictable)


class EvictionPolicy(Generic[N]):
    """Base of all policies: nodes in the order in which they are to be evicted."""

    def add(self, node: N) -> None:
        """A node that is not in the order becomes evictable."""
        raise NotImplementedError

    def touch(self, node: N) -> None:
        """A node of the order was matched; its numbers have changed."""
        raise NotImplementedError

    def remove(self, node: N) -> None:
        """A node of the order stops being evictable."""
        raise NotImplementedError

    def pop(self) -> N:
        """Take the first to go out of the order; KeyError when there is none."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __contains__(self, node: object) -> bool:
        raise NotImplementedError


class LRU(EvictionPolicy[N]):
    """Least recently used first.

    Exact but for one case: a parent that outlives its last child, and was used after the oldest of the order, goes to
    the new end instead of the middle, which would have to be searched for.
    """

    _moment = attrgetter("last_access")

    def __init__(self) -> None:
        self._order: OrderedDict[N, None] = OrderedDict()

    def add(self, node: N) -> None:
        order = self._order
        is_oldest = bool(order) and self._moment(node) <= self._moment(next(iter(order)))
        order[node] = None
        if is_oldest:
            order.move_to_end(node, last=False)

    def touch(self, node: N) -> None:
        self._order.move_to_end(node)

    def remove(self, node: N) -> None:
        del self._order[node]

    def pop(self) -> N:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, node: object) -> bool:
        return node in self._order


class FIFO(LRU[N]):
    """First made, first gone; a match changes nothing. A node that was locked joins at one of the ends, as in LRU."""

    _moment = attrgetter("created")

    def touch(self, node: N) -> None:
        pass


class LFU(EvictionPolicy[N]):
    """Least often matched first, the least recent of those before the others. Counts stop at 255."""

    MAX_COUNT = 255

    def __init__(self) -> None:
        self._buckets: list[LRU[N]] = [LRU() for _ in range(self.MAX_COUNT + 1)]
        self._bucket_of: dict[N, LRU[N]] = {}

    def add(self, node: N) -> None:
        self._bucket_of[node] = bucket = self._buckets[min(node.num_hits, self.MAX_COUNT)]
        bucket.add(node)

    def touch(self, node: N) -> None:
        self.remove(node)
        self.add(node)

    def remove(self, node: N) -> None:
        self._bucket_of.pop(node).remove(node)

    def pop(self) -> N:
        node = next(filter(len, self._buckets), self._buckets[0]).pop()
        del self._bucket_of[node]
        return node

    def __len__(self) -> int:
        return len(self._bucket_of)

    def __contains__(self, node: object) -> bool:
        return node in self._bucket_of


_POLICIES: dict[str, type[EvictionPolicy[Any]]] = {"lru": LRU, "lfu": LFU, "fifo": FIFO}


def register_eviction_policy(name: str, cls: type[EvictionPolicy[Any]]) -> None:
    """Make a policy of one's own known by a name. It is made without arguments, once per cache."""
    if not isinstance(cls, type) or not issubclass(cls, EvictionPolicy):
        raise InvalidOptionError(f"An eviction policy must be a subclass of EvictionPolicy, not {cls!r}.")
    if _POLICIES.get(name, cls) is not cls:
        raise InvalidOptionError(f"There is already an eviction policy {name!r}.", hint="Choose another name.")
    _POLICIES[name] = cls


def eviction_policy(name: str) -> EvictionPolicy[Any]:
    """A new, empty order of the policy of that name."""
    refuse_unknown([name], _POLICIES, "eviction policy")
    return _POLICIES[name]()
