"""BufferPool: arrays that are used again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from archerfish.kernels.buffers import BufferPool, PoolStats

Array = npt.NDArray[np.int64]


def new_pool(made: list[int]) -> BufferPool[Array]:
    def allocate(size: int) -> Array:
        made.append(size)
        return np.zeros(size, dtype=np.int64)

    return BufferPool(allocate)


def test_arrays_grow_by_powers_of_two_and_are_used_again() -> None:
    made: list[int] = []
    pool = new_pool(made)
    first = pool.get("x", 5, 10)
    first[:] = 7
    assert pool.get("x", 8, 10).base is first.base and pool.get("x", 2, 40)[0] == 7
    assert made == [80] and len(first) == 50
    assert pool.get("y", 1, 3).base is not first.base
    assert pool.get("x", 9, 10).base is not first.base
    assert made == [80, 3, 160]
    assert pool.pool_stats() == PoolStats(total_gets=5, cache_hits=2, cache_misses=3, num_elements=163, peak_usage=90)
    pool.clear()
    assert pool.pool_stats().num_elements == 0 and len(pool.get("x", 1, 1)) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 70), st.integers(1, 9)), max_size=40))
def test_a_pool_gives_what_is_asked_for_and_makes_few_arrays(asked: list[tuple[str, int, int]]) -> None:
    made: list[int] = []
    pool = new_pool(made)
    for use, num_rows, width in asked * 2:
        assert pool.get(use, num_rows, width).shape == (num_rows * width,)
    stats = pool.pool_stats()
    assert stats.total_gets == 2 * len(asked) and stats.cache_misses == len(made)
    for use, num_rows, width in asked:  # all sizes have been there: nothing more is made
        pool.get(use, num_rows, width)
    assert pool.pool_stats().cache_misses == len(made)
