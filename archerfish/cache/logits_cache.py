"""Logits of contexts that were computed before, so that an exact repeat costs no forward pass.

An entry of an engine belongs to the RadixCache node that ends at its context: it goes by age, and when that node goes
(`RadixCache(on_drop=cache.drop)`). A split keeps the lower node, so that an entry stays with the node that ends where its
context ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from archerfish.cache.adaptive import AdaptiveCache
from archerfish.cache.key import RadixKey
from archerfish.cache.node import Node
from archerfish.errors import InvalidInputError
from archerfish.sequence import pack_tokens


class CacheKey:
    """What logits depend on: the context, the position that they predict, and the state of the model.

    `model_state_hash` is the caller's string for everything else: model, adapter, and the namespace, since namespaces share no
    entries. `state_hash_of(model, namespace)` makes one. `context_tokens` may be a RadixKey, which is packed already.
    """

    __slots__ = ("_hash", "context_tokens", "model_state_hash", "position")

    def __init__(self, context_tokens: Sequence[int] | RadixKey, position: int, model_state_hash: str) -> None:
        if isinstance(context_tokens, RadixKey):
            self.context_tokens = context_tokens.data
        else:
            self.context_tokens = pack_tokens(context_tokens).tobytes()
        self.position = position
        self.model_state_hash = model_state_hash
        self._hash = hash((self.context_tokens, position, model_state_hash))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CacheKey) and self.position == other.position and self.context_tokens == other.context_tokens
            and self.model_state_hash == other.model_state_hash
        )  # fmt: skip


def state_hash_of(model: str, namespace: Sequence[str]) -> str:
    """A `model_state_hash` that no two namespaces share, whatever their names hold."""
    return "".join(f"{len(part)}:{part}" for part in (model, *namespace))


@dataclass(slots=True, frozen=True)
class LogitsCacheStats:
    """Counters of a LogitsCache."""

    hits: int
    misses: int
    entries: int
    bytes: int
    evictions: int  # gone for room, or with their node
    expirations: int
    refusals: int  # not kept: too large, or not worth it


@dataclass(slots=True)
class _Kept:
    value: Any
    node: Node | None


class LogitsCache:
    """Opaque values by CacheKey, at most `max_bytes` of them, each for at most `ttl_seconds`.

    What is kept and what goes first is up to an AdaptiveCache: contexts that are never repeated take no room from others.
    """

    def __init__(self, max_bytes: int, ttl_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept: AdaptiveCache[CacheKey, _Kept] = AdaptiveCache(
            max_bytes, ttl_seconds, clock=clock, on_drop=self._leave
        )
        self._of_node: dict[Node, set[CacheKey]] = {}
        self._num_dropped = 0  # with their node
        self.on_drop: Callable[[Any], None] | None = None  # called with every value that goes, for whatever reason

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: CacheKey) -> bool:
        """Whether `get` would find it; counts nothing."""
        return key in self._kept

    @property
    def max_bytes(self) -> int:
        return self._kept.max_bytes

    @property
    def ttl_seconds(self) -> float:
        return self._kept.ttl_seconds

    def get(self, key: CacheKey) -> Any | None:
        """The value, or None where there is none or it is too old."""
        found = self._kept.get(key)
        return None if found is None else found.value

    def should_cache(self, key: CacheKey) -> bool:
        """Whether logits of this context, which `get` has just not found, are worth keeping."""
        return self._kept.should_cache(key)

    def insert(self, key: CacheKey, value: Any, num_bytes: int | None = None, node: Node | None = None) -> bool:
        """Keep a value, as long as `node` lives if there is one. False: too large, not worth it, or the node is gone or a root.

        num_bytes: left out, what an array or a tensor says of itself.
        """
        if num_bytes is None:
            num_bytes = getattr(value, "nbytes", None)
            if num_bytes is None:
                raise InvalidInputError(f"A {type(value).__name__} does not say its size.", hint="Give num_bytes too.")
        if node is not None and (node.is_stale or node.parent is None):
            self._kept.discard(key)
            return False
        is_kept = self._kept.insert(key, _Kept(value, node), num_bytes)
        if is_kept and node is not None:
            self._of_node.setdefault(node, set()).add(key)
        return is_kept

    def resize(self, max_bytes: int, ttl_seconds: float) -> None:
        """Other limits from now on, for what is there too: entries that are too old now go, and those that do not fit."""
        self._kept.resize(max_bytes, ttl_seconds)

    def evict_expired(self, max_age_s: float | None = None) -> int:
        """Drop what is too old, or older than max_age_s; returns how many."""
        return self._kept.evict_expired(max_age_s)

    def drop(self, node: Node) -> None:
        """Drop what belongs to a node that has gone."""
        for key in list(self._of_node.get(node, ())):
            self._kept.discard(key)
            self._num_dropped += 1

    def get_stats(self) -> LogitsCacheStats:
        found = self._kept.get_stats()
        return LogitsCacheStats(
            found.hits, found.misses, found.entries, found.bytes, found.evictions + self._num_dropped, found.expirations,
            found.refusals,
        )  # fmt: skip

    def _leave(self, key: CacheKey, kept: _Kept) -> None:
        if self.on_drop is not None:
            self.on_drop(kept.value)
        if kept.node is None:
            return
        keys = self._of_node[kept.node]
        keys.discard(key)
        if not keys:
            del self._of_node[kept.node]
