"""Values that a backend finds once, such as what all layers ask of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K")
V = TypeVar("V")


class WeakCache(Generic[K, V]):
    """A function of an object, whose result is kept as long as the object lives."""

    def __init__(self, find: Callable[[K], V]) -> None:
        self._find = find
        self._found: WeakKeyDictionary[K, V] = WeakKeyDictionary()

    def __call__(self, key: K) -> V:
        if key not in self._found:
            self._found[key] = self._find(key)
        return self._found[key]

    def set(self, key: K, value: V) -> None:
        """Give the value of an object instead of finding it."""
        self._found[key] = value
