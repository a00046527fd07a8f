"""Three times the embeddings that a machine can do, through the real HostedEncoder and its gate, with a clock of the test's.

Every job takes its own time beside that of its tokens, as on cores that others want too, and every request that comes takes
some of the time of the job that runs, whether it is let in or not.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest

from archerfish.observe.collector import MetricsCollector
from archerfish.serve import service_rate
from archerfish.serve.compute import ComputeThread
from archerfish.serve.gate import ReadingGate
from archerfish.serve.hosted_encoder import ALONE, Array, HostedEncoder
from archerfish.serve.limits import RateLimits
from archerfish.serve.pending_request import PendingRequest
from archerfish.serve.wire import EmbedRequest, Vectors
from archerfish.text.tokenizer import TokenizedText

pytestmark = pytest.mark.no_cover
NUM_TOKENS, TOKEN_S, ARRIVAL_S = 32, 1.4e-4, 1e-4
DEADLINE_S = 1.0


class Inline(Executor):
    """Does everything at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Machine:
    """ModelHost, lane and engine of one HostedEncoder. job_s: of every job, whatever it computes."""

    model_name, is_cross_encoder = "simulated", False
    arrival_s = ARRIVAL_S

    def __init__(self, job_s: float, is_accompanied: bool = False, num_workers: int = 1) -> None:
        self.num_workers, self.pieces = num_workers, list[tuple[Future[Any], Any, float]]()  # as `running`, on a core each
        self.waits_for_core: Future[Any] | None = None
        self.now = 0.0
        self.is_accompanied = is_accompanied
        self.job_s = job_s
        self.reader = self.compiler = Inline()
        self.running: tuple[Future[Any], Any, float] | None = None  # with its result, and when it ends
        self.outbox: list[tuple[PendingRequest, Any]] = []
        self.num_good = self.num_late = self.num_refused = self.num_left = 0
        self.num_done, self.busy_s = 0, 0.0
        gate = ReadingGate(RateLimits(self.clock), clock=self.clock)
        self.hosted = HostedEncoder(self, self, self, MetricsCollector(), gate)  # type: ignore[arg-type]

    def clock(self) -> float:
        return self.now

    # The engine

    def tokenize(self, texts: Sequence[Any]) -> list[TokenizedText]:
        return [TokenizedText(np.ones(NUM_TOKENS, np.int64)) for _ in texts]

    def compute(self, texts: Sequence[TokenizedText], normalize: bool | None = None) -> Array:
        self.now += self.job_s + TOKEN_S * sum(len(text.token_ids) for text in texts)
        return np.zeros((len(texts), 2), np.float32)

    def begin(self, texts: Sequence[TokenizedText], normalize: bool | None = None) -> Future[Array]:
        began, future = self.now, Future[Any]()
        rows = self.compute(texts)
        self.pieces.append((future, rows, began + self.num_workers * (self.now - began)))
        self.now = began
        return future

    # The lane

    def wake(self) -> None:
        pass

    def has_company(self, within_s: float) -> bool:
        return self.is_accompanied

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        began, future, num_pieces = self.now, Future[Any](), len(self.pieces)
        result = fn(*args)
        if len(self.pieces) == num_pieces:
            self.running, self.now = (future, result, self.now), began
        elif len(self.pieces) < self.num_workers:
            future.set_result(None)
        else:
            self.waits_for_core = future
        return future

    # The desk

    def answer(self, ticket: PendingRequest, message: Any) -> None:
        self.outbox.append((ticket, message))

    def fail(self, ticket: PendingRequest, error: BaseException) -> None:
        self.outbox.append((ticket, error))

    def post(self, work: Callable[[], None]) -> None:
        work()

    # The loop

    def ask(self, deadline_s: float | None = DEADLINE_S) -> PendingRequest:
        request = EmbedRequest(request_id="", texts=["x" * 4 * NUM_TOKENS], deadline_s=deadline_s)
        ticket = PendingRequest(b"", request, arrived=self.now)
        if self.running is not None:
            self.running = (*self.running[:2], self.running[2] + self.arrival_s)
        elif self.pieces:
            self.pieces[0] = (*self.pieces[0][:2], self.pieces[0][2] + self.arrival_s)
        try:
            self.hosted.submit(ticket)
        except Exception as error:
            self.fail(ticket, error)
        self.advance()
        return ticket

    def advance(self) -> None:
        while self.hosted.advance() and self.running is None and self.waits_for_core is None:
            pass
        while self.outbox:
            ticket, message = self.outbox.pop(0)
            assert not ticket.is_over
            ticket.is_over = True
            if ticket.release is not None:
                ticket.release()
            if not isinstance(message, Vectors):
                self.num_refused += 1
            elif self.now - ticket.arrived <= DEADLINE_S:
                self.num_good += 1
            else:
                self.num_late += 1

    def next_end(self) -> float:
        """When a job ends; never without one."""
        return min((end for _, _, end in [*self.pieces, *([self.running] if self.running else [])]), default=float("inf"))

    def end_job(self) -> None:
        if self.running is not None and self.running[2] <= self.next_end():
            (future, result, end), self.running = self.running, None
        else:
            self.pieces.sort(key=lambda piece: piece[2])
            future, result, end = self.pieces.pop(0)
        self.now = max(self.now, end)
        future.set_result(result)
        if self.waits_for_core is not None and len(self.pieces) < self.num_workers:
            self.waits_for_core.set_result(None)
            self.waits_for_core = None
        self.advance()


def capacity(
    job_s: float, num_at_once: int = 32, duration_s: float = 30.0, *, is_accompanied: bool = False, num_workers: int = 1
) -> float:
    """Answers a second to so many clients, each of which waits for its answer."""
    machine, num_asked = Machine(job_s, is_accompanied, num_workers), 0
    while machine.now < duration_s:
        while num_asked - machine.num_good - machine.num_late < num_at_once:
            machine.ask(None)
            num_asked += 1
        machine.end_job()
    return machine.num_good / duration_s


def overloaded(
    job_s: float, rate: float, duration_s: float = 60.0, *, is_accompanied: bool = False, num_workers: int = 1,
    arrival_s: float = ARRIVAL_S,
) -> Machine:
    machine, chance = Machine(job_s, is_accompanied, num_workers), random.Random(5)
    machine.arrival_s = arrival_s
    next_at = 0.0
    while machine.now < duration_s:
        if next_at <= machine.next_end():
            machine.now = max(machine.now, next_at)
            machine.ask()
            next_at += chance.expovariate(rate)
        else:
            machine.end_job()
    while machine.next_end() < float("inf"):
        machine.end_job()
    return machine


@pytest.mark.parametrize("is_accompanied", [False, True])
@pytest.mark.parametrize(("job_s", "num_workers"), [(0.002, 1), (0.03, 1), (0.06, 1), (0.002, 2), (0.03, 2)])
def test_goodput_at_three_times_the_capacity_is_the_capacity(job_s: float, is_accompanied: bool, num_workers: int) -> None:
    most = capacity(job_s, is_accompanied=is_accompanied, num_workers=num_workers)
    machine = overloaded(job_s, 3 * most, is_accompanied=is_accompanied, num_workers=num_workers)
    assert machine.num_good / 60 > 0.9 * most
    assert machine.num_late < 0.05 * machine.num_good
    assert machine.num_refused > machine.num_good
    hosted = machine.hosted
    assert (hosted.num_queued, hosted.gate.num_requests, hosted.gate.num_tokens, hosted.has_work) == (0, 0, 0, False)


def test_jobs_cut_to_a_time_that_none_keeps_would_do_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth: jobs that only get smaller when they take too long do a tenth of what they could."""
    best = overloaded(0.06, 600.0, is_accompanied=True).num_good
    monkeypatch.setattr(service_rate, "WORTH", 0.0)
    assert overloaded(0.06, 600.0, is_accompanied=True).num_good < 0.3 * best


def test_beside_others_jobs_keep_to_their_time() -> None:
    """Where a job itself takes little, its latency is what was asked for."""
    machine = overloaded(0.002, 600.0, 20.0, is_accompanied=True)
    assert machine.hosted.budget * TOKEN_S == pytest.approx(machine.hosted.latency_s, rel=0.3)
    alone = overloaded(0.002, 600.0, 20.0)
    assert alone.hosted.budget * TOKEN_S == pytest.approx(ALONE * machine.hosted.latency_s, rel=0.3)


def test_cores_with_jobs_of_their_own_lose_half_of_what_arrivals_take() -> None:
    """Each takes the time of one core: half of that of a machine whose cores wait for one another."""
    quiet, together, beside = (
        overloaded(0.002, 600.0, num_workers=num_workers, arrival_s=arrival_s).num_good
        for num_workers, arrival_s in ((1, 0.0), (1, 4e-4), (2, 4e-4))
    )
    assert together < 0.8 * quiet
    assert quiet - beside == pytest.approx((quiet - together) / 2, rel=0.2)


def test_a_lane_knows_of_the_others() -> None:
    now = 0.0
    thread = ComputeThread(clock=lambda: now)
    own, other = thread.lane("own"), thread.lane("other")
    own.submit(int).result()
    assert not own.has_company(1.0)
    started, may_end = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        may_end.wait()

    job = other.submit(work)
    assert started.wait(10) and own.has_company(1.0) and other.has_company(1.0)  # which has done something just now
    may_end.set()
    job.result()
    assert own.has_company(1.0)
    now = 2.0
    assert not own.has_company(1.0)
    thread.close()
