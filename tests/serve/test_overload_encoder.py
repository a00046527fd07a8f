"""Threefold overload of embeddings, through the real HostedEncoder and its controller, on a clock of the test."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest

from archerfish.observe.metrics import MetricsCollector
from archerfish.serve.compute import PendingRequest
from archerfish.serve.hosted_encoder import ALONE_FACTOR, Array, HostedEncoder
from archerfish.serve.overload import RateLimits
from archerfish.serve.processes import HostConfig
from archerfish.serve.wire import EmbedRequest, Vectors
from archerfish.text.tokenizer import TokenizedText

pytestmark = pytest.mark.no_cover
NUM_TOKENS = 32
TOKEN_S = 1.4e-4
ARRIVAL_S = 1e-4
DEADLINE_S = 1.0


class InlineExecutor(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class SimulatedMachine:
    """Host, lane and engine of one HostedEncoder. A job takes job_s and TOKEN_S per token. Arrivals delay it by
    ARRIVAL_S."""

    model_name, is_cross_encoder = "simulated", False

    def __init__(self, job_s: float, *, has_other_models: bool = False) -> None:
        self.now = 0.0
        self.job_s = job_s
        self.has_other_models = has_other_models
        self.reader = self.compiler = InlineExecutor()
        self.running: tuple[Future[Any], Any] | None = None  # a job and its result
        self.ends_at = self.last_s = 0.0
        self.outbox: list[tuple[PendingRequest, Any]] = []
        self.num_good = self.num_late = self.num_refused = 0
        self.config = HostConfig()
        self.rates = RateLimits(self.clock)
        self.figures = MetricsCollector()
        self.hosted = HostedEncoder(self, self, self)  # type: ignore[arg-type]

    def clock(self) -> float:
        return self.now

    def tokenize(self, texts: Sequence[Any], *, prompt_name: str | None = None) -> list[TokenizedText]:
        return [TokenizedText(np.ones(NUM_TOKENS, np.int64)) for _ in texts]

    def compute(self, texts: Sequence[TokenizedText], normalize: bool | None = None, *, is_raw: bool = False) -> Array:
        self.now += self.job_s + TOKEN_S * sum(len(text.token_ids) for text in texts)
        return np.zeros((len(texts), 2), np.float32)

    def are_others_active(self, within_s: float) -> bool:
        return self.has_other_models

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        began, future = self.now, Future[Any]()
        self.running = future, fn(*args)
        self.ends_at = self.now
        self.last_s = self.now - began
        self.now = began
        return future

    def answer(self, request: PendingRequest, message: Any) -> None:
        self.outbox.append((request, message))

    fail = answer

    def post(self, work: Callable[[], None]) -> None:
        work()

    def arrive(self, deadline_s: float | None = DEADLINE_S) -> None:
        message = EmbedRequest(request_id="", texts=["x" * 4 * NUM_TOKENS], deadline_s=deadline_s)
        request = PendingRequest(b"", message, arrived=self.now)
        self.ends_at += ARRIVAL_S
        try:
            self.hosted.submit(request)
        except Exception as error:
            self.fail(request, error)
        self.advance()

    def advance(self) -> None:
        while self.hosted.advance() and self.running is None:
            pass
        while self.outbox:
            request, message = self.outbox.pop(0)
            assert not request.is_over
            request.is_over = True
            if request.release is not None:
                request.release()
            self.num_refused += not isinstance(message, Vectors)
            is_late = self.now - request.arrived > DEADLINE_S
            self.num_late += isinstance(message, Vectors) and is_late
            self.num_good += isinstance(message, Vectors) and not is_late

    def end_job(self) -> None:
        assert self.running is not None
        (future, result), self.running = self.running, None
        self.now = max(self.now, self.ends_at)
        future.set_result(result)
        self.advance()

    def serve_clients(self, num_clients: int, seconds: float) -> float:
        """Answers per second for clients that each wait for their answer."""
        num_requests = 0
        while self.now < seconds:
            while num_requests - self.num_good - self.num_late < num_clients:
                self.arrive(None)
                num_requests += 1
            self.end_job()
        return self.num_good / seconds

    def serve_arrivals(self, rate: float, seconds: float) -> float:
        """Answers in time per second for random arrivals."""
        arrivals, next_at = random.Random(5), 0.0
        while self.now < seconds:
            if self.running is None or next_at <= self.ends_at:
                self.now = max(self.now, next_at)
                self.arrive()
                next_at += arrivals.expovariate(rate)
            else:
                self.end_job()
        while self.running is not None:
            self.end_job()
        return self.num_good / seconds


@pytest.mark.parametrize("has_other_models", [False, True])
@pytest.mark.parametrize("job_s", [0.002, 0.03, 0.06])
def test_goodput_at_three_times_the_capacity(job_s: float, has_other_models: bool) -> None:
    capacity = SimulatedMachine(job_s, has_other_models=has_other_models).serve_clients(32, 4.0)
    machine = SimulatedMachine(job_s, has_other_models=has_other_models)
    assert machine.serve_arrivals(3 * capacity, 6.0) > 0.8 * capacity
    assert machine.num_late < 0.1 * machine.num_good
    assert machine.num_refused > machine.num_good
    assert (machine.hosted.controller.num_places, machine.hosted.has_work) == (0, False)


def test_jobs_keep_the_latency_budget() -> None:
    for has_other_models, factor in ((True, 1.0), (False, ALONE_FACTOR)):
        machine = SimulatedMachine(0.002, has_other_models=has_other_models)
        machine.serve_arrivals(600.0, 2.0)
        assert machine.hosted.job_tokens * TOKEN_S == pytest.approx(factor * machine.hosted.latency_s, rel=0.3)
