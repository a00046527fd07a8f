"""The threads that compute."""

from __future__ import annotations

import os
import threading

import pytest

from archerfish.kernels import pool
from archerfish.kernels.pool import ComputePool, compute_pool, num_pass_threads, set_pass_threads

LIMIT_S = 60


def test_workers_compute_alone_and_a_lone_pass_on_all_cores() -> None:
    """Red if a pass in the pool could wait for threads that other passes hold."""
    threads = ComputePool("cpu", 2)
    assert threads.num_workers == 2
    assert [threads.submit(num_pass_threads).result(LIMIT_S) for _ in range(4)] == [1, 1, 1, 1]
    assert threads.run(num_pass_threads) == 0
    assert threads.run(threading.get_ident) == threading.get_ident()
    release = threading.Event()
    busy = threads.submit(release.wait)
    assert threads.run(num_pass_threads) == 1
    release.set()
    assert busy.result(LIMIT_S)
    set_pass_threads(3)
    assert threads.run(num_pass_threads) == 3
    set_pass_threads(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_forked_process_computes_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compute_pool("cpu", 2)
    assert compute_pool("cpu", 2) is before
    monkeypatch.setattr(pool, "_is_forked", False)
    pool.reset_in_child()
    assert num_pass_threads() == 1
    after = compute_pool("cpu", 2)
    assert after is not before
    assert after.run(threading.get_ident) != threading.get_ident()
