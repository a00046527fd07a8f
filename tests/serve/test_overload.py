"""OverloadController: its estimates, its queue, its deadlines, and what it makes of threefold overload.

`SimulatedEngine` computes prompts in chunks together with one token of every running sequence, on a clock of the test.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import InputTooLargeError
from archerfish.serve.limits import OverLimitError, RateLimitedError, RateLimits, RefusedError
from archerfish.serve.overload import (
    AdmissionLimits,
    AdmittedRequest,
    Backlog,
    BusyError,
    ImpossibleDeadlineError,
    OverloadController,
    ShareUsedError,
    StepCost,
    TooLateError,
)
from archerfish.serve.tenants import ANONYMOUS, Tenant

CPU = (0.02, 0.0008, 0.0015)  # seconds of a step, a prompt token and an output token: SmolLM2-135M on two cores
SLOW_CPU = (0.004, 0.0009, 0.0004)
GPU = (0.005, 0.00001, 0.00002)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_controller(clock: Clock, order: Any = "arrival", max_running: int = 256, **limits: Any) -> OverloadController:
    return OverloadController(
        rates=RateLimits(clock), limits=AdmissionLimits(**limits), max_running=max_running, max_tokens=8192, order=order,
        clock=clock,
    )  # fmt: skip


def measured(order: Any = "arrival", max_running: int = 4, **limits: Any) -> tuple[OverloadController, Clock]:
    """A controller that has seen decode steps of 0.1 s, whatever the batch, and 1,000 prompt tokens per second."""
    clock = Clock()
    controller = make_controller(clock, order, max_running, **limits)
    for _ in range(8):
        for num_sequences in (1, 2, 4):
            controller.cost.observe(0, num_sequences, 0.1)
        controller.cost.observe(1000, 0, 1.1)
        controller.cost.observe(500, 0, 0.6)
    return controller, clock


def admit(
    controller: OverloadController, num_prompt: int = 10, max_tokens: int | None = 10, tenant: Tenant = ANONYMOUS,
    num_sequences: int = 1, **options: Any,
) -> AdmittedRequest:
    return controller.admit(
        tenant, num_prompt_tokens=num_prompt, max_tokens=max_tokens, num_sequences=num_sequences, **options
    )


def make_tenant(name: str, weight: float = 1.0, **limits: float) -> Tenant:
    return Tenant(name=name, namespace=name, weight=weight, **limits)


@dataclass(eq=False)
class Job:
    admitted: AdmittedRequest
    num_prompt_left: int
    num_output_left: int
    deadline: float
    ended_at: float = 0.0
    is_late: bool = False


@dataclass(eq=False)
class SimulatedEngine:
    """costs: seconds of a step, a prompt token and an output token. noise: a step takes up to so much longer."""

    costs: tuple[float, float, float]
    noise: float = 0.0
    max_running: int = 256
    chunk: int = 512
    clock: Clock = field(default_factory=Clock)
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    num_refused: int = 0

    def __post_init__(self) -> None:
        self.controller = make_controller(self.clock, max_running=self.max_running)
        self._random = random.Random(7)
        self._tokens_done = [0, 0]

    def submit(self, num_prompt: int, num_output: int, deadline_s: float | None = None, max_tokens: int = 0) -> Job | None:
        try:
            if deadline_s is not None:
                self.controller.check_deadline(deadline_s, 0, max_tokens or num_output)
            admitted = admit(self.controller, num_prompt, max_tokens or num_output, deadline_s=deadline_s)
        except (RefusedError, ImpossibleDeadlineError):
            self.num_refused += 1
            return None
        if not self.is_busy:
            self.controller.begin_work()
        deadline = self.clock.now + deadline_s if deadline_s is not None else float("inf")
        self.waiting.append(Job(admitted, num_prompt, num_output, deadline))
        return self.waiting[-1]

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> None:
        room, num_decodes, started = self.chunk - len(self.running), len(self.running), list[Job]()
        while self.waiting and room > 0 and len(self.running) + len(started) < self.max_running:
            job = self.waiting[0]
            count = min(room, job.num_prompt_left)
            job.num_prompt_left -= count
            room -= count
            if job.num_prompt_left:
                break
            started.append(self.waiting.popleft())
        num_prompt = self.chunk - num_decodes - room
        step_s, prompt_token_s, output_token_s = self.costs
        seconds = step_s + prompt_token_s * num_prompt + output_token_s * num_decodes
        self.clock.now += seconds * (1 + self.noise * self._random.random())
        self.running += started
        self._tokens_done = [self._tokens_done[0] + num_prompt, self._tokens_done[1] + len(self.running)]
        self.controller.observe_totals(*self._tokens_done)
        for job in started:
            job.admitted.start()
        for job in [*self.running, *self.waiting]:
            if job in self.running:
                job.admitted.num_output_tokens += 1
                job.num_output_left -= 1
            if not job.num_output_left or self.clock.now > job.deadline:
                self._end(job)

    def _end(self, job: Job) -> None:
        (self.running if job in self.running else self.waiting).remove(job)
        job.is_late = self.clock.now > job.deadline
        job.admitted.is_complete = not job.is_late
        job.ended_at = self.clock.now
        job.admitted.end()
        self.ended.append(job)

    def run(self) -> None:
        while self.is_busy:
            self.step()

    @property
    def num_good(self) -> int:
        return sum(not job.is_late for job in self.ended)

    def serve_clients(self, num_clients: int, num_prompt: int, num_output: int, seconds: float) -> float:
        """Answers per second for clients that each wait for their answer."""
        end, num_before = self.clock.now + seconds, self.num_good
        while self.clock.now < end:
            while len(self.waiting) + len(self.running) < num_clients:
                self.submit(num_prompt, num_output)
            self.step()
        return (self.num_good - num_before) / seconds

    def serve_arrivals(self, rate: float, num_prompt: int, num_output: int, deadline_s: float, seconds: float) -> float:
        """Answers in time per second for random arrivals."""
        arrivals, next_at = random.Random(3), self.clock.now
        end, num_before = self.clock.now + seconds, self.num_good
        while self.clock.now < end:
            while next_at <= self.clock.now:
                length = max(1, round(num_output * arrivals.uniform(0.5, 1.0)))
                self.submit(num_prompt, length, deadline_s, num_output)
                next_at += arrivals.expovariate(rate)
            if self.is_busy:
                self.step()
            else:
                self.clock.now = next_at
        return (self.num_good - num_before) / seconds


# Estimates


@pytest.mark.parametrize("costs", [CPU, SLOW_CPU, GPU])
@pytest.mark.parametrize("history", [[(512, 2)] * 4, [(8, 64)] * 4, [(94, 16), (3000, 8), (5, 300)]])
def test_estimates_of_an_idle_server_are_within_a_factor_of_1_5(
    costs: tuple[float, float, float], history: list[tuple[int, int]]
) -> None:
    engine = SimulatedEngine(costs)
    for num_prompt, num_output in history:
        engine.submit(num_prompt, num_output)
        engine.run()
    seen_prompts = {num_prompt for num_prompt, _ in history}
    for num_prompt in (8, 94, 512, 6000):
        if num_prompt > 10 * max(seen_prompts):
            continue  # much longer than any prompt before: nothing has shown what it costs
        for num_output in (2, 16, 400):
            size = Backlog(num_requests=1, num_sequences=1, num_prompt_tokens=num_prompt, num_output_tokens=num_output)
            expected = engine.controller.estimate(ANONYMOUS, size).total_s
            began = engine.clock.now
            assert engine.submit(num_prompt, num_output) is not None
            engine.run()
            taken = engine.clock.now - began
            assert taken / 1.5 < expected < taken * 1.5, (num_prompt, num_output)


@pytest.mark.parametrize("costs", [CPU, SLOW_CPU, GPU])
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_an_idle_server_refuses_nothing_that_would_be_in_time(
    costs: tuple[float, float, float], noise: float, seed: int
) -> None:
    engine, sizes = SimulatedEngine(costs, noise), random.Random(seed)
    for _ in range(60):
        num_prompt, num_output = sizes.choice([1, 30, 512, 4000]), sizes.choice([1, 2, 30, 300])
        step_s, prompt_token_s, output_token_s = costs
        longest_s = (num_prompt * prompt_token_s + num_output * (step_s + output_token_s) + 9 * step_s) * (1 + noise)
        for _ in range(sizes.choice([0, 0, 16])):
            engine.submit(num_prompt, num_output)
        engine.run()
        assert engine.submit(num_prompt, num_output, 1.1 * longest_s) is not None
        engine.run()


def test_rates_of_stats_are_those_of_steps() -> None:
    engine = SimulatedEngine(SLOW_CPU)
    for _ in range(4):
        engine.submit(512, 2)
        engine.run()
    stats = engine.controller.stats()
    assert stats["prefill_tokens_per_second"] == pytest.approx(512 / (0.004 + 512 * 0.0009))
    assert stats["decode_tokens_per_second"] == pytest.approx(1 / 0.0044)


def test_step_costs_are_told_apart_in_mixed_steps() -> None:
    cost, sizes = StepCost(), random.Random(3)
    assert (cost.step_s(4), cost.prompt_s(100), cost.single_step_s) == (0, 0, 0)
    for _ in range(300):
        num_prompt, num_output = sizes.choice([0, 0, 64, 200]), sizes.choice([1, 8, 32])
        cost.observe(num_prompt, num_output, 0.02 + 0.001 * num_output + 0.0005 * num_prompt)
    assert cost.coefficients == pytest.approx((0.02, 0.0005, 0.001), rel=0.02)
    for _ in range(1000):  # decode steps alone do not make it forget what a prompt costs
        cost.observe(0, 4, 0.024)
    assert cost.coefficients == pytest.approx((0.02, 0.0005, 0.001), rel=0.02)
    cost.observe(0, 0, 1.0)
    cost.observe(10, 1, 0.0)
    assert cost.coefficients == pytest.approx((0.02, 0.0005, 0.001), rel=0.02)


def test_a_slow_first_step_hardly_counts() -> None:
    cost = StepCost()
    cost.observe(512, 1, 20.0)
    for _ in range(4):
        cost.observe(512, 1, 0.45)
        cost.observe(0, 1, 0.005)
    assert cost.prompt_s(512) + cost.step_s(1) < 1.5 * 0.455


@pytest.mark.parametrize("num_running", [4, 16, 40])
def test_estimates_of_a_busy_server_are_near_the_truth(num_running: int) -> None:
    engine = SimulatedEngine(CPU, max_running=16)
    engine.serve_clients(24, 64, 30, 20.0)
    engine.run()
    for _ in range(num_running):
        engine.submit(64, 30)
    size = Backlog(num_requests=1, num_sequences=1, num_prompt_tokens=64, num_output_tokens=30)
    expected, began = engine.controller.estimate(ANONYMOUS, size).total_s, engine.clock.now
    job = engine.submit(64, 30)
    engine.run()
    assert job is not None
    taken = job.ended_at - began
    assert taken / 1.5 < expected < taken * 1.5


# Overload


@pytest.mark.parametrize("costs", [CPU, SLOW_CPU, GPU, (0.05, 0.0002, 0.004)])
@pytest.mark.parametrize(("num_output", "noise", "deadline_s"), [(16, 0.0, 10.0), (16, 2.0, 10.0), (64, 0.5, 20.0)])
def test_goodput_at_three_times_the_capacity(
    costs: tuple[float, float, float], num_output: int, noise: float, deadline_s: float
) -> None:
    capacity = SimulatedEngine(costs, noise).serve_clients(64, 94, round(0.75 * num_output), 20.0)
    engine = SimulatedEngine(costs, noise)
    goodput = engine.serve_arrivals(3 * capacity, 94, num_output, deadline_s, 60.0)
    print(costs, num_output, noise, round(goodput / capacity, 3), sum(j.is_late for j in engine.ended), engine.num_good)
    assert goodput > 0.8 * capacity
    engine.run()
    assert (engine.controller.queue.num_requests, len(engine.controller.running)) == (0, 0)
