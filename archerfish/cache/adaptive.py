"""AdaptiveCache keeps less of what does not repeat, by its recent hit rate. LogitsCache is one for logits of
contexts."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, Generic, TypeVar

from archerfish.cache.tree import Node
from archerfish.errors import InvalidInputError, InvalidOptionError
from archerfish.sequence import RadixKey

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, frozen=True)
class AdaptiveCacheStats:
    """Counters of an AdaptiveCache."""

    hits: int
    misses: int
    hit_rate: float  # of the window
    entries: int
    bytes: int
    evictions: int  # gone for room
    expirations: int
    refusals: int  # not kept: too large, or not worth it


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    num_bytes: int
    stored: float
    used: int  # the tick of its last hit, or of when it was stored
    is_proven: bool = False  # hit at least once


class AdaptiveCache(Generic[K, V]):
    """Values by key, at most `max_bytes` of them, each for at most `ttl_seconds`; every operation in constant time.

    While the hit rate of a full window is below `min_hit_rate`, a key is kept only when it is asked for a second time,
    and entries that were never hit go before all others. Otherwise all keys are kept, and the least recently used go
    first. So what does not repeat takes no room from what does, and a low rate ends when requests begin to repeat.
    """

    def __init__(
        self,
        max_bytes: int,
        ttl_seconds: float,
        *,
        window_size: int = 256,
        min_hit_rate: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if window_size < 1 or not 0 <= min_hit_rate <= 1:
            raise InvalidOptionError(
                f"window_size must be at least 1 and min_hit_rate from 0 to 1: {window_size}, {min_hit_rate}."
            )
        self.min_hit_rate = min_hit_rate
        self._set_limits(max_bytes, ttl_seconds)
        self._clock = clock
        self._window: deque[bool] = deque(maxlen=window_size)  # whether each of the last lookups found something
        self._num_window_hits = 0
        self._num_missed_kept = 4 * window_size
        self._missed: OrderedDict[int, int] = OrderedDict()  # hashes of keys -> how often not found, least recent first
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()  # by age: also the order in which they expire
        self._fresh: OrderedDict[K, None] = OrderedDict()  # never hit, oldest first
        self._proven: OrderedDict[K, None] = OrderedDict()  # hit, least recently hit first
        self._tick = self.num_bytes = 0
        self._hits = self._misses = self._evictions = self._expirations = self._refusals = 0

    def _set_limits(self, max_bytes: int, ttl_seconds: float) -> None:
        if max_bytes < 0 or not ttl_seconds > 0:
            raise InvalidOptionError(
                f"max_bytes must be at least 0 and ttl_seconds above 0: {max_bytes}, {ttl_seconds}."
            )
        self.max_bytes = max_bytes
        self.ttl_seconds = ttl_seconds

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        """Whether `get` would find it; counts nothing."""
        entry = self._entries.get(key)
        return entry is not None and self._clock() - entry.stored < self.ttl_seconds

    @property
    def hit_rate(self) -> float:
        """Share of hits among the last lookups."""
        return self._num_window_hits / len(self._window) if self._window else 0.0

    @property
    def is_of_little_use(self) -> bool:
        return len(self._window) == self._window.maxlen and self.hit_rate < self.min_hit_rate

    # Use

    def get(self, key: K, max_age_s: float | None = None) -> V | None:
        """The value, or None where there is none or it is too old. max_age_s: for this caller; others may still have
        it."""
        entry, now = self._entries.get(key), self._clock()
        if entry is not None and now - entry.stored >= self.ttl_seconds:
            self.discard(key)
            self._expirations += 1
            entry = None
        is_hit = entry is not None and (max_age_s is None or now - entry.stored <= max_age_s)
        if len(self._window) == self._window.maxlen:
            self._num_window_hits -= self._window[0]
        self._window.append(is_hit)
        self._num_window_hits += is_hit
        if entry is None or not is_hit:
            self._misses += 1
            mark = hash(key)
            self._missed[mark] = self._missed.get(mark, 0) + 1
            self._missed.move_to_end(mark)
            if len(self._missed) > self._num_missed_kept:
                self._missed.popitem(last=False)
            return None
        self._hits += 1
        self._tick += 1
        entry.used = self._tick
        if not entry.is_proven:
            entry.is_proven = True
            del self._fresh[key]
        self._proven[key] = None
        self._proven.move_to_end(key)
        return entry.value

    def should_cache(self, key: K) -> bool:
        """Whether a value of this key, which `get` has just not found, is worth keeping."""
        return not self.is_of_little_use or self._missed.get(hash(key), 0) > 1

    def insert(self, key: K, value: V, num_bytes: int) -> bool:
        """Keep a value, in place of an older one of its key. False where it is not kept: too large, or not worth it."""
        is_known = key in self._entries
        self.discard(key)
        if num_bytes > self.max_bytes or not (is_known or self.should_cache(key)):
            self._refusals += 1
            return False
        self.evict_expired()
        self.adaptive_eviction(num_bytes)
        self._tick += 1
        self._entries[key] = _Entry(value, num_bytes, self._clock(), self._tick)
        self._fresh[key] = None
        self.num_bytes += num_bytes
        return True

    def adaptive_eviction(self, num_bytes: int) -> int:
        """Make room for so many bytes; returns how many entries went."""
        count = 0
        while self._entries and self.num_bytes + num_bytes > self.max_bytes:
            key = next(iter(self._fresh or self._proven))
            if self._fresh and self._proven and not self.is_of_little_use:
                proven = next(iter(self._proven))
                key = key if self._entries[key].used < self._entries[proven].used else proven
            self.discard(key)
            count += 1
        self._evictions += count
        return count

    def evict_expired(self, max_age_s: float | None = None) -> int:
        """Drop what is too old, or for once what has reached max_age_s; returns how many."""
        if max_age_s is not None and not max_age_s >= 0:
            raise InvalidOptionError(f"max_age_s must be at least 0, not {max_age_s}.")
        oldest = self.ttl_seconds if max_age_s is None else min(max_age_s, self.ttl_seconds)
        now = self._clock()
        expired = [key for key, _ in takewhile(lambda item: now - item[1].stored >= oldest, self._entries.items())]
        for key in expired:
            self.discard(key)
        self._expirations += len(expired)
        return len(expired)

    def discard(self, key: K) -> None:
        """Drop an entry, if there is one of this key. Every entry that goes passes through here."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
            del (self._proven if entry.is_proven else self._fresh)[key]

    def resize(self, max_bytes: int, ttl_seconds: float) -> None:
        """Other limits from now on, for what is there too."""
        self._set_limits(max_bytes, ttl_seconds)
        self.evict_expired()
        self.adaptive_eviction(0)

    def get_stats(self) -> AdaptiveCacheStats:
        return AdaptiveCacheStats(
            self._hits,
            self._misses,
            self.hit_rate,
            len(self._entries),
            self.num_bytes,
            self._evictions,
            self._expirations,
            self._refusals,
        )


@dataclass(slots=True, init=False, unsafe_hash=True)
class CacheKey:
    """What logits depend on: the context, the position that they predict, and the state of the model.

    `model_state_hash` is the caller's string for everything else: model, adapter, and the namespace, since namespaces
    share no entries. `state_hash_of(model, namespace)` makes one. `context_tokens` may be a RadixKey, which is packed
    already.
    """

    context_tokens: bytes
    position: int
    model_state_hash: str

    def __init__(self, context_tokens: Sequence[int] | RadixKey, position: int, model_state_hash: str) -> None:
        key = context_tokens if isinstance(context_tokens, RadixKey) else RadixKey(context_tokens)
        self.context_tokens = key.data
        self.position = position
        self.model_state_hash = model_state_hash


@lru_cache(4096)
def state_hash_of(model: str, namespace: tuple[str, ...]) -> str:
    """A `model_state_hash` that no two namespaces share, whatever their names hold."""
    return "".join(f"{len(part)}:{part}" for part in (model, *namespace))


class LogitsCache(AdaptiveCache[CacheKey, Any]):
    """Logits of contexts that were computed before, so that an exact repeat costs no forward pass; any values will do.

    An entry of an engine belongs to the RadixCache node that ends at its context: it goes by age, and when that node
    goes (`RadixCache(on_drop=cache.drop)`). A split keeps the lower node, so that an entry stays with the node that
    ends where its context ends.
    """

    def __init__(self, max_bytes: int, ttl_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(max_bytes, ttl_seconds, clock=clock)
        self._node_of: dict[CacheKey, Node] = {}
        self._of_node: dict[Node, set[CacheKey]] = {}
        self.on_drop: Callable[[Any], None] | None = None  # called with every value that goes, for whatever reason

    def insert(self, key: CacheKey, value: Any, num_bytes: int | None = None, node: Node | None = None) -> bool:
        """Keep a value, as long as `node` lives if there is one. False: too large, not worth it, or the node is gone or
        a root.

        num_bytes: left out, what an array or a tensor says of itself.
        """
        if num_bytes is None:
            num_bytes = getattr(value, "nbytes", None)
            if num_bytes is None:
                raise InvalidInputError(f"A {type(value).__name__} does not say its size.", hint="Give num_bytes too.")
        if node is not None and (node.is_stale or node.parent is None):
            self.discard(key)
            return False
        is_kept = super().insert(key, value, num_bytes)
        if is_kept and node is not None:
            self._node_of[key] = node
            self._of_node.setdefault(node, set()).add(key)
        return is_kept

    def drop(self, node: Node) -> None:
        """Drop what belongs to a node that has gone."""
        for key in list(self._of_node.get(node, ())):
            self.discard(key)
            self._evictions += 1

    def discard(self, key: CacheKey) -> None:
        entry = self._entries.get(key)
        super().discard(key)
        if entry is None:
            return
        if self.on_drop is not None:
            self.on_drop(entry.value)
        node = self._node_of.pop(key, None)
        if node is not None:
            self._of_node[node].discard(key)
            if not self._of_node[node]:
                del self._of_node[node]
