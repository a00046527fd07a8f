"""Logits of contexts that were computed before, so that an exact repeat costs no forward pass.

An entry of an engine belongs to the RadixCache node that ends at its context: it goes by age, and when that node goes
(`RadixCache(on_drop=cache.drop)`). A split keeps the lower node, so that an entry stays with the node that ends where its
context ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from archerfish.cache.adaptive import AdaptiveCache
from archerfish.cache.tree import Node, RadixKey
from archerfish.errors import InvalidInputError


@dataclass(slots=True, init=False, unsafe_hash=True)
class CacheKey:
    """What logits depend on: the context, the position that they predict, and the state of the model.

    `model_state_hash` is the caller's string for everything else: model, adapter, and the namespace, since namespaces share no
    entries. `state_hash_of(model, namespace)` makes one. `context_tokens` may be a RadixKey, which is packed already.
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
    """Opaque values by CacheKey, at most `max_bytes` of them, each for at most `ttl_seconds`.

    What is kept and what goes first is up to AdaptiveCache: contexts that are never repeated take no room from others.
    """

    def __init__(self, max_bytes: int, ttl_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(max_bytes, ttl_seconds, clock=clock)
        self._node_of: dict[CacheKey, Node] = {}
        self._of_node: dict[Node, set[CacheKey]] = {}
        self.on_drop: Callable[[Any], None] | None = None  # called with every value that goes, for whatever reason

    def insert(self, key: CacheKey, value: Any, num_bytes: int | None = None, node: Node | None = None) -> bool:
        """Keep a value, as long as `node` lives if there is one. False: too large, not worth it, or the node is gone or a root.

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
