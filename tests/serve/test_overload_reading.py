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

from archerfish.engine.tokenizer import TokenizedText
from archerfish.serve import service_rate
from archerfish.serve.compute import ComputeThread
from archerfish.serve.figures import Figures
from archerfish.serve.gate import ReadingGate
from archerfish.serve.hosted_encoder import ALONE, Array, HostedEncoder
from archerfish.serve.limits import RateLimits
from archerfish.serve.ticket import Ticket
from archerfish.serve.wire import Embed, Vectors

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
    """Desk, lane and engine of one HostedEncoder. job_s: of every job, whatever it computes."""

    model_name, is_cross_encoder = "simulated", False

    def __init__(self, job_s: float, is_accompanied: bool = False) -> None:
        self.now = 0.0
        self.is_accompanied = is_accompanied
        self.job_s = job_s
        self.reader = self.compiler = Inline()
        self.running: tuple[Future[Any], Any, float] | None = None  # with its result, and when it ends
        self.outbox: list[tuple[Ticket, Any]] = []
        self.num_good = self.num_late = self.num_refused = self.num_left = 0
        self.num_done, self.busy_s = 0, 0.0
        gate = ReadingGate(RateLimits(self.clock), clock=self.clock)
        self.hosted = HostedEncoder(self, self, self, Figures(), gate)  # type: ignore[arg-type]

    def clock(self) -> float:
        return self.now

    # The engine

    def tokenize(self, texts: Sequence[Any]) -> list[TokenizedText]:
        return [TokenizedText(np.ones(NUM_TOKENS, np.int64)) for _ in texts]

    def compute(self, texts: Sequence[TokenizedText], normalize: bool | None = None) -> Array:
        self.now += self.job_s + TOKEN_S * sum(len(text.token_ids) for text in texts)
        return np.zeros((len(texts), 2), np.float32)

    # The lane

    def has_company(self, within_s: float) -> bool:
        return self.is_accompanied

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        began, future = self.now, Future[Any]()
        result = fn(*args)
        self.running, self.now = (future, result, self.now), began
        return future

    # The desk

    def answer(self, ticket: Ticket, message: Any) -> None:
        self.outbox.append((ticket, message))

    def fail(self, ticket: Ticket, error: BaseException) -> None:
        self.outbox.append((ticket, error))

    def post(self, work: Callable[[], None]) -> None:
        work()

    # The loop

    def ask(self, deadline_s: float | None = DEADLINE_S) -> Ticket:
        ticket = Ticket(b"", Embed(request_id="", texts=["x" * 4 * NUM_TOKENS], deadline_s=deadline_s), arrived=self.now)
        if self.running is not None:
            self.running = (*self.running[:2], self.running[2] + ARRIVAL_S)
        try:
            self.hosted.submit(ticket)
        except Exception as error:
            self.fail(ticket, error)
        self.advance()
        return ticket

    def advance(self) -> None:
        while self.hosted.advance() and self.running is None:
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

    def end_job(self) -> None:
        assert self.running is not None
        (future, result, end), self.running = self.running, None
        self.now = max(self.now, end)
        future.set_result(result)
        self.advance()


def capacity(
    job_s: float, num_at_once: int = 32, duration_s: float = 30.0, *, is_accompanied: bool = False
) -> float:
    """Answers a second to so many clients, each of which waits for its answer."""
    machine, num_asked = Machine(job_s, is_accompanied), 0
    while machine.now < duration_s:
        while num_asked - machine.num_good - machine.num_late < num_at_once:
            machine.ask(None)
            num_asked += 1
        machine.end_job()
    return machine.num_good / duration_s


def overloaded(job_s: float, rate: float, duration_s: float = 60.0, *, is_accompanied: bool = False) -> Machine:
    machine, chance = Machine(job_s, is_accompanied), random.Random(5)
    next_at = 0.0
    while machine.now < duration_s:
        if machine.running is None or next_at <= machine.running[2]:
            machine.now = max(machine.now, next_at)
            machine.ask()
            next_at += chance.expovariate(rate)
        else:
            machine.end_job()
    while machine.running is not None:
        machine.end_job()
    return machine


@pytest.mark.parametrize("is_accompanied", [False, True])
@pytest.mark.parametrize("job_s", [0.002, 0.03, 0.06])
def test_goodput_at_three_times_the_capacity_is_the_capacity(job_s: float, is_accompanied: bool) -> None:
    most = capacity(job_s, is_accompanied=is_accompanied)
    machine = overloaded(job_s, 3 * most, is_accompanied=is_accompanied)
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
