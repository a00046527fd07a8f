"""The threads that compute."""

from __future__ import annotations

import platform
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from archerfish.kernels.machine import ARM
from archerfish.kernels.pool import ComputePool, let_team_go, openmp

LIMIT_S = 60


def max_active_levels() -> int:
    library = openmp()
    assert library
    return int(library.omp_get_max_active_levels())


@pytest.mark.skipif(platform.machine() not in ARM, reason="elsewhere products take as many threads as torch says")
def test_a_thread_of_the_pool_starts_no_others() -> None:
    pool = ComputePool("cpu", 2)
    assert pool.submit(max_active_levels).result(LIMIT_S) == 0
    assert max_active_levels() > 0


def other_threads() -> set[str]:
    return {entry.name for entry in Path("/proc/self/task").iterdir()} - {str(threading.get_native_id())}


@pytest.mark.skipif(openmp() is None, reason="torch brings another library of threads")
def test_a_team_ends_with_all_its_threads() -> None:
    def work() -> set[str]:
        torch.set_num_threads(3)
        before = other_threads()
        torch.ones(1 << 20).mul_(2.0)
        team = other_threads() - before
        let_team_go(has_company=False)
        deadline = time.monotonic() + LIMIT_S
        while team & other_threads() and time.monotonic() < deadline:
            pass
        assert len(team) == 2
        return team & other_threads()

    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(1) as alone:
        assert not alone.submit(work).result(LIMIT_S * 2)
        assert alone.submit(lambda: float(torch.ones(1 << 20).sum())).result(LIMIT_S) == 1 << 20  # a new one, if it is wanted
    torch.set_num_threads(num_threads)


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
