"""OverloadController: its estimates, its queue, its deadlines, and what it makes of threefold overload.

`SimulatedEngine` computes prompts in chunks together with one token of every running sequence, on a clock of the test.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from archerfish.errors import InputTooLargeError
from archerfish.serve import overload
from archerfish.serve.overload import (
    AdmittedRequest,
    Backlog,
    BusyError,
    ImpossibleDeadlineError,
    OverloadController,
    StepCost,
)
from archerfish.serve.tenants import ANONYMOUS, Tenant

from .hosting import FakeClock

CPU = (0.02, 0.0008, 0.0015)  # seconds of a step, a prompt token and an output token: SmolLM2-135M on two cores
SLOW_CPU = (0.004, 0.0009, 0.0004)
GPU = (0.005, 0.00001, 0.00002)


def make_controller(
    clock: FakeClock, order: Any = "arrival", max_running: int = 256, **limits: Any
) -> OverloadController:
    return OverloadController(
        rates=overload.RateLimits(clock), max_running=max_running, max_tokens=8192, order=order, clock=clock, **limits
    )


def measured(order: Any = "arrival", max_running: int = 4, **limits: Any) -> tuple[OverloadController, FakeClock]:
    """A controller that has seen decode steps of 0.1 s, whatever the batch, and 1,000 prompt tokens per second."""
    clock = FakeClock()
    controller = make_controller(clock, order, max_running, **limits)
    for _ in range(8):
        for num_sequences in (1, 2, 4):
            controller.cost.observe(0, num_sequences, 0.1)
        controller.cost.observe(1000, 0, 1.1)
        controller.cost.observe(500, 0, 0.6)
    return controller, clock


def admit(
    controller: OverloadController,
    num_prompt: int = 10,
    max_tokens: int | None = 10,
    tenant: Tenant = ANONYMOUS,
    num_sequences: int = 1,
    **options: Any,
) -> AdmittedRequest:
    return controller.admit(
        tenant, num_prompt_tokens=num_prompt, max_tokens=max_tokens, num_sequences=num_sequences, **options
    )


def make_tenant(name: str, weight: float = 1.0, **limits: Any) -> Tenant:
    return Tenant(name=name, weight=weight, **limits)


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
    clock: FakeClock = field(default_factory=FakeClock)
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    num_refused: int = 0

    def __post_init__(self) -> None:
        self.controller = make_controller(self.clock, max_running=self.max_running)
        self._random = random.Random(7)
        self._tokens_done = [0, 0]

    def submit(
        self, num_prompt: int, num_output: int, deadline_s: float | None = None, max_tokens: int = 0
    ) -> Job | None:
        try:
            if deadline_s is not None:
                self.controller.check_deadline(deadline_s, 0, max_tokens or num_output)
            admitted = admit(self.controller, num_prompt, max_tokens or num_output, deadline_s=deadline_s)
        except (overload.RefusedError, ImpossibleDeadlineError):
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
        room = self.chunk - len(self.running)
        num_decodes = len(self.running)
        started = list[Job]()
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
        self.controller.observe(*self._tokens_done)
        for job in started:
            self.controller.start(job.admitted)
        for job in self.running:
            job.admitted.num_output_tokens += 1
            job.num_output_left -= 1
        ended = [
            job for job in (*self.running, *self.waiting) if not job.num_output_left or self.clock.now > job.deadline
        ]
        for job in ended:
            self._end(job)
        self.running = [job for job in self.running if not job.ended_at]
        self.waiting = deque(job for job in self.waiting if not job.ended_at)

    def _end(self, job: Job) -> None:
        job.is_late = self.clock.now > job.deadline
        job.admitted.is_complete = not job.is_late
        job.ended_at = self.clock.now
        self.controller.end(job.admitted)
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
def test_estimates_of_an_idle_server(costs: tuple[float, float, float], history: list[tuple[int, int]]) -> None:
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
            expected = sum(engine.controller.estimate(ANONYMOUS, size))
            began = engine.clock.now
            assert engine.submit(num_prompt, num_output) is not None
            engine.run()
            taken = engine.clock.now - began
            assert taken / 1.5 < expected < taken * 1.5, (num_prompt, num_output)


@pytest.mark.parametrize("costs", [CPU, SLOW_CPU, GPU])
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_idle_server_admits_what_would_be_in_time(costs: tuple[float, float, float], noise: float, seed: int) -> None:
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


def test_step_costs_of_mixed_steps() -> None:
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


@given(st.lists(st.tuples(st.sampled_from([0, 1, 500]), st.sampled_from([0, 1, 64]), st.floats(1e-6, 10)), min_size=1))
@example([(1, 0, 1.0), (1, 2, 5e-05), (5, 64, 0.001), (5, 1, 3e-06), (0, 1, 3e-06)])
def test_any_steps_give_a_cost(steps: list[tuple[int, int, float]]) -> None:
    cost = StepCost()
    for step in steps:
        cost.observe(*step)
    assert all(0 <= part < 1e3 for part in cost.coefficients)


def test_slow_first_step_hardly_counts() -> None:
    cost = StepCost()
    cost.observe(512, 1, 20.0)
    for _ in range(4):
        cost.observe(512, 1, 0.45)
        cost.observe(0, 1, 0.005)
    assert cost.prompt_s(512) + cost.step_s(1) < 1.5 * 0.455


@pytest.mark.parametrize("num_running", [4, 16, 40])
def test_estimates_of_a_busy_server(num_running: int) -> None:
    engine = SimulatedEngine(CPU, max_running=16)
    engine.serve_clients(24, 64, 30, 20.0)
    engine.run()
    for _ in range(num_running):
        engine.submit(64, 30)
    size = Backlog(num_requests=1, num_sequences=1, num_prompt_tokens=64, num_output_tokens=30)
    expected, began = sum(engine.controller.estimate(ANONYMOUS, size)), engine.clock.now
    job = engine.submit(64, 30)
    engine.run()
    assert job is not None
    taken = job.ended_at - began
    assert taken / 1.5 < expected < taken * 1.5


# Overload


@pytest.mark.parametrize(
    ("costs", "num_output", "noise", "deadline_s"),
    [
        (CPU, 16, 0.0, 10.0),
        (CPU, 64, 0.5, 20.0),
        (SLOW_CPU, 16, 2.0, 10.0),
        (SLOW_CPU, 64, 0.5, 20.0),
        ((0.05, 0.0002, 0.004), 16, 0.5, 10.0),
    ],
)
def test_goodput_at_three_times_the_capacity(
    costs: tuple[float, float, float], num_output: int, noise: float, deadline_s: float
) -> None:
    capacity = SimulatedEngine(costs, noise).serve_clients(64, 94, round(0.75 * num_output), 20.0)
    engine = SimulatedEngine(costs, noise)
    goodput = engine.serve_arrivals(3 * capacity, 94, num_output, deadline_s, 40.0)

    assert goodput > 0.8 * capacity
    engine.run()
    assert (engine.controller.queue.num_requests, len(engine.controller.running)) == (0, 0)


def test_goodput_with_an_unknown_batch_size() -> None:
    """Steps of up to 32 sequences are known when three times the capacity arrives."""
    engine = SimulatedEngine((0.04, 0.0003, 0.001))
    capacity = max(engine.serve_clients(num_clients, 94, 12, 12.0) for num_clients in (16, 32))
    engine.run()
    assert engine.serve_arrivals(3 * capacity, 94, 16, 10.0, 60.0) > 0.8 * capacity


def test_nearly_nothing_is_refused_below_the_capacity() -> None:
    capacity = SimulatedEngine(CPU).serve_clients(64, 94, 24, 30.0)
    engine = SimulatedEngine(CPU)
    engine.serve_arrivals(0.6 * capacity, 94, 32, 10.0, 60.0)
    assert engine.num_refused <= 2
    assert not any(job.is_late for job in engine.ended)


def test_long_answer_does_not_keep_out_a_short_one() -> None:
    engine = SimulatedEngine(CPU)
    engine.serve_clients(1, 94, 16, 5.0)
    engine.run()
    engine.submit(94, 8000)
    engine.step()
    assert engine.submit(94, 16, deadline_s=2.0) is not None


# Sizes and limits of tenants


def test_sizes_over_the_limits_are_refused() -> None:
    controller = make_controller(FakeClock(), max_prompt_tokens=10, max_output_tokens=20)
    with pytest.raises(InputTooLargeError, match="11 tokens; the limit is 10"):
        admit(controller, 11)
    with pytest.raises(InputTooLargeError, match="30; the limit is 20"):
        admit(controller, num_sequences=3)
    for num_tokens in (90, 100):
        request = admit(controller, 100, is_tokenized=False)  # an estimate is no reason to refuse
        with pytest.raises(InputTooLargeError, match=f"{num_tokens} tokens"):
            controller.set_prompt_tokens(request, num_tokens)
        controller.end(request)
    assert controller.queue.num_requests == 0


def test_tokens_are_settled_with_what_was_used() -> None:
    tenant = make_tenant("t", tokens_per_minute=100)
    controller = make_controller(FakeClock())
    request = admit(controller, 40, 50, tenant)
    with pytest.raises(overload.RateLimitedError):
        admit(controller, 5, 20, tenant)
    request.num_output_tokens = 10
    controller.end(request)
    admit(controller, 5, 20, tenant)


def test_refused_request_costs_no_tokens() -> None:
    tenant = make_tenant("t", tokens_per_minute=100, requests_per_minute=2)
    controller = make_controller(FakeClock(), max_queued=1)
    first = admit(controller, tenant=tenant)
    for _ in range(5):
        with pytest.raises(BusyError):
            admit(controller, tenant=tenant)
    controller.end(first)
    admit(controller, tenant=tenant)
    with pytest.raises(overload.OverLimitError):
        admit(controller, 101, tenant=tenant)


def test_open_answer_reserves_few_tokens() -> None:
    tenant = make_tenant("t", tokens_per_minute=2000)
    controller = make_controller(FakeClock())
    for request in [admit(controller, 100, None, tenant) for _ in range(2)]:
        request.num_output_tokens = 1500
        controller.end(request)
    with pytest.raises(overload.RateLimitedError) as caught:  # 3,200 were used, which are paid for now
        admit(controller, 100, None, tenant)
    assert caught.value.retry_after_s == pytest.approx((3200 - 2000 + 612) * 60 / 2000)


# The queue


def test_full_queue_error_has_the_time_of_the_next_place() -> None:
    controller, _ = measured(max_queued=2)
    first = admit(controller, 10)
    controller.start(first)
    for _ in range(2):
        admit(controller, 100)
    with pytest.raises(BusyError, match="2 of 2 places") as caught:
        admit(controller)
    # 200 prompt tokens take 0.3 s and 30 output tokens of 3 sequences 10 steps of 0.1 s. One of three leaves.
    assert caught.value.retry_after_s == pytest.approx((0.3 + 1.0) / 3, rel=0.05)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    controller.end(first)
    with pytest.raises(BusyError):
        admit(controller)


def test_tenant_cannot_fill_the_queue() -> None:
    controller, _ = measured(max_queued=12)
    flood, heavy = make_tenant("flood"), make_tenant("heavy", 2.0)
    for _ in range(10):
        admit(controller, 1, tenant=flood)  # while no other tenant waits
    held = admit(controller, 1, tenant=heavy)
    with pytest.raises(overload.ShareUsedError, match="'flood' holds 10 places; its share is 4") as caught:
        admit(controller, 1, tenant=flood)
    assert caught.value.status == 429
    admit(controller, 1, tenant=heavy)
    controller.end(held)
    assert controller.queue.num_requests == 11


def test_encoder_counts_texts() -> None:
    controller = make_controller(FakeClock(), "round-robin", max_queued=10)
    big = controller.admit(ANONYMOUS, num_prompt_tokens=500, num_places=50)
    with pytest.raises(BusyError, match="50 of 10 places"):
        controller.admit(ANONYMOUS, num_prompt_tokens=10)
    controller.end(big)
    controller.admit(ANONYMOUS, num_prompt_tokens=10)


# Deadlines


def test_deadlines_of_a_busy_server() -> None:
    controller, _ = measured()
    size = Backlog(num_requests=1, num_places=1, num_sequences=1, num_prompt_tokens=500, num_output_tokens=20)
    assert controller.estimate(ANONYMOUS, size) == pytest.approx((0.0, 2.6), rel=0.02)
    admit(controller, 500, 20, deadline_s=0.1)  # an idle server admits it: its prompt may be cached
    admit(controller, 500, 20, deadline_s=6.0)
    with pytest.raises(overload.TooLateError, match=r"expected in 3\.\d s, after the deadline of 3\.5 s") as caught:
        admit(controller, 500, 20, deadline_s=3.5)
    assert caught.value.status == 503 and 0 < caught.value.retry_after_s <= 2
    with pytest.raises(overload.TooLateError, match=r"more than 2\.6 s, which it takes without a wait"):
        admit(controller, 500, 20, deadline_s=1.0)


def test_impossible_deadlines_are_client_errors() -> None:
    controller, _ = measured()
    controller.check_deadline(1.1, 0, 10)
    controller.check_deadline(0.11, 0, None)
    with pytest.raises(ImpossibleDeadlineError, match=r"0\.9 s cannot.* takes about 1 s .*lower max_tokens") as caught:
        controller.check_deadline(0.9, 0, 10)
    assert (caught.value.status, caught.value.param) == (400, "deadline_s")
    with pytest.raises(ImpossibleDeadlineError, match=r"0\.01 s cannot be met.*about 0\.1 s.*\(deadline_s\)\.$"):
        controller.check_deadline(0.01, 0, None)


def test_batches_say_nothing_of_single_requests() -> None:
    controller = make_controller(FakeClock())
    for _ in range(8):
        controller.cost.observe(0, 16, 1.6)
    controller.check_deadline(0.2, 0, 1)


def test_max_wait_without_a_deadline() -> None:
    controller, _ = measured(max_wait_s=1.0)
    admit(controller, 1500, 1)
    with pytest.raises(BusyError, match=r"1\.\d s; the limit is 1 s") as caught:
        admit(controller, 1, 1)
    assert caught.value.retry_after_s == pytest.approx(0.7, abs=0.2)
    admit(controller, 1, 1, deadline_s=60.0)


def test_fair_share_makes_only_the_flooding_tenant_wait() -> None:
    size = Backlog(num_requests=1, num_places=1, num_sequences=1, num_prompt_tokens=50, num_output_tokens=10)
    waits = {}
    for order in ("arrival", "fair-share"):
        controller, _ = measured(order)
        for _ in range(100):
            admit(controller, 50, tenant=make_tenant("flood"))
        for name in ("flood", "trickle"):
            waits[name, order] = controller.estimate(make_tenant(name), size)[0]
    assert waits["trickle", "arrival"] == waits["flood", "arrival"] == waits["flood", "fair-share"]
    assert waits["trickle", "fair-share"] < waits["flood", "fair-share"] / 30


def test_long_list_delays_a_short_one_little() -> None:
    controller, _ = measured("round-robin", max_wait_s=5.0)
    controller.admit(ANONYMOUS, num_prompt_tokens=100_000, num_places=1000)
    controller.admit(ANONYMOUS, num_prompt_tokens=100, deadline_s=3.0)
    with pytest.raises(BusyError):
        controller.admit(ANONYMOUS, num_prompt_tokens=100, num_places=1000)


def test_expected_output_follows_past_answers() -> None:
    controller, _ = measured()
    for _ in range(200):
        request = admit(controller, 1, 100)
        controller.start(request)
        request.num_output_tokens, request.is_complete = 20, True
        controller.end(request)
    for _ in range(50):
        controller.end(admit(controller, 1, 100))  # without an answer: counts for nothing
    assert admit(controller, 1, 100).size.num_output_tokens == 20


def test_idle_time_does_not_count_as_slowness() -> None:
    clock = FakeClock()
    controller = make_controller(clock)
    clock.now += 1000.0
    controller.begin_work()
    clock.now += 1.0
    controller.observe(10, 1)
    assert controller.stats()["prefill_tokens_per_second"] == pytest.approx(10.0)


actions = st.lists(
    st.tuples(
        st.sampled_from(["admit", "tokenize", "start", "step", "end"]), st.integers(0, 30), st.sampled_from("abc")
    ),
    max_size=80,
)


@settings(deadline=None)
@given(actions)
def test_counts_balance(history: list[tuple[str, int, str]]) -> None:
    clock = FakeClock()
    controller = make_controller(clock, "fair-share", max_queued=10)
    waiting: list[AdmittedRequest] = []
    running: list[AdmittedRequest] = []
    done = (0, 0)
    for action, number, name in history:
        clock.now += 0.1
        if action == "admit":
            try:
                waiting.append(admit(controller, number, number, make_tenant(name), 1 + number % 3))
            except overload.RefusedError as error:
                assert error.retry_after_s >= 0
        elif action == "tokenize" and waiting:
            controller.set_prompt_tokens(waiting[number % len(waiting)], number)
        elif action == "start" and waiting:
            running.append(waiting.pop(number % len(waiting)))
            controller.start(running[-1])
        elif action == "step" and running:
            done = done[0] + number, done[1] + len(running)
            controller.observe(*done)
            for request in running:
                request.num_output_tokens += 1
        elif action == "end" and (running or waiting):
            ended = (running or waiting).pop(0)
            for _ in range(2):
                controller.end(ended)
                controller.start(ended)
        queue = controller.queue
        assert (queue.num_requests, controller.running) == (len(waiting), set(running))
        assert queue.num_prompt_tokens == sum(request.size.num_prompt_tokens for request in waiting)
        assert queue.num_output_tokens == sum(request.size.num_output_tokens for request in waiting)
        assert set(controller._queues) == {request.tenant.name for request in waiting}
        assert controller.stats()["drain_seconds"] >= 0
        assert "'a'" not in repr(controller.stats())
