"""The threads that compute, shared by all engines of a process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import ParamSpec, TypeVar

from archerfish.kernels.machine import ARM, cpu

SOFT = 1  # omp_pause_soft: settings stay
P = ParamSpec("P")
R = TypeVar("R")


class ComputePool:
    """Runs forward passes.

    Many batches: one pass per core beats one pass over all cores by a third, since a core keeps its batch in its own cache and
    waits for no other; so each thread of the pool computes alone. A single batch while nothing else runs gets all cores, in the
    caller's own thread, since most of its time goes into reading the weights. On a GPU one thread feeds the device.
    """

    def __init__(self, device: str, num_threads: int) -> None:
        import torch

        self.num_workers = (num_threads or cpu().num_cores) if device == "cpu" else 1
        self._num_running = 0
        self._lock = threading.Lock()
        ready = threading.Barrier(self.num_workers + 1)

        def start() -> None:
            torch.get_num_threads()  # a thread takes the default when it first asks, in place of what was set before
            torch.set_num_threads(1)
            library = openmp()
            if library and platform.machine() in ARM:  # where oneDNN's products do not ask torch how many threads to start
                library.omp_set_max_active_levels(0)
            ready.wait()

        before = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(self.num_workers, thread_name_prefix=f"archerfish-{device}", initializer=start)
        for _ in range(self.num_workers):
            self._threads.submit(int)
        ready.wait()
        torch.set_num_threads(before)  # set_num_threads also moves the default of threads that have not used torch yet

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


def release_threads() -> None:
    """End the OpenMP threads that this thread has started.

    Once a process has more of them than cores, they all sleep whenever they wait, and waking them takes longer than a small
    operation: a thread that has loaded a model would slow down the thread that computes with it.
    """
    end = getattr(openmp(), "omp_pause_resource_all", None)  # older libraries have none
    if end and not _is_forked:
        end(SOFT)


@lru_cache(maxsize=1)
def openmp() -> ctypes.CDLL | None:
    """GNU's OpenMP that torch computes with; other packages may have brought their own."""
    import torch

    home = Path(torch.__file__).parent
    for path in (*home.glob("lib/libgomp*"), *home.parent.glob("torch.libs/libgomp*"), "libgomp.so.1"):
        with contextlib.suppress(OSError, AttributeError):  # not there, or a system without such flags
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
    return None


@lru_cache(maxsize=8)
def compute_pool(device: str, num_threads: int) -> ComputePool:
    """The pool of a device; engines that ask for the same one share it, so that cores are not oversubscribed."""
    return ComputePool(device, num_threads)


_is_forked = False  # OpenMP does not survive a fork: there, passes run on single threads of the pool only


def reset_in_child() -> None:
    global _is_forked
    _is_forked = True
    compute_pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=reset_in_child)
