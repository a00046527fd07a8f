"""The threads that compute."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from archerfish.kernels.machine import ARM
from archerfish.kernels.pool import ComputePool

LIMIT_S = 60


def max_active_levels() -> int:
    return int(ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).omp_get_max_active_levels())


@pytest.mark.skipif(platform.machine() not in ARM, reason="elsewhere products take as many threads as torch says")
def test_a_thread_of_the_pool_starts_no_others() -> None:
    pool = ComputePool("cpu", 2)
    assert pool.submit(max_active_levels).result(LIMIT_S) == 0
    assert max_active_levels() > 0


def test_begin_returns_when_a_thread_is_free() -> None:
    pool, may_end, has_begun = ComputePool("cpu", 2), [threading.Event(), threading.Event()], threading.Event()

    def work() -> bool:
        has_begun.set()
        return may_end[1].wait(LIMIT_S)

    def begin_second() -> tuple[Future[bool], bool]:
        return pool.begin(work), may_end[0].is_set()

    first = pool.begin(may_end[0].wait, LIMIT_S)  # at once: a thread is left
    with ThreadPoolExecutor(1) as beginner:
        beginning = beginner.submit(begin_second)
        assert has_begun.wait(LIMIT_S)
        may_end[0].set()
        second, is_first_over = beginning.result(LIMIT_S)
    assert first.result(LIMIT_S)
    assert is_first_over and not second.done()
    may_end[1].set()
    assert second.result(LIMIT_S)
