"""The one thread in which all models of a process compute, and how other threads wake the loop."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Job = tuple[Future[Any], Callable[[], Any]]


class Waker:
    """Ends a poll from another thread. Calls before the loop has noticed the first cost nothing."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_set = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        if not self._is_set:
            self._is_set = True
            with contextlib.suppress(OSError):  # the socket is full, so that the loop wakes anyway, or it is closed
                self._writer.send(b"\0")

    def clear(self) -> None:
        """The loop calls this before it looks for work, so that work which comes later wakes it again."""
        with contextlib.suppress(OSError):
            self._reader.recv(4096)
        self._is_set = False

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class WakingExecutor(Executor):
    """A pool of threads that wakes the loop after each job."""

    def __init__(self, name: str, num_threads: int, waker: Waker) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"archerfish-{name}")
        self._waker = waker

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = self._threads.submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._waker.wake())
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)


@dataclass(eq=False)
class Lane(Executor):
    """The jobs of one model, which run in the order of their submission."""

    compute: ComputeThread
    name: str
    waiting: deque[Job] = field(default_factory=deque)
    num_done: int = 0
    busy_s: float = 0.0
    longest_s: float = 0.0  # of a job that succeeded
    last_done: float = float("-inf")  # when a job last succeeded

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self.compute.add(self, (future, lambda: fn(*args, **kwargs)))
        return future

    def are_others_active(self, within_s: float) -> bool:
        """Whether other models compute now, or did within so many seconds."""
        return self.compute.are_others_active(self, within_s)


class ComputeThread:
    """Runs one job at a time, so that jobs never compete for cores, and takes jobs from the lanes in rotation.

    However many jobs one model submits, they delay a job of another model by one job. The thread calls `on_done` after each.
    """

    def __init__(self, on_done: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic) -> None:
        self.lanes: list[Lane] = []
        self.running_since: float | None = None
        self.running_lane: Lane | None = None
        self.num_done = 0
        self._on_done, self._clock = on_done, clock
        self._next_lane = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="archerfish-compute", daemon=True)
        self._thread.start()

    def lane(self, name: str) -> Lane:
        """A new lane for a model."""
        lane = Lane(self, name)
        with self._changed:
            self.lanes.append(lane)
        return lane

    def remove(self, lane: Lane) -> None:
        """Remove a lane, which must be empty."""
        with self._changed:
            self.lanes.remove(lane)

    def add(self, lane: Lane, job: Job) -> None:
        with self._changed:
            if self._is_closed:
                raise RuntimeError("The compute thread has been closed.")
            lane.waiting.append(job)
            self._changed.notify()

    @property
    def has_work(self) -> bool:
        with self._changed:
            return self.running_lane is not None or any(lane.waiting for lane in self.lanes)

    def are_others_active(self, lane: Lane, within_s: float) -> bool:
        """See `Lane.are_others_active`."""
        since = self._clock() - within_s
        with self._changed:
            others = [other for other in self.lanes if other is not lane]
            return any(other.waiting or other is self.running_lane or other.last_done > since for other in others)

    def running_s(self) -> float:
        """How long the current job has been running; 0 without one."""
        since = self.running_since
        return 0.0 if since is None else self._clock() - since

    def close(self) -> None:
        """Run the waiting jobs, then end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            lane, (future, work) = found
            started = self.running_since = self._clock()
            try:
                result = work()
            except BaseException as error:
                self._count(lane, started, has_failed=True)
                future.set_exception(error)
            else:
                self._count(lane, started, has_failed=False)
                future.set_result(result)
                del result
            del found, future, work
            self._on_done()

    def _count(self, lane: Lane, started: float, *, has_failed: bool) -> None:
        now = self._clock()
        self.running_since = self.running_lane = None
        self.num_done += 1
        lane.num_done += 1
        lane.busy_s += now - started
        if not has_failed:
            lane.last_done = now
            lane.longest_s = max(lane.longest_s, now - started)

    def _next(self) -> tuple[Lane, Job] | None:
        """The oldest job of the next lane that has one; waits for it. None after `close`."""
        with self._changed:
            while True:
                for offset in range(len(self.lanes)):
                    lane = self.lanes[(self._next_lane + offset) % len(self.lanes)]
                    if lane.waiting:
                        self._next_lane = (self._next_lane + offset + 1) % len(self.lanes)
                        self.running_lane = lane
                        return lane, lane.waiting.popleft()
                if self._is_closed:
                    return None
                self._changed.wait()
