"""What jobs cost, and how many tokens are worth one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archerfish.serve.service_rate import LEAST_TOKEN_SHARE, MOST_WORTH, WORTH, JobCost


def cost_of(job_s: float, token_s: float, *sizes: int) -> JobCost:
    cost = JobCost()
    for size in sizes:
        cost.add(size, job_s + token_s * size)
    return cost


def test_a_job_has_the_tokens_of_its_time() -> None:
    cost = cost_of(0.01, 0.001, 10, 40, 80)
    assert cost.seconds(100) == pytest.approx(0.11, rel=0.05)
    assert cost.worthwhile(0.05) == pytest.approx(40, rel=0.05)


def test_a_job_that_takes_all_of_its_time_itself_is_made_longer() -> None:
    cost = cost_of(0.06, 0.0001, 64, 300, 1000)
    assert cost.worthwhile(0.05) == pytest.approx(MOST_WORTH * 0.05 / 0.0001, rel=0.1)
    assert cost.worthwhile(0.07) == pytest.approx(WORTH * 0.06 / 0.0001, rel=0.1)


def test_jobs_of_one_size_say_that_tokens_take_the_time() -> None:
    cost = cost_of(0.06, 0.0001, *[100] * 20)
    assert cost.worthwhile(0.05) == pytest.approx(100 * 0.05 / 0.07)
    assert cost.tokens_per_s == pytest.approx(100 / 0.07)


def test_nothing_is_known_before_the_first() -> None:
    cost = JobCost()
    cost.add(0, 1.0)
    cost.add(10, 0.0)
    assert (cost.seconds(100), cost.tokens_per_s) == (0.0, 0.0)


def test_at_least_a_job_takes_what_those_before_it_took() -> None:
    cost = cost_of(0.01, 0.001, 10, 40, 70)
    assert cost.least_seconds(40) == pytest.approx(0.05, rel=0.01) == cost.least_seconds(10**6)
    assert cost.least_seconds(10) == pytest.approx(0.02, rel=0.1)
    assert JobCost().least_seconds(100) == 0.0


@given(st.lists(st.tuples(st.integers(1, 65_536), st.floats(1e-6, 1e3)), min_size=1, max_size=100), st.floats(0.001, 10))
def test_whatever_was_measured_sizes_stay_near_it(jobs: list[tuple[int, float]], wanted_s: float) -> None:
    cost = JobCost()
    for num_tokens, seconds in jobs:
        cost.add(num_tokens, seconds)
    mean_tokens = cost._sums[1] / cost._sums[0]
    mean_s = cost._sums[2] / cost._sums[0]
    most = max(WORTH * (1 / LEAST_TOKEN_SHARE - 1), wanted_s / mean_s / LEAST_TOKEN_SHARE) * mean_tokens
    assert 0 < cost.worthwhile(wanted_s) <= most * (1 + 1e-6)
    assert cost.seconds(1) > 0 and cost.seconds(2 * mean_tokens) <= 2 * mean_s * (1 + 1e-6)
