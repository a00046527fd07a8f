"""Logits of contexts that were computed before, so that an exact repeat costs no forward pass.

An entry belongs to the RadixCache node that ends at its context: it goes by age, and when that node goes
(`RadixCache(on_drop=cache.drop)`). A split keeps the lower node, so that an entry stays with the node that ends where its
context ends.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from archerfish.cache.key import RadixKey
from archerfish.cache.node import Node
from archerfish.errors import InvalidOptionError
from archerfish.sequence import pack_tokens


class CacheKey:
    """What logits depend on: the context, the position that they predict, and the state of the model.

    `model_state_hash` is the caller's string for everything else: model, adapter, and the namespace, whose entries nobody
    else may see. `state_hash_of(model, namespace)` makes one. `context_tokens` may be a RadixKey, which is packed already.
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


@dataclass(slots=True)
class _Entry:
    value: Any
    num_bytes: int
    node: Node
    stored: float


class LogitsCache:
    """Opaque values by CacheKey, at most `max_bytes` of them, each for at most `ttl_seconds`; the oldest go first."""

    def __init__(self, max_bytes: int, ttl_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if max_bytes < 0 or not ttl_seconds > 0:
            raise InvalidOptionError(f"max_bytes must be at least 0 and ttl_seconds above 0: {max_bytes}, {ttl_seconds}.")
        self.max_bytes = max_bytes
        self.ttl_seconds = ttl_seconds
        self._clock = clock
        self._entries: OrderedDict[CacheKey, _Entry] = OrderedDict()  # by age: also the order in which they expire
        self._of_node: dict[Node, set[CacheKey]] = {}
        self._num_bytes = self._hits = self._misses = self._evictions = self._expirations = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: CacheKey) -> bool:
        """Whether `get` would find it; counts nothing."""
        entry = self._entries.get(key)
        return entry is not None and not self._is_expired(entry)

    def get(self, key: CacheKey) -> Any | None:
        """The value, or None where there is none or it is too old."""
        entry = self._entries.get(key)
        if entry is not None and self._is_expired(entry):
            self._forget(key)
            self._expirations += 1
            entry = None
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        return entry.value

    def insert(self, key: CacheKey, value: Any, num_bytes: int, node: Node) -> bool:
        """Keep a value as long as `node` lives. False where it is not kept: too large, or the node is gone or a root."""
        if key in self._entries:
            self._forget(key)
        if num_bytes > self.max_bytes or node.is_stale or node.parent is None:
            return False
        while self._num_bytes + num_bytes > self.max_bytes:
            self._forget(next(iter(self._entries)))
            self._evictions += 1
        self._entries[key] = _Entry(value, num_bytes, node, self._clock())
        self._of_node.setdefault(node, set()).add(key)
        self._num_bytes += num_bytes
        return True

    def resize(self, max_bytes: int, ttl_seconds: float) -> None:
        """Other limits from now on, for what is there too: entries that are too old now go, and the oldest that do not fit."""
        if max_bytes < 0 or not ttl_seconds > 0:
            raise InvalidOptionError(f"max_bytes must be at least 0 and ttl_seconds above 0: {max_bytes}, {ttl_seconds}.")
        self.max_bytes, self.ttl_seconds = max_bytes, ttl_seconds
        self.evict_expired()
        while self._num_bytes > max_bytes:
            self._forget(next(iter(self._entries)))
            self._evictions += 1

    def evict_expired(self) -> int:
        """Drop what is too old; returns how many."""
        count = 0
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if not self._is_expired(entry):
                break
            self._forget(key)
            count += 1
        self._expirations += count
        return count

    def drop(self, node: Node) -> None:
        """Drop what belongs to a node that has gone."""
        for key in list(self._of_node.get(node, ())):
            self._forget(key)
            self._evictions += 1

    def get_stats(self) -> LogitsCacheStats:
        return LogitsCacheStats(
            self._hits, self._misses, len(self._entries), self._num_bytes, self._evictions, self._expirations
        )  # fmt: skip

    def _is_expired(self, entry: _Entry) -> bool:
        return self._clock() - entry.stored >= self.ttl_seconds

    def _forget(self, key: CacheKey) -> None:
        entry = self._entries.pop(key)
        self._num_bytes -= entry.num_bytes
        keys = self._of_node[entry.node]
        keys.discard(key)
        if not keys:
            del self._of_node[entry.node]
