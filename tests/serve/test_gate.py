"""The gate of a model: limits of tenants and admission together, with a clock of the test's."""

from __future__ import annotations

import pytest

from archerfish.errors import InputTooLargeError
from archerfish.sequence import FinishReason
from archerfish.serve.admission import AdmissionLimits, BusyError, TooLateError
from archerfish.serve.gate import Gate
from archerfish.serve.limits import RateLimitedError, RateLimits
from archerfish.serve.tenants import ANONYMOUS, Tenant


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def gate_with(clock: Clock, **limits: float) -> Gate:
    chosen = AdmissionLimits(**limits)  # type: ignore[arg-type]
    return Gate(RateLimits(clock), chosen, max_running=2, max_tokens=100, clock=clock)


def test_a_request_goes_through_and_leaves_nothing_behind() -> None:
    clock = Clock()
    gate = gate_with(clock)
    one = gate.admit(ANONYMOUS, max_tokens=10, num_sequences=1, num_prompt_bytes=40)
    assert gate.admission.num_queued == 1
    one.tokenized(12)
    one.started()
    assert (gate.admission.num_queued, gate.admission.num_running) == (0, 1)
    one.num_output, one.reason = 5, "stop"
    one.ended()
    one.ended()
    assert (gate.admission.num_queued, gate.admission.num_running) == (0, 0)


def test_tokens_are_settled_with_what_was_used() -> None:
    clock, tenant = Clock(), Tenant(name="t", namespace="n", tokens_per_minute=100)
    gate = gate_with(clock)
    one = gate.admit(tenant, max_tokens=50, num_sequences=1, num_prompt_tokens=40)
    with pytest.raises(RateLimitedError):
        gate.admit(tenant, max_tokens=20, num_sequences=1, num_prompt_tokens=5)
    one.num_output = 10
    one.ended()  # 50 of 100 used
    gate.admit(tenant, max_tokens=20, num_sequences=1, num_prompt_tokens=5)


def test_what_admission_refuses_costs_no_tokens() -> None:
    clock, tenant = Clock(), Tenant(name="t", namespace="n", tokens_per_minute=100, requests_per_minute=2)
    gate = gate_with(clock, max_queued_requests=1)
    first = gate.admit(tenant, max_tokens=10, num_sequences=1, num_prompt_tokens=10)
    for _ in range(5):
        with pytest.raises(BusyError) as refused:
            gate.admit(tenant, max_tokens=10, num_sequences=1, num_prompt_tokens=10)
    assert refused.value.retry_after_s >= 0
    first.ended()
    gate.admit(tenant, max_tokens=10, num_sequences=1, num_prompt_tokens=10)


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    clock = Clock()
    gate = gate_with(clock)
    one = gate.admit(ANONYMOUS, max_tokens=10, num_sequences=1, num_prompt_tokens=10)
    clock.now = 1.0
    gate.watch(10, 1)  # a second for the prompt
    one.started()
    for step in range(9):
        clock.now += 0.5
        gate.watch(10, 2 + step)  # half a second a token
    one.num_output, one.reason = 10, "length"
    one.ended()
    gate.admit(ANONYMOUS, max_tokens=10, num_sequences=1, num_prompt_tokens=10, deadline_s=60.0).ended()
    with pytest.raises(TooLateError):
        gate.admit(ANONYMOUS, max_tokens=10, num_sequences=1, num_prompt_tokens=10, deadline_s=1.0)


def test_idle_time_does_not_count_as_slowness() -> None:
    clock = Clock()
    gate = gate_with(clock)
    clock.now = 1000.0
    one = gate.admit(ANONYMOUS, max_tokens=5, num_sequences=1, num_prompt_tokens=10)
    clock.now += 1.0
    gate.watch(10, 1)
    one.ended()
    assert gate.admission.rate.prefill_tokens_per_s == pytest.approx(10.0)


def test_a_prompt_over_the_limit_is_found_when_it_is_tokenised() -> None:
    gate = gate_with(Clock(), max_prompt_tokens=20)
    one = gate.admit(ANONYMOUS, max_tokens=5, num_sequences=1, num_prompt_bytes=8)
    with pytest.raises(InputTooLargeError):
        one.tokenized(21)
    one.ended()
    assert gate.admission.num_queued == 0


def test_only_answers_teach_how_sure_an_expected_time_is() -> None:
    clock = Clock()
    gate = gate_with(clock)
    margins = []
    reasons: list[FinishReason] = ["deadline", "abort", "error", "length"]
    for reason in reasons:
        one = gate.admit(ANONYMOUS, max_tokens=5, num_sequences=1, num_prompt_tokens=10, deadline_s=10.0)
        clock.now += 0.1
        one.reason = reason
        one.ended()
        margins.append(gate.admission.margin)
    assert margins[0] == margins[1] == margins[2] > 1.0
    assert 1.0 <= margins[3] < margins[2]


def test_probes_of_an_idle_model_do_not_make_it_seem_slow() -> None:
    clock = Clock()
    gate = gate_with(clock)
    one = gate.admit(ANONYMOUS, max_tokens=5, num_sequences=1, num_prompt_tokens=10)
    clock.now += 1.0
    gate.watch(10, 1)
    one.ended()
    for number in range(1, 100):
        clock.now += 10.0
        gate.watch(10 + 2 * number, 1 + number)
    assert gate.admission.rate.prefill_tokens_per_s == pytest.approx(10.0)
    gate.admit(ANONYMOUS, max_tokens=5, num_sequences=1, num_prompt_tokens=10, deadline_s=2.0)


def test_an_answer_whose_length_is_left_open_does_not_take_all_tokens_of_a_minute() -> None:
    clock, tenant = Clock(), Tenant(name="t", namespace="n", tokens_per_minute=2000)
    gate = Gate(RateLimits(clock), AdmissionLimits(), max_running=2, max_tokens=8192, clock=clock)
    passes = [gate.admit(tenant, max_tokens=None, num_sequences=1, num_prompt_tokens=100) for _ in range(2)]
    for one in passes:
        one.num_output, one.reason = 1500, "stop"
        one.ended()
    with pytest.raises(RateLimitedError) as caught:  # 3,200 were used, which are paid for now
        gate.admit(tenant, max_tokens=None, num_sequences=1, num_prompt_tokens=100)
    assert caught.value.retry_after_s == pytest.approx((3200 - 2000 + 612) * 60 / 2000)
