"""Rate limits: exact waits, corrections of estimates, and tenants that do not affect each other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.serve import tenants
from archerfish.serve.tenants import ANONYMOUS, OverLimitError, RateLimitedError, RateLimits, Tenant, retry_after

from .hosting import FakeClock

ALICE = Tenant(name="alice", requests_per_minute=3, tokens_per_minute=600)
TOKENS = replace(ALICE, requests_per_minute=0.0)


def make_limits() -> tuple[RateLimits, FakeClock]:
    clock = FakeClock()
    return RateLimits(clock), clock


def try_to_take(rates: RateLimits, tenant: Tenant, num_tokens: int) -> float:
    """0 if the tokens were taken, else the seconds until they can be."""
    try:
        rates.take(tenant, num_tokens)
    except RateLimitedError as error:
        return error.retry_after_s
    return 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 600), st.integers(0, 600)), max_size=40))
def test_no_period_gets_more_than_the_limit(requests: list[tuple[float, int, int]]) -> None:
    rates, clock = make_limits()
    taken: list[tuple[float, int]] = []
    for pause, estimate, used in requests:
        clock.now += pause
        if not try_to_take(rates, TOKENS, estimate):
            rates.give_back(TOKENS, max(0, estimate - used))
            taken.append((clock.now, min(estimate, used)))
    for start, end in itertools.combinations_with_replacement(range(len(taken)), 2):
        seconds = taken[end][0] - taken[start][0]
        assert sum(amount for _, amount in taken[start : end + 1]) <= 10 * seconds + 600 + 1e-6


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 600)), max_size=20), st.integers(1, 600))
def test_wait_is_exact(requests: list[tuple[float, int]], wanted: int) -> None:
    rates, clock = make_limits()
    for pause, amount in requests:
        clock.now += pause
        try_to_take(rates, TOKENS, amount)
    wait_s = try_to_take(rates, TOKENS, wanted)
    if wait_s > 0.01:
        clock.now += wait_s - 0.01
        assert 0 < try_to_take(rates, TOKENS, wanted) < 0.011
        clock.now += 0.01001
        assert try_to_take(rates, TOKENS, wanted) == 0


def test_requests_over_the_limit_get_retry_after() -> None:
    rates, clock = make_limits()
    for _ in range(3):
        rates.take(ALICE, 10)
    clock.now += 5
    with pytest.raises(RateLimitedError, match="3 requests a minute") as caught:
        rates.take(ALICE, 10)
    assert caught.value.retry_after_s == pytest.approx(15)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert str(caught.value).endswith("Try again in 15 seconds.")
    clock.now += 15.001
    rates.take(ALICE, 10)


def test_refused_request_takes_nothing() -> None:
    rates, _ = make_limits()
    rates.take(ALICE, 400)
    for _ in range(5):
        with pytest.raises(RateLimitedError, match="tokens"):
            rates.take(ALICE, 400)
    rates.take(ALICE, 200)
    rates.take(ALICE, 0)


def test_request_above_the_limit_of_a_minute_is_an_error() -> None:
    rates, _ = make_limits()
    with pytest.raises(OverLimitError, match="601 tokens; 'alice' has 600") as caught:
        rates.take(ALICE, 601)
    assert caught.value.status == 413
    rates.take(ALICE, 600)
    rates.take(ANONYMOUS, 10**9)  # without limits


def test_changed_limits_apply_at_once() -> None:
    rates, _ = make_limits()
    for _ in range(3):
        rates.take(ALICE, 1)
    assert try_to_take(rates, ALICE, 1) == pytest.approx(20)
    assert try_to_take(rates, replace(ALICE, requests_per_minute=60.0), 1) == 0
    slow = replace(ALICE, name="slow", requests_per_minute=0.5)
    assert [try_to_take(rates, slow, 1) for _ in range(2)] == pytest.approx([0, 120])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 20), st.integers(1, 400)), max_size=60))
def test_tenants_do_not_affect_each_other(requests: list[tuple[str, float, int]]) -> None:
    def waits_of_a(names: str) -> list[float]:
        rates, clock = make_limits()
        found = []
        for name, pause, num_tokens in requests:
            clock.now += pause
            if name in names:
                wait_s = try_to_take(rates, replace(ALICE, name=name), num_tokens)
                found += [wait_s] if name == "a" else []
        return found

    assert waits_of_a("ab") == waits_of_a("a")


def test_paid_debts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MAX_KNOWN_DEBTS", 8)
    rates, clock = make_limits()
    for number in range(200):
        rates.take(replace(ALICE, name=f"t{number}"), 600)
        clock.now += 1000
        assert len(rates._debts) <= 9
    rates.take(replace(ALICE, name="new"), 600)
    assert try_to_take(rates, replace(ALICE, name="new"), 600) > 0


def test_retry_after_is_in_whole_seconds() -> None:
    assert [retry_after(seconds) for seconds in (0.0, 0.2, 1.0, 1.01, 59.5)] == ["1", "1", "1", "2", "60"]
