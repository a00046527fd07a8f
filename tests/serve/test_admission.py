"""The gate: what it lets in can be served in time, what it refuses is told when to come back, and its books balance."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import InputTooLargeError, InvalidInputError, InvalidOptionError
from archerfish.sequence import FinishReason
from archerfish.serve.admission import Admission, AdmissionLimits, BusyError, Entry, ShareUsedError, TooLateError
from archerfish.serve.limits import RefusedError
from archerfish.serve.service_rate import Average, LittlesLaw, ServiceRate
from archerfish.serve.tenants import ANONYMOUS, Tenant


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def gate(max_running: int = 4, **limits: Any) -> tuple[Admission, Clock]:
    clock = Clock()
    return Admission(AdmissionLimits(**limits), max_running=max_running, clock=clock), clock


def measured(max_running: int = 4, **limits: Any) -> tuple[Admission, Clock]:
    """One that has seen 100 ms decode steps whatever the batch, and 1,000 prompt tokens a second."""
    admission, clock = gate(max_running, **limits)
    admission.observe(0, max_running, 0.1)
    admission._running_output = 0.0
    admission.observe(1000, 0, 1.0)
    return admission, clock


def tenant(name: str, weight: float = 1.0) -> Tenant:
    return Tenant(name=name, namespace=name, weight=weight)


# Rates


def test_averages_begin_as_means_and_then_forget() -> None:
    average = Average(4)
    seen = [average.value]
    for value in (1.0, 2.0, 3.0, 4.0, *[10.0] * 50):
        average.add(value)
        seen.append(average.value)
    assert seen[:6] == [None, 1.0, 1.5, 2.0, 2.5, 4.375]
    assert seen[-1] == pytest.approx(10.0, abs=1e-4)


def test_rates_are_told_apart_in_mixed_steps() -> None:
    """Steps of 20 ms + 1 ms a sequence + 0.5 ms a prompt token."""
    rate, rng = ServiceRate(), random.Random(3)
    assert rate.decode_step_s(1) is None and rate.prefill_tokens_per_s is None and rate.prefill_s(100) == 0
    for _ in range(500):
        num_prompt, batch = rng.choice([0, 0, 64, 200]), rng.choice([1, 8, 32])
        rate.observe(num_prompt, batch, 0.02 + 0.001 * batch + 0.0005 * num_prompt)
    assert rate.decode_step_s(1) == pytest.approx(0.021)
    assert rate.decode_step_s(8) == pytest.approx(0.028)
    assert rate.decode_step_s(32) == pytest.approx(0.052)
    assert rate.prefill_tokens_per_s == pytest.approx(2000, rel=0.01)
    assert rate.prefill_s(400) == pytest.approx(0.2, rel=0.01)


def test_sizes_that_were_never_seen_lie_on_the_line_through_the_nearest_smaller_ones() -> None:
    rate = ServiceRate()
    rate.observe(0, 4, 0.4)
    assert rate.decode_step_s(1) == rate.decode_step_s(4) == rate.decode_step_s(1000) == 0.4
    rate.observe(0, 16, 1.0)
    assert rate.decode_step_s(5) == 0.4 and rate.decode_step_s(9) == 1.0
    assert rate.decode_step_s(64) == pytest.approx(1.0 + 48 * 0.6 / 12)
    rate.observe(0, 32, 0.9)  # no line goes down
    assert rate.decode_step_s(64) == 0.9
    assert rate.decode_tokens_per_s == pytest.approx(52 / 2.3, rel=0.02)
    rate.observe(0, 0, 1.0)
    rate.observe(10, 1, 0.0)
    assert rate.prefill_tokens_per_s is None


# Sizes


def test_sizes_over_the_limits_are_refused() -> None:
    admission, _ = gate(max_prompt_tokens=10, max_output_tokens=20)
    with pytest.raises(InputTooLargeError, match="11 tokens; the limit is 10"):
        admission.admit(ANONYMOUS, 5, num_prompt_tokens=11)
    with pytest.raises(InputTooLargeError, match="30; the limit is 20"):
        admission.admit(ANONYMOUS, 10, num_sequences=3, num_prompt_tokens=5)
    entry = admission.admit(ANONYMOUS, 5, num_prompt_bytes=400)  # an estimate is no reason to refuse
    with pytest.raises(InputTooLargeError, match="90 tokens"):
        entry.tokenized(90)
    entry.ended(0, "abort")
    assert admission.num_queued == 0


def test_wrong_values_are_refused() -> None:
    admission, _ = gate()
    mistakes: list[dict[str, Any]] = [{"max_tokens": -1}, {"num_sequences": 0}, {"deadline_s": 0.0}]
    for options in mistakes:
        with pytest.raises(InvalidInputError):
            admission.admit(ANONYMOUS, **{"max_tokens": 1, "num_prompt_tokens": 1} | options)
    with pytest.raises(InvalidOptionError, match="max_wait_s"):
        AdmissionLimits(max_wait_s=-1.0)


def test_tokens_are_estimated_from_bytes_as_prompts_were() -> None:
    admission, _ = gate()
    assert admission.estimate_tokens(400) == 100 and admission.estimate_tokens(0) == 1
    for _ in range(100):
        entry = admission.admit(ANONYMOUS, 5, num_prompt_bytes=200)
        entry.tokenized(100)
        entry.ended(1, "stop")
    assert admission.estimate_tokens(400) == 200


# The queue


def test_a_full_queue_refuses_and_says_when_a_place_is_free() -> None:
    admission, _ = measured(max_running=4, max_queued_requests=2)
    running = [admission.admit(ANONYMOUS, 10, num_prompt_tokens=10)]
    running[0].started()
    for _ in range(2):
        admission.admit(ANONYMOUS, 10, num_prompt_tokens=100)
    with pytest.raises(BusyError, match="2 requests wait") as caught:
        admission.admit(ANONYMOUS, 10, num_prompt_tokens=10)
    # 200 prompt tokens take 0.2 s; 30 output tokens of 3 sequences 10 steps of 0.1 s; one of three leaves.
    assert caught.value.retry_after_s == pytest.approx((0.2 + 1.0) / 3)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    running[0].ended(10, "length")
    with pytest.raises(BusyError):
        admission.admit(ANONYMOUS, 10, num_prompt_tokens=10)


def test_a_flood_does_not_take_the_places_of_others() -> None:
    admission, _ = measured(max_queued_requests=12)
    flood, heavy = tenant("flood"), tenant("heavy", 2.0)
    for _ in range(10):
        admission.admit(flood, 10, num_prompt_tokens=1)  # nobody else is there
    held = admission.admit(heavy, 10, num_prompt_tokens=1)
    with pytest.raises(ShareUsedError, match="'flood' has its share of it: 10 requests") as caught:
        admission.admit(flood, 10, num_prompt_tokens=1)
    assert caught.value.status == 429 and caught.value.retry_after_s == pytest.approx(3 * admission._one_leaves_s())
    admission.admit(heavy, 10, num_prompt_tokens=1)
    held.ended(0, "abort")
    assert admission.num_queued == 11


# Deadlines


def test_nothing_is_refused_for_time_before_a_rate_is_known() -> None:
    admission, _ = gate(max_wait_s=0.001)
    assert admission.outlook(ANONYMOUS, 10**6, 10**6) is None
    admission.admit(ANONYMOUS, 10**6, num_prompt_tokens=10**6, deadline_s=0.001)


def test_a_request_that_cannot_be_in_time_is_refused_at_once() -> None:
    admission, _ = measured()
    outlook = admission.outlook(ANONYMOUS, 500, 20)
    assert outlook is not None and [outlook.wait_s, outlook.service_s] == pytest.approx([0.0, 2.5])
    admission.admit(ANONYMOUS, 20, num_prompt_tokens=500, deadline_s=2.6)
    with pytest.raises(TooLateError, match=r"expected in 3\.0 s; the deadline of 2\.6 s is too near") as caught:
        admission.admit(ANONYMOUS, 20, num_prompt_tokens=500, deadline_s=2.6)
    assert caught.value.retry_after_s == pytest.approx(0.5) and caught.value.status == 503
    assert "Try again in 1 second." in str(caught.value)
    with pytest.raises(TooLateError, match=r"more than the 2\.5 s that it takes without a wait"):
        admission.admit(ANONYMOUS, 20, num_prompt_tokens=500, deadline_s=1.0)


def test_a_request_is_refused_before_it_is_tokenised() -> None:
    admission, _ = measured()
    with pytest.raises(TooLateError):
        admission.admit(ANONYMOUS, 1, num_prompt_bytes=4 * 5000, deadline_s=4.9)
    entry = admission.admit(ANONYMOUS, 1, num_prompt_bytes=4 * 4000, deadline_s=4.9)
    assert entry.num_prompt_tokens == 4000


def test_slots_that_are_taken_are_waited_for() -> None:
    admission, _ = measured(max_running=2, is_fair=False)
    for _ in range(2):
        admission.admit(ANONYMOUS, 100, num_prompt_tokens=0).started()
    outlook = admission.outlook(ANONYMOUS, 0, 10)
    assert outlook is not None and outlook.wait_s == pytest.approx(5.0)  # half of 200 tokens at 20 a second
    admission.observe(0, 100, 5.0)
    outlook = admission.outlook(ANONYMOUS, 0, 10)
    assert outlook is not None and outlook.wait_s < 5.0


def test_sequences_of_one_request_run_together_but_take_their_slots() -> None:
    admission, _ = measured(max_running=4, is_fair=False)
    before = admission.outlook(ANONYMOUS, 100, 10)
    entry = admission.admit(ANONYMOUS, 10, num_sequences=4, num_prompt_tokens=100, deadline_s=1.2)
    assert before is not None and before.total_s == pytest.approx(1.1) and entry.expected_output == 40
    entry.started()
    after = admission.outlook(ANONYMOUS, 0, 10)
    assert after is not None and after.wait_s > 0


def test_without_a_deadline_the_longest_wait_counts() -> None:
    admission, _ = measured(max_wait_s=1.0)
    admission.admit(ANONYMOUS, 1, num_prompt_tokens=1500)
    with pytest.raises(BusyError, match=r"1\.5 s; the limit is 1 s") as caught:
        admission.admit(ANONYMOUS, 1, num_prompt_tokens=1)
    assert caught.value.retry_after_s == pytest.approx(0.5)
    admission.admit(ANONYMOUS, 1, num_prompt_tokens=1, deadline_s=60.0)


def test_with_fair_shares_a_flood_makes_only_itself_wait() -> None:
    waits: dict[tuple[str, bool], float] = {}
    for is_fair in (True, False):
        admission, _ = measured(is_fair=is_fair)
        for _ in range(100):
            admission.admit(tenant("flood"), 10, num_prompt_tokens=50)
        for name in ("flood", "trickle"):
            outlook = admission.outlook(tenant(name), 50, 10)
            assert outlook is not None
            waits[name, is_fair] = outlook.wait_s
    assert waits["trickle", False] == waits["flood", False] == waits["flood", True]
    assert waits["trickle", True] < waits["flood", True] / 50
    admission, _ = measured()
    for _ in range(100):
        admission.admit(tenant("flood", 5.0), 10, num_prompt_tokens=50)
    turns = [admission._ahead(tenant("t", weight)) for weight in (1.0, 2.5, 5.0)]
    assert turns == [(5, 250, 50), (2, 100, 20), (1, 50, 10)]


def test_answers_shorter_than_max_tokens_are_expected_of_the_next() -> None:
    admission, _ = measured()
    for _ in range(200):
        entry = admission.admit(ANONYMOUS, 100, num_prompt_tokens=1)
        entry.started()
        entry.ended(20, "stop")
    assert admission.expected_output(100) == pytest.approx(20)
    reasons: list[FinishReason] = ["abort", "error", "deadline"]
    for reason in reasons * 50:
        admission.admit(ANONYMOUS, 100, num_prompt_tokens=1).ended(0, reason)
    assert admission.expected_output(100) == pytest.approx(20)
    admission.margin = 1.0
    admission.admit(ANONYMOUS, 100, num_prompt_tokens=1, deadline_s=2.5)


def test_late_answers_widen_the_margin_and_others_narrow_it() -> None:
    admission, clock = measured()
    for _ in range(10):
        admission.admit(ANONYMOUS, 10, num_prompt_tokens=1, deadline_s=60.0).ended(3, "deadline")
    assert admission.margin == pytest.approx(1.05**10)
    with pytest.raises(TooLateError):
        admission.admit(ANONYMOUS, 20, num_prompt_tokens=500, deadline_s=2.6)
    admission.admit(ANONYMOUS, 10, num_prompt_tokens=1).ended(10, "length")  # one without a deadline tells nothing
    assert admission.margin == pytest.approx(1.05**10)
    for seconds, narrowed in ((60.0, 0.999), (30.0, 0.999**2), (0.0, 0.999**50)):  # the sooner, the more
        before, entry = admission.margin, admission.admit(ANONYMOUS, 10, num_prompt_tokens=1, deadline_s=60.0)
        clock.now += seconds
        entry.ended(10, "length")
        assert admission.margin == pytest.approx(before * narrowed)
    for _ in range(1000):
        admission.admit(ANONYMOUS, 10, num_prompt_tokens=1, deadline_s=60.0).ended(10, "length")
    assert admission.margin == 1.0
    for _ in range(1000):
        admission.admit(ANONYMOUS, 10, num_prompt_tokens=1, deadline_s=60.0).ended(10, "deadline")
    assert admission.margin == 3.0


# Books


kinds = st.sampled_from(["admit", "tokenize", "start", "step", "end", "abort"])
actions = st.lists(st.tuples(kinds, st.integers(0, 30), st.sampled_from("abc")), max_size=80)


@settings(deadline=None)
@given(actions)
def test_the_books_balance_whatever_happens(history: list[tuple[str, int, str]]) -> None:
    admission, clock = gate(max_queued_requests=10)
    waiting: list[Entry] = []
    running: dict[Entry, int] = {}
    for action, number, name in history:
        clock.now += 0.1
        if action == "admit":
            try:
                options = {"num_prompt_tokens": number} if number % 2 else {"num_prompt_bytes": 9 * number}
                waiting.append(admission.admit(tenant(name), number, num_sequences=1 + number % 3, **options))
            except RefusedError as error:
                assert error.retry_after_s >= 0
        elif action == "tokenize" and waiting:
            waiting[number % len(waiting)].tokenized(number)
        elif action == "start" and waiting:
            entry = waiting.pop(number % len(waiting))
            entry.started()
            running[entry] = 0
        elif action == "step" and running:
            admission.observe(number, len(running), 0.05)
            running = {entry: count + 1 for entry, count in running.items()}
        elif action in ("end", "abort") and (running or waiting):
            entry = next(iter(running), None) or waiting[0]
            entry.ended(running.pop(entry, 0), "stop" if action == "end" else "abort")
            waiting = [other for other in waiting if other is not entry]
            entry.ended(99, "stop")
            entry.started()
        assert (admission.num_queued, admission.num_running) == (len(waiting), len(running))
        assert admission._queued_prompt == pytest.approx(sum(entry.num_prompt_tokens for entry in waiting))
        assert admission._queued_output == pytest.approx(sum(entry.expected_output for entry in waiting))
        owed = sum(entry.expected_output - count for entry, count in running.items())
        assert admission._running_output == pytest.approx(owed if running or waiting else 0.0)
        assert admission._running_sequences == sum(entry.num_sequences for entry in running)
        assert {name: line.num_requests for name, line in admission._lines.items()} == {
            name: sum(entry.tenant.name == name for entry in waiting) for name in {entry.tenant.name for entry in waiting}
        }
        assert admission.figures()["drain_seconds"] >= 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["in", "in", "out"]), st.floats(0, 5), st.integers(0, 9)), max_size=60))
def test_littles_law_holds_between_the_figures(history: list[tuple[str, float, int]]) -> None:
    clock = Clock()
    law = LittlesLaw(clock)
    inside: list[float] = []
    for action, pause, number in history:
        clock.now += pause
        if action == "in":
            inside.append(law.enter())
        elif action == "out" and inside:
            law.leave(inside.pop(number % len(inside)))
        figures = law.figures()
        served = figures.requests_per_s * figures.period_s * figures.mean_s
        assert figures.mean_requests * figures.period_s == pytest.approx(served + figures.open_s, abs=1e-6)
        assert figures.open_s >= -1e-6
    for entered in inside:
        law.leave(entered)
    clock.now += 1
    figures = law.figures()
    if figures.requests_per_s:
        assert figures.mean_requests == pytest.approx(figures.requests_per_s * figures.mean_s, abs=1e-6)


# A server that is simulated: 20 ms + 1 ms a sequence + 0.2 ms a prompt token for each step


@dataclass(eq=False)
class Job:
    entry: Entry
    deadline: float
    num_tokens: int
    num_done: int = 0
    ended: float = 0.0


@dataclass
class Server:
    admission: Admission
    clock: Clock
    max_running: int
    queue: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)

    def step(self) -> None:
        num_prompt = 0
        while self.queue and len(self.running) < self.max_running and num_prompt < 512:
            job = self.queue.popleft()
            num_prompt += job.entry.num_prompt_tokens
            self.running.append(job)
        seconds = 0.02 + 0.001 * len(self.running) + 0.0002 * num_prompt
        self.clock.now += seconds
        self.admission.observe(num_prompt, len(self.running), seconds)
        for job in list(self.running):
            job.num_done += 1
            job.entry.started()
            is_late = self.clock.now > job.deadline
            if is_late or job.num_done == job.num_tokens:
                job.ended = self.clock.now
                job.entry.ended(job.num_done, "deadline" if is_late else "length")
                self.running.remove(job)
                self.ended.append(job)
        for job in [job for job in self.queue if self.clock.now > job.deadline]:
            job.ended = self.clock.now
            job.entry.ended(0, "deadline")
            self.queue.remove(job)
            self.ended.append(job)


def simulate(load: float, seconds: float, *, is_guarded: bool, seed: int = 1) -> tuple[float, int, int, list[float]]:
    """Poisson arrivals at a multiple of the capacity: answers in time a second, late ones, refusals, and their Retry-Afters."""
    clock, rng = Clock(), random.Random(seed)
    limits = AdmissionLimits(max_queued_requests=1000, is_fair=False)
    admission = Admission(limits, max_running=16, clock=clock)
    server = Server(admission, clock, 16)
    prompt, output, deadline_s = 64, 30, 6.0
    capacity = 16 / (output * (0.02 + 0.016) + 16 * prompt * 0.0002)  # requests a second with a full batch
    start, arrival, refused = clock.now, clock.now, []
    while clock.now < start + seconds:
        while arrival <= clock.now:
            arrival += rng.expovariate(load * capacity)
            try:
                entry = admission.admit(
                    ANONYMOUS, 2 * output, num_prompt_tokens=prompt, deadline_s=deadline_s if is_guarded else None
                )
            except RefusedError as error:
                refused.append(error.retry_after_s)
                continue
            server.queue.append(Job(entry, clock.now + deadline_s, rng.randint(output // 2, output * 3 // 2)))
        if server.queue or server.running:
            server.step()
        else:
            clock.now = arrival
    good = [job for job in server.ended if job.num_done == job.num_tokens]
    return len(good) / seconds / capacity, len(server.ended) - len(good), len(refused), refused


def test_at_three_times_the_capacity_goodput_stays() -> None:
    goodput, num_late, num_refused, waits = simulate(3.0, 120, is_guarded=True)
    assert goodput > 0.9
    assert num_late < 0.05 * num_refused
    assert all(0 < wait < 30 for wait in waits)


def test_without_the_gate_it_would_not() -> None:
    """What the test above is worth: the same load, refused only by the bound of the queue."""
    goodput, num_late, _, _ = simulate(3.0, 120, is_guarded=False)
    assert goodput < 0.6 and num_late > 100


def test_below_the_capacity_nearly_nothing_is_refused() -> None:
    goodput, num_late, num_refused, _ = simulate(0.7, 120, is_guarded=True)
    assert num_refused <= 2 and num_late == 0 and goodput == pytest.approx(0.7, rel=0.1)


def test_the_outlook_is_near_what_comes() -> None:
    """Bursts into an idle server: the last of each is told when it will be done."""
    clock = Clock()
    admission = Admission(AdmissionLimits(is_fair=False), max_running=16, clock=clock)
    server = Server(admission, clock, 16)
    for burst in (4, 16, 32, 64, 100):
        expected = 0.0
        for index in range(burst):
            if index == burst - 1:
                outlook = admission.outlook(ANONYMOUS, 64, 30)
                expected = outlook.total_s if outlook is not None else 0.0
            server.queue.append(Job(admission.admit(ANONYMOUS, 30, num_prompt_tokens=64), clock.now + 1e9, 30))
        began, last = clock.now, server.queue[-1]
        while not last.ended:
            server.step()
        if burst > 16:  # before that the rates of full batches are not known
            assert expected == pytest.approx(last.ended - began, rel=0.35)
        while server.running:
            server.step()
    assert admission.num_queued == admission.num_running == 0


def test_figures_have_no_names() -> None:
    admission, _ = measured()
    admission.admit(replace(ANONYMOUS, name="secret-name"), 10, num_prompt_tokens=10)
    assert "secret-name" not in repr(admission.figures()) and admission.figures()["queued_requests"] == 1
