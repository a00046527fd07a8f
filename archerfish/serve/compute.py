"""What the models of an engine process share: the requests they get, the host that they answer to, and the one thread
in which all of them compute.

The host's loop calls all methods of models, unless a name or a comment says otherwise. Slow work (text, computing) runs
in other threads, and the loop takes its results.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from archerfish.cache.digest import PrefixDigest
from archerfish.errors import ArcherfishError, OutOfMemoryError, TooManyRequestsError
from archerfish.observe.metrics import MetricsCollector
from archerfish.serve.overload import RateLimits, RefusedError
from archerfish.serve.processes import HostConfig, Stall
from archerfish.serve.tenants import ANONYMOUS, Callers, Tenant, Tenants
from archerfish.serve.wire import Failed, Message

logger = logging.getLogger("archerfish.serve")
P = ParamSpec("P")
T = TypeVar("T")
Job = tuple[Future[Any], Callable[[], Any]]
NEW_JOBS, NEW_FACTOR = 64, 5  # the first jobs of a model may compile kernels and get this many times hang_s
LONGEST_FACTOR = 4  # a job may take this many times as long as the longest job before it


@dataclass(eq=False, slots=True)
class PendingRequest:
    """The host's record of a client's request, from its arrival to its last answer."""

    client: bytes
    message: Any
    tenant: Tenant = ANONYMOUS
    arrived: float = 0.0
    is_over: bool = False
    release: Callable[[], None] | None = None  # called once at the end, so that the model frees what the request holds
    end_sequence: Callable[[int], object] | None = None  # ends one of the n sequences
    model_entry: Any = None  # the ModelEntry of its model
    on_end: Callable[[Message], None] | None = None  # gets the last answer, for a request that the host made itself

    def left_s(self, now: float) -> float | None:
        """Seconds until the deadline. An invalid (negative) deadline is returned unchanged."""
        deadline_s: float | None = self.message.deadline_s
        return deadline_s if deadline_s is None or deadline_s < 0 else max(0.0, deadline_s - (now - self.arrived))


def attempt(host: ModelHost, pending: PendingRequest, act: Callable[[], None]) -> None:
    """Call `act`, unless the request is over. An error fails the request."""
    if not pending.is_over:
        try:
            act()
        except Exception as error:
            host.fail(pending, error)


def read_in_thread(
    host: ModelHost, pending: PendingRequest, work: Callable[[], Callable[[], None]], executor: Executor | None = None
) -> None:
    """Call `work` in another thread and then, in the loop, the function that it returned, unless the request is
    over."""

    def run() -> None:
        act = work()
        host.post(lambda: attempt(host, pending, act))

    (executor or host.reader).submit(attempt, host, pending, run)


class Waker:
    """Ends a poll from another thread. Calls before the loop has noticed the first cost nothing."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()  # the reader is for the poll
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_set = False

    def wake(self) -> None:
        if not self._is_set:
            self._is_set = True
            with contextlib.suppress(OSError):  # the socket is full, so that the loop wakes anyway, or it is closed
                self._writer.send(b"\0")

    def clear(self) -> None:
        """The loop calls this before it looks for work, so that work which comes later wakes it again."""
        with contextlib.suppress(OSError):
            self.reader.recv(4096)
        self._is_set = False

    def close(self) -> None:
        self.reader.close()
        self._writer.close()


class WakingExecutor(ThreadPoolExecutor):
    """A pool of threads that wakes the loop after each job."""

    def __init__(self, name: str, num_threads: int, waker: Waker) -> None:
        super().__init__(num_threads, thread_name_prefix=f"archerfish-{name}")
        self._waker = waker

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._waker.wake())
        return future


@dataclass(eq=False)
class Lane(Executor):
    """The jobs of one model, which run in the order of their submission."""

    compute: ComputeThread
    name: str
    waiting: deque[Job] = field(default_factory=deque)
    num_done: int = 0
    busy_s: float = 0.0
    last_s: float = 0.0  # duration of the last job that succeeded
    longest_s: float = 0.0  # of all of them
    last_done: float = float("-inf")  # when a job last succeeded

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self.compute.changed:
            if self.compute.is_closed:
                raise RuntimeError("The compute thread has been closed.")
            self.waiting.append((future, partial(fn, *args, **kwargs)))
            self.compute.changed.notify()
        return future

    def wake(self) -> None:
        """For an engine whose work goes on in threads of its own: the loop looks for work again."""
        self.compute.on_done()

    def are_others_active(self, within_s: float) -> bool:
        """Whether other models compute now, or did within so many seconds."""
        compute = self.compute
        since = compute.clock() - within_s
        with compute.changed:
            others = [other for other in compute.lanes if other is not self]
            return any(other.waiting or other is compute.running_lane or other.last_done > since for other in others)


class ComputeThread:
    """Runs one job at a time, so that jobs never compete for cores, and takes jobs from the lanes in rotation.

    However many jobs one model submits, they delay a job of another model by one job. The thread calls `on_done` after
    each.
    """

    def __init__(self, on_done: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic) -> None:
        self.lanes: list[Lane] = []
        self.running_since: float | None = None
        self.running_lane: Lane | None = None
        self.num_done = 0
        self.clock = clock
        self.changed = threading.Condition()
        self.is_closed = False
        self.on_done = on_done
        self._thread = threading.Thread(target=self._run, name="archerfish-compute", daemon=True)
        self._thread.start()

    def lane(self, name: str) -> Lane:
        """A new lane for a model."""
        lane = Lane(self, name)
        with self.changed:
            self.lanes.append(lane)
        return lane

    def remove(self, lane: Lane) -> None:
        """Remove a lane, which must be empty."""
        with self.changed:
            self.lanes.remove(lane)

    @property
    def has_work(self) -> bool:
        with self.changed:
            return self.running_lane is not None or any(lane.waiting for lane in self.lanes)

    def running_s(self) -> float:
        """How long the current job has been running; 0 without one."""
        since = self.running_since
        return 0.0 if since is None else self.clock() - since

    def close(self) -> None:
        """Run the waiting jobs, then end."""
        with self.changed:
            self.is_closed = True
            self.changed.notify()
        self._thread.join()

    def _run(self) -> None:
        next_lane = 0
        while True:
            with self.changed:
                while not (waiting := [lane for lane in self.lanes if lane.waiting]):
                    if self.is_closed:
                        return
                    self.changed.wait()
                lane = next((lane for lane in self.lanes[next_lane:] if lane.waiting), waiting[0])
                next_lane = self.lanes.index(lane) + 1
                self.running_lane, (future, work) = lane, lane.waiting.popleft()
            started = self.running_since = self.clock()
            result = error = None
            try:
                result = work()
            except BaseException as raised:
                error = raised
            now = self.clock()
            self.running_since = self.running_lane = None
            self.num_done += 1
            lane.num_done += 1
            lane.busy_s += now - started
            if error is None:
                lane.last_done = now
                lane.last_s = now - started
                lane.longest_s = max(lane.longest_s, now - started)
                future.set_result(result)
            else:
                future.set_exception(error)
            del future, work, result, error  # they may hold large arrays while the thread waits
            self.on_done()


class HangWatch:
    """Tells whether the compute thread hangs. hang_s: the time limit of a job, unless its model has needed longer
    before."""

    def __init__(self, compute: ComputeThread, hang_s: float) -> None:
        self._compute, self._hang_s = compute, hang_s
        self._stall = Stall()

    def check(self, now: float, *, has_work: bool, is_loading: bool, num_moves: int = 0) -> str:
        """Return why the process hangs, or "". has_work: of the models, even if no job was made of it yet.

        num_moves: how often models made progress, which a GPU model does without jobs of the compute thread.
        """
        has_work = has_work or self._compute.has_work
        seconds = self._stall.check(now, self._compute.num_done + num_moves, has_work=has_work)
        return self.problem(seconds, is_loading=is_loading)

    def problem(self, seconds: float, *, is_loading: bool = False) -> str:
        """Return what is wrong after so many seconds without progress, or ""."""
        lane = self._compute.running_lane
        is_new = is_loading or (lane is not None and lane.num_done < NEW_JOBS)
        longest_s = 0.0 if lane is None else lane.longest_s
        if seconds <= max(self._hang_s * (NEW_FACTOR if is_new else 1), LONGEST_FACTOR * longest_s):
            return ""
        what = "There is work, but no job" if lane is None else f"A job of {lane.name} runs and none"
        return f"{what} has ended for {seconds:.0f} s."


class ModelHost:
    """The host as its models see it. `answer`, `fail` and `post` may be called in any thread; the rest is for the
    loop."""

    def __init__(self, config: HostConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.clock = clock
        self.figures = MetricsCollector()
        self.rates = RateLimits(clock)
        is_private = not config.open_address and config.address.startswith(("ipc:", "inproc:"))
        self.callers = Callers(Tenants.from_file(config.api_keys_file), config.front_end_pass, is_private=is_private)
        self.digest = PrefixDigest(config.routing_secret.encode()) if config.routing_secret else None
        self.waker = Waker()
        self.compute = ComputeThread(self.waker.wake, clock)
        self.reader: Executor = WakingExecutor("read", 2, self.waker)  # threads that tokenize
        self.compiler: Executor = WakingExecutor(
            "grammars", 2, self.waker
        )  # they compile grammars, which may take seconds
        self.loader: Executor = WakingExecutor("load", 1, self.waker)  # the thread that reads adapters
        self.writer: Executor = WakingExecutor("write", 1, self.waker)  # the thread that makes text of tokens
        self._posted: deque[Callable[[], None]] = deque()
        self._outbox: deque[tuple[PendingRequest, Message]] = deque()
        self._pending: dict[bytes, dict[str, PendingRequest]] = {}  # by client and request_id

    def answer(self, pending: PendingRequest, message: Message) -> None:
        """Send an answer at the end of this round of the loop. Any answer but a Chunk is the last one."""
        self._outbox.append((pending, message))

    def fail(self, pending: PendingRequest, error: BaseException) -> None:
        """Answer with an error."""
        if isinstance(error, MemoryError):
            error = OutOfMemoryError.of("The request", error)
        if not isinstance(error, ArcherfishError):
            logger.error("A request failed.", exc_info=error)
        hosted = None if pending.model_entry is None else pending.model_entry.hosted
        if isinstance(error, RefusedError | TooManyRequestsError):  # without a model: at the limits of a tenant
            model = "" if hosted is None else hosted.name
            self.figures.refused(model, error.code, self.figures.tenant_label(pending.tenant.name))
        wait_s: float | None = getattr(error, "retry_after_s", None)
        if getattr(error, "status", 500) in (429, 503):
            if wait_s is None and hosted is not None:
                wait_s = hosted.controller.retry_after_s(pending.tenant)
            wait_s = max(1.0, wait_s or 0.0)
        self.answer(pending, Failed.of(pending.message.request_id, error, wait_s))

    def post(self, work: Callable[[], None]) -> None:
        """Have the loop call `work`."""
        self._posted.append(work)
        self.waker.wake()

    def live_requests(self) -> list[PendingRequest]:
        """All requests that are not over, those whose texts are being read included."""
        return [pending for requests in self._pending.values() for pending in requests.values()]
