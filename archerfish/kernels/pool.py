"""The threads that compute, shared by all engines of a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import ParamSpec, TypeVar

from archerfish.kernels.machine import cpu

P = ParamSpec("P")
R = TypeVar("R")
_local = threading.local()
_is_forked = False  # threads do not survive a fork: there, a pass computes on one


def num_pass_threads() -> int:
    """How many threads a pass of this thread may use; 0: all cores."""
    return 1 if _is_forked else getattr(_local, "num_threads", 0)


def is_forked() -> bool:
    return _is_forked


def set_pass_threads(num_threads: int) -> None:
    _local.num_threads = num_threads


class ComputePool:
    """Runs forward passes.

    Many batches: one pass per core beats one pass over all cores, since a core keeps its batch in its own cache and
    waits for no other; so each thread of the pool computes alone. A single batch while nothing else runs gets all
    cores, in the caller's own thread, since most of its time goes into reading the weights. On a GPU one thread feeds
    the device.
    """

    def __init__(self, device: str, num_threads: int) -> None:
        self.num_workers = (num_threads or cpu().num_cores) if device == "cpu" else 1
        self._num_running = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(
            self.num_workers, thread_name_prefix=f"archerfish-{device}", initializer=set_pass_threads, initargs=(1,)
        )

    def submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run in a thread of the pool."""
        with self._lock:
            self._num_running += 1
        future = self._threads.submit(work, *args, **kwargs)
        future.add_done_callback(self._finish)
        return future

    def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run and wait: here, on all cores, if the pool is idle; else in the pool."""
        with self._lock:
            is_alone = self._num_running == 0 and not _is_forked
            self._num_running += is_alone
        if not is_alone:
            return self.submit(work, *args, **kwargs).result()
        try:
            return work(*args, **kwargs)
        finally:
            self._finish()

    def _finish(self, _: Future[R] | None = None) -> None:
        with self._lock:
            self._num_running -= 1


@lru_cache(maxsize=8)
def compute_pool(device: str, num_threads: int) -> ComputePool:
    """The pool of a device; engines that ask for the same one share it, so that cores are not oversubscribed."""
    return ComputePool(device, num_threads)


def reset_in_child() -> None:
    global _is_forked
    _is_forked = True
    compute_pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=reset_in_child)
