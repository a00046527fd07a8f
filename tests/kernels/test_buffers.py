from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from archerfish.kernels.sampling import BufferPool, PoolStats

Array = npt.NDArray[np.int64]


def new_pool(made: list[int]) -> BufferPool[Array]:
    def allocate(size: int) -> Array:
        made.append(size)
        return np.zeros(size, dtype=np.int64)

    return BufferPool(allocate)


def test_a_returned_array_is_lent_again_and_a_lent_one_is_not() -> None:
    made: list[int] = []
    pool = new_pool(made)
    first, second = pool.borrow(50), pool.borrow(50)
    assert first is not second and made == [64, 64]
    pool.give_back(first)
    assert pool.borrow(33) is first
    pool.give_back(first)
    pool.give_back(second)
    assert pool.pool_stats() == PoolStats(3, 3, cache_hits=1, cache_misses=2, num_elements=128, peak_usage=128)
    pool.clear()
    assert pool.pool_stats().num_elements == 0


def test_idle_arrays_that_are_too_small_are_released() -> None:
    made: list[int] = []
    pool = new_pool(made)
    for size in (3, 60, 200, 40):
        pool.give_back(pool.borrow(size))
    assert made == [4, 64, 256] and pool.pool_stats().num_elements == 256


@given(st.lists(st.lists(st.integers(1, 70), max_size=5), max_size=20))
def test_repeated_work_allocates_nothing(calls: list[list[int]]) -> None:
    made: list[int] = []
    pool = new_pool(made)
    for _ in range(8):  # a growing need replaces arrays, so the first rounds may allocate
        before = len(made)
        for sizes in calls:
            for array in [pool.borrow(size) for size in sizes]:
                pool.give_back(array)
    assert len(made) == before
    assert pool.pool_stats().total_gets == pool.pool_stats().total_returns


def test_threads_never_share_an_array() -> None:
    pool = new_pool([])

    def work(number: int) -> bool:
        for _ in range(200):
            array = pool.borrow(16)
            array[:] = number
            is_own = bool((array == number).all())
            pool.give_back(array)
            if not is_own:
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
