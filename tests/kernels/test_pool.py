"""The threads that compute."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from concurrent.futures import Future

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
    pool, may_end = ComputePool("cpu", 2), [threading.Event(), threading.Event()]
    first = pool.begin(may_end[0].wait, LIMIT_S)
    second: list[Future[bool]] = []
    beginner = threading.Thread(target=lambda: second.append(pool.begin(may_end[1].wait, LIMIT_S)))
    beginner.start()
    beginner.join(0.05)
    assert beginner.is_alive()
    assert not first.done()
    may_end[0].set()
    beginner.join(LIMIT_S)
    assert first.result(LIMIT_S)
    assert not second[0].done()
    may_end[1].set()
    assert second[0].result(LIMIT_S)
