"""Buckets: never more than rate * t + burst, waits that are exact, and tenants that do not feel each other."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import InvalidOptionError
from archerfish.serve import limits
from archerfish.serve.limits import OverLimitError, RateLimitedError, RateLimits, TokenBucket, retry_after
from archerfish.serve.tenants import ANONYMOUS, Tenant

ALICE = Tenant(name="alice", namespace="a", requests_per_minute=3, tokens_per_minute=600)


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def take(bucket: TokenBucket, amount: float) -> bool:
    """Whether there was that much; if so, it is gone."""
    if bucket.free_at(amount) > bucket.now():
        return False
    bucket.add(-amount)
    return True


def left(rates: RateLimits, tenant: Tenant) -> list[float]:
    """Requests and tokens that a tenant may have now."""
    buckets = (rates._bucket(tenant.name, "requests", tenant.requests_per_minute),
               rates._bucket(tenant.name, "tokens", tenant.tokens_per_minute))  # fmt: skip
    return [bucket.level for bucket in buckets if bucket is not None]


pauses = st.floats(0, 30, allow_nan=False)
amounts = st.floats(0, 12, allow_nan=False)
rates = st.floats(0.05, 20)
bursts = st.floats(0.5, 10)


@settings(deadline=None)
@given(rates, bursts, st.lists(st.tuples(pauses, amounts), max_size=40))
def test_no_window_holds_more_than_its_share(rate: float, burst: float, asks: list[tuple[float, float]]) -> None:
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock)
    granted: list[tuple[float, float]] = []
    for pause, amount in asks:
        clock.now += pause
        if take(bucket, amount):
            granted.append((clock.now, amount))
        assert -1e-6 <= bucket.level <= burst + 1e-6
    for start, end in itertools.combinations_with_replacement(range(len(granted)), 2):
        seconds = granted[end][0] - granted[start][0]
        assert sum(amount for _, amount in granted[start : end + 1]) <= rate * seconds + burst + 1e-6


@settings(deadline=None)
@given(rates, bursts, st.lists(st.tuples(pauses, amounts, st.floats(0, 12)), max_size=40))
def test_no_window_that_ends_with_a_grant_holds_more_even_with_settlements(
    rate: float, burst: float, asks: list[tuple[float, float, float]]
) -> None:
    """What was reserved, and what settlements added or gave back, together."""
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock)
    charges: list[tuple[float, float, bool]] = []
    for pause, estimate, real in asks:
        clock.now += pause
        if take(bucket, estimate):
            charges.append((clock.now, estimate, True))
            clock.now += pause / 2
            before = bucket.level
            bucket.add(estimate - real)
            charges.append((clock.now, before - bucket.level, False))  # what a full bucket cannot take is lost
    for start, end in itertools.combinations_with_replacement(range(len(charges)), 2):
        if charges[end][2]:
            seconds = charges[end][0] - charges[start][0]
            assert sum(charge for _, charge, _ in charges[start : end + 1]) <= rate * seconds + burst + 1e-6


@settings(deadline=None)
@given(rates, bursts, st.lists(st.tuples(pauses, amounts), max_size=20), st.floats(0.01, 10))
def test_the_wait_is_exact(rate: float, burst: float, asks: list[tuple[float, float]], wanted: float) -> None:
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock)
    for pause, amount in asks:
        clock.now += pause
        take(bucket, amount)
    free_at = bucket.free_at(wanted)
    if wanted > burst:
        assert free_at == math.inf and not take(bucket, wanted)
        return
    if free_at > clock.now:
        clock.now = max(clock.now, math.nextafter(free_at, 0))
        assert not take(bucket, wanted), "a moment before, it is refused"
        clock.now = free_at
    assert take(bucket, wanted), "at that moment it is not"


@settings(deadline=None)
@given(rates, bursts, st.lists(st.tuples(st.floats(-50, 30), amounts), max_size=40))
def test_a_clock_that_goes_back_gives_nothing(rate: float, burst: float, asks: list[tuple[float, float]]) -> None:
    clock, steady = Clock(), Clock()
    bucket, expected = TokenBucket(rate, burst, clock), TokenBucket(rate, burst, steady)
    for pause, amount in asks:
        clock.now += pause
        steady.now = max(steady.now, clock.now)
        assert take(bucket, amount) == take(expected, amount)


def test_a_bucket_is_used_up_and_fills_again() -> None:
    clock = Clock()
    bucket = TokenBucket(2.0, 10.0, clock)
    assert take(bucket, 10) and not take(bucket, 0.1) and bucket.level == 0
    seen = []
    for seconds in (2, 100):
        clock.now += seconds
        seen.append((bucket.level, bucket.is_full))
    assert seen == [(4, False), (10, True)]


def test_other_limits_keep_the_level() -> None:
    clock = Clock()
    bucket = TokenBucket(1.0, 10.0, clock)
    assert take(bucket, 6)
    bucket.change(2.0, 20.0)
    assert bucket.level == pytest.approx(4)
    bucket.change(1.0, 3.0)
    assert bucket.level == pytest.approx(3)
    bucket.add(-5)
    assert bucket.level == pytest.approx(-2) and bucket.free_at(1) == pytest.approx(clock.now + 3)


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0), (-1, 1), (math.nan, 1), (1, math.inf)])
def test_impossible_buckets_are_refused(rate: float, burst: float) -> None:
    with pytest.raises(InvalidOptionError):
        TokenBucket(rate, burst)


# Tenants


def test_requests_over_the_limit_are_told_when_to_come_back() -> None:
    clock = Clock()
    rates = RateLimits(clock)
    for _ in range(3):
        rates.admit(ALICE, 10)
    clock.now += 5
    with pytest.raises(RateLimitedError, match="3 requests a minute") as caught:
        rates.admit(ALICE, 10)
    assert caught.value.retry_after_s == pytest.approx(15)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert str(caught.value).endswith("Try again in 15 seconds.")
    clock.now += 15.001
    rates.admit(ALICE, 10)


def test_tokens_are_reserved_and_settled() -> None:
    clock = Clock()
    rates = RateLimits(clock)
    tenant = replace(ALICE, requests_per_minute=0.0)
    first = rates.admit(tenant, 500)
    with pytest.raises(RateLimitedError, match="600 tokens a minute") as caught:
        rates.admit(tenant, 200)
    assert caught.value.retry_after_s == pytest.approx(10)
    first.settle(100)
    first.settle(0)  # once only
    first.cancel()
    second = rates.admit(tenant, 200)
    second.change(350)
    assert left(rates, tenant) == pytest.approx([150])
    second.settle(650)
    with pytest.raises(RateLimitedError) as caught:
        rates.admit(tenant, 50)
    assert caught.value.retry_after_s == pytest.approx(20), "what was taken too much is paid for first"


def test_a_refused_request_takes_nothing() -> None:
    clock = Clock()
    rates = RateLimits(clock)
    rates.admit(ALICE, 400)
    for _ in range(5):
        with pytest.raises(RateLimitedError, match="tokens"):
            rates.admit(ALICE, 400)
    assert left(rates, ALICE) == pytest.approx([2, 200])
    reserved = rates.admit(ALICE, 100)
    reserved.cancel()
    assert left(rates, ALICE) == pytest.approx([2, 200])


def test_a_request_that_never_fits_is_no_matter_of_waiting() -> None:
    rates = RateLimits(Clock())
    with pytest.raises(OverLimitError, match="601 tokens; 'alice' has 600") as caught:
        rates.admit(ALICE, 601)
    assert caught.value.status == 413
    rates.admit(ALICE, 600)


def test_without_limits_nothing_is_counted() -> None:
    rates = RateLimits(Clock())
    for _ in range(10_000):
        rates.admit(ANONYMOUS, 10**9).settle(10**9)
    assert not rates._buckets


def test_changed_limits_count_at_once() -> None:
    rates = RateLimits(Clock())
    for _ in range(3):
        rates.admit(ALICE, 1)
    with pytest.raises(RateLimitedError):
        rates.admit(ALICE, 1)
    more = replace(ALICE, requests_per_minute=60.0)
    with pytest.raises(RateLimitedError) as caught:
        rates.admit(more, 1)
    assert caught.value.retry_after_s == pytest.approx(1)
    rates.admit(replace(ALICE, requests_per_minute=0.0), 1)


def test_slow_limits_let_one_request_through() -> None:
    clock = Clock()
    rates = RateLimits(clock)
    tenant = replace(ALICE, requests_per_minute=0.5)
    rates.admit(tenant, 1)
    with pytest.raises(RateLimitedError) as caught:
        rates.admit(tenant, 1)
    assert caught.value.retry_after_s == pytest.approx(120)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 20), st.integers(1, 400)), max_size=60))
def test_tenants_do_not_feel_each_other(asks: list[tuple[str, float, int]]) -> None:
    def decisions(names: str) -> list[tuple[bool, float]]:
        clock = Clock()
        rates = RateLimits(clock)
        found = []
        for name, pause, num_tokens in asks:
            clock.now += pause
            if name not in names:
                continue
            try:
                rates.admit(replace(ALICE, name=name), num_tokens)
                answer = True, 0.0
            except RateLimitedError as error:
                answer = False, error.retry_after_s
            if name == "a":
                found.append(answer)
        return found

    assert decisions("ab") == decisions("a")


def test_buckets_of_tenants_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_IDLE_TENANTS", 8)
    clock = Clock()
    rates = RateLimits(clock)
    for i in range(200):
        rates.admit(replace(ALICE, name=f"t{i}"), 600)
        clock.now += 20
        assert len(rates._buckets) <= 17
    with pytest.raises(RateLimitedError):
        rates.admit(replace(ALICE, name="t199"), 600)  # not of one that still owes


def test_the_header_is_in_whole_seconds() -> None:
    assert [retry_after(seconds) for seconds in (0.0, 0.2, 1.0, 1.01, 59.5)] == ["1", "1", "1", "2", "60"]
