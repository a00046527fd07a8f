"""BufferPool: arrays that are borrowed, given back and lent again, on the host, pinned, or on a device."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

A = TypeVar("A", bound=Any)  # an array of one dimension


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of a BufferPool. In a steady state cache_misses does not grow: nothing is allocated."""

    total_gets: int = 0
    total_returns: int = 0
    cache_hits: int = 0
    cache_misses: int = 0  # arrays that had to be allocated
    num_elements: int = 0  # of the idle arrays
    peak_usage: int = 0  # the most elements that were lent at the same time


class BufferPool(Generic[A]):
    """Lends arrays of `allocate(size)`; safe to use from any thread.

    Sizes are powers of two. `borrow` gives the smallest idle array that is large enough; when there is none, idle arrays that
    are too small are released before a new one is allocated, so that a pool does not keep every size that it ever lent.
    """

    def __init__(self, allocate: Callable[[int], A]) -> None:
        self._allocate = allocate
        self._idle: list[A] = []  # by size
        self._lock = threading.Lock()
        self._num_gets = self._num_returns = self._num_misses = self._num_lent = self._peak = 0

    def borrow(self, min_size: int) -> A:
        """An array of at least min_size elements with any contents. It belongs to the caller until `give_back`."""
        size = 1 << max(0, min_size - 1).bit_length()
        with self._lock:
            place = bisect_left(self._idle, size, key=len)
            array = self._idle.pop(place) if place < len(self._idle) else None
            if array is None:
                self._idle.clear()
                self._num_misses += 1
            self._num_gets += 1
            self._num_lent += size if array is None else len(array)
            self._peak = max(self._peak, self._num_lent)
        return self._allocate(size) if array is None else array

    def give_back(self, array: A) -> None:
        with self._lock:
            insort(self._idle, array, key=len)
            self._num_returns += 1
            self._num_lent -= len(array)

    def clear(self) -> None:
        """Release all idle arrays."""
        with self._lock:
            self._idle.clear()

    def pool_stats(self) -> PoolStats:
        with self._lock:
            num_hits, num_idle = self._num_gets - self._num_misses, sum(map(len, self._idle))
            return PoolStats(self._num_gets, self._num_returns, num_hits, self._num_misses, num_idle, self._peak)
