"""Step costs: what is fitted to measured steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from archerfish.sched.cost import StepCost


def test_step_costs_of_mixed_steps() -> None:
    cost, sizes = StepCost(), random.Random(3)
    assert (cost.step_s(4), cost.prompt_s(100), cost.single_step_s) == (0, 0, 0)

    def observe(num_prompt: int, num_output: int, start: int) -> None:
        num_pairs = num_prompt * (start + num_prompt / 2)
        seconds = 0.02 + 0.0005 * num_prompt + 0.001 * num_output + 2e-7 * num_pairs
        cost.observe(num_prompt, num_output, seconds, num_pairs)

    for _ in range(300):
        observe(sizes.choice([0, 0, 64, 200]), sizes.choice([1, 8, 32]), sizes.randint(0, 5000))
    found = pytest.approx((0.02, 0.0005, 0.001, 2e-7), rel=0.02)
    assert cost.coefficients == found and cost.single_step_s == pytest.approx(0.021)
    assert cost.prompt_s(100, 1000) == pytest.approx(0.05 + 100 * 1050 * 2e-7, rel=0.02)
    for _ in range(1000):  # decode steps alone do not make it forget what a prompt costs
        observe(0, 4, 0)
    assert cost.coefficients == found
    cost.observe(0, 0, 1.0)
    cost.observe(10, 1, 0.0)
    cost.observe(64, 1, 60.0)  # one step that something delayed
    cost.observe(64, 1, 0.0001)  # one that was measured too short
    assert cost.prompt_s(100, 1000) + cost.step_s(1) == pytest.approx(0.071 + 0.021, rel=0.25)


@given(st.lists(st.tuples(st.sampled_from([0, 1, 500]), st.sampled_from([0, 1, 64]), st.floats(1e-6, 10)), min_size=1))
@example([(1, 0, 1.0), (1, 2, 5e-05), (5, 64, 0.001), (5, 1, 3e-06), (0, 1, 3e-06)])
def test_any_steps_give_a_cost(steps: list[tuple[int, int, float]]) -> None:
    cost = StepCost()
    for num_prompt, num_output, seconds in steps:
        cost.observe(num_prompt, num_output, seconds, num_prompt * 100)
    assert all(0 <= part < 1e3 for part in cost.coefficients)


def test_slow_first_step_hardly_counts() -> None:
    cost = StepCost()
    cost.observe(512, 1, 20.0)
    for _ in range(5):
        cost.observe(512, 1, 0.45)
        cost.observe(0, 1, 0.005)
    assert cost.prompt_s(512) + cost.step_s(1) < 1.5 * 0.455
