"""The gate of a model: limits of tenants and admission together, with a clock of the test's."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from archerfish.errors import InputTooLargeError
from archerfish.sequence import FinishReason
from archerfish.serve.admission import AdmissionLimits, BusyError, ImpossibleDeadlineError, TooLateError
from archerfish.serve.client import AsyncClient, RemoteError
from archerfish.serve.gate import Gate
from archerfish.serve.limits import RateLimitedError, RateLimits
from archerfish.serve.tenants import ANONYMOUS, Tenant
from archerfish.serve.wire import EmbedRequest
from tests.serve.hosting import WordEncoder, add_encoder, add_llm, make_host, talk, whole


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
    gate.check_deadline(5.1, 10)
    gate.check_deadline(0.51, None)  # of an answer whose length is open, the first token
    with pytest.raises(ImpossibleDeadlineError, match=r"4\.9 s cannot.* takes about 5 s .*lower max_tokens") as caught:
        gate.check_deadline(4.9, 10)
    assert (caught.value.status, caught.value.param) == (400, "deadline_s")
    for max_tokens in (1, None):
        with pytest.raises(ImpossibleDeadlineError, match=r"0\.001 s cannot be met.*about 0\.5 s.*\(deadline_s\)\.$"):
            gate.check_deadline(0.001, max_tokens)


def test_what_load_alone_makes_too_late_may_come_again() -> None:
    clock = Clock()
    gate = gate_with(clock)
    for _ in range(2):
        gate.admit(ANONYMOUS, max_tokens=10, num_sequences=1, num_prompt_tokens=10).started()
    gate.watch(20, 2)
    for step in range(9):
        clock.now += 0.5
        gate.watch(20, 4 + 2 * step)  # half a second for a token of each, which one alone may have sooner
    gate.check_deadline(0.1, 10)
    with pytest.raises(TooLateError) as caught:
        gate.admit(ANONYMOUS, max_tokens=10, num_sequences=1, num_prompt_tokens=10, deadline_s=0.1)
    assert caught.value.status == 503


def test_a_deadline_that_can_never_be_met_is_the_callers_mistake(tmp_path: Path) -> None:
    host = make_host(tmp_path)
    add_llm(host, tmp_path)
    add_encoder(host, WordEncoder())

    async def test(client: AsyncClient) -> None:
        embed = EmbedRequest(request_id="", model="words", texts=["a b c"])
        await whole(client, model="tiny", token_ids=[5, 6])
        await client.ask(embed)
        for ask in (
            lambda deadline_s: whole(client, model="tiny", token_ids=[5, 6], deadline_s=deadline_s),
            lambda deadline_s: client.ask(replace(embed, deadline_s=deadline_s)),
        ):
            with pytest.raises(RemoteError, match="cannot be met") as caught:
                await ask(1e-7)
            error = caught.value
            assert (error.status, error.code, error.param, error.retry_after_s) == (
                400, "deadline_impossible", "deadline_s", None,
            )  # fmt: skip
            await ask(60.0)

    talk(host, test)


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
