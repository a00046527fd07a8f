"""OverloadController and Forecast: estimates, the queue, deadlines, and threefold overload.

`SimulatedServer` has the real scheduler and the real forecast. Its steps take time on a clock of the test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import InputTooLargeError
from archerfish.params import SamplingParams
from archerfish.sequence import Namespace, Request, Sequence
from archerfish.serve import overload
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.overload import AdmittedRequest, BusyError, ImpossibleDeadlineError, OverloadController
from archerfish.serve.tenants import ANONYMOUS, Tenant
from archerfish.step import StepResult
from tests.sched.worlds import World

from .hosting import FakeClock

CPU = (0.004, 0.0012, 0.004, 5e-7)  # seconds of a step, a prompt token, an output token and a pair: two cores
SLOW_CPU = (0.004, 0.0009, 0.0004, 0.0)
GPU = (0.005, 0.00001, 0.00002, 1e-9)


@dataclass(eq=False)
class Job:
    admitted: AdmittedRequest
    num_output: int
    arrived: float
    expected_s: float  # wait for the first token
    waited_s: float = 0.0
    ended_at: float = 0.0
    is_late: bool = False


class SimulatedServer:
    """costs: as CPU. noise: a step takes up to this share longer."""

    def __init__(
        self,
        costs: tuple[float, ...] = CPU,
        noise: float = 0.0,
        policy: str = "fcfs",
        max_running: int = 256,
        **limits: Any,
    ) -> None:
        self.costs, self.noise = costs, noise
        self.world = World(
            num_blocks=1 << 16,
            block_size=16,
            has_cache=False,
            has_logits_cache=False,
            policy=policy,
            max_num_seqs=max_running,
            max_num_batched_tokens=16384 if costs is GPU else 512,
            max_queue_size=1 << 20,
            max_model_len=20_000,
            max_gap_s=0.08,
        )
        self.scheduler = scheduler = self.world.scheduler
        rates = overload.RateLimits(lambda: self.world.now)
        self.controller = OverloadController(rates=rates, expect=self.expect, max_tokens=8192, **limits)
        self.engine = SimpleNamespace(scheduler=scheduler, expect=scheduler.forecast.expect)
        self.jobs: dict[Sequence, Job] = {}
        self.ended: list[Job] = []
        self.num_refused = 0
        self._random, self._number = random.Random(7), 0

    def expect(self, request: AdmittedRequest, unread: Any = ()) -> tuple[float, float]:
        return HostedLLM.expect(cast(HostedLLM, self), request, unread)

    def submit(
        self,
        num_prompt: int,
        num_output: int,
        deadline_s: float | None = None,
        tenant: str = "",
        max_tokens: int = 0,
    ) -> Job | None:
        """num_output: length of the answer, of `max_tokens` that the client allows."""
        now, most = self.world.now, max_tokens or num_output
        arriving = AdmittedRequest(make_tenant(tenant), num_prompt, max_tokens=most, deadline_s=deadline_s)
        expected_s = self.expect(arriving)[0] + self.scheduler.cost.prompt_s(num_prompt)
        try:
            if deadline_s is not None:
                self.controller.check_deadline(deadline_s, self.scheduler.forecast.alone_s(most))
            self.controller.admit(arriving)
        except (overload.RefusedError, ImpossibleDeadlineError):
            self.num_refused += 1
            return None
        self._number += 1
        deadline = None if deadline_s is None else now + deadline_s
        request = Request(str(self._number), [1] * num_prompt, SamplingParams(max_tokens=most), most)
        request.namespace, request.deadline = Namespace(tenant), deadline
        (sequence,) = self.scheduler.add(request)
        self.controller.enter(arriving)
        job = self.jobs[sequence] = Job(arriving, num_output, now, expected_s)
        return job

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            num_output = len(plan.input.tokens) - plan.num_prompt_tokens
            parts = (1, plan.num_prompt_tokens, num_output, plan.num_pairs)
            seconds = sum(part * cost for part, cost in zip(parts, self.costs, strict=True))
            self.world.now += seconds * (1 + self.noise * self._random.random())
            self.scheduler.commit(plan, StepResult(np.full((len(plan.sequences), 1), 7)))
        for delta in self.scheduler.take_deltas():
            sequence, now = delta.sequence, self.world.now
            job = self.jobs[sequence]
            job.admitted.num_output_tokens += len(delta.token_ids)
            if delta.token_ids and not job.waited_s:
                job.waited_s = now - job.arrived
                self.controller.start(job.admitted)
            if job.admitted.num_output_tokens == job.num_output:
                self.scheduler.finish(sequence)
            if sequence.finish_reason is not None and not job.ended_at:
                job.ended_at, job.is_late = now, sequence.finish_reason == "deadline"
                self.controller.end(job.admitted)
                self.ended.append(job)
        self.jobs = {sequence: job for sequence, job in self.jobs.items() if not job.ended_at}
        self.scheduler.take_deltas()

    def run(self, until: float = float("inf")) -> None:
        while self.jobs and self.world.now < until:
            self.step()
        if until < float("inf"):
            self.world.now = max(self.world.now, until)

    @property
    def num_good(self) -> int:
        return sum(not job.is_late for job in self.ended)

    def serve_clients(self, num_clients: int, num_prompt: int, num_output: int, seconds: float) -> float:
        """Answers per second for clients that each wait for their answer."""
        end, num_before = self.world.now + seconds, self.num_good
        while self.world.now < end:
            while len(self.jobs) < num_clients:
                self.submit(num_prompt, num_output)
            self.step()
        return (self.num_good - num_before) / seconds

    def serve_arrivals(self, rate: float, num_prompt: int, num_output: int, deadline_s: float, seconds: float) -> float:
        """Answers in time per second for random arrivals."""
        arrivals, next_at = random.Random(3), self.world.now
        end, num_before = self.world.now + seconds, self.num_good
        while next_at < end:
            self.run(next_at)
            length = max(1, round(num_output * arrivals.uniform(0.5, 1.0)))
            self.submit(num_prompt, length, deadline_s, max_tokens=num_output)
            next_at += arrivals.expovariate(rate)
        return (self.num_good - num_before) / seconds


def make_tenant(name: str, weight: float = 1.0, **limits: Any) -> Tenant:
    return Tenant(name=name, weight=weight, **limits) if name else ANONYMOUS


def measured(**options: Any) -> SimulatedServer:
    """A server that has computed prompts and answers of several lengths."""
    server = SimulatedServer(**options)
    for num_prompt, num_output in ((30, 16), (200, 8), (2000, 4), (60, 60)):
        server.submit(num_prompt, num_output)
        server.run()
    server.ended.clear()
    return server


# Estimates


@pytest.mark.parametrize("costs", [CPU, SLOW_CPU, GPU])
@pytest.mark.parametrize("history", [[(512, 2)] * 4, [(8, 64)] * 4, [(94, 16), (3000, 8), (5, 300)]])
def test_estimates_of_an_idle_server(costs: tuple[float, ...], history: list[tuple[int, int]]) -> None:
    server = SimulatedServer(costs)
    for num_prompt, num_output in history:
        server.submit(num_prompt, num_output)
        server.run()
    seen_prompts = {num_prompt for num_prompt, _ in history}
    for num_prompt in (8, 94, 512, 6000):
        if num_prompt > 4 * max(seen_prompts):
            continue  # much longer than any prompt before: nothing has shown what it costs
        for num_output in (2, 16, 400):
            expected = sum(server.expect(AdmittedRequest(ANONYMOUS, num_prompt, max_tokens=num_output)))
            began = server.world.now
            assert server.submit(num_prompt, num_output) is not None
            server.run()
            taken = server.world.now - began
            assert taken / 1.5 < expected < taken * 1.5, (num_prompt, num_output)


@pytest.mark.parametrize("costs", [CPU, SLOW_CPU, GPU])
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_idle_server_admits_what_would_be_in_time(costs: tuple[float, ...], noise: float, seed: int) -> None:
    server, sizes = SimulatedServer(costs, noise), random.Random(seed)
    for _ in range(20):
        num_prompt, num_output = sizes.choice([1, 30, 512, 2000]), sizes.choice([1, 2, 30, 300])
        step_s, prompt_token_s, output_token_s, pair_s = costs
        longest_s = num_prompt * (prompt_token_s + num_prompt / 2 * pair_s) + num_output * (step_s + output_token_s)
        longest_s += (9 + num_prompt // 64) * step_s
        for _ in range(sizes.choice([0, 0, 16])):
            server.submit(num_prompt, num_output)
        server.run()
        assert server.submit(num_prompt, num_output, 1.1 * longest_s * (1 + noise)) is not None
        server.run()


@pytest.mark.parametrize("policy", ["fcfs", "fair-share", "priority", "deadline"])
def test_short_chats_are_taken_beside_a_long_prompt_of_another_tenant(policy: str) -> None:
    """The prompt takes about 20 s, of which 10 are left after half of it. No chat waits as long."""
    server = measured(policy=policy, max_wait_s=2.0)
    long = server.submit(6400, 1, tenant="long")
    while server.jobs:
        if not server._number % 2 or server.world.now % 1 < 0.1:
            server.submit(30, 16, tenant="short")
        server.step()
    assert long is not None and long.waited_s > 15 and len(server.ended) > 20
    assert not server.num_refused
    assert max(job.waited_s for job in server.ended if job is not long) < 1.0


def test_the_estimate_falls_while_a_prompt_is_computed() -> None:
    server = measured()
    server.submit(6400, 1)
    waits = []
    while server.jobs:
        waits.append(server.expect(AdmittedRequest(ANONYMOUS, 7000))[0])
        server.step()
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] < 0.05 * waits[0]


@pytest.mark.parametrize("max_running", [16, 256])
def test_a_flood_is_told_how_long_it_waits(max_running: int) -> None:
    server = measured(max_running=max_running, max_wait_s=1e6)
    for _ in range(500):
        assert server.submit(30, 16, tenant="flood") is not None
    told_s, last = server.controller.retry_after_s(make_tenant("flood")), server.submit(30, 16, tenant="flood")
    server.run()
    assert last is not None and last.waited_s / 2 < min(told_s * 1.0, last.expected_s) < 2 * last.waited_s


def record_load(server: SimulatedServer) -> list[Job]:
    """Five minutes of chats, a long prompt now and then, and bursts of one tenant, at about 0.7 of the capacity."""
    draw, jobs = random.Random(2), list[Job | None]()
    while server.world.now < 400:
        length = draw.choice([1] * 12 + [8] * 2 + [40]) * draw.randint(20, 160)
        for _ in range(draw.choice([1] * 29 + [40]) if length < 200 else 1):
            jobs.append(server.submit(length, draw.randint(8, 60), tenant=draw.choice("abcd")))
        server.run(server.world.now + draw.expovariate(1 / 2.0))
    server.run()
    return [job for job in jobs if job is not None]


@pytest.mark.parametrize("policy", ["fcfs", "fair-share"])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_estimates_over_a_recorded_load(policy: str, noise: float) -> None:
    """Waits of a few steps depend on the moment of arrival in a step: they are left out."""
    server = measured(policy=policy, noise=noise)
    jobs = [job for job in record_load(server) if max(job.expected_s, job.waited_s) > 0.25]
    num_right = sum(job.waited_s / 2 <= job.expected_s <= 2 * job.waited_s for job in jobs)
    assert len(jobs) > 100 and max(job.waited_s for job in jobs) > 20
    assert num_right >= 0.9 * len(jobs)
    for limit_s in (10.0, 20.0, 60.0):  # with this max_wait_s the requests would have been refused
        assert all(job.waited_s > limit_s / 2 for job in jobs if job.expected_s > limit_s)


# Overload


@pytest.mark.parametrize(
    ("costs", "num_output", "noise", "deadline_s"),
    [
        (CPU, 16, 0.0, 10.0),
        (CPU, 64, 0.5, 20.0),
        (SLOW_CPU, 16, 2.0, 10.0),
        (SLOW_CPU, 64, 0.5, 20.0),
        ((0.05, 0.0002, 0.004, 0.0), 16, 0.5, 10.0),
    ],
)
def test_goodput_at_three_times_the_capacity(
    costs: tuple[float, ...], num_output: int, noise: float, deadline_s: float
) -> None:
    capacity = SimulatedServer(costs, noise).serve_clients(64, 94, round(0.75 * num_output), 20.0)
    server = SimulatedServer(costs, noise)
    goodput = server.serve_arrivals(3 * capacity, 94, num_output, deadline_s, 40.0)

    assert goodput > 0.8 * capacity
    server.run()
    assert (server.controller.num_places, len(server.controller.running)) == (0, 0)


def test_nearly_nothing_is_refused_below_the_capacity() -> None:
    capacity = SimulatedServer(CPU).serve_clients(64, 94, 24, 30.0)
    server = SimulatedServer(CPU)
    server.serve_arrivals(0.6 * capacity, 94, 32, 10.0, 60.0)
    assert server.num_refused <= 2
    assert not any(job.is_late for job in server.ended)


def test_long_answer_does_not_keep_out_a_short_one() -> None:
    server = SimulatedServer(CPU)
    server.serve_clients(1, 94, 16, 5.0)
    server.run()
    server.submit(94, 8000)
    server.step()
    assert server.submit(94, 16, deadline_s=2.0) is not None


def test_fair_share_makes_only_the_flooding_tenant_wait() -> None:
    waits = {}
    for policy in ("fcfs", "fair-share"):
        server = measured(policy=policy, max_running=4)
        for _ in range(100):
            server.submit(50, 10, tenant="flood")
        for name in ("flood", "trickle"):
            waits[name, policy] = server.expect(AdmittedRequest(make_tenant(name), 50, max_tokens=10))[0]
    assert waits["trickle", "fcfs"] == pytest.approx(waits["flood", "fcfs"])
    assert waits["trickle", "fair-share"] < waits["flood", "fair-share"] / 15


def test_expected_output_follows_past_answers() -> None:
    server = measured()
    for _ in range(100):
        server.submit(30, 20, max_tokens=100)
        server.run()
    short, long = (server.expect(AdmittedRequest(ANONYMOUS, 30, max_tokens=num))[1] for num in (20, 100))
    server.submit(30, 20)
    server.run()
    job = server.ended[-1]
    assert long == pytest.approx(job.ended_at - job.arrived, rel=0.2) and short < long / 2


# Sizes and limits of tenants


def make_controller(wait_s: float = 0.0, service_s: float = 0.0, **limits: Any) -> OverloadController:
    rates = overload.RateLimits(FakeClock())
    return OverloadController(rates=rates, expect=lambda *_: (wait_s, service_s), max_tokens=8192, **limits)


def admit(
    controller: OverloadController,
    num_prompt: int = 10,
    max_tokens: int | None = 10,
    tenant: Tenant = ANONYMOUS,
    is_tokenized: bool = True,
    **options: Any,
) -> AdmittedRequest:
    arriving = AdmittedRequest(tenant, num_prompt, max_tokens=max_tokens, **options)
    return controller.admit(arriving, is_tokenized=is_tokenized)


def test_sizes_over_the_limits_are_refused() -> None:
    controller = make_controller(max_prompt_tokens=10, max_output_tokens=20)
    with pytest.raises(InputTooLargeError, match="11 tokens; the limit is 10"):
        admit(controller, 11)
    with pytest.raises(InputTooLargeError, match="30; the limit is 20"):
        admit(controller, num_sequences=3)
    for num_tokens in (90, 100):
        request = admit(controller, 100, is_tokenized=False)  # an estimate is no reason to refuse
        with pytest.raises(InputTooLargeError, match=f"{num_tokens} tokens"):
            controller.set_prompt_tokens(request, num_tokens)
        controller.end(request)
    assert controller.num_places == 0


def test_tokens_are_settled_with_what_was_used() -> None:
    tenant = make_tenant("t", tokens_per_minute=100)
    controller = make_controller()
    request = admit(controller, 40, 50, tenant)
    with pytest.raises(overload.RateLimitedError):
        admit(controller, 5, 20, tenant)
    request.num_output_tokens = 10
    controller.end(request)
    admit(controller, 5, 20, tenant)


def test_refused_request_costs_no_tokens() -> None:
    tenant = make_tenant("t", tokens_per_minute=100, requests_per_minute=2)
    controller = make_controller(max_queued=1)
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
    controller = make_controller()
    for request in [admit(controller, 100, None, tenant) for _ in range(2)]:
        request.num_output_tokens = 1500
        controller.end(request)
    with pytest.raises(overload.RateLimitedError) as caught:  # 3,200 were used, which are paid for now
        admit(controller, 100, None, tenant)
    assert caught.value.retry_after_s == pytest.approx((3200 - 2000 + 612) * 60 / 2000)


# The queue


def test_full_queue_error_has_the_time_of_the_next_place() -> None:
    controller = make_controller(wait_s=4.0, max_queued=2)
    first = admit(controller, 10)
    controller.start(first)
    for _ in range(2):
        admit(controller, 100)
    with pytest.raises(BusyError, match="2 of 2 places") as caught:
        admit(controller)
    assert caught.value.retry_after_s == 2.0
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    controller.end(first)
    with pytest.raises(BusyError):
        admit(controller)


def test_tenant_cannot_fill_the_queue() -> None:
    controller = make_controller(wait_s=5.0, max_queued=12)
    flood, heavy = make_tenant("flood"), make_tenant("heavy", 2.0)
    for _ in range(10):
        admit(controller, 1, tenant=flood)  # while no other tenant waits
    held = admit(controller, 1, tenant=heavy)
    with pytest.raises(overload.ShareUsedError, match="'flood' holds 10 places; its share is 4") as caught:
        admit(controller, 1, tenant=flood)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 0.5)
    admit(controller, 1, tenant=heavy)
    controller.end(held)
    assert controller.num_places == 11


def test_encoder_counts_texts() -> None:
    controller = make_controller(max_queued=10)
    big = admit(controller, 500, num_places=50)
    with pytest.raises(BusyError, match="50 of 10 places"):
        admit(controller)
    controller.end(big)
    admit(controller)


# Deadlines


def test_deadlines_of_a_busy_server() -> None:
    controller = make_controller(0.8, 2.6)
    admit(controller, deadline_s=0.1)  # an idle server admits it: its prompt may be cached
    admit(controller, deadline_s=6.0)
    with pytest.raises(overload.TooLateError, match=r"expected in 3\.4 s, after the deadline of 3\.5 s") as caught:
        admit(controller, deadline_s=3.5)
    assert caught.value.status == 503 and caught.value.retry_after_s == 0.8
    with pytest.raises(overload.TooLateError, match=r"more than 2\.6 s, which it takes without a wait"):
        admit(controller, deadline_s=1.0)


def test_impossible_deadlines_are_client_errors() -> None:
    server = measured()
    controller, forecast = server.controller, server.scheduler.forecast
    controller.check_deadline(0.5, forecast.alone_s(10))
    with pytest.raises(ImpossibleDeadlineError, match=r"0\.05 s cannot.* takes about 0\.08.* s .*lower it\.") as caught:
        controller.check_deadline(0.05, forecast.alone_s(10), " or lower it")
    assert (caught.value.status, caught.value.param) == (400, "deadline_s")
    for _ in range(8):  # batches say nothing of single requests
        server.scheduler.cost.observe(0, 16, 1.6)
    controller.check_deadline(0.05, forecast.alone_s(None))


def test_max_wait_without_a_deadline() -> None:
    controller = make_controller(1.7, max_wait_s=1.0)
    admit(controller)
    with pytest.raises(BusyError, match=r"1\.7 s; the limit is 1 s") as caught:
        admit(controller)
    assert caught.value.retry_after_s == pytest.approx(0.7)
    admit(controller, deadline_s=60.0)


actions = st.lists(
    st.tuples(
        st.sampled_from(["admit", "tokenize", "enter", "start", "end"]), st.integers(0, 30), st.sampled_from("abc")
    ),
    max_size=80,
)


@settings(deadline=None)
@given(actions)
def test_counts_balance(history: list[tuple[str, int, str]]) -> None:
    controller = make_controller(max_queued=10)
    unread, waiting, running = list[AdmittedRequest](), list[AdmittedRequest](), list[AdmittedRequest]()
    for action, number, name in history:
        if action == "admit":
            try:
                unread.append(admit(controller, number, number, make_tenant(name), num_sequences=1 + number % 3))
            except overload.RefusedError as error:
                assert error.retry_after_s >= 0
        elif action == "tokenize" and unread:
            controller.set_prompt_tokens(unread[number % len(unread)], number)
        elif action == "enter" and unread:
            waiting.append(unread.pop(number % len(unread)))
            controller.enter(waiting[-1])
        elif action == "start" and waiting:
            running.append(waiting.pop(number % len(waiting)))
            controller.start(running[-1])
        elif action == "end" and (running or waiting or unread):
            ended = (running or waiting or unread).pop(0)
            for _ in range(2):
                controller.end(ended)
                controller.start(ended)
        assert controller.waiting == dict.fromkeys(unread, False) | dict.fromkeys(waiting, True)
        assert controller.running == set(running)
        assert controller.num_places == len(unread) + len(waiting)
        assert "'a'" not in repr(controller.stats())
