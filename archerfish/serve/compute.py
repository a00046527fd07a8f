"""The one thread that all models of a process compute in, and what wakes the loop that waits for it."""

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
Work = tuple[Future[Any], Callable[[], Any]]


class Waker:
    """Ends a poll from another thread. Calls before the loop has seen the first cost nothing."""

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
            with contextlib.suppress(OSError):  # full, so that the loop wakes in any case; or closed, so that there is none
                self._writer.send(b"\0")

    def clear(self) -> None:
        """Call before looking at what has been left for the loop: what comes later wakes it again."""
        with contextlib.suppress(OSError):
            self._reader.recv(4096)
        self._is_set = False

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Beside(Executor):
    """Threads whose jobs wake the loop when they are done."""

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
    """The jobs of one model, which run in the order they came."""

    compute: ComputeThread
    name: str
    waiting: deque[Work] = field(default_factory=deque)
    num_done: int = 0
    busy_s: float = 0.0
    longest_s: float = 0.0  # of a job that succeeded
    last_done: float = float("-inf")  # when a job of it last succeeded

    def wake(self) -> None:
        """Let the loop look whether there is something to do, without a job."""
        self.compute.on_done()

    def has_company(self, within_s: float) -> bool:
        """Whether other lanes have work, or had some within so many seconds."""
        return self.compute.has_company(self, within_s)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self.compute.add(self, (future, lambda: fn(*args, **kwargs)))
        return future


class ComputeThread:
    """Runs jobs one at a time, so that cores are never shared out twice, taking one from each lane in turn.

    A burst in one lane so delays a job of another by one job, whatever its length in jobs. `on_done` is called in this thread
    after each.
    """

    def __init__(self, on_done: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic) -> None:
        self.lanes: list[Lane] = []
        self.running_since: float | None = None
        self.running_lane: Lane | None = None
        self.num_done = 0
        self.on_done, self._clock = on_done, clock
        self._turn = 0  # the lane that is looked at first
        self._has_work = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="archerfish-compute", daemon=True)
        self._thread.start()

    def lane(self, name: str) -> Lane:
        """A new lane for a model."""
        lane = Lane(self, name)
        with self._has_work:
            self.lanes.append(lane)
        return lane

    def remove(self, lane: Lane) -> None:
        """Forget a lane, which must be empty."""
        with self._has_work:
            self.lanes.remove(lane)

    def add(self, lane: Lane, work: Work) -> None:
        with self._has_work:
            if self._is_closed:
                raise RuntimeError("The compute thread has been closed.")
            lane.waiting.append(work)
            self._has_work.notify()

    @property
    def has_work(self) -> bool:
        with self._has_work:
            return self.running_lane is not None or any(lane.waiting for lane in self.lanes)

    def has_company(self, lane: Lane, within_s: float) -> bool:
        """See `Lane.has_company`."""
        since = self._clock() - within_s
        with self._has_work:
            others = [other for other in self.lanes if other is not lane]
            return any(other.waiting or other is self.running_lane or other.last_done > since for other in others)

    def running_s(self) -> float:
        """How long the job that runs now has been running; 0 without one."""
        since = self.running_since
        return 0.0 if since is None else self._clock() - since

    def close(self) -> None:
        """Run what waits and end."""
        with self._has_work:
            self._is_closed = True
            self._has_work.notify()
        self._thread.join()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            lane, (future, work) = found
            started = self.running_since = self._clock()
            try:
                result = work()
            except BaseException as error:  # handed to whoever asks for the result
                self._note(lane, started, has_failed=True)
                future.set_exception(error)
            else:
                self._note(lane, started, has_failed=False)
                future.set_result(result)
                del result
            del found, future, work
            self.on_done()

    def _note(self, lane: Lane, started: float, *, has_failed: bool) -> None:
        now = self._clock()
        self.running_since = self.running_lane = None
        self.num_done += 1
        lane.num_done += 1
        lane.busy_s += now - started
        if not has_failed:
            lane.last_done = now
            lane.longest_s = max(lane.longest_s, now - started)

    def _next(self) -> tuple[Lane, Work] | None:
        """The next lane's oldest job; waits for one. None: there will be none."""
        with self._has_work:
            while True:
                for place in range(len(self.lanes)):
                    lane = self.lanes[(self._turn + place) % len(self.lanes)]
                    if lane.waiting:
                        self._turn = (self._turn + place + 1) % len(self.lanes)
                        self.running_lane = lane
                        return lane, lane.waiting.popleft()
                if self._is_closed:
                    return None
                self._has_work.wait()
