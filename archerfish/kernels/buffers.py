"""BufferPool: arrays that are used again from step to step, on the host, pinned, or on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

A = TypeVar("A", bound=Any)  # an array of one dimension


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a BufferPool has done, and holds. In a steady state cache_misses stands still: nothing is allocated."""

    total_gets: int = 0
    cache_hits: int = 0
    cache_misses: int = 0  # arrays that had to be made
    num_elements: int = 0  # of all arrays that are held
    peak_usage: int = 0  # most elements that a single array was asked for at once


class BufferPool(Generic[A]):
    """One array for each use, made by `allocate(size)` and used again; one thread at a time may use a pool.

    An array is larger than asked for, by rows up to the next power of two, so that a batch that grows row by row does not make
    one for each size. Asking again for the same use gives the memory of the one before: that is how it is given back.
    """

    def __init__(self, allocate: Callable[[int], A]) -> None:
        self._allocate = allocate
        self._arrays: dict[str, A] = {}
        self._num_gets = self._num_misses = self._peak = 0

    def get(self, use: str, num_rows: int, width: int) -> A:
        """An array of num_rows * width elements, with whatever they hold."""
        size = num_rows * width
        found = self._arrays.get(use)
        self._num_gets += 1
        self._peak = max(self._peak, size)
        if found is None or len(found) < size:
            self._num_misses += 1
            found = self._arrays[use] = self._allocate((1 << (num_rows - 1).bit_length()) * width)
        part: A = found[:size]
        return part

    def clear(self) -> None:
        """Let all memory go."""
        self._arrays.clear()

    def pool_stats(self) -> PoolStats:
        held = sum(len(array) for array in self._arrays.values())
        return PoolStats(self._num_gets, self._num_gets - self._num_misses, self._num_misses, held, self._peak)
